"""Anomalies of a run: outliers, divergence, the diagnosis, and the watchdog."""

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from trainer.base.metrics import PhaseClock
from trainer.base.parallel import collective_timeout
from trainer.checkpoint.health import Health
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import EXIT_INTERRUPTED
from trainer.loop.watchdog import Watchdog

BASE: dict[str, Any] = {"batch_tokens": 256, "max_steps": 1000, "learning_rate": 0.01}


def judged(losses: list[float], norms: list[float] | None = None, **config: Any) -> tuple[Health, list[int]]:
    """The health after a series, and the steps (from 1) that were skipped."""
    health, skipped = Health(), []
    settings = TrainConfig(**BASE, **config)
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        health, why = health.after(loss, norm, settings)
        skipped += [step] if why else []
    return health, skipped


@pytest.mark.parametrize("limit", [2.0, 3.0, 6.0])
def test_the_z_score_is_that_of_an_independent_implementation(limit: float) -> None:
    noise = np.random.RandomState(0)
    losses = 5 * np.exp(-np.arange(700) / 300) + 0.05 * noise.randn(700)
    norms = 1 + 0.1 * noise.randn(700)
    losses[noise.rand(700) < 0.02] += 3.0
    norms[noise.rand(700) < 0.02] *= 40.0

    def expected(values: np.ndarray) -> list[int]:
        seen: list[float] = []
        found = []
        for step, value in enumerate(values, 1):
            window = np.array(seen[-128:])
            most = window.mean() + limit * window.std() if len(window) == 128 else np.inf
            found += [step] if value > most else []
            seen.append(min(value, most))
        return found

    on_loss, on_norm = expected(losses), expected(norms)
    assert min(len(on_loss), len(on_norm)) > 2 and on_loss != on_norm
    as_lists = losses.tolist(), norms.tolist()
    assert judged(*as_lists, skip_loss_zscore=limit)[1] == on_loss
    assert judged(*as_lists, skip_grad_norm_zscore=limit)[1] == on_norm
    both, skipped = judged(*as_lists, skip_loss_zscore=limit, skip_grad_norm_zscore=limit)
    assert skipped == sorted({*on_loss, *on_norm}) and both.skipped == len(skipped)
    assert judged(*as_lists)[1] == []


def watched(minutes: float | None | str = "auto", phase: str = "train", **options: Any) -> tuple[Watchdog, list[str]]:
    reports: list[str] = []
    runtime = RuntimeConfig.model_validate({"watchdog_minutes": minutes})
    return Watchdog(runtime, PhaseClock(phase), on_stuck=reports.append, poll_seconds=0.01, **options), reports


def test_the_limit_is_ten_minutes_or_twenty_steps_and_six_times_that_outside_of_steps() -> None:
    watchdog, _ = watched()
    assert watchdog.limit_seconds() == 600
    for seconds in (1.0, 2.0, 3.0):
        watchdog.step_done(seconds)
    assert watchdog.limit_seconds() == 600
    for _ in range(9):
        watchdog.step_done(50.0)
    assert watchdog.limit_seconds() == 1000
    for phase in ("evaluate", "checkpoint", "compile", "download", "setup"):
        watchdog.clock.enter(phase)
        assert watchdog.limit_seconds() == 6000
    assert watched(2.5)[0].limit_seconds() == 150
    assert watched(None)[0].limit_seconds() == math.inf


@pytest.mark.parametrize("minutes", ["auto", 0.01, 1.0, 30.0])
def test_a_collectives_timeout_is_longer_than_the_watchdogs_whose_exit_code_is_resumable(minutes: Any) -> None:
    runtime = RuntimeConfig(watchdog_minutes=minutes)
    for phase in ("compile", "train", "evaluate", "checkpoint"):
        watchdog = Watchdog(runtime, PhaseClock(phase))
        for _ in range(100):
            watchdog.step_done(30.0)  # longer steps than any recipe's
        assert collective_timeout(runtime).total_seconds() > watchdog.limit_seconds() + 2 * watchdog.poll_seconds
    assert collective_timeout(RuntimeConfig(watchdog_minutes=None)).total_seconds() == 600


def test_a_rank_whose_peers_never_come_leaves_resumable_and_names_the_phase() -> None:
    alone = """
import trainer.loop.watchdog
from trainer.config.config import RuntimeConfig
from trainer.base.metrics import PhaseClock
with trainer.loop.watchdog.Watchdog(RuntimeConfig(), PhaseClock("imports"), poll_seconds=0.1) as watch:
    from trainer.base.parallel import World
    trainer.loop.watchdog.START_MINUTES = 0.5 / 60
    watch.enter("rendezvous")
    World.start(RuntimeConfig(device="cpu"))
"""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", alone], env=os.environ | ranks, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == EXIT_INTERRUPTED, done.stderr
    assert "rank 0: no progress in phase 'rendezvous' for " in done.stderr and "init_process_group" in done.stderr
