"""`python -m trainer` shows its progress: one moving line on a terminal, a line every N steps in a log."""

import io
import itertools

import pytest

from trainer.events import Row, Started
from trainer.progress import Progress, time_left


def rows(progress: Progress, first: int, last: int) -> None:
    for step in range(first, last + 1):
        metrics = {"train/loss": 10.0 - step / 100, "perf/tokens_per_second": 12_345.6}
        progress(Row(step, 0.0, metrics, {}, "train"))


def started(step: int) -> Started:
    return Started(step, 1, "cpu", "eager", "fp32", 7, 8, "as configured")


def test_a_log_has_a_line_every_n_steps_and_one_for_each_validation(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = itertools.count(step=10)
    progress = Progress(100, every=40, clock=lambda: next(seconds))
    progress(Row(0, 0.0, {"val/loss": 11.0}, {}, "train"))
    progress(started(0))
    rows(progress, 1, 100)
    progress(Row(100, 0.0, {"val/loss": 9.5}, {}, "train"))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    begun = [line.partition("  ")[0] for line in lines]
    assert begun == [
        "step 0: val loss 11.0000",
        "step 0 of 100: training begins on 1 x cpu",
        "step 40 of 100 (40%)",
        "step 80 of 100 (80%)",
        "step 100 of 100 (100%)",
        "step 100: val loss 9.5000",
    ]
    assert lines[2].startswith("step 40 of 100 (40%)  train loss 9.6000  val loss 11.0000  12,346 tokens/s  ")
    assert lines[2].endswith(" left") and "left" not in lines[-2]


def test_a_terminal_has_one_line_that_moves_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    progress = Progress(10**12, every=1, terminal=terminal, clock=itertools.count().__next__)
    progress(started(0))
    rows(progress, 1, 50)
    progress.close()
    shown = terminal.getvalue()
    assert shown.count("\n") == 1 and shown.endswith("\n")
    moves = [move for move in shown.split("\r\x1b[K") if move]
    assert len(moves) == 50 and all(len(move.strip()) < 80 and move.rstrip("\n").endswith("\r") for move in moves)
    assert "step 50 of" in moves[-1] and "step" in capsys.readouterr().out  # that training begins


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (90, "2 min"), (7500, "2 h 05 min")])
def test_the_time_left_has_one_readable_unit(seconds: float, text: str) -> None:
    assert time_left(seconds) == text
