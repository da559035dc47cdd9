"""The measures of an evaluation and their inputs: for the stage evaluate, and for a run while it trains.

Inputs come to this machine once, before ranks start; each rank reads them from its disk.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.recipe import Recipe
from pipelines.text.core_bundle import core_tasks, verify_items
from pipelines.text.encode import several_encoder
from pipelines.text.hub import HUB
from pipelines.text.retry import LOOK_SECONDS, with_retries
from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    from trainer.core import CoreScore
    from trainer.evaluation import Evaluation
    from trainer.hellaswag import Encode, HellaSwagItem, HellaSwagScore
    from trainer.parallel import World
    from trainer.scoring import Scored


def hellaswag_identity(source: str | None) -> str | None:
    """The Hub's name of the benchmark, which never changes, or the sha256 of a file."""
    if source is None or source.startswith(HUB):
        return source
    if not Path(source).is_file():
        raise UserError(f"evaluate.hellaswag: {source}: no such file; use {HUB}Rowan/hellaswag, a jsonl file, or null")
    return f"sha256:{sha256_of(Path(source))}"


def fetch_inputs(recipe: Recipe, cache: Path) -> None:
    """Bring the inputs of the recipe's measures to this machine, and check them. UserError if that fails."""
    if recipe.evaluate.hellaswag:
        hellaswag_items(recipe.evaluate.hellaswag, cache)
    if recipe.evaluate.core:
        verify_items(recipe.evaluate.core)


def hellaswag_items(source: str, cache: Path) -> "list[HellaSwagItem]":
    """The items of a jsonl file, or of the validation split on the Hub (`hf://datasets/ORG/NAME[@commit]`), of which
    `cache` then has a copy."""
    from trainer.hellaswag import read_hellaswag, read_hellaswag_file

    if not source.startswith(HUB):
        return read_hellaswag_file(Path(source))
    copy = cache / f"hellaswag-{hashlib.sha256(source.encode()).hexdigest()[:16]}.jsonl"
    if copy.exists():
        return read_hellaswag_file(copy)
    rows = [{name: row.get(name) for name in ("ctx", "endings", "label")} for row in hub_rows(source)]
    items = read_hellaswag(iter(rows), source)
    cache.mkdir(parents=True, exist_ok=True)
    partial = copy.with_suffix(f".{os.getpid()}")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    partial.replace(copy)
    return items


def read_source(source: str) -> int:
    """The number of items of a source, which are read here and now. UserError if that fails."""
    from trainer.hellaswag import read_hellaswag, read_hellaswag_file

    if not source.startswith(HUB):
        return len(read_hellaswag_file(Path(source)))
    import huggingface_hub.utils.logging as hub_log

    hub_log.set_verbosity_error()  # it warns of each repetition
    return len(read_hellaswag(hub_rows(source, LOOK_SECONDS), source))


def hub_rows(source: str, seconds: float | None = None) -> Iterator[dict[str, Any]]:
    """The rows of the validation split on the Hub. UserError if it cannot be loaded within so many seconds."""
    import datasets

    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        yield from with_retries(
            lambda: datasets.load_dataset(name, split="validation", revision=revision or None), seconds
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"evaluate.hellaswag: {source}: cannot be loaded ({str(error).splitlines()[0]}); "
            "name a jsonl file, or null to skip it"
        ) from error


CHECKED_CHARACTERS = 500_000  # tiktoken encodes them in about 0.2 s on a core


def encoder(encoding: "tiktoken.Encoding", world: "World", check: Callable[[], None] = lambda: None) -> "Encode":
    """Texts to token ids, on this rank's share of the cores.

    `check` is called after every CHECKED_CHARACTERS, over all calls: equally often on all ranks, which encode the same
    texts. So a stop does not wait for the texts of a whole benchmark. A `check` that communicates needs calls from one
    thread alone: beside the communication of another thread, the ranks would mix both up.
    """
    threads = max(1, (os.cpu_count() or 1) // world.world_size)
    encode_some = several_encoder(encoding, threads)
    unchecked = 0

    def encode(texts: list[str]) -> "list[np.ndarray]":
        nonlocal unchecked
        encoded: list[np.ndarray] = []
        begin = 0
        for end, text in enumerate(texts, 1):
            unchecked += len(text)
            if unchecked >= CHECKED_CHARACTERS or end == len(texts):
                encoded += encode_some(texts[begin:end])
                begin = end
            if unchecked >= CHECKED_CHARACTERS:
                unchecked = 0
                check()
        return encoded

    return encode


def hellaswag_facts(score: "HellaSwagScore") -> dict[str, float]:
    """The scores by metric."""
    return {"eval/hellaswag_acc_norm": score.acc_norm, "eval/hellaswag_acc": score.acc}


def core_facts(score: "CoreScore") -> dict[str, float]:
    """CORE, and the centred accuracy of each of its tasks, by metric."""
    return {"eval/core": score.core} | {f"core/{task}": value for task, value in score.centred.items()}


def evaluation_in_training(
    recipe: Recipe, tokenizer: "Callable[[], tiktoken.Encoding]", cache: Path, world: "World"
) -> "Evaluation | None":
    """The evaluation of a run while it trains, on this rank; None if the recipe has none. A collective call."""
    from trainer.core import core
    from trainer.evaluation import Evaluation, Sampling
    from trainer.hellaswag import hellaswag

    if recipe.evaluate.every is None:
        return None
    if world.local_rank == 0:  # the first of a node that is not the head downloads them
        fetch_inputs(recipe, cache)
    world.gather(None)
    encoding = tokenizer()
    measures = []
    if source := recipe.evaluate.hellaswag:
        items = hellaswag_items(source, cache)

        def measure(model: "Scored", world: "World", check: Callable[[], None]) -> dict[str, float]:
            return hellaswag_facts(hellaswag(model, items, encoder(encoding, world, check), world, before_batch=check))

        measures.append(measure)
    if source := recipe.evaluate.core:
        tasks = core_tasks(source)

        def measure_core(model: "Scored", world: "World", check: Callable[[], None]) -> dict[str, float]:
            encode = encoder(encoding, world)  # a thread encodes ahead, so without `check`
            return core_facts(core(model, tasks, encode, encoding.eot_token, world, before_batch=check))

        measures.append(measure_core)
    sampling = Sampling(encoding.eot_token, encoding.decode, recipe.train.seed)
    return Evaluation(recipe.evaluate.every, tuple(measures), sampling)
