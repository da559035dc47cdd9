"""Printed tables of runs, the run card, series and plans."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import PLANS, RECIPE, RUN, TRAIN, attempted, done_run, finished, recipe_with, recorded, row, segment

from pipelines import cli
from pipelines.artifacts.manifest import File
from pipelines.show import tables
from pipelines.show.console import TerminalScreen
from pipelines.show.tables import (
    card_facts,
    duration,
    next_commands,
    plan_of,
    print_card,
    print_plan,
    print_runs,
    printable,
    program,
)
from pipelines.stage import STAGES, Pipeline
from pipelines.tracking.clusters import Interval, record_intervals
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.records import Billing, Machine, Progress
from pipelines.tracking.runs import (
    Run,
    Summary,
    read_run,
)
from trainer.process import StopSignal
from trainer.store import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_the_table_of_runs_shows_every_column_whole(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    long = "a" * 63 + "-12345678"
    summary = Run(store, done_run(store)).summary
    print_runs([summary, replace(summary, run=long, val_loss=None, hellaswag_acc_norm=None)], store.uri)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run",
        "state",
        "attempts",
        "tokens",
        "val",
        "loss",
        "HellaSwag",
        "hours",
        "dollars",
        "goodput",
    ]
    assert first.split() == [RUN, "done", "1", "1,638,400", "2.4568", "0.2945", "2.000", "20.00", "24%"]
    assert second.split() == [long, "done", "1", "1,638,400", "2.000", "20.00", "24%"]


def test_no_runs_are_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs([], "file:///some/[odd]/place")
    assert capsys.readouterr().out == "no runs in file:///some/[odd]/place yet; `skytrain run smoke` makes one\n"


@pytest.fixture
def finished_pipeline(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    done_run(store)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker(tmp_path / "tracking", RUN, default_uri="sqlite:///some folder/mlflow.db")
    stop = StopSignal.__new__(StopSignal)  # pytest keeps its signals
    stop.asked = False
    pipeline = Pipeline(RECIPE, store, tmp_path, Billing(10.0), tracker, TerminalScreen(quiet=True), stop, PLANS)
    file = File("config.json", "a0001/config.json", 0, "")
    pipeline.made = {stage: finished(store, stage) for stage in STAGES}
    pipeline.made["export"] = replace(pipeline.made["export"], files=(file,))
    pipeline.skipped = dict.fromkeys(STAGES, False) | {"tokenize": True}
    return pipeline


def test_the_run_card_shows_what_was_made_what_it_cost_and_where_to_look(
    finished_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    print_card(finished_pipeline)
    card = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in card.splitlines()]
    assert f"{RUN} done" in lines
    assert f"tokenize {PLANS['tokenize'].prefix} (skipped) 30 min 00 s 1 5.00" in lines
    assert f"train {TRAIN} 30 min 00 s 1 5.00" in lines
    for fact in (
        "tokens 1,638,400 in 200 steps",
        "speed 4,321 tokens/s (median step)",
        "train loss 2.4000",
        "val loss 2.4568",
        "HellaSwag 0.2945 (completion style, acc_norm)",
        "time 2 h 00 min billed, in 1 attempt(s)",
        "dollars 20.00",
        f"store {finished_pipeline.store.uri}",
    ):
        assert fact in lines
    assert "def [bold]f(x):" in card and "\x1b" not in card  # generated text is no markup, and no commands
    assert f"{program('skytrain')} report {RUN} --series" in lines
    assert f"{program('mlflow')} ui --backend-store-uri 'sqlite:///some folder/mlflow.db'" in lines


def test_a_card_without_a_price_says_how_to_give_one(finished_pipeline: Pipeline) -> None:
    free = replace(finished_pipeline.snapshot().summary, usd=0.0)
    assert dict(card_facts(finished_pipeline, free))["dollars"] == "0.00  (--price-per-hour gives this machine a price)"


def test_the_card_names_a_store_that_is_not_the_default_one(finished_pipeline: Pipeline, tmp_path: Path) -> None:
    finished_pipeline.home = tmp_path / "elsewhere"
    for command in next_commands(finished_pipeline)[:3]:
        assert command.startswith(program("skytrain"))
        assert command.endswith(f"--store {finished_pipeline.store.uri}")


def test_the_card_does_not_print_the_address_of_a_tracking_server(
    finished_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_pipeline.tracker.uri = "https://user:secret@mlflow.example.org"
    assert "secret" not in "".join(next_commands(finished_pipeline))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (7.44, "7.4 s"), (59.9, "59.9 s"), (60, "1 min 00 s"), (192, "3 min 12 s"), (7500, "2 h 05 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_generated_text_cannot_command_a_terminal() -> None:
    assert printable("a\tb\n\x1b[31m\x00é\u202e") == "a\tb\n·[31m·é·"


@pytest.mark.parametrize("stage", STAGES)
def test_a_report_goes_on_past_a_damaged_manifest_and_names_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    done_run(store)
    key = f"{PLANS[stage].prefix}/MANIFEST.json"
    store.put(key, b"{")
    cli.report(None, store=store.uri)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:2] == [RUN, "damaged"] and f"{store.uri}/{key}: damaged" in out
    assert "20.00" in out


def test_what_skypilot_says_of_a_runs_clusters_stands_below_the_table(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    done_run(store)
    attempted(store, "train", hours=0.5, price_per_hour=10.0, machine=Machine(cloud="aws", cluster="spot-7"))
    record_intervals(store, RUN, [Interval("spot-7", 1, 0.0, 1800.0), Interval("spot-7", 1, 3600.0, 3960.0)])
    cli.report(None, store=store.uri)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{RUN}: cluster spot-7: 0.600 h by SkyPilot, 0.500 h in the ledger (+1.00 dollars)"
    )


def test_the_report_of_one_run_says_for_what_and_at_what_price(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    done_run(store)
    spot = Machine(cloud="aws", spot=True, instance="p5.48xlarge", on_demand_per_hour=12.0)
    steps = Progress(resumed_from=0, step=70, notice="SIGTERM")
    half: dict[str, Any] = {"hours": 0.5, "price_per_hour": 10.0, "machine": spot, "price_source": "catalog aws"}
    attempted(store, "train", 1, state="interrupted", progress=steps, **half)
    attempted(store, "train", 2, price_per_hour=None, phases={"setup": 900.0, "train": 2700.0}, nodes=2)
    cli.report([RUN], store=store.uri)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "aws spot 30 min 00 s 5.00" in lines
    assert "train 2 h 30 min 5.00 + 2 h of unknown price" in lines
    assert any(
        line.startswith("train 1 interrupted (SIGTERM) p5.48xlarge, aws spot ")
        and line.endswith(" 30 min 00 s 10.00 (catalog aws) 5.00 70 70 0")
        for line in lines
    ), lines
    assert (
        "0.00 + 0.5 h of unknown price dollars lost to interruptions: work done again, and the way back to it" in lines
    )
    assert "1.00 dollars saved against on-demand prices" in lines
    cli.report(None, store=store.uri)
    assert "aws spot" not in capsys.readouterr().out  # that is for one run


def test_the_series_has_one_row_a_step_as_the_last_attempt_did_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    segment(store, 4, 1, [row(s, 1.0) for s in (1, 2, 3, 4)])
    segment(store, 6, 1, [row(s, 1.5) for s in (5, 6)])
    segment(store, 7, 2, [row(s, 2.0) for s in (5, 6, 7)])  # went on from step 4: its predecessor's 6 was damaged
    segment(store, 8, 3, [{"step": 7, "time": 1.0, "val/loss": 9.0}, row(8, 3.0)])
    found = Run(store, recorded(store)).series
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r["train/loss"] for r in found] == [1.0] * 4 + [2.0] * 3 + [3.0]
    tables.print_series(RUN, found, as_json=False, alone=True)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "step,train/loss,lr,grad_norm,tokens/s"
    assert out.splitlines()[7] == "7,2.0,0.001,0.5,10.0"
    assert [int(r["step"]) for r in csv.DictReader(io.StringIO(out))] == list(range(1, 9))


def test_steps_that_were_only_evaluated_are_no_rows_of_the_csv(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_series(RUN, [{"step": 0, "val/loss": 9.0}, row(1, 2.0)], as_json=False, alone=True)
    assert capsys.readouterr().out.splitlines()[1:] == ["1,2.0,0.001,0.5,10.0"]


def test_series_of_several_runs_name_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_series("a-1", [row(1, 2.0)], as_json=False, alone=False)
    assert capsys.readouterr().out.splitlines() == [
        "run,step,train/loss,lr,grad_norm,tokens/s",
        "a-1,1,2.0,0.001,0.5,10.0",
    ]
    tables.print_series("a-1", [row(1, 2.0)], as_json=True, alone=False)
    assert json.loads(capsys.readouterr().out) == {"run": "a-1", **row(1, 2.0)}


def test_report_prints_json_and_csv_for_programs(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done_run(store)
    segment(store, 1, 1, [row(1, 2.0)])
    cli.report([RUN[:7]], store=store.uri, as_json=True)
    (printed,) = json.loads(capsys.readouterr().out)
    account = printed.pop("account")
    assert Summary(**printed) == read_run(store, RUN).summary
    assert (len(account["attempts"]), account["total"]["usd"]) == (4, pytest.approx(20.0))
    assert account["by_phase"]["setup"]["usd"] == pytest.approx(4 * 60 / 3600 * 10)
    cli.report(None, store=store.uri, series=True)
    assert capsys.readouterr().out.splitlines()[1:] == ["1,2.0,0.001,0.5,10.0"]


def test_a_plan_says_what_is_there_and_what_a_run_would_make(store: LocalStore) -> None:
    finished(store, "tokenize")
    shown = plan_of(RECIPE, store)
    assert (shown["run"], shown["store"], shown["steps"], shown["tokens"]) == (RUN, store.uri, 200, 200 * 8192)
    assert shown["parameters"] == RECIPE.model.parameters and shown["flops"] == RECIPE.train_flops
    assert [shown["stages"][s]["exists"] for s in STAGES] == [True, False, False, False]
    assert shown["stages"]["train"]["why"] == "nothing like it in train/ yet"
    assert shown["stages"]["train"]["fingerprint"] == PLANS["train"].fingerprint
    assert shown["stages"]["train"]["artifact"] == TRAIN


def test_a_plan_names_the_fields_that_differ_from_the_nearest_sibling(store: LocalStore) -> None:
    finished(store, "train")
    near = plan_of(recipe_with("train.seed=7"), store)["stages"]["train"]
    assert near["sibling"] == TRAIN
    assert near["differs"] == {"train.seed": {"here": 7, "there": 1337}}
    assert near["why"] == f"differs from {TRAIN} in train.seed: 7 here, 1337 there"
    far = plan_of(recipe_with(*(f"train.{f}=0.5" for f in ("beta1", "beta2", "epsilon", "grad_clip"))), store)
    assert far["stages"]["train"]["why"].endswith(" and 1 more fields")


def test_a_plan_says_how_far_an_unfinished_stage_is(store: LocalStore) -> None:
    attempted(store, "train", 3, state="interrupted", progress=Progress(step=12_000))
    why = plan_of(RECIPE, store)["stages"]["train"]["why"]
    assert why == "attempt 3 is interrupted, step 12,000: run goes on from its last commit"


def test_a_plan_changes_nothing(store: LocalStore) -> None:
    plan_of(RECIPE, store)
    assert not store.root.exists()


def test_a_printed_plan_cuts_and_swallows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "artifact": "train/" + "a" * 63 + "-12345678",
        "exists": False,
        "why": "source: data/[a-c].txt " + "x " * 200,
    }
    stages = {"train": plan, "export": {"artifact": "export/b", "exists": True}}
    print_plan(
        {"run": RUN, "store": "file:///a [b]", "parameters": 1, "steps": 2, "tokens": 3, "flops": 4.0, "stages": stages}
    )
    out = capsys.readouterr().out
    assert f"{RUN} in file:///a [b]\n" in out
    assert f"{plan['artifact']}  to do: {plan['why']}\n" in out and "✓ exists" in out
