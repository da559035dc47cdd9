"""The card of a finished run shows its artifacts, its cost and commands for a closer look."""

from dataclasses import replace
from pathlib import Path

import pytest
from run_records import PLANS, RECIPE, RUN, TRAIN, attempted, done_run, finished, put_heartbeat
from stage_work import NoSignals

from pipelines.recipe.loader import load_recipe
from pipelines.run.pipeline import Pipeline
from pipelines.run.stage import STAGES
from pipelines.store.manifest import File
from pipelines.store.records import Billing
from pipelines.user.show.card import print_card
from pipelines.user.show.console import TerminalScreen, program
from pipelines.user.verbs.node import next_commands
from trainer.base.store import LocalStore

MLFLOW = "sqlite:///some folder/mlflow.db"


@pytest.fixture
def finished_pipeline(store: LocalStore, tmp_path: Path) -> Pipeline:
    done_run(store)
    pipeline = Pipeline(RECIPE, store, tmp_path, Billing(10.0), TerminalScreen(quiet=True), NoSignals(), PLANS)
    file = File("config.json", "a0001/config.json", 0, "")
    pipeline.made = {stage: finished(store, stage) for stage in STAGES}
    pipeline.made["export"] = replace(pipeline.made["export"], files=(file,))
    pipeline.skipped = dict.fromkeys(STAGES, False) | {"tokenize": True}
    return pipeline


def test_the_run_card_shows_artifacts_costs_and_commands(
    finished_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    store = finished_pipeline.store
    record = done_run(store)
    put_heartbeat(
        store, "evaluate/smoke-12345678", attempted(store, "evaluate", hours=9, price_per_hour=10.0)
    )  # with other tasks
    store.put(f"runs/{RUN}.json", replace(record, earlier={"evaluate": ["evaluate/smoke-12345678"]}).to_json())
    attempted(store, "evaluate", hours=0.5, price_per_hour=10.0)
    print_card(finished_pipeline, next_commands(finished_pipeline, MLFLOW))
    card = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in card.splitlines()]
    assert f"{RUN} done" in lines
    assert f"tokenize {PLANS['tokenize'].prefix} (skipped) 30 min 00 s 1 5.00" in lines
    assert f"evaluate {PLANS['evaluate'].prefix} 30 min 00 s 1 5.00" in lines
    assert f"train {TRAIN} 30 min 00 s 1 5.00" in lines
    for fact in (
        "tokens 1,638,400 in 200 steps",
        "speed 4,321 tokens/s (median step)",
        "train loss 2.4000",
        "val loss 2.4568 (1.0235 bits per byte)",
        "CORE 0.1139 (centred accuracy, 22 tasks)",
        "HellaSwag 0.2945 (completion style, acc_norm)",
        "time 11 h 00 min billed, in 1 attempt",
        "dollars 110.00",
        f"store {finished_pipeline.store.uri}",
    ):
        assert fact in lines
    assert "def [bold]f(x):" in card and "\x1b" not in card  # generated text is neither markup nor a command
    commands = [line.partition(" --store")[0] for line in lines]
    pull = f"pull {RUN} {RECIPE.name}"
    for command in (f'sample {RUN} --prompt "def "', f"serve {RUN}", pull):
        assert f"{program('skytrain')} {command}" in commands
    own = "run laptop --set name=mine --set 'tokens.source=FOLDER/*.txt'"
    finished_pipeline.recipe = load_recipe("smoke")  # of the demo's text
    after_the_demo = [command.partition(" --store")[0] for command in next_commands(finished_pipeline, MLFLOW)][-2:]
    assert after_the_demo == [f"{program('skytrain')} {command}" for command in (own, "launch gpt2-124m --dry-run")]
    assert f"{program('mlflow')} ui --backend-store-uri 'sqlite:///some folder/mlflow.db'" in lines


def test_the_card_of_a_tuned_run_leads_with_the_tuned_model(
    finished_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"method": "grpo", "tune/exact_before": 0.35, "tune/exact": 0.5}
    finished_pipeline.made["tune.grpo"] = replace(finished_pipeline.made["export"], stage="tune", facts=facts)
    finished_pipeline.skipped["tune.grpo"] = False
    print_card(finished_pipeline, next_commands(finished_pipeline, MLFLOW))
    lines = [" ".join(line.partition(" --store")[0].split()) for line in capsys.readouterr().out.splitlines()]
    assert lines.index("tune.grpo exact 0.350 → 0.500") < lines.index("tokens 1,638,400 in 200 steps")
    for command in (f'sample {RUN} --chat --prompt "3+4"', f"serve {RUN}", f"pull {RUN} {RECIPE.name} --tuned"):
        assert f"{program('skytrain')} {command}" in lines


def test_the_card_does_not_print_the_address_of_a_tracking_server(finished_pipeline: Pipeline) -> None:
    assert "secret" not in "".join(next_commands(finished_pipeline, "https://user:secret@mlflow.example.org"))
