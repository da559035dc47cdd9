"""A plan names the state of each artifact, and the fields that differ from the nearest one."""

from pathlib import Path

import pytest
from run_records import PLANS, RECIPE, RUN, TRAIN, attempted, committed, finished, recipe_with

from pipelines.recipe.loader import load_recipe
from pipelines.run.plan import plan_of
from pipelines.run.stage import STAGES
from pipelines.store.process_id import this_process
from pipelines.user.show.plan import print_plan
from trainer.base.store import LocalStore
from trainer.config.errors import UserError


def test_a_plan_shows_existing_artifacts_and_those_that_a_run_would_make(store: LocalStore) -> None:
    plan_of(RECIPE, store)
    assert not store.root.exists()  # it changes nothing
    finished(store, "tokenize")
    plan = plan_of(RECIPE, store)
    assert (plan.run, plan.store, plan.steps, plan.tokens) == (RUN, store.uri, 200, 200 * 8192)
    assert plan.parameters == RECIPE.model.parameters and plan.flops == RECIPE.train_flops
    assert [plan.stages[s].exists for s in STAGES] == [True, False, False, False]
    assert plan.stages["train"].why is None
    assert plan.stages["train"].fingerprint == PLANS["train"].fingerprint
    assert plan.stages["train"].artifact == TRAIN


def test_a_plan_names_the_fields_that_differ_from_the_nearest_sibling(store: LocalStore) -> None:
    finished(store, "train")
    near = plan_of(recipe_with("train.seed=7"), store).stages["train"]
    differs, ways = str(near.why).split("; ", 1)
    assert differs == f"differs from {TRAIN} in train.seed: 7, not 1337" and ways == near.other
    far = plan_of(recipe_with(*(f"train.{f}=0.5" for f in ("beta1", "beta2", "epsilon", "grad_clip"))), store)
    assert " and 1 more fields; it starts" in (far.stages["train"].why or "")


def test_a_longer_training_names_the_way_to_continue_the_finished_one(store: LocalStore) -> None:
    finished(store, "train")
    committed(store, 200)
    longer = plan_of(recipe_with("train.max_steps=300"), store).stages["train"]
    state = f"--set train.branch_from=run:{RUN}@200 continues it"
    assert (longer.other or "").startswith(f"it starts at step 0, beside the finished {RUN}: {state}, ")
    assert (longer.why or "").endswith(str(longer.other))
    branch = f"train.branch_from=run:{RUN}@200@sha256:{'0' * 64}"
    assert plan_of(recipe_with("train.max_steps=300", branch), store).stages["train"].other is None  # it is one already


def test_a_changed_field_names_the_finished_run_and_the_ways_to_go_on(store: LocalStore) -> None:
    finished(store, "train")
    changed = plan_of(recipe_with("train.learning_rate=0.5"), store).stages["train"]
    other = f"it starts at step 0, beside the finished {RUN}: "
    weights = f"--set train.init_from=run:{RUN} begins with its weights, run:{RUN} is its recipe"
    assert changed.why == f"differs from {TRAIN} in train.learning_rate: 0.5, not 0.003; {other}{weights}"
    for step in (150, 200):  # of 200: nothing is left after the last one
        committed(store, step)
    state = f"--set train.branch_from=run:{RUN}@150 continues it, "
    assert plan_of(recipe_with("train.learning_rate=0.5"), store).stages["train"].other == other + state + weights


def test_a_changed_recipe_names_the_unfinished_training_of_its_name(store: LocalStore) -> None:
    committed(store, 40, at=2.0)
    committed(store, 50, prefix="train/smoke-big-0123abcd", at=3.0)  # another name
    committed(store, 60, prefix="train/smoke-0123abcd", at=1.0)  # which a copy of the store wrote last
    changed = plan_of(recipe_with("train.seed=7"), store).stages["train"]
    assert changed.why == f"it starts at step 0; the recipe run:{RUN} resumes {RUN} at step 40 instead"
    for state in ("failed", "running"):
        attempted(store, "train", state=state, process=this_process())
        assert plan_of(recipe_with("train.seed=7"), store).stages["train"].other is None


def test_the_plan_of_a_text_of_ones_own_has_tokens_in_both_splits_or_says_why_not(
    store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("a word " * 1_000)  # smoke holds out 2 million tokens
    (one,) = plan_of(load_recipe("smoke", [f"tokens.source={tmp_path}/mine.txt"]), store).sources
    assert (one.train_tokens, one.val_tokens) == (6_300, 700)
    (tmp_path / "mine.txt").write_text("a word " * 100)
    with pytest.raises(UserError, match="no validation shard holds a sequence of 129 tokens: the largest has 70;"):
        plan_of(load_recipe("smoke", [f"tokens.source={tmp_path}/mine.txt"]), store)


def test_a_plan_shows_the_growth_of_the_batch_and_what_scale_rates_makes_of_the_rates(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    ramp = ["train.batch_ramp_from=2048", "train.batch_ramp_tokens=100_000"]
    recipe = load_recipe("smoke-modern", ["train.scale_rates=true", "train.batch_tokens=8192", *ramp])
    print_plan(plan_of(recipe, store))
    out = " ".join(capsys.readouterr().out.split())
    assert "scaled rates at their peak: matrix 0.0025, embedding 0.0306, values 0.0153, head 0.00122," in out
    assert "gate 0.2, weight decay 1.28" in out
    assert "the batch grows from 2,048 to 8,192 tokens over the first 100,000 tokens" in out
    assert plan_of(load_recipe("smoke-modern"), store).rates == {}


def test_a_plan_shows_tokens_epochs_and_the_share_of_validation(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("a word " * 100_000)
    mine = [f"tokens.source={tmp_path}/*.txt", "tokens.val_shards=null", "tokens.max_tokens=null"]
    recipe = load_recipe("smoke", [*mine, "train.max_steps=3000"])
    print_plan(plan_of(recipe, store))
    out = " ".join(capsys.readouterr().out.split())
    assert "text of about 700,000 tokens: 693,000 for training (8.87 epochs), 7,000 for validation (1.0%)" in out
    assert "validations of up to 7,000 tokens" in out
    assert "! training goes over the text 8.9 times: it reads 6,144,000 tokens" in out
    assert "use more text or a train.max_steps of about 1,353" in out
    finished(store, "tokenize")
    counted = plan_of(RECIPE, store)
    (text,) = counted.sources
    assert (text.train_tokens, text.val_tokens, counted.estimated) == (6_000_000, 2_000_000, False)
    assert text.warning is None
