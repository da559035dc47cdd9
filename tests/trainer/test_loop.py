"""The training loop in this process: runs learn, stop, resume bit for bit and save in time."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from trainer_runs import ALONE, Runners, weights

from trainer.checkpoint.commits import committed_state
from trainer.config.errors import StoreUnavailable
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards
from trainer.engines.plain import PlainEngine
from trainer.eval.evaluation import validation_loss


def test_a_run_learns_and_logs_every_step(runner: Runners) -> None:
    run = runner(max_steps=60)
    model, state = run.attempt()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(61))
    assert [row["step"] for row in rows if "val/loss" in row] == list(range(0, 61, 5))
    assert rows[0]["val/loss"] == pytest.approx(math.log(70), abs=0.1)  # knows nothing yet
    assert rows[-1]["train/loss"] < 0.6 * rows[1]["train/loss"]
    assert state.val_loss == rows[-1]["val/loss"] < 0.6 * rows[0]["val/loss"]
    assert (state.step, state.optimizer_steps, state.tokens_seen) == (60, 60, 60 * 256)
    assert len({row["data/checksum"] for row in rows[1:]}) == 60
    val = TokenData(local_shards(run.data, "val"), run.data.joinpath, 32, 0)
    assert validation_loss(model, val, 400, 7, ALONE) == pytest.approx(state.val_loss, rel=1e-5)


def test_a_batch_ramp_resumes_where_it_was_interrupted(runner: Runners) -> None:
    ramp = {"batch_tokens": 256, "batch_ramp_from": 64, "batch_ramp_tokens": 600, "max_steps": 10}
    whole, parts = runner("whole", **ramp), runner("parts", **ramp)
    model, state = whole.attempt()
    assert state.tokens_seen == 4 * 64 + 2 * 128 + 192 + 3 * 256
    for last in (3, 3, 2):
        parts.attempt(stop_after=last)
    assert weights(parts.attempt()[0]) == weights(model) and parts.rows() == whole.rows()


def test_the_accumulated_gradient_is_that_of_the_whole_batch(runner: Runners) -> None:
    runs = [runner(f"micro-{size}", micro_batch_size=size) for size in (1, 2, 3, 8)]  # 3: 2, 3 and 3
    for run in runs:
        run.attempt()
    first, *others = (run.rows() for run in runs)
    for rows in others:
        for a, b in zip(first, rows, strict=True):
            assert a.get("data/checksum") == b.get("data/checksum")
            assert b == pytest.approx(a, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(runner: Runners) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    if " " in torch.__file__:
        pytest.skip("needs a torch whose path has no space: inductor's call of the C++ compiler does not quote it")
    eager, compiled = runner("eager", max_steps=4), runner("compiled", max_steps=4, engine="compiled")
    eager.attempt()
    compiled.attempt()
    for a, b in zip(eager.rows(), compiled.rows(), strict=True):
        assert b == pytest.approx(a, rel=1e-4)


# --- resuming


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stopped_in_any_step_ends_with_the_same_losses_and_weights(runner: Runners, precision: str) -> None:
    for stop_after in (1, 5, 11, 12):  # 5 and 12: a validation is due where it stops
        run = runner(f"stopped-{stop_after}", precision=precision)
        _, state = run.attempt(stop_after)
        assert state.step == stop_after and run.commits() == [stop_after]
        resumed, state = run.attempt()
        assert state.step == 12 and state.is_complete(run.config.train) and committed_state(run.store, "run") == state
        assert run.ended(resumed) == runner.undisturbed(precision=precision)


def test_a_resumed_run_takes_the_number_of_threads_of_its_first_attempt(runner: Runners) -> None:
    run = runner("threads")
    for own, stop_after in ((3, 4), (1, 4), (2, None)):
        torch.set_num_threads(own)
        _, state = run.attempt(stop_after)
        assert torch.get_num_threads() == state.threads == 3


def test_a_run_that_cannot_fetch_its_next_shard_leaves_with_its_last_state(runner: Runners) -> None:
    run, fetched = runner("cut"), list[str]()

    def fetch(name: str) -> Path:
        fetched.append(name)
        if len({one for one in fetched if one.startswith("train")}) > 1:
            raise StoreUnavailable("refused")
        return run.data / name

    with pytest.raises(StoreUnavailable, match="refused"):
        run.attempt(fetch=fetch)
    (step,) = run.commits()
    assert 0 < step < 12
    resumed, _ = run.attempt()
    assert run.ended(resumed) == runner.undisturbed()


# A validation has 6 batches.
@pytest.mark.parametrize(("batch", "step"), [(2, 0), (8, 5), (13, 10), (20, 12)])
def test_a_stop_in_a_validation_ends_the_attempt_there_and_the_next_one_validates_again(
    runner: Runners,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    step: int,
) -> None:
    validated: list[int] = []
    loss = PlainEngine.loss

    def counted(engine: PlainEngine, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        validated.append(len(tokens))
        return loss(engine, tokens, targets)

    run = runner("stopped")
    with monkeypatch.context() as counting:
        counting.setattr(PlainEngine, "loss", counted)
        _, state = run.attempt(stop_in_val_batch=batch)
    assert validated == [2] * (batch - 1) + [1] * bool(step)  # and the probe of the weights that it commits
    assert state.step == step and run.commits() == [step] * bool(step)  # no step after the stop
    resumed, _ = run.attempt()
    assert run.ended(resumed) == runner.undisturbed()


# --- when a save is due
