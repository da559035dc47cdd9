"""What a store alone tells about its runs: states, tables, series, plans, and what can be thrown away."""

import csv
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli, gc
from pipelines.artifacts.manifest import ArtifactPlan, File, Manifest, commit, scratch
from pipelines.gc import Leftover, leftovers, remove
from pipelines.recipe import Recipe, load_recipe
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
from pipelines.stage import STAGES, Pipeline, plans_of, run_name
from pipelines.tracking.audit import Audit, audit
from pipelines.tracking.clusters import Interval, record_intervals
from pipelines.tracking.compare import compare
from pipelines.tracking.ledger import claim, this_process
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.records import Billing, Heartbeat, Machine, ProcessId, Progress
from pipelines.tracking.runs import (
    Run,
    RunRecord,
    Summary,
    full_name,
    read_records,
    read_run,
    read_runs,
    record,
)
from trainer.commits import Commit, TrainState
from trainer.errors import UserError
from trainer.process import StopSignal
from trainer.shards import Order, Shard, sequence_digest, sequences_of
from trainer.store import PARTIAL, LocalStore, Store

SMALLER = ["train.max_steps=200", "train.batch_tokens=8192"]
RECIPE = load_recipe("smoke", ["tokens.source=hf://datasets/a/b", f"tokens.revision={'a' * 40}", *SMALLER])
PLANS = plans_of(RECIPE)
RUN = run_name(PLANS)
TRAIN = PLANS["train"].prefix
ELSEWHERE = ProcessId("other/boot", 1, "1")
GONE = replace(this_process(), started="1")  # this machine, a process that is no more
DAY = 86_400.0
FACTS: dict[str, dict[str, Any]] = {
    "tokenize": {"tokens": 8_000_000},
    "train": {"steps": 200, "train/loss": 2.4, "val/loss": 2.5, "perf/tokens_per_second": 4321.0},
    "evaluate": {"val/loss": 2.45678, "eval/hellaswag_acc_norm": 0.2945, "sample": "def [bold]f(x):\n\x1b[2J"},
    "export": {"parameters": 7},
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def finished(store: Store, stage: str, files: tuple[File, ...] = (), **facts: Any) -> Manifest:
    plan = PLANS[stage]
    manifest = Manifest(
        plan.stage, plan.label, plan.fingerprint, plan.identity, {}, files, {}, FACTS[stage] | facts, RUN, 1, 1.0
    )
    return commit(store, manifest)


def attempted(store: Store, stage: str, number: int = 1, hours: float = 1.0, **changes: Any) -> Heartbeat:
    """An attempt as it last reported, by default one that is done."""
    claim(store, PLANS[stage].prefix, RUN, stage, number, Billing())
    now = time.time()
    beat = Heartbeat(RUN, stage, number, "done", now - hours * 3600, now, 0.0, GONE)
    beat = replace(beat, **changes)
    store.put(f"{PLANS[stage].prefix}/attempts/{number:04d}/heartbeat.json", beat.to_json())
    return beat


def recorded(store: Store, until: str = "export", recipe: Recipe = RECIPE) -> RunRecord:
    return record(store, RUN, recipe, PLANS, until)


def dfull_name(store: Store) -> RunRecord:
    for stage in STAGES:
        attempted(store, stage, hours=0.5, price_per_hour=10.0, phases={"setup": 60.0, stage: 1740.0})
        finished(store, stage)
    return recorded(store)


# --- states and sums


def test_a_run_with_all_its_artifacts_is_done_and_carries_their_facts(store: LocalStore) -> None:
    summary = Run(store, dfull_name(store)).summary
    assert (summary.run, summary.state, summary.attempts) == (RUN, "done", 1)
    assert (summary.steps, summary.tokens) == (200, 200 * 8192)
    assert (summary.train_loss, summary.val_loss, summary.hellaswag_acc_norm) == (2.4, 2.45678, 0.2945)
    assert (summary.billed_hours, summary.usd) == (pytest.approx(2.0), pytest.approx(20.0))
    assert summary.phases == {"setup": 240.0} | dict.fromkeys(STAGES, 1740.0)


LONG_AGO = time.time() - 300


@pytest.mark.parametrize(
    ("beat", "state"),
    [
        ({"state": "running", "process": this_process()}, "running"),
        ({"state": "running", "process": GONE}, "lost"),
        ({"state": "running", "process": ELSEWHERE}, "running"),
        ({"state": "running", "process": ELSEWHERE, "time": LONG_AGO}, "lost"),
        ({"state": "interrupted", "process": this_process()}, "interrupted"),
        ({"state": "interrupted", "process": GONE}, "interrupted"),
        ({"state": "failed", "process": GONE}, "failed"),
        # Done with this stage: about to start the next one, if it lives.
        ({"state": "done", "process": this_process()}, "running"),
        ({"state": "done", "process": GONE}, "interrupted"),
    ],
)
def test_the_state_of_an_unfinished_run_is_that_of_its_newest_attempt(
    store: LocalStore, beat: dict[str, Any], state: str
) -> None:
    attempted(store, "train", 1, hours=9, state="failed")
    attempted(store, "train", 2, hours=0.1, **beat)
    summary = Run(store, recorded(store)).summary
    assert (summary.state, summary.attempts) == (state, 2)


def test_a_stale_attempt_says_nothing_about_its_run(store: LocalStore) -> None:
    attempted(store, "train", 1, hours=0.1, state="stale")  # started last, by a clock that goes ahead
    attempted(store, "train", 2, hours=0.2, state="failed")
    assert Run(store, recorded(store)).summary.state == "failed"


def test_a_run_whose_new_machine_was_up_before_the_old_one_died_is_running(store: LocalStore) -> None:
    attempted(store, "train", 1, hours=1.0, state="running", process=GONE)
    attempted(store, "train", 2, hours=3.0, state="running", process=this_process())  # on the bill since it booted
    assert Run(store, recorded(store)).summary.state == "running"


def test_a_run_that_never_started_working_is_interrupted(store: LocalStore) -> None:
    summary = Run(store, recorded(store)).summary
    assert (summary.state, summary.attempts, summary.usd, summary.val_loss) == ("interrupted", 1, 0.0, None)


def test_how_far_an_unfinished_run_came_is_in_its_heartbeats(store: LocalStore) -> None:
    attempted(
        store,
        "train",
        1,
        state="interrupted",
        progress=Progress(step=120, metrics={"train/loss": 3.0, "val/loss": 3.1}),
    )
    attempted(store, "train", 2, state="interrupted", progress=Progress(step=150, metrics={"train/loss": 2.9}))
    summary = Run(store, recorded(store)).summary
    assert (summary.steps, summary.tokens) == (150, 150 * 8192)
    assert (summary.train_loss, summary.val_loss) == (2.9, 3.1)


def test_what_another_run_did_for_a_shared_artifact_is_on_its_own_bill(store: LocalStore) -> None:
    attempted(store, "tokenize", 1, hours=100.0, price_per_hour=10.0, run="other-12345678")
    attempted(store, "tokenize", 2, hours=0.5, price_per_hour=10.0)
    summary = Run(store, recorded(store)).summary
    assert (summary.attempts, summary.usd) == (1, pytest.approx(5.0))


def test_asking_for_less_later_forgets_nothing_of_a_run(store: LocalStore) -> None:
    dfull_name(store)
    before = read_run(store, RUN).summary
    again = recorded(store, until="tokenize")
    assert (again.until, list(again.prefixes)) == ("export", list(STAGES))
    assert replace(Run(store, again).summary, updated=0) == replace(before, updated=0)


def test_a_run_that_was_asked_for_one_stage_is_done_with_that(store: LocalStore) -> None:
    finished(store, "tokenize")
    assert Run(store, recorded(store, until="tokenize")).summary.state == "done"
    assert recorded(store, until="train").until == "train"


# --- names


def test_a_run_is_found_by_the_beginning_of_its_name() -> None:
    runs = ["smoke-1a2b3c4d", "smoke-1aaaaaaa", "smoke", "gpt2-124m-99999999"]
    assert full_name(runs, "gpt", "file:///s") == "gpt2-124m-99999999"
    assert full_name(runs, "smoke-1a2", "file:///s") == "smoke-1a2b3c4d"
    assert full_name(runs, "smoke", "file:///s") == "smoke"  # a full name is not ambiguous
    with pytest.raises(UserError) as several:
        full_name(runs, "smoke-1a", "file:///s")
    assert str(several.value) == (
        "smoke-1a: more than one run begins so in file:///s; there: smoke-1a2b3c4d, smoke-1aaaaaaa"
    )
    with pytest.raises(UserError) as none:
        full_name(runs[:2], "gpt3", "file:///s")
    assert str(none.value) == "gpt3: no such run in file:///s; there: smoke-1a2b3c4d, smoke-1aaaaaaa"
    with pytest.raises(UserError, match="there: none yet; `skytrain run RECIPE` makes one"):
        full_name([], "gpt3", "file:///s")


def test_all_runs_are_read_oldest_first(store: LocalStore) -> None:
    for name, updated in (("b-1", 2.0), ("a-1", 3.0), ("c-1", 1.0)):
        body = asdict(RunRecord(name, RECIPE.model_dump(), "export", {}, updated))
        store.put(f"runs/{name}.json", json.dumps(body).encode())
    assert [r.run for r in read_records(store)] == ["c-1", "b-1", "a-1"]
    assert [r.run for r in read_records(store, ["a", "b-1"])] == ["b-1", "a-1"]


# --- tables


def test_the_table_of_runs_shows_every_column_whole(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    long = "a" * 63 + "-12345678"
    summary = Run(store, dfull_name(store)).summary
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
    dfull_name(store)
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


# --- what the whole bill holds, and what can't be read


def test_an_evaluation_that_was_asked_for_in_another_way_stays_on_the_bill(store: LocalStore) -> None:
    before = dfull_name(store)
    other = load_recipe("smoke", ["tokens.source=hf://datasets/a/b", f"tokens.revision={'a' * 40}", *SMALLER,
                                  "evaluate.val_tokens=4096"])  # fmt: skip
    plans = plans_of(other)
    assert plans["evaluate"].prefix != PLANS["evaluate"].prefix
    for _ in range(2):
        now = record(store, RUN, other, plans, "export")
    assert now.earlier["evaluate"] == [before.prefixes["evaluate"]] and now.earlier["train"] == []
    bill = Run(store, now).account
    assert bill.total.usd == pytest.approx(20.0) and bill.by_stage["evaluate"].usd == pytest.approx(5.0)
    assert Run(store, now).summary.attempts == 1
    again = record(store, RUN, RECIPE, PLANS, "export")  # and back
    assert again.earlier["evaluate"] == [plans["evaluate"].prefix]
    assert Run(store, again).account.total.usd == pytest.approx(20.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_report_goes_on_past_a_damaged_manifest_and_names_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    dfull_name(store)
    key = f"{PLANS[stage].prefix}/MANIFEST.json"
    store.put(key, b"{")
    cli.report(None, store=store.uri)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:2] == [RUN, "damaged"] and f"{store.uri}/{key}: damaged" in out
    assert "20.00" in out


def test_a_damaged_heartbeat_is_named_and_the_others_are_still_billed(store: LocalStore) -> None:
    made = dfull_name(store)
    key = f"{TRAIN}/attempts/0001/heartbeat.json"
    store.put(key, b"")
    bill = Run(store, made).account
    assert bill.total.usd == pytest.approx(15.0)  # its claim says when it began, and no more
    assert [fault.split(": damaged")[0] for fault in bill.faults] == [f"{store.uri}/{key}"]


def test_a_damaged_record_of_a_run_is_a_mistake_that_is_named(store: LocalStore) -> None:
    store.put(f"runs/{RUN}.json", b"{}")
    with pytest.raises(UserError, match=f"runs/{RUN}.json: damaged"):
        read_records(store)


def test_what_skypilot_says_of_a_runs_clusters_stands_below_the_table(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    dfull_name(store)
    attempted(store, "train", hours=0.5, price_per_hour=10.0, machine=Machine(cloud="aws", cluster="spot-7"))
    record_intervals(store, RUN, [Interval("spot-7", 1, 0.0, 1800.0), Interval("spot-7", 1, 3600.0, 3960.0)])
    cli.report(None, store=store.uri)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{RUN}: cluster spot-7: 0.600 h by SkyPilot, 0.500 h in the ledger (+1.00 dollars)"
    )


def test_the_report_of_full_name_says_for_what_and_at_what_price(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    dfull_name(store)
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


# --- two runs compared


def priced(store: Store, run: str, recipe: Recipe, losses: dict[int, float], price: float) -> None:
    """A run whose steps took a minute each, from its beginning on, and its cost."""
    plans = plans_of(recipe)
    record(store, run, recipe, plans, "train")
    prefix, minutes = plans["train"].prefix, max(losses)
    assert claim(store, prefix, run, "train", 1, Billing(price))
    beat = Heartbeat(run, "train", 1, "done", 0.0, 60.0 * minutes, price, GONE)
    store.put(f"{prefix}/attempts/0001/heartbeat.json", beat.to_json())
    rows = [{"step": step, "time": 60.0 * step, "val/loss": loss} for step, loss in losses.items()]
    body = "".join(json.dumps(one) + "\n" for one in rows)
    store.put(f"{prefix}/metrics/step-{minutes:08d}-a0001.jsonl", body.encode())


def test_two_runs_are_compared_at_equal_tokens_and_at_equal_dollars(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = load_recipe("smoke", ["tokens.source=hf://datasets/a/b", f"tokens.revision={'a' * 40}", *SMALLER,
                                  "train.learning_rate=0.01"])  # fmt: skip
    priced(store, RUN, RECIPE, {0: 9.0, 50: 5.0, 100: 4.0}, price=6.0)  # 10 dollars
    priced(store, run_name(plans_of(quick)), quick, {0: 9.0, 50: 4.5, 100: 3.5, 200: 3.0}, price=12.0)  # 40 dollars
    cli.report([RUN, run_name(plans_of(quick))], store=store.uri, as_json=True, compare=True)
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == [RUN, run_name(plans_of(quick))]
    assert told["differs"]["recipe.train.learning_rate"] == [RECIPE.train.learning_rate, 0.01]
    assert "recipe.train.seed" not in told["differs"]
    assert told["differs"]["machines.price_per_hour"] == ["6.0", "12.0"]
    tokens = {level["at"]: level["values"] for level in told["at_equal_tokens"]}
    assert tokens[100 * 8192] == [4.0, 3.5] and tokens[50 * 8192] == [5.0, 4.5]
    dollars = {round(level["at"], 6): level["values"] for level in told["at_equal_dollars"]}
    assert dollars[10.0] == [4.0, 4.5]  # for the same money the dearer machine did half the steps
    cli.report([run_name(plans_of(quick)), RUN], store=store.uri, compare=True)
    shown = capsys.readouterr().out
    assert "recipe.train.learning_rate" in shown and "at equal dollars" in shown
    with pytest.raises(UserError, match="takes two runs, got 1"):
        cli.report([RUN], store=store.uri, compare=True)


def test_runs_of_unknown_price_are_not_compared_by_dollars(store: LocalStore) -> None:
    priced(store, RUN, RECIPE, {0: 9.0, 50: 5.0}, price=6.0)
    beat = json.loads(store.get(f"{TRAIN}/attempts/0001/heartbeat.json") or b"")
    store.put(f"{TRAIN}/attempts/0001/heartbeat.json", json.dumps(beat | {"price_per_hour": None}).encode())
    (made,) = read_runs(store)
    compared = compare(made, made)
    assert compared.at_equal_dollars == [] and compared.differs == {} and len(compared.at_equal_tokens) > 0


# --- series


def segment(store: Store, step: int, attempt: int, rows: list[dict[str, Any]]) -> None:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    store.put(f"{TRAIN}/metrics/step-{step:08d}-a{attempt:04d}.jsonl", body)


def row(step: int, loss: float) -> dict[str, Any]:
    values = {"train/loss": loss, "train/lr": 1e-3, "train/grad_norm": 0.5, "perf/tokens_per_second": 10.0}
    return {"step": step, "time": 1.0, **values}


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
    dfull_name(store)
    segment(store, 1, 1, [row(1, 2.0)])
    cli.report([RUN[:7]], store=store.uri, as_json=True)
    (printed,) = json.loads(capsys.readouterr().out)
    account = printed.pop("account")
    assert Summary(**printed) == read_run(store, RUN).summary
    assert (len(account["attempts"]), account["total"]["usd"]) == (4, pytest.approx(20.0))
    assert account["by_phase"]["setup"]["usd"] == pytest.approx(4 * 60 / 3600 * 10)
    cli.report(None, store=store.uri, series=True)
    assert capsys.readouterr().out.splitlines()[1:] == ["1,2.0,0.001,0.5,10.0"]


# --- plans


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
    near = plan_of(load_recipe_with("train.seed=7"), store)["stages"]["train"]
    assert near["sibling"] == TRAIN
    assert near["differs"] == {"train.seed": {"here": 7, "there": 1337}}
    assert near["why"] == f"differs from {TRAIN} in train.seed: 7 here, 1337 there"
    far = plan_of(load_recipe_with(*(f"train.{f}=0.5" for f in ("beta1", "beta2", "epsilon", "grad_clip"))), store)
    assert far["stages"]["train"]["why"].endswith(" and 1 more fields")


def load_recipe_with(*changes: str) -> Recipe:
    source = [f"tokens.source={RECIPE.tokens.source}", f"tokens.revision={'a' * 40}"]
    return load_recipe("smoke", [*source, *SMALLER, *changes])


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


# --- audits


def committed(store: Store, step: int, attempt: int, rollbacks: tuple[tuple[int, int], ...] = ()) -> None:
    commit = Commit(step, attempt, 1, 0.0, TrainState(step=step, rollbacks=rollbacks), "", ())
    store.put(f"{TRAIN}/checkpoints/step-{step:08d}-a{attempt:04d}/COMMIT.json", commit.encode())


def read_at(step: int, shards: dict[str, int], place: int | None = None) -> dict[str, Any]:
    """The row of a step that read the place of the data order that is its own, or another."""
    order = Order([Shard(name, n) for name, n in shards.items()], RECIPE.model.block_size, RECIPE.train.seed)
    mine = sequences_of(step - 1 if place is None else place, RECIPE.model, RECIPE.train, 0, 1)
    return row(step, 1.0) | {"data/digest": sequence_digest(order, mine)}


def test_an_audit_ends_where_the_newest_commit_does(store: LocalStore) -> None:
    shards = {"train_000000.bin": 300_000, "train_000001.bin": 200_000}
    finished(store, "tokenize", shards=shards)
    seen = recorded(store)
    rows = [read_at(step, shards) for step in range(1, 7)]
    segment(store, 4, 1, rows[:4])
    segment(store, 6, 1, rows[4:])  # its commit was never made
    committed(store, 4, 1)
    assert audit(Run(store, seen)) == Audit(RUN, 4, 4 * 8192 // RECIPE.model.block_size, (), ())
    committed(store, 6, 1)
    assert audit(Run(store, seen)).steps == 6
    committed(store, 8, 2)  # and its rows are nowhere
    assert audit(Run(store, seen)).missing_steps == (7, 8)
    segment(store, 8, 2, [read_at(7, shards), read_at(8, shards, place=3)])
    assert audit(Run(store, seen)).wrong_steps == (8,)


# --- leftovers


def put(store: LocalStore, key: str, days_old: float = 0.0) -> str:
    store.put(key, b"12345")
    then = time.time() - days_old * DAY
    os.utime(store.path_of(key), (then, then))
    return key


def age_all(store: LocalStore, days: float) -> None:
    for entry in store.entries(""):
        put_back = time.time() - days * DAY
        os.utime(store.path_of(entry.key), (put_back, put_back))


def found(store: LocalStore, home: Path, days: float = 7.0) -> list[str]:
    return [leftover.key for leftover in leftovers(store, home, days)]


def test_of_a_finished_artifact_goes_what_its_manifest_does_not_name(store: LocalStore, tmp_path: Path) -> None:
    kept = [put(store, f"{TRAIN}/a0002/model.safetensors")]
    kept += [put(store, f"{TRAIN}/metrics/step-00000004-a0001.jsonl")]
    gone = [put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/{name}") for name in ("a.safetensors", "COMMIT.json")]
    gone += [put(store, f"{TRAIN}/a0001/model.safetensors"), put(store, f"{TRAIN}/shards/000000.json")]
    attempted(store, "train")
    finished(store, "train", (File("model.safetensors", "a0002/model.safetensors", 5, "0" * 64),))
    recorded(store)
    before = {entry.key for entry in store.entries("")}
    going = found(store, tmp_path)
    assert sorted(going) == sorted(gone)
    assert going[0].endswith("/COMMIT.json")  # the marker first: what is half deleted was never committed
    for leftover in list(leftovers(store, tmp_path, 7.0)):
        remove(store, leftover)
    assert {entry.key for entry in store.entries("")} == before - set(gone)
    assert set(kept) < before - set(gone)
    assert found(store, tmp_path) == []


def test_an_interrupted_run_can_be_resumed_until_it_is_old(store: LocalStore, tmp_path: Path) -> None:
    sound = [put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/{name}") for name in ("COMMIT.json", "a.st")]
    torn = put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st")
    shard = put(store, f"{PLANS['tokenize'].prefix}/a0001/val_000000.bin")
    receipt = put(store, f"{PLANS['tokenize'].prefix}/shards/000000.json")
    series = put(store, f"{TRAIN}/metrics/step-00000004-a0001.jsonl")
    for stage in ("tokenize", "train"):
        attempted(store, stage, state="interrupted")
    assert found(store, tmp_path) == [torn]
    age_all(store, days=6.9)
    assert found(store, tmp_path) == [torn]
    age_all(store, days=7.1)
    assert set(found(store, tmp_path)) == {*sound, torn, shard, receipt}
    assert found(store, tmp_path, days=8.0) == [torn]
    assert series not in found(store, tmp_path, days=0.0)


def test_a_run_that_was_tried_again_lately_is_not_old(store: LocalStore, tmp_path: Path) -> None:
    put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/COMMIT.json", days_old=30)
    attempted(store, "train", 1, state="interrupted")
    age_all(store, days=30)
    attempted(store, "train", 2, state="interrupted")  # died before its first commit
    assert found(store, tmp_path) == []


@pytest.mark.parametrize("process", [this_process(), ELSEWHERE])
def test_nothing_of_an_attempt_that_may_be_alive_goes(store: LocalStore, tmp_path: Path, process: ProcessId) -> None:
    put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st", days_old=30)
    attempted(store, "train", state="running", process=process)
    assert found(store, tmp_path, days=0.0) == []


def test_of_an_attempt_that_died_without_a_word_goes_what_was_never_committed(
    store: LocalStore, tmp_path: Path
) -> None:
    torn = put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st")
    put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/COMMIT.json")
    attempted(store, "train", state="running", process=GONE)
    assert found(store, tmp_path) == [torn]


def test_an_artifact_whose_manifest_is_damaged_is_passed_over_and_named(store: LocalStore, tmp_path: Path) -> None:
    tokens = PLANS["tokenize"].prefix
    for prefix in (tokens, TRAIN):
        put(store, f"{prefix}/a0001/superfluous")
    for stage in ("tokenize", "train"):
        attempted(store, stage)
        finished(store, stage)
    store.put(f"{tokens}/MANIFEST.json", b"{")
    notes: list[str] = []
    assert [e.key for e in leftovers(store, tmp_path, 0.0, notes.append)] == [f"{TRAIN}/a0001/superfluous"]
    assert len(notes) == 1 and notes[0].startswith(f"{store.uri}/{tokens}/MANIFEST.json: damaged")


def test_what_a_stale_attempt_commits_behind_a_finished_artifact_goes(store: LocalStore, tmp_path: Path) -> None:
    attempted(store, "train", 2)
    finished(store, "train")
    late = [put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/{name}") for name in ("COMMIT.json", "a.st")]
    assert found(store, tmp_path) == late


def test_an_artifact_that_is_finished_while_we_look_loses_nothing(tmp_path: Path) -> None:
    """The attempt commits between any two of the looks that gc takes."""
    for number in range(6):
        fresh = LocalStore(tmp_path / f"store-{number}")
        model = put(fresh, f"{TRAIN}/a0001/model.safetensors")
        attempted(fresh, "train", state="running", process=this_process())
        calls = 0

        def look(how: Callable[..., Any], *arguments: Any, number: int = number, fresh: LocalStore = fresh) -> Any:
            nonlocal calls
            if calls == number:
                file = File("model.safetensors", "a0001/model.safetensors", 5, "0" * 64)
                finished(LocalStore(fresh.root), "train", (file,))
                beat = Heartbeat(RUN, "train", 1, "done", 0.0, 1.0, 0.0, this_process())
                key = f"{TRAIN}/attempts/0001/heartbeat.json"
                LocalStore(fresh.root).put(key, beat.to_json())
            calls += 1
            return how(*arguments)

        plain = LocalStore(fresh.root)
        fresh.entries = partial(look, plain.entries)  # type: ignore[method-assign]
        fresh.get = partial(look, plain.get)  # type: ignore[method-assign]
        going = found(fresh, tmp_path, days=0.0)
        assert model not in going and f"{TRAIN}/MANIFEST.json" not in going, f"look {number}"


def test_half_written_files_of_killed_processes_go_once_nobody_can_be_writing_them(
    store: LocalStore, tmp_path: Path
) -> None:
    put(store, f"{TRAIN}/a0001/model.safetensors")
    attempted(store, "train", state="interrupted")
    old, young = (store.root / TRAIN / "a0001" / f"{PARTIAL}{name}" for name in ("old", "young"))
    cached = tmp_path / "cache" / ("0" * 64) / f"{PARTIAL}old"
    cached.parent.mkdir(parents=True)
    for path in (old, young, cached):
        path.write_bytes(b"123")
    for path in (old, cached):
        os.utime(path, (time.time() - 3700, time.time() - 3700))
    going = list(leftovers(store, tmp_path, 7.0))
    assert {leftover.path for leftover in going} == {old, cached} and all(x.size == 3 for x in going)
    for leftover in going:
        remove(store, leftover)
        remove(store, leftover)  # gone already is fine
    assert young.exists() and not old.exists() and not cached.exists()
    assert store.get(f"{TRAIN}/a0001/model.safetensors") == b"12345"


def test_scratch_goes_once_its_attempt_is_over(store: LocalStore, tmp_path: Path) -> None:
    def work_in(number: int, prefix: str = TRAIN, node: str = "") -> Path:
        folder = scratch(tmp_path, store, prefix) / f"a{number:04d}{node}"
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint" / "train.log").write_bytes(b"1234")
        return folder

    attempted(store, "train", 1, state="interrupted")
    attempted(store, "train", 2, state="running", process=GONE)
    attempted(store, "train", 3, state="running", process=this_process())
    interrupted, killed, alive = (work_in(number) for number in (1, 2, 3))
    lent, lending = work_in(1, node="-node1"), work_in(3, node="-node1")
    unknown = work_in(1, PLANS["export"].prefix)  # the store was made anew meanwhile
    of_another_store = scratch(tmp_path, LocalStore(tmp_path / "other"), TRAIN) / "a0001"
    of_another_store.mkdir(parents=True)
    going = list(leftovers(store, tmp_path, 7.0))
    assert {leftover.path for leftover in going} == {interrupted, killed, unknown, lent}
    assert {leftover.size for leftover in going} == {4}
    for leftover in going:
        remove(store, leftover)
    assert [folder.exists() for folder in (interrupted, killed, unknown, alive)] == [False, False, False, True]
    assert of_another_store.exists() and lending.exists() and not lent.exists()


def test_a_dry_run_tells_all_and_deletes_nothing(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_HOME", str(tmp_path))
    torn = put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st")
    attempted(store, "train", state="failed")
    folder = scratch(tmp_path, store, TRAIN) / "a0001"
    folder.mkdir(parents=True)
    before = sorted(path for path in tmp_path.rglob("*"))
    cli.gc(store=store.uri, dry_run=True)
    told = capsys.readouterr().out
    assert torn in told and str(folder) in told and f"2 objects, 5 bytes would be removed in {store.uri}" in told
    assert sorted(path for path in tmp_path.rglob("*")) == before
    cli.gc(store=store.uri, dry_run=False)
    assert capsys.readouterr().out == told.replace("would be removed", "removed")
    assert store.get(torn) is None and not folder.exists()
    cli.gc(store=store.uri)
    assert capsys.readouterr().out == f"0 objects, 0 bytes removed in {store.uri}\n"


def test_an_empty_store_has_no_leftovers(store: LocalStore, tmp_path: Path) -> None:
    assert list(leftovers(store, tmp_path / "nowhere", 0.0)) == []
    assert gc.artifacts(store) == [] and Leftover("k", 1, "why").path is None
    assert ArtifactPlan("train", "x", {}).prefix.startswith("train/x-")
