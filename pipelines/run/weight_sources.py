"""Weights from elsewhere, for `train.init_from` and `train.branch_from`: found and checked before a machine is rented,
brought to a node once.

`pinned` gives a recipe in which every source (trainer/config/source.py) names its content: the commit of a repository,
or the sha256 of the bytes. So a recipe on record plans the same run on every machine, also once the source is gone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import TokenizerFile
from pipelines.run.fetch import check_content, hub_file, named, path_of
from pipelines.run.run_record import full_names
from pipelines.run.runs import Run, find_run
from pipelines.run.text.hub import asked
from pipelines.run.text.tokenizer import ids_in, tokenizer_file_bytes, tokenizer_files, tokenizer_of
from pipelines.store.layout import TOKENIZER
from pipelines.store.manifest import ArtifactPlan, File, fetch, read_manifest
from trainer.base.record import decoded_at
from trainer.base.store import Store, sha256_of
from trainer.checkpoint.commits import committed_folders
from trainer.checkpoint.layout import commit_key, step_of
from trainer.checkpoint.weights import (
    CONFIG_FILE,
    StoredTensor,
    WeightsFile,
    from_hub_layout,
    open_weights,
    weight_files,
)
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.config.source import HUB, RUN, WEIGHTS, Source

INIT, BRANCH = "train.init_from", "train.branch_from"  # fields of a recipe

# The fields that a branch can't change, with the reason.
POSITION = "the state counts its text in batches of that size"
FIXED_IN_A_BRANCH = {
    **dict.fromkeys(("batch_tokens", "batch_ramp_from", "batch_ramp_tokens"), POSITION),
    "seed": "the state is a position in the order that the seed gives",
    **dict.fromkeys(("beta1", "beta2", "epsilon"), "the moments of the optimizer were made with it"),
    "optimizer": "the state of another optimizer has other tensors",
    "precision": "the state of another precision has other tensors",
}


@dataclass(frozen=True)
class ParentWeights:
    """A commit or the final weights of another run of the store."""

    run: Run
    prefix: str  # of its training
    sha256: str  # of COMMIT.json, or of the file of final weights
    folder: str | None = None  # of the commit
    file: File | None = None  # of the final weights

    def pin(self) -> Source:
        """This commit, or these weights, with the content in their name."""
        step = step_of(self.folder) if self.folder else None
        return Source("run", self.run.name, step=step, sha256=self.sha256)


def weights_named(text: str, field: str) -> Source:
    """The source of weights that a recipe names. UserError for a path that does not exist and may be a model."""
    source = Source.of(text, field, WEIGHTS)
    unknown = source.kind == "path" and not source.sha256 and not path_of(source).exists()
    if unknown and re.fullmatch(r"[\w.-]+/[\w.-]+", source.name):
        Source.of(f"{HUB}{source.name}", f"{field}: no such path, and a model of the Hub")  # says how to name one
    return source


def pinned(recipe: Recipe, store: Store) -> Recipe:
    """The recipe with the content of every source in its name. Reads local weights.

    UserError for a source that does not exist or does not fit, and for a branch that changes what its state can't bear.
    """
    train, own = recipe.train, recipe.tokens.tokenizer
    changes: dict[str, Any] = {}
    init = weights_named(train.init_from, INIT) if train.init_from else None
    branch = weights_named(train.branch_from, BRANCH) if train.branch_from else None
    for source in filter(None, (init, branch)):
        if (source.kind, source.name) == ("run", recipe.name):
            (run,) = full_names(store, [recipe.name])
            raise UserError(f"train: {source}: once begun, this run is the newest '{recipe.name}'; write {RUN}{run}")
    if isinstance(own, TokenizerFile) and own.named.sha256 is None:
        found = sha256(tokenizer_file_bytes(own)).hexdigest()
        own = own.model_copy(update={"file": str(own.named.pinned(found))})
        changes["tokens"] = recipe.tokens.model_copy(update={"tokenizer": own})
    if init:
        changes["train"] = train.model_copy(update={"init_from": str(pinned_weights(init, store, recipe.model))})
    if branch:
        parent = find_parent(store, branch, BRANCH)
        check_branch(parent.run.recipe, recipe, f"{BRANCH}: {branch.unpinned}")
        changes["train"] = train.model_copy(update={"branch_from": str(parent.pin())})
    return recipe.model_copy(update=changes) if changes else recipe


def pinned_weights(source: Source, store: Store, model: ModelConfig, field: str = INIT) -> Source:
    """The source of weights with its content, and with the shapes of local weights checked."""
    if source.kind == "run":
        parent = find_parent(store, source, field)
        check_model(parent.run.recipe.model, model, f"{field}: {source.unpinned}")
        return parent.pin()
    if source.kind == "model":
        return source
    path = path_of(source)
    open_weights(path, f"{field}: {path}").check(model)
    return checked_path(source, field)


def checked_path(source: Source, field: str) -> Source:
    """Weights at a path, with their content. UserError if these are others than pinned."""
    path = path_of(source)
    return check_content(replace(source, name=str(path)), content_of(path, f"{field}: {path}"), field)


def content_of(path: Path, where: str) -> str:
    """The sha256 of a file, or of the weights in a folder; of several files, the sha256 of their sha256s."""
    if not path.exists():
        raise UserError(f"{where}: no such file or folder; `skytrain run run:NAME` resumes a run that began with it")
    files = (
        [path / name for name in weight_files([one.name for one in path.iterdir()], where)] if path.is_dir() else [path]
    )
    sums = [sha256_of(file) for file in files]
    return sums[0] if len(sums) == 1 else sha256("\n".join(sums).encode()).hexdigest()


def content_identity(text: str) -> dict[str, Any]:
    """The content of a source of weights, for a fingerprint."""
    source = weights_named(text, INIT)
    if source.kind == "model":
        return {"hub": source.name, "revision": source.commit}
    return {"sha256": source.sha256 or checked_path(source, INIT).sha256}


def check_sources(recipe: Recipe, plans: dict[str, ArtifactPlan], store: Store) -> None:
    """Check the weights of train.init_from that are still needed: those of the Hub by their headers alone, and that the
    tokens have the ids of the tokenizer beside the weights. UserError if they do not fit."""
    init, prefix = recipe.train.init_from, plans["train"].prefix
    if not init or read_manifest(store, prefix) is not None or committed_folders(store, prefix):
        return
    source = weights_named(init, INIT)
    if source.kind == "model":
        hub_weights(source, INIT).check(recipe.model)
    where = f"{INIT}: {source.unpinned}"
    if (theirs := tokenizer_beside(source, store, where)) is None:
        return
    ours = tokenizer_files(tokenizer_of(recipe.tokens, store, plans["tokenize"].prefix), 0)[TOKENIZER]
    if not ids_in(ours, where).items() <= ids_in(theirs, f"{where}/{TOKENIZER}").items():
        raise UserError(
            f"{where}: its {TOKENIZER} has other ids than tokens.tokenizer '{recipe.tokens.tokenizer}'; set "
            "tokens.tokenizer to that file, or to the tokenizer of that run"
        )


def tokenizer_beside(source: Source, store: Store, where: str) -> bytes | None:
    """The tokenizer.json of the run, the folder or the model of the Hub that has the weights; None without one."""
    if source.kind == "run":
        run = find_parent(store, source, INIT).run
        encoding = tokenizer_of(run.recipe.tokens, store, run.record.prefixes["tokenize"])
        return tokenizer_files(encoding, 0)[TOKENIZER]
    if source.kind == "path":
        path = path_of(source) / TOKENIZER
        return path.read_bytes() if path.is_file() else None
    import huggingface_hub

    exists = partial(huggingface_hub.file_exists, source.name, TOKENIZER, revision=source.commit)
    return tokenizer_file_bytes(TokenizerFile(file=str(source))) if asked(where, exists) else None


def bring(text: str, store: Store, cache: Path, field: str) -> Path:
    """The weights of a pinned source as a path of this machine, verified. Not for a commit of a run."""
    source = Source.of(text, field, WEIGHTS)
    if source.kind == "run":
        parent = find_parent(store, source, field)
        assert parent.file, text
        return fetch(store, parent.prefix, parent.file, cache)
    return fetched_from_hub(source, field) if source.kind == "model" else Path(checked_path(source, field).name)


# --- other runs


def find_parent(store: Store, source: Source, field: str) -> ParentWeights:
    """The commit or final weights that `run:NAME[@STEP]` names. UserError if there are none, or others than pinned."""
    where = f"{field}: {source.unpinned}"
    try:
        (name,) = full_names(store, [source.name])
        run = find_run(store, name)
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
    prefix = run.record.prefixes.get("train") if run else None
    if run is None or prefix is None:
        raise UserError(f"{where}: that run has not trained yet; start it with skytrain run")
    found = _final(store, run, prefix, where) if source.step is None else _commit(store, run, prefix, source, where)
    if source.sha256 not in (None, found.sha256):
        raise UserError(f"{where}: it changed after this run was planned; plan it again")
    return found


def _final(store: Store, run: Run, prefix: str, where: str) -> ParentWeights:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        steps = steps_text(committed_folders(store, prefix))
        raise UserError(f"{where}: it has no final weights yet; name a commit, as {RUN}{run.name}@STEP: {steps}")
    file = manifest.file("model.safetensors")
    return ParentWeights(run, prefix, file.sha256, file=file)


def _commit(store: Store, run: Run, prefix: str, source: Source, where: str) -> ParentWeights:
    folders = committed_folders(store, prefix)
    found = [
        ParentWeights(run, prefix, digest, folder=folder)
        for folder in folders
        if step_of(folder) == source.step
        and (digest := decoded_at(store, commit_key(folder), lambda body, _: sha256(body).hexdigest()))
    ]
    if not found:
        raise UserError(f"{where}: step {source.step} is not a commit of {run.name}; {steps_text(folders)}")
    return next((one for one in found if one.sha256 == source.sha256), found[0])


def steps_text(folders: Iterable[str]) -> str:
    """The steps of commits, for a message."""
    steps = sorted({step_of(folder) for folder in folders})
    return f"its commits are at {', '.join(map(str, steps))}" if steps else "it has no commit in the store"


def check_model(theirs: ModelConfig, ours: ModelConfig, where: str) -> None:
    """UserError for weights of another shape."""
    for name, value in theirs.model_dump().items():
        if value != (here := getattr(ours, name, None)):
            raise UserError(f"{where}: its {name} is {value}, and model.{name} is {here}; --set model.{name}={value}")


def check_branch(parent: Recipe, recipe: Recipe, where: str) -> None:
    """UserError for a change that the state of the parent can't bear."""
    check_model(parent.model, recipe.model, where)
    for name, reason in FIXED_IN_A_BRANCH.items():
        here, there = getattr(recipe.train, name), getattr(parent.train, name)
        if here != there:
            raise UserError(
                f"{where}: train.{name} is {there} in the parent: {reason}; set it to {there}, or use train.init_from"
            )
    if recipe.tokens.tokenizer_identity != parent.tokens.tokenizer_identity:
        raise UserError(
            f"{where}: tokens.tokenizer is {parent.tokens.tokenizer} in the parent, whose weights know its ids"
        )
    if recipe.train.batch_ramp_from and recipe.tokens != parent.tokens:
        raise UserError(f"{where}: other text restarts the ramp of the batch; keep tokens, or remove the ramp")


# --- the Hub


def hub_weights(source: Source, field: str) -> WeightsFile:
    """The weights of a model of the Hub, by its headers and its config: some KB. UserError if they can't be had."""
    import huggingface_hub

    where, api = named(source, field), huggingface_hub.HfApi()
    names = asked(where, lambda: api.list_repo_files(source.name, revision=source.commit))
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(names, where):
        header = asked(
            where, lambda file=file: api.parse_safetensors_file_metadata(source.name, file, revision=source.commit)
        )
        for name, one in header.tensors.items():
            tensors[name] = StoredTensor(f"{where}/{file}", tuple(one.shape), unread)
    path = asked(where, lambda: api.hf_hub_download(source.name, CONFIG_FILE, revision=source.commit))
    return from_hub_layout(where, Path(path).read_text(encoding="utf8"), tensors)


def unread() -> Any:
    raise AssertionError("only the header of these weights is here")


def fetched_from_hub(source: Source, field: str) -> Path:
    """The folder of a model of the Hub in the cache of its library, verified."""
    import huggingface_hub

    where, api = named(source, field), huggingface_hub.HfApi()
    names = asked(where, lambda: api.list_repo_files(source.name, revision=source.commit))
    return [hub_file(source, name, field) for name in (CONFIG_FILE, *weight_files(names, where))][-1].parent
