"""A store in a folder whose calls a test watches, delays or refuses; and the same work in several threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.base.store import LocalStore

A = TypeVar("A")


class Interfering(LocalStore):
    """Calls `before[method](key)` ahead of that method, which an exception replaces."""

    def __init__(self, root: Path, **before: Callable[[str], object]) -> None:
        super().__init__(root)
        for name, interfere in before.items():
            setattr(self, name, partial(_interfered, interfere, getattr(self, name)))


def _interfered(interfere: Callable[[str], object], method: Callable[..., Any], *arguments: Any) -> Any:
    interfere(next(one for one in arguments if isinstance(one, str)))
    return method(*arguments)


def each(those: Sequence[A], work: Callable[[A], Any]) -> list[Any]:
    """What `work` returns for each, all at once in threads, or the exception that it raised."""

    def outcome(one: A) -> Any:
        try:
            return work(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(those)) as pool:
        return list(pool.map(outcome, those))
