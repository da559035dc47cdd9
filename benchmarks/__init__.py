"""Side-by-side measurements. Each module is a command: `python -m benchmarks.NAME`."""

import os
import statistics
import sys
from collections.abc import Callable
from typing import NoReturn

from trainer.errors import EXIT_MISTAKE, UserError
from trainer.parallel import World


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


def rank_0_prints(world: World) -> None:
    """Let the other ranks print nothing on stdout."""
    if world.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
