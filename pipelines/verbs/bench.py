"""`skytrain bench`: the speed of whole optimizer steps on this machine, and the time of each kernel."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.verbs.options import Changes, Json

LEAST_STEPS = 20


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="The recipe of model and batch [gpt2-124m; without a GPU smoke]"),
    ] = None,
    micro_batch: Annotated[str, typer.Option(metavar="N|auto", help="Set the sequences of a micro-batch.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16, fp16, fp8 or fp8_head.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, fused, sharded, compiled or eager.")] = "auto",
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an optimizer step [the recipe's]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="Optimizer steps to time.")] = LEAST_STEPS,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Read train_*.bin of this folder [tokens drawn by Zipf's law]"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profiled steps as a Chrome trace.")
    ] = None,
    set_: Changes = None,
    as_json: Json = False,
) -> None:
    """Time whole optimizer steps: tokens/s, MFU, memory, clock, and the longest kernels."""
    import torch

    from pipelines.bench import measure
    from pipelines.show.bench import print_bench

    name = model or ("gpt2-124m" if torch.cuda.is_available() else "smoke")
    options = {
        "runtime.micro_batch_size": micro_batch,
        "runtime.engine": engine,
        "train.precision": precision,
    }
    changes = [f"{field}={value}" for field, value in options.items()] + [*(set_ or [])]
    changes += [f"train.batch_tokens={batch_tokens}"] if batch_tokens else []
    if result := measure.bench(name, measure.bench_recipe(name, changes), steps, data, trace):
        print(json.dumps(asdict(result))) if as_json else print_bench(result)
