"""A process hears a request to stop, and its threads report their death."""

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from trainer.errors import HandedOver, Interrupted
from trainer.process import Background, StopSignal


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    """Handles this process's signals for one test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield StopSignal()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_ends_an_import_where_it_arrives_and_no_library_swallows_it(stop: StopSignal) -> None:
    reached = ["the region"]
    with pytest.raises(Interrupted), stop.leaving_at_once():
        with suppress(Exception):  # as around an optional import
            signal.raise_signal(signal.SIGTERM)
            reached.append("the rest")
        reached.append("the next import")
    assert reached == ["the region"] and stop.reason == "SIGTERM"
    with pytest.raises(Interrupted), stop.leaving_at_once():  # it was asked before
        reached.append("another region")
    signal.raise_signal(signal.SIGTERM)  # outside it only asks
    assert reached == ["the region"]


def test_a_request_of_a_thread_during_an_import_keeps_its_own_ending(stop: StopSignal) -> None:
    with pytest.raises(HandedOver, match="no slack"), stop.leaving_at_once():
        stop.ask("no slack", HandedOver)


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), MemoryError()])
def test_a_background_thread_reports_the_error_that_ended_it(error: BaseException) -> None:
    def work() -> None:
        raise error

    reported: list[Background] = []
    thread = Background("odd jobs", work, reported.append)
    thread.start()
    thread.join(10)
    assert reported == [thread] and thread.error is error


def test_without_a_listener_the_death_of_a_thread_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    thread = Background("exits", lambda: sys.exit(3))
    thread.start()
    thread.join(10)
    assert "the thread 'exits' DIED" in capsys.readouterr().out
