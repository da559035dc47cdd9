"""A run that begins with a commit of another run, with its whole state or with its weights alone."""

import shutil
from typing import Any

import pytest
import trainer_runs
from trainer_runs import EVERY_STEP, Runner, Runners

from trainer.checkpoint.commits import committed_folders
from trainer.checkpoint.layout import step_of
from trainer.checkpoint.weights import Origin
from trainer.config.errors import UserError


@pytest.fixture
def parent(runner: Runners) -> Runner:
    """A run with a commit after every step."""
    made = runner("parent", checkpoint_minutes=EVERY_STEP, keep_last=20)
    made.attempt()
    return made


def branch_of(parent: Runner, runner: Runners, step: int, **how: Any) -> Runner:
    """A run that begins at a commit of the parent. One store of the tests holds one run, so the commit is copied."""
    made = runner("branch")
    (folder,) = (f for f in committed_folders(parent.store, "run") if step_of(f) == step)
    copied = folder.replace("run/", "parent/")
    shutil.copytree(parent.store.path_of(folder), made.store.path_of(copied))
    made.origin = lambda world: Origin("train.branch_from: run:parent", commit=copied, **how)
    return made


def test_a_branch_with_another_text_reads_it_from_the_start(parent: Runner, runner: Runners) -> None:
    branch = branch_of(parent, runner, 6, whole=True, other_text=True)
    branch.attempt(stop_after=2)
    _, state = branch.attempt()
    digests = {row["step"]: row["data/checksum"] for row in branch.rows() if "data/checksum" in row}
    first = {row["step"]: row["data/checksum"] for row in parent.rows() if "data/checksum" in row}
    assert digests == {step: first[step - 6] for step in range(7, 13)}
    assert (state.step, state.text_from, state.data_step) == (12, 6, 6)
    assert [row["train/lr"] for row in branch.rows() if "train/lr" in row] == [
        row["train/lr"] for row in parent.rows() if row["step"] > 6
    ]


def test_the_weights_of_a_commit_begin_a_run_with_a_new_optimizer(parent: Runner, runner: Runners) -> None:
    tuned = branch_of(parent, runner, 5)
    _, state = tuned.attempt()
    (validated,) = (row["val/loss"] for row in parent.rows() if row["step"] == 5)
    assert tuned.rows()[0] == {"step": 0, "val/loss": validated}
    assert tuned.rows()[1]["train/lr"] == parent.rows()[1]["train/lr"] and state.optimizer_steps == 12


def test_a_damaged_commit_is_no_beginning(parent: Runner, runner: Runners) -> None:
    branch = branch_of(parent, runner, 5, whole=True)
    trainer_runs.flip_a_byte(next(branch.store.path_of("parent/checkpoints").iterdir()))
    with pytest.raises(UserError, match=r"^train.branch_from: run:parent: the commit is damaged: rank-00000"):
        branch.attempt()
