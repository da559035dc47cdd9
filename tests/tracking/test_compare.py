"""Two runs are compared at equal tokens and at equal dollars."""

import json

import pytest
from run_records import GONE, RECIPE, RUN, put_heartbeat, recipe_with

from pipelines.recipe import Recipe
from pipelines.stage import plans_of, run_name
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing, Heartbeat
from pipelines.tracking.runs import (
    record,
)
from pipelines.verbs.report import report
from trainer.errors import UserError
from trainer.store import LocalStore, Store


def priced(store: Store, run: str, recipe: Recipe, losses: dict[int, float], price: float) -> None:
    """A run whose steps took a minute each, and its cost."""
    plans = plans_of(recipe)
    record(store, run, recipe, plans, "train")
    prefix, minutes = plans["train"].prefix, max(losses)
    assert claim(store, prefix, run, "train", 1, Billing(price))
    beat = Heartbeat(run, "train", 1, "done", 0.0, 60.0 * minutes, price, GONE)
    put_heartbeat(store, prefix, beat)
    rows = [{"step": step, "time": 60.0 * step, "val/loss": loss} for step, loss in losses.items()]
    body = "".join(json.dumps(one) + "\n" for one in rows)
    store.put(f"{prefix}/metrics/step-{minutes:08d}-a0001.jsonl", body.encode())


def test_two_runs_are_compared_at_equal_tokens_and_at_equal_dollars(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = recipe_with("train.learning_rate=0.01")
    priced(store, RUN, RECIPE, {0: 9.0, 50: 5.0, 100: 4.0}, price=6.0)  # 10 dollars
    priced(store, run_name(plans_of(quick)), quick, {0: 9.0, 50: 4.5, 100: 3.5, 200: 3.0}, price=12.0)  # 40 dollars
    report([RUN, run_name(plans_of(quick))], store=store.uri, as_json=True, compare=True)
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["runs"] == [RUN, run_name(plans_of(quick))]
    assert comparison["differs"]["recipe.train.learning_rate"] == [RECIPE.train.learning_rate, 0.01]
    assert "recipe.train.seed" not in comparison["differs"]
    assert comparison["differs"]["machines.price_per_hour"] == ["6.0", "12.0"]
    tokens = {level["at"]: level["values"] for level in comparison["at_equal_tokens"]}
    assert tokens[100 * 8192] == [4.0, 3.5] and tokens[50 * 8192] == [5.0, 4.5]
    dollars = {round(level["at"], 6): level["values"] for level in comparison["at_equal_dollars"]}
    assert dollars[10.0] == [4.0, 4.5]  # for the same money the more expensive machine did half the steps
    report([run_name(plans_of(quick)), RUN], store=store.uri, compare=True)
    printed = capsys.readouterr().out
    assert "recipe.train.learning_rate" in printed and "at equal dollars" in printed
    with pytest.raises(UserError, match="takes two runs, got 1"):
        report([RUN], store=store.uri, compare=True)
