"""Threads report the error that ended them."""

import pytest

from trainer.process import Background


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), MemoryError()])
def test_a_background_thread_reports_the_error_that_ended_it(error: BaseException) -> None:
    def work() -> None:
        raise error

    reported: list[Background] = []
    thread = Background("odd jobs", work, reported.append)
    thread.start()
    thread.join(10)
    assert reported == [thread] and thread.error is error
