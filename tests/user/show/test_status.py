"""The state of runs reads as a person speaks."""

import pytest

from pipelines.store.records import Heartbeat, Progress
from pipelines.user.show.status import print_stopped


def test_a_stopped_run_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    running = Heartbeat("r-1", "train", 3, "running", 0.0, 0.0, 0.0)
    stopped = Heartbeat("r-1", "train", 3, "stopped", 0.0, 0.0, 0.0, progress=Progress(step=17))
    print_stopped("r-1", running, stopped, launched=True)
    print_stopped("r-1", running, stopped, launched=False)
    assert capsys.readouterr().out.splitlines() == [
        "r-1: train: attempt 3 is stopped at step 17; once its job is over, skytrain resume r-1 continues",
        "r-1: train: attempt 3 is stopped at step 17; skytrain run run:r-1 continues",
    ]
