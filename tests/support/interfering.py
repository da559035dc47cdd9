"""A store in a folder whose calls a test watches, delays or refuses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.store import LocalStore


class Interfering(LocalStore):
    """Calls `before[method](key)` ahead of that method, which an exception replaces."""

    def __init__(self, root: Path, **before: Callable[[str], object]) -> None:
        super().__init__(root)
        for name, interfere in before.items():
            setattr(self, name, partial(_interfered, interfere, getattr(self, name)))


def _interfered(interfere: Callable[[str], object], method: Callable[..., Any], *arguments: Any) -> Any:
    interfere(next(one for one in arguments if isinstance(one, str)))
    return method(*arguments)
