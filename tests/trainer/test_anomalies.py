"""Runs with anomalies skip updates or exit, and repeat exactly that when they resume."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trainer_runs
import troubled
from safetensors.torch import load_file
from trainer_command import Command
from trainer_runs import EVERY_STEP, Runner, Runners, configured, weights
from troubled import inject

import trainer.checkpoint.health
import trainer.loop.loop
from trainer.base.events import Started, Warned
from trainer.base.parallel import clip_
from trainer.checkpoint.commits import series
from trainer.config.errors import Diverged
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of
from trainer.engines.choice import make_engine
from trainer.engines.plain import PlainEngine
from trainer.optim.rates import rates_at

TROUBLED = (str(Path(troubled.__file__)),)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that a run of seconds can fill."""
    monkeypatch.setattr(trainer.checkpoint.health, "OUTLIER_WINDOW", 10)


def tensors_at(run: Runner, step: int) -> dict[str, torch.Tensor]:
    (folder,) = (run.out / "run/checkpoints").glob(f"step-{step:08d}-*")
    return load_file(next(folder.glob("*.safetensors")))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


ARMED = {"skip_loss_zscore": 20.0, "skip_grad_norm_zscore": 30.0}


def test_a_healthy_run_is_the_plain_loop_bit_for_bit(runner: Runners, small_windows: None) -> None:
    plain, armed = runner("plain", max_steps=30), runner("armed", max_steps=30, **ARMED | {"skip_loss_zscore": 1e6})
    model, _ = plain.attempt()
    assert weights(armed.attempt()[0]) == weights(model) and armed.rows() == plain.rows()
    c = plain.config
    engine = make_engine(c.model, c.train, c.runtime, trainer_runs.ALONE)
    assert isinstance(engine, PlainEngine)
    engine.initialize(c.train.seed)
    tokens = TokenData(local_shards(plain.data, "train"), plain.data.joinpath, c.model.block_size, c.train.seed)
    for number, row in enumerate(plain.rows()[1:]):
        engine.optimizer.rates = rates_at(number, c.train, c.model)
        engine.gradients.zero_()
        total = torch.zeros(())
        for batch in tokens.micro_batches(sequences_of(number, c.model, c.train, 0, 1), 2, torch.device("cpu")):
            loss = engine.model(*batch) / 4
            loss.backward()
            total += loss.detach()
        norm = engine.gradients.norm()
        clip_(engine.gradients, norm, c.train.grad_clip)
        assert row["train/loss"] == float(total) and row["train/grad_norm"] == float(norm)
        engine.optimizer.step()
    assert weights(engine.model) == weights(model)
    assert not {k for row in series(plain.store, "run") for k in row if "skipped" in k}


@pytest.mark.parametrize(("kind", "place"), [("nan", 4), ("infinite", 4), ("huge", 14)])
def test_a_bad_batch_is_skipped_counted_and_leaves_weights_and_moments_alone(
    runner: Runners, monkeypatch: pytest.MonkeyPatch, small_windows: None, kind: str, place: int
) -> None:
    inject({kind: [place]}, monkeypatch.setattr)
    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=99, max_steps=20, skip_grad_norm_zscore=30.0)
    _, state = run.attempt()
    assert (state.step, state.optimizer_steps, state.tokens_seen) == (20, 19, 20 * 256)
    assert state.health.skipped == 1
    (event,) = run.events_of(Warned)
    assert event.message.startswith(f"update {place + 1} skipped: ")
    assert ("standard deviations above its last 10" if kind == "huge" else "train/loss is ") in event.message
    rows = {row["step"]: row for row in series(run.store, "run")}
    assert {s: row["train/skipped_updates"] for s, row in rows.items() if "train/skipped_updates" in row} == {
        place + 1: 1
    }
    assert sorted(rows) == list(range(21)) and all(math.isfinite(v) for row in rows.values() for v in row.values())
    if kind == "huge":  # no commit of a step that was not finite: the weights might be ruined already
        assert same(tensors_at(run, place), tensors_at(run, place + 1))
    else:
        assert place + 1 not in run.commits()
    assert not same(tensors_at(run, place), tensors_at(run, place + 2))


def test_a_run_with_skips_is_resumed_bit_for_bit(
    runner: Runners, monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    inject({"nan": [3, 4, 15], "huge": [13, 17]}, monkeypatch.setattr)
    whole = runner("whole", max_steps=20, **ARMED)
    model, state = whole.attempt()
    assert state.health.skipped == 5 and state.optimizer_steps == 15
    for stop_after in (3, 4, 14, 18):  # before, in and after a skip
        run = runner(f"stopped-{stop_after}", max_steps=20, **ARMED)
        run.attempt(stop_after)
        resumed, again = run.attempt()
        assert again == state and run.rows() == whole.rows() and weights(resumed) == weights(model)


RUINED_AFTER = 7  # updates: from then on no loss is finite


@pytest.mark.parametrize(
    ("changes", "stop_after", "evidence"),
    [
        ({}, RUINED_AFTER, "diverged at step 7: the loss of a probe is nan"),
        ({}, RUINED_AFTER + 3, "diverged at step 10: the loss of a probe is nan"),  # two bad updates before the stop
        ({"max_steps": RUINED_AFTER}, None, "diverged at step 7: the loss of a probe is nan"),
        ({"max_steps": RUINED_AFTER + 2}, None, "diverged at step 9: the loss of a probe is nan"),
        ({"max_steps": RUINED_AFTER, "val_every": 7}, None, "diverged at step 7: val/loss is nan"),
        ({"val_every": 8}, None, "diverged at step 8: val/loss is nan"),
        ({}, None, "diverged at step 15: loss or gradient were not finite in 8 updates in a row"),
    ],
)
def test_ruined_weights_are_never_committed_and_end_the_run_as_diverged(
    runner: Runners,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    stop_after: int | None,
    evidence: str,
) -> None:
    inject({"ruin": [RUINED_AFTER - 1]}, monkeypatch.setattr)
    settings = {"max_steps": 20, "val_every": None, "grad_clip": None, "checkpoint_minutes": EVERY_STEP} | changes
    run = runner(**settings)
    with pytest.raises(Diverged, match=evidence):
        run.attempt(stop_after)
    assert run.commits() == [RUINED_AFTER - 1, RUINED_AFTER - 2]
    run.config = configured(**settings | {"max_steps": RUINED_AFTER - 1})
    resumed, state = run.attempt()
    assert state.step == RUINED_AFTER - 1 and all(bool(p.isfinite().all()) for p in resumed.parameters())


# --- as a command, with several ranks, killed and frozen


# How long torchrun (2.12 or newer; 30 else) waits for a frozen rank to end before it kills it.
FROZEN_SECONDS = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")


def is_rank(process: psutil.Process, rank: int) -> bool:
    return "troubled.py" in " ".join(process.cmdline()) and process.environ().get("RANK") == str(rank)


@pytest.mark.parametrize("how", [pytest.param("SIGSTOP", marks=pytest.mark.slow), "sleep"])
def test_a_rank_that_is_stuck_ends_the_attempt_and_the_next_one_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps({"sleep": [20]} if how == "sleep" else {}))
    monkeypatch.setenv(*FROZEN_SECONDS)
    config = configured(max_steps=60, val_every=None, checkpoint_minutes=0.0005, watchdog_minutes=5 / 60)
    command = Command(data, tmp_path / "out", config, TROUBLED)
    ranks = 1 if how == "sleep" else 2
    with command.started(ranks) as process:
        if how == "SIGSTOP":
            command.wait_for_rows(10, process)
            victim = next(p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p, 1))
            os.kill(victim.pid, signal.SIGSTOP)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == (75 if ranks == 1 else 1), output
    assert "no progress in phase 'train' for " in output and "most recent call first" in output
    assert ("sleep_once" if how == "sleep" else "all_reduce") in output  # where it hangs
    done = command.rows_logged()
    assert done < 60
    command.finish()
    assert [row["step"] for row in command.rows()] == list(range(1, 61))
    assert [e.step > 0 for e in command.events_of(Started)] == [False, True]
