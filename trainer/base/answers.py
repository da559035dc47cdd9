"""A bound on the whole answer of another machine.

A socket's timeout bounds the time between two bytes. A server that sends a byte every few seconds never reaches it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def answered_within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises. TimeoutError if that takes longer than `seconds` in all; then its thread goes on
    until it has an answer, or the process ends."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="answer", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error
