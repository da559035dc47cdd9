"""Weights from elsewhere, for `train.init_from` and `train.branch_from`: found and checked before a machine is rented,
brought to a node once.

A source is a model of the Hugging Face Hub at a commit, a path of this machine, or a run of the same store
(`run:NAME[@STEP]`). `pinned` gives a recipe in which every source names its content: the commit of a repository, or the
sha256 of the bytes. So a recipe on record plans the same run on every machine, also once the source is gone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import TokenizerFile
from pipelines.run.text.hub import asked
from pipelines.run.text.tokenizer import ids_in, tokenizer_file_bytes, tokenizer_files, tokenizer_of
from pipelines.store.layout import TOKENIZER
from pipelines.store.manifest import ArtifactPlan, File, fetch, read_manifest
from pipelines.store.run_record import RUN, full_names
from pipelines.store.runs import Run, find_run
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

RUN_SOURCE = re.compile(
    r"run:(?P<run>[a-z0-9][a-z0-9._-]*)(?:@(?P<step>\d{1,12}))?(?:@sha256:(?P<sha256>[0-9a-f]{64}))?"
)
HUB_MODEL = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
PINNED_PATH = re.compile(r"(?P<path>.+)@sha256:(?P<sha256>[0-9a-f]{64})")

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

    @property
    def pinned(self) -> str:
        step = f"@{step_of(self.folder)}" if self.folder else ""
        return f"{RUN}{self.run.name}{step}@sha256:{self.sha256}"


@dataclass(frozen=True)
class Hub:
    """A model of the Hugging Face Hub at a commit."""

    name: str
    revision: str


@dataclass(frozen=True)
class Local:
    """Weights at a path, with their content if it is known."""

    path: Path
    sha256: str | None


def source_of(text: str, field: str) -> Hub | Local:
    """The source that a recipe names, if it is not a run. UserError for a model of the Hub without a commit."""
    if pinned := PINNED_PATH.fullmatch(text):
        return Local(Path(pinned["path"]), pinned["sha256"])
    model = HUB_MODEL.fullmatch(text)
    if model and model["revision"] and COMMIT.fullmatch(model["revision"]):
        return Hub(model["name"], model["revision"])
    path = Path(text).expanduser()
    if path.exists() or not model:
        return Local(path.absolute(), None)
    moves = f"'{model['revision']}' can move"
    given = moves if model["revision"] else "no such path, and as a model of the Hub it lacks its commit"
    raise UserError(
        f"{field}: {text}: {given}; write {model['name']}@ and the 40 hex digits that "
        f"`git ls-remote https://huggingface.co/{model['name']} main` prints"
    )


def pinned(recipe: Recipe, store: Store) -> Recipe:
    """The recipe with the content of every source in its name. Reads local weights.

    UserError for a source that does not exist or does not fit, and for a branch that changes what its state can't bear.
    """
    train, own = recipe.train, recipe.tokens.tokenizer
    changes: dict[str, Any] = {}
    for source in filter(None, (train.init_from, train.branch_from)):
        if (named := RUN_SOURCE.fullmatch(source)) and named["run"] == recipe.name:
            (run,) = full_names(store, [recipe.name])
            raise UserError(f"train: {source}: once begun, this run is the newest '{recipe.name}'; write {RUN}{run}")
    if isinstance(own, TokenizerFile) and own.sha256 is None:
        own = own.model_copy(update={"sha256": sha256(tokenizer_file_bytes(own)).hexdigest()})
        changes["tokens"] = recipe.tokens.model_copy(update={"tokenizer": own})
    if train.init_from:
        changes["train"] = train.model_copy(update={"init_from": pinned_source(train.init_from, store, recipe.model)})
    if train.branch_from:
        where = f"train.branch_from: {train.branch_from.partition('@sha256:')[0]}"
        parent = find_parent(store, train.branch_from, "train.branch_from")
        check_branch(parent.run.recipe, recipe, where)
        changes["train"] = train.model_copy(update={"branch_from": parent.pinned})
    return recipe.model_copy(update=changes) if changes else recipe


def pinned_source(text: str, store: Store, model: ModelConfig, field: str = "train.init_from") -> str:
    """`train.init_from` with the content in its name, and with the shapes of local weights checked."""
    if text.startswith(RUN):
        parent = find_parent(store, text, field)
        check_model(parent.run.recipe.model, model, f"{field}: {text.partition('@sha256:')[0]}")
        return parent.pinned
    source = source_of(text, field)
    if isinstance(source, Hub):
        return text
    open_weights(source.path, f"{field}: {source.path}").check(model)
    return pinned_path(source, field)


def pinned_path(source: Local, field: str) -> str:
    """A path with the sha256 of its weights. UserError if these are others than pinned."""
    found = content_of(source.path, f"{field}: {source.path}")
    if source.sha256 not in (None, found):
        raise UserError(f"{field}: {source.path}: its weights have the sha256 {found}, the recipe has {source.sha256}")
    return f"{source.path}@sha256:{found}"


def content_of(path: Path, where: str) -> str:
    """The sha256 of a file, or of the weights in a folder; of several files, that of their sha256s."""
    if not path.exists():
        raise UserError(f"{where}: no such file or folder; `skytrain run run:NAME` resumes a run that began with it")
    files = (
        [path / name for name in weight_files([one.name for one in path.iterdir()], where)] if path.is_dir() else [path]
    )
    sums = [sha256_of(file) for file in files]
    return sums[0] if len(sums) == 1 else sha256("\n".join(sums).encode()).hexdigest()


def content_identity(text: str) -> dict[str, Any]:
    """The content of a pinned source, for a fingerprint."""
    if content := text.partition("@sha256:")[2]:
        return {"sha256": content}
    source = source_of(text, "train.init_from")
    if isinstance(source, Hub):
        return {"hub": source.name, "revision": source.revision}
    return {"sha256": content_of(source.path, f"train.init_from: {source.path}")}


def check_sources(recipe: Recipe, plans: dict[str, ArtifactPlan], store: Store) -> None:
    """Check the weights of train.init_from that are still needed: those of the Hub by their headers alone, and that the
    tokens have the ids of the tokenizer beside the weights. UserError if they do not fit."""
    init, prefix = recipe.train.init_from, plans["train"].prefix
    if not init or read_manifest(store, prefix) is not None or committed_folders(store, prefix):
        return
    if isinstance(source := first_source(recipe), Hub):
        hub_weights(source, "train.init_from").check(recipe.model)
    where = f"train.init_from: {init.partition('@sha256:')[0]}"
    if (theirs := tokenizer_beside(init, store, where)) is None:
        return
    ours = tokenizer_files(tokenizer_of(recipe.tokens, store, plans["tokenize"].prefix), 0)[TOKENIZER]
    if not ids_in(ours, where).items() <= ids_in(theirs, f"{where}/{TOKENIZER}").items():
        raise UserError(
            f"{where}: its {TOKENIZER} has other ids than tokens.tokenizer '{recipe.tokens.tokenizer}'; set "
            "tokens.tokenizer to that file, or to the tokenizer of that run"
        )


def tokenizer_beside(init: str, store: Store, where: str) -> bytes | None:
    """The tokenizer.json of the run, the folder or the model of the Hub that has the weights; None without one."""
    if init.startswith(RUN):
        run = find_parent(store, init, "train.init_from").run
        encoding = tokenizer_of(run.recipe.tokens, store, run.record.prefixes["tokenize"])
        return tokenizer_files(encoding, 0)[TOKENIZER]
    source = source_of(init, "train.init_from")
    if isinstance(source, Local):
        path = source.path / TOKENIZER
        return path.read_bytes() if path.is_file() else None
    import huggingface_hub

    exists = partial(huggingface_hub.file_exists, source.name, revision=source.revision)
    if not asked(where, exists):
        return None
    return tokenizer_file_bytes(TokenizerFile(file=f"hf://{source.name}@{source.revision}"))


def first_source(recipe: Recipe) -> Hub | Local | None:
    """The source of train.init_from; None if it is a run, or not set."""
    init = recipe.train.init_from
    return source_of(init, "train.init_from") if init and not init.startswith(RUN) else None


def bring(text: str, store: Store, cache: Path, field: str) -> Path:
    """The weights of a pinned source as a path of this machine, verified. Not for a commit of a run."""
    if text.startswith(RUN):
        parent = find_parent(store, text, field)
        assert parent.file, text
        return fetch(store, parent.prefix, parent.file, cache)
    source = source_of(text, field)
    if isinstance(source, Hub):
        return fetched_from_hub(source, field)
    pinned_path(source, field)
    return source.path


# --- other runs


def find_parent(store: Store, source: str, field: str) -> ParentWeights:
    """The commit or final weights that `run:NAME[@STEP]` names. UserError if there are none, or others than pinned."""
    where, named = f"{field}: {source.partition('@sha256:')[0]}", RUN_SOURCE.fullmatch(source)
    if named is None:
        raise UserError(f"{field}: {source}: is not a run; write run:NAME or run:NAME@STEP")
    try:
        (name,) = full_names(store, [named["run"]])
        run = find_run(store, name)
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
    prefix = run.record.prefixes.get("train") if run else None
    if run is None or prefix is None:
        raise UserError(f"{where}: that run has not trained yet; start it with skytrain run")
    found = _final(store, run, prefix, where) if named["step"] is None else _commit(store, run, prefix, named, where)
    if named["sha256"] not in (None, found.sha256):
        raise UserError(f"{where}: it changed after this run was planned; plan it again")
    return found


def _final(store: Store, run: Run, prefix: str, where: str) -> ParentWeights:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        steps = steps_text(committed_folders(store, prefix))
        raise UserError(f"{where}: it has no final weights yet; name a commit, as {RUN}{run.name}@STEP: {steps}")
    file = manifest.file("model.safetensors")
    return ParentWeights(run, prefix, file.sha256, file=file)


def _commit(store: Store, run: Run, prefix: str, named: re.Match[str], where: str) -> ParentWeights:
    folders = committed_folders(store, prefix)
    found = [
        ParentWeights(run, prefix, digest, folder=folder)
        for folder in folders
        if step_of(folder) == int(named["step"])
        and (digest := decoded_at(store, commit_key(folder), lambda body, _: sha256(body).hexdigest()))
    ]
    if not found:
        raise UserError(f"{where}: step {named['step']} is not a commit of {run.name}; {steps_text(folders)}")
    return next((one for one in found if one.sha256 == named["sha256"]), found[0])


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


def hub_weights(source: Hub, field: str) -> WeightsFile:
    """The weights of a model of the Hub, by its headers and its config: some KB. UserError if they can't be had."""
    import huggingface_hub

    where, api = f"{field}: {source.name}@{source.revision[:12]}", huggingface_hub.HfApi()
    names = asked(where, lambda: api.list_repo_files(source.name, revision=source.revision))
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(names, where):
        header = asked(
            where, lambda file=file: api.parse_safetensors_file_metadata(source.name, file, revision=source.revision)
        )
        for name, one in header.tensors.items():
            tensors[name] = StoredTensor(f"{where}/{file}", tuple(one.shape), unread)
    path = asked(where, lambda: api.hf_hub_download(source.name, CONFIG_FILE, revision=source.revision))
    return from_hub_layout(where, Path(path).read_text(encoding="utf8"), tensors)


def unread() -> Any:
    raise AssertionError("only the header of these weights is here")


def fetched_from_hub(source: Hub, field: str) -> Path:
    """The folder of a model of the Hub in the cache of its library, each file with the sha256 that the Hub names."""
    import huggingface_hub

    where, api = f"{field}: {source.name}@{source.revision[:12]}", huggingface_hub.HfApi()
    names = weight_files(asked(where, lambda: api.list_repo_files(source.name, revision=source.revision)), where)
    folder = Path()
    for name in (CONFIG_FILE, *names):
        path = Path(asked(where, partial(api.hf_hub_download, source.name, name, revision=source.revision)))
        url = huggingface_hub.hf_hub_url(source.name, name, revision=source.revision)
        etag = asked(where, partial(api.get_hf_file_metadata, url=url)).etag or ""
        if re.fullmatch("[0-9a-f]{64}", etag) and sha256_of(path) != etag:  # of large files
            path.resolve().unlink()
            raise UserError(f"{where}/{name}: damaged on its way (sha256 differs); run again to fetch it again")
        folder = path.parent
    return folder
