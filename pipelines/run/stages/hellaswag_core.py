"""The measures of an evaluation and their inputs: for the stage evaluate, and for a run while it trains.

Inputs come to this machine once, before ranks start; each rank reads them from its disk. CORE's bundle is there as
soon as a recipe is planned: long before a GPU is rented.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.recipe.recipe import Recipe
from pipelines.run.fetch import check_content, path_of
from pipelines.run.text.chat import ChatTokens
from pipelines.run.text.encode import Encoder
from pipelines.run.text.hub import asked, datasets_library
from trainer.base.store import replacing, sha256_of
from trainer.config.errors import UserError
from trainer.config.source import FORMS, Kind, Source

if TYPE_CHECKING:
    import tiktoken

    from trainer.base.parallel import World
    from trainer.eval.core import CoreTask
    from trainer.eval.evaluation import Evaluation, Measure
    from trainer.eval.hellaswag import HellaSwagItem

BENCHMARKS: tuple[Kind, ...] = ("dataset", "path")


def hellaswag_source(text: str) -> Source:
    """Its items never change, so the Hub's need no commit."""
    return Source.of(text, "evaluate.hellaswag", BENCHMARKS, moving=True)


def hellaswag_identity(text: str | None) -> str | None:
    """The Hub's name of the benchmark, or the sha256 of a file."""
    if text is None or (source := hellaswag_source(text)).kind == "dataset":
        return text
    if not (path := path_of(source)).is_file():
        raise UserError(
            f"evaluate.hellaswag: {text}: no such file; use hf://datasets/Rowan/hellaswag, a jsonl file, or null"
        )
    return f"sha256:{check_content(source, sha256_of(path), 'evaluate.hellaswag').sha256}"


def core_identity(source: str | None) -> str | None:
    """sha256 of the tasks, wherever the bundle lies; None for none. UserErrors as in `core_tasks`."""
    from trainer.eval.core import bundle_digest

    if source is None:
        return None
    named = Source.of(source, "evaluate.core", BENCHMARKS)
    return f"sha256:{check_content(named, bundle_digest(core_tasks(source)), 'evaluate.core').sha256}"


def fetch_inputs(recipe: Recipe, cache: Path, seconds: float | None = None) -> None:
    """Bring the inputs of the recipe's measures to this machine, and check them. UserError if that fails, for an answer
    of the Hub within this many seconds."""
    if recipe.evaluate.hellaswag:
        hellaswag_items(recipe.evaluate.hellaswag, cache, seconds)
    if recipe.evaluate.core:
        from trainer.eval.core import read_items

        for task in core_tasks(recipe.evaluate.core):
            read_items(task)


def hellaswag_items(source: str, cache: Path, seconds: float | None = None) -> "list[HellaSwagItem]":
    """The items of a jsonl file, or of the validation split on the Hub (`hf://datasets/ORG/NAME[@commit]`), of which
    `cache` then has a copy. UserError if they cannot be had, from the Hub within this many seconds."""
    from trainer.eval.hellaswag import read_hellaswag

    named = hellaswag_source(source)
    if named.kind == "path":
        return read_hellaswag(path_of(named))
    known = f"hellaswag-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    copies = cache.glob(f"{known}-*.jsonl")  # with the sha256 of their bytes
    copy = next((one for one in copies if one.stem.rpartition("-")[2] == sha256_of(one)), None)
    if copy is None:
        load = partial(datasets_library().load_dataset, named.name, split="validation", revision=named.commit)
        loaded = asked(f"evaluate.hellaswag: {source}", load, "name a jsonl file, or null to skip it", seconds)
        rows = ({field: row.get(field) for field in ("ctx", "endings", "label")} for row in loaded)
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        copy = cache / f"{known}-{hashlib.sha256(body).hexdigest()}.jsonl"
        with replacing(copy) as file:
            file.write(body)
    return read_hellaswag(copy)


def core_tasks(source: str) -> "list[CoreTask]":
    """The tasks of CORE's bundle: a folder, or a dataset on the Hub at one commit, which is then on this machine.
    UserError if it cannot be had, or lacks a task."""
    from trainer.eval.core import read_bundle

    named = Source.of(source, "evaluate.core", BENCHMARKS)
    if named.kind == "path":
        if not (path := path_of(named)).is_dir():
            forms = f"{FORMS['dataset']}, or null"
            raise UserError(f"evaluate.core: {source}: no such folder; use a folder with a CORE bundle, {forms}")
        return read_bundle(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    folder = named.files
    how = {"repo_type": "dataset", "revision": named.commit, "allow_patterns": [f"{folder}/*" if folder else "*"]}
    fetch = partial(snapshot_download, named.name, **how)
    with suppress(OSError, ValueError):  # not here, or not all of it
        return read_bundle(Path(fetch(local_files_only=True)) / folder)
    remedy = "name the folder of a CORE bundle, or null to leave CORE out"
    return read_bundle(Path(asked(f"evaluate.core: {source}", fetch, remedy)) / folder)


def measures_of(
    recipe: Recipe, encoding: "tiktoken.Encoding", cache: Path, world: "World", tuned: bool = False
) -> "dict[str, Measure]":
    """HellaSwag and CORE by name, as far as the recipe has them; of a `tuned` model in chat form, too."""
    from trainer.eval.core import core
    from trainer.eval.hellaswag import hellaswag

    encode = Encoder(encoding).rows
    measures: dict[str, partial[dict[str, float]]] = {}
    if source := recipe.evaluate.hellaswag:
        measures["HellaSwag"] = partial(hellaswag, items=hellaswag_items(source, cache), encode=encode)
    if source := recipe.evaluate.core:
        measures["CORE"] = partial(core, tasks=core_tasks(source), encode=encode, end_of_text=encoding.eot_token)
    if tuned:
        chat = ChatTokens(encoding).prompt
        measures |= {f"{name} in chat form": partial(plain, chat=chat) for name, plain in measures.items()}
    return {**measures}


def evaluation_in_training(
    recipe: Recipe, tokenizer: "Callable[[], tiktoken.Encoding]", cache: Path, world: "World"
) -> "Evaluation":
    """The evaluation of a run while it trains, on this rank. A collective call."""
    from trainer.eval.evaluation import Evaluation, TextSampler

    if recipe.evaluate.every is None:
        return Evaluation()
    if world.local_rank == 0:  # the first of a node that is not the head downloads them
        fetch_inputs(recipe, cache)
    world.gather(None)
    encoding = tokenizer()
    sampling = TextSampler(encoding.eot_token, encoding.decode, recipe.train.seed)
    measures = tuple(measures_of(recipe, encoding, cache, world).values())
    return Evaluation(recipe.evaluate.every, measures, sampling)
