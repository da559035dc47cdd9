"""The trainer with trouble at chosen places of the data order: `python troubled.py CONFIG --data … --out …`.

The trouble is JSON in TROUBLE: a kind, and the places (steps of the data order) where it strikes:
nan        loss and gradient of the last rank are not a number
infinite   the last rank's gradient holds an infinity, its loss is fine
huge       the gradient is ten thousand times too long
spike      the learning rate is three hundred times too high: weights are ruined, yet finite
sleep      rank 0 falls asleep, once in the life of the output folder
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

import trainer.loop
from trainer.__main__ import main
from trainer.engine import PlainEngine


def afflict(trouble: dict[str, list[int]], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the trouble strike wherever its places are read, however often that is."""
    batch_tokens_at, backward, update = trainer.loop.batch_tokens_at, PlainEngine.backward, PlainEngine.update
    place = -1

    def noted(step: int, *args: Any) -> int:
        nonlocal place
        place = step
        return batch_tokens_at(step, *args)

    def strikes_now() -> set[str]:
        return {kind for kind, places in trouble.items() if place in places}

    def struck(engine: PlainEngine, *args: Any) -> Tensor:
        loss = backward(engine, *args)
        strikes, last_rank = strikes_now(), engine.world.rank == engine.world.world_size - 1
        if "nan" in strikes and last_rank:
            engine.gradients.flat.fill_(math.nan)
            loss.fill_(math.nan)
        if "infinite" in strikes and last_rank:
            engine.gradients.flat[17] = math.inf
        if "huge" in strikes:
            engine.gradients.flat.mul_(1e4)
        if "sleep" in strikes and os.environ.get("RANK", "0") == "0":
            doze()
        return loss

    def spiked(engine: PlainEngine, learning_rate: float, *args: Any, **options: Any) -> bool:
        return update(engine, learning_rate * (300 if "spike" in strikes_now() else 1), *args, **options)

    patch(trainer.loop, "batch_tokens_at", noted)
    patch(PlainEngine, "backward", struck)
    patch(PlainEngine, "update", spiked)


def doze() -> None:
    mark = Path(sys.argv[-1]) / "slept"
    if not mark.exists():
        mark.touch()
        time.sleep(600)


if __name__ == "__main__":
    afflict(json.loads(os.environ["TROUBLE"]))
    sys.exit(main())
