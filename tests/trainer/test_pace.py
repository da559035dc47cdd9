"""A rank that computes slower than the others is found, although all whole steps take equally long."""

import time
from collections.abc import Callable

import pytest
import torch
import trainer_runs
from trainer_runs import Runner

from trainer.events import Paced
from trainer.health import straggler
from trainer.pace import WINDOW, Pace, Paces

_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner


def test_a_rank_measures_its_own_work_and_not_its_waits() -> None:
    pace = Pace(torch.device("cpu"))
    assert pace.seconds() == 0
    for _ in pace.each(range(3)):
        time.sleep(0.02)
    own = pace.seconds()
    time.sleep(0.2)  # for the others
    assert pace.seconds() == own >= 0.06


def test_the_slowest_rank_is_named_from_ten_percent_on_and_only_if_it_is_slow_persistently() -> None:
    paces = Paces()
    steps = [(1.0, 1.02, 9.0 if step % 10 == 0 else 1.05, 1.2) for step in range(WINDOW)]  # some steps are an accident
    found = [paces.add(step) for step in steps]
    assert found[:-1] == [None] * (WINDOW - 1) and found[-1] == (1.0, 1.02, 1.05, 1.2)
    assert straggler(found[-1]) == (3, pytest.approx(1.2 / 1.035))
    assert straggler((1.0, 1.02, 1.05, 1.1)) is None


def test_ranks_that_measure_nothing_and_single_ranks_have_no_pace() -> None:
    for step in ((1.0,), (1.0, 0.0)):
        paces = Paces()
        assert {paces.add(step) for _ in range(3 * WINDOW)} == {None}


def test_a_run_of_one_rank_reports_no_pace(runner: Callable[..., Runner]) -> None:
    run = runner("alone")
    run.attempt()
    assert run.events_of(Paced) == []
