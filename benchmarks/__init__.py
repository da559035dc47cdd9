"""Side-by-side measurements. Each module is a command: `python -m benchmarks.NAME`."""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer.config.errors import EXIT_MISTAKE, UserError


def run_as_command(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the result of a module's `main`. A mistake of the user is one line, and exit code 2."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_MISTAKE)


def spread(values: list[float]) -> str:
    """The median, and the least and greatest."""
    return f"{statistics.median(values):8.3f} [{min(values):.3f} … {max(values):.3f}]"


def median_ms(
    works: Sequence[Callable[[], object]], rounds: int, warm_up: int = 3, before: Callable[[], object] = lambda: None
) -> list[float]:
    """The median milliseconds of each piece of work on the GPU. They take turns; `before` precedes each, untimed."""
    import torch

    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for _ in range(warm_up + rounds):
        for work, each in zip(works, marks, strict=True):
            before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            each.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in each[warm_up:]) for each in marks]
