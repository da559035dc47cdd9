"""The trainer with faults at chosen positions of the data order: `python troubled.py CONFIG --data … --out …`.

The environment variable TROUBLE holds JSON: kinds of faults, each with its positions (steps of the data order):
nan        loss and gradient of the last rank are not a number
infinite   the gradient of the last rank contains an infinity; its loss is finite
huge       the gradient is ten thousand times too long
ruin       the learning rate is 1e30: the loss before the update is finite, no loss after it
sleep      rank 0 sleeps, once for each output folder
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import trainer.loop.loop
from trainer.__main__ import main
from trainer.engines.plain import PlainEngine
from trainer.optim.rates import Rates


def inject(trouble: dict[str, list[int]], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Inject the faults of `trouble` each time when training reads their positions."""
    batch_tokens_at, backward, update = trainer.loop.loop.batch_tokens_at, PlainEngine.backward, PlainEngine.update
    position = -1

    def recording_batch_tokens_at(step: int, *args: Any) -> int:
        nonlocal position
        position = step
        return batch_tokens_at(step, *args)

    def active_kinds() -> set[str]:
        return {kind for kind, positions in trouble.items() if position in positions}

    def troubled_backward(engine: PlainEngine, *args: Any) -> Tensor:
        loss = backward(engine, *args)
        kinds, last_rank = active_kinds(), engine.world.rank == engine.world.world_size - 1
        if "nan" in kinds and last_rank:
            engine.gradients.fill_(math.nan)
            loss.fill_(math.nan)
        if "infinite" in kinds and last_rank:
            engine.gradients[17] = math.inf
        if "huge" in kinds:
            engine.gradients.mul_(1e4)
        if "sleep" in kinds and os.environ.get("RANK", "0") == "0":
            sleep_once()
        return loss

    def troubled_update(engine: PlainEngine, rates: Rates, *args: Any) -> None:
        update(engine, Rates.adamw(1e30) if "ruin" in active_kinds() else rates, *args)

    patch(trainer.loop.loop, "batch_tokens_at", recording_batch_tokens_at)
    patch(PlainEngine, "backward", troubled_backward)
    patch(PlainEngine, "update", troubled_update)


def sleep_once() -> None:
    mark = Path(sys.argv[-1]) / "slept"
    if not mark.exists():
        mark.touch()
        time.sleep(600)


if __name__ == "__main__":
    inject(json.loads(os.environ["TROUBLE"]))
    sys.exit(main())
