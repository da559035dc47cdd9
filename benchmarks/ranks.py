"""What benchmarks under torchrun share."""

import os
import sys

from trainer.parallel import World


def rank_0_prints(world: World) -> None:
    """Let the other ranks print nothing on stdout."""
    if world.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
