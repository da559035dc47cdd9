"""`skytrain bench`: the speed of whole optimizer steps on this machine, and the time of each kernel."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.user.verbs.options import Changes, Json

LEAST_STEPS = 20


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="The recipe of model, batch and engine [gpt2-124m; without a GPU smoke]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="Optimizer steps to time.")] = LEAST_STEPS,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Read train_*.bin of this folder [tokens drawn by Zipf's law]"),
    ] = None,
    set_: Changes = None,
    as_json: Json = False,
) -> None:
    """Time whole optimizer steps: tokens/s, MFU, memory, clock, and the longest kernels."""
    import torch

    from pipelines.extras.bench.steps import bench as measured
    from pipelines.extras.bench.steps import bench_recipe
    from pipelines.user.show.bench import print_bench

    name = model or ("gpt2-124m" if torch.cuda.is_available() else "smoke")
    if result := measured(name, bench_recipe(name, set_ or []), steps, data):
        print(json.dumps(asdict(result))) if as_json else print_bench(result)
