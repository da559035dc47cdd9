"""The commits and weights of other runs that a run begins with, and their price.

A recipe names them as `run:NAME[@STEP]`; a plan pins them by full name and sha256. From the start of a run until its
training is done, a pin lies beside the commit that it begins with (`branch-<run>`): neither the other run nor gc
removes such a commit.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pipelines.artifacts.manifest import Beginning, File, differences, read_manifest
from pipelines.recipe import Recipe
from pipelines.tracking.account import Cost, cost_until
from pipelines.tracking.runs import Run, find_run, full_name, read_record
from trainer.commits import PIN, Commit, DamagedCommit, committed_folders, step_of
from trainer.errors import NotAFile, UserError
from trainer.model_config import ModelConfig
from trainer.store import Store
from trainer.stored import typed

RUN = "run:"
RUN_SOURCE = re.compile(
    r"run:(?P<run>[a-z0-9][a-z0-9._-]*)(?:@(?P<step>\d{1,12}))?(?:@sha256:(?P<sha256>[0-9a-f]{64}))?"
)
FIELDS = ("init_from", "branch_from")
# What the state of a run can't bear, with the reason.
POSITION = "the state counts its text in batches of that size"
UNBEARABLE = {
    **dict.fromkeys(("batch_tokens", "batch_ramp_from", "batch_ramp_tokens"), POSITION),
    "seed": "the state is a position in the order that the seed gives",
    **dict.fromkeys(("beta1", "beta2", "epsilon"), "the moments of the optimizer were made with it"),
    **dict.fromkeys(("optimizer", "muon_beta2"), "the state of another optimizer has other tensors"),
    "precision": "the state of another precision has other tensors",
}


@dataclass(frozen=True)
class Other:
    """A commit or the final weights of another run."""

    run: Run
    prefix: str  # of its training
    sha256: str  # of COMMIT.json, or of the file of final weights
    folder: str | None = None  # of the commit
    file: File | None = None  # of the final weights

    @property
    def pinned(self) -> str:
        step = f"@{step_of(self.folder)}" if self.folder else ""
        return f"{RUN}{self.run.name}{step}@sha256:{self.sha256}"


def find_other(store: Store, source: str, field: str) -> Other:
    """The commit or final weights that `run:NAME[@STEP]` names. UserError if there are none, or others than pinned."""
    where, named = f"{field}: {source.partition('@sha256:')[0]}", RUN_SOURCE.fullmatch(source)
    if named is None:
        raise UserError(f"{field}: {source}: names no run; write run:NAME or run:NAME@STEP")
    runs = [entry.key.removeprefix("runs/").removesuffix(".json") for entry in store.entries("runs/")]
    try:
        run = find_run(store, full_name(runs, named["run"], store.uri))
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
    prefix = run.record.prefixes.get("train") if run else None
    if run is None or prefix is None:
        raise UserError(f"{where}: that run has not begun to train")
    found = _final(store, run, prefix, where) if named["step"] is None else _commit(store, run, prefix, named, where)
    if named["sha256"] not in (None, found.sha256):
        raise UserError(f"{where}: it is another one now than when this run was planned; plan it again")
    return found


def _final(store: Store, run: Run, prefix: str, where: str) -> Other:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        steps = steps_text(committed_folders(store, prefix))
        raise UserError(f"{where}: it has no final weights yet; name a commit, as {RUN}{run.name}@STEP: {steps}")
    file = manifest.file("model.safetensors")
    return Other(run, prefix, file.sha256, file=file)


def _commit(store: Store, run: Run, prefix: str, named: re.Match[str], where: str) -> Other:
    folders = committed_folders(store, prefix)
    found = [
        Other(run, prefix, sha256(body).hexdigest(), folder=folder)
        for folder in folders
        if step_of(folder) == int(named["step"]) and (body := store.get(f"{folder}/COMMIT.json"))
    ]
    if not found:
        raise UserError(f"{where}: step {named['step']} is no commit of {run.name}; {steps_text(folders)}")
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
    for name, reason in UNBEARABLE.items():
        here, there = getattr(recipe.train, name), getattr(parent.train, name)
        if here != there:
            raise UserError(f"{where}: train.{name} {here} is {there} there: {reason}; keep it, or use train.init_from")
    if recipe.tokens.tokenizer_identity != parent.tokens.tokenizer_identity:
        raise UserError(f"{where}: tokens.tokenizer is {parent.tokens.tokenizer} there: the weights know its ids alone")
    if recipe.train.batch_ramp_from and recipe.tokens != parent.tokens:
        raise UserError(f"{where}: another text begins at its start, where the ramp of the batch would begin again")


# --- pins


def pin_commits(store: Store, run: str, recipe: Recipe) -> None:
    """Keep the commit that a run begins with, until its training is done. UserError if it is gone."""
    for field in FIELDS:
        source = getattr(recipe.train, field)
        if source and source.startswith(RUN) and not is_trained(store, run):
            other = find_other(store, source, f"train.{field}")
            if other.folder and store.get(pin := f"{other.folder}/{PIN}{run}") is None:
                store.put(pin, b"{}")
                if store.get(f"{other.folder}/COMMIT.json") is None:
                    store.delete(pin)
                    raise UserError(f"train.{field}: {source}: the commit was removed just now; name a later one")


def is_trained(store: Store, run: str) -> bool:
    """Whether the training of a run is done, or the store does not know the run."""
    record = read_record(store, run)
    prefix = record.prefixes.get("train") if record else None
    return record is None or (prefix is not None and read_manifest(store, prefix) is not None)


# --- lineage


def beginning_of(store: Store, recipe: Recipe, facts: dict[str, Any] | None = None) -> Beginning | None:
    """Where a run begins; None for weights drawn from its seed. `facts`: of its training, once that is done."""
    if facts and "began" in facts:
        return typed(Beginning, facts["began"], f"{store.uri}: the beginning of a training")
    branched = recipe.train.branch_from is not None
    source = recipe.train.branch_from or recipe.train.init_from
    if source is None or not source.startswith(RUN):
        return Beginning(source, branched) if source else None
    try:
        other = find_other(store, source, f"train.{FIELDS[branched]}")
    except UserError:  # removed since
        named = RUN_SOURCE.fullmatch(source)
        step = int(named["step"]) if named and named["step"] else None
        return Beginning(source, branched, named and named["run"], step=step)
    cost, step = cost_of(store, other), step_of(other.folder) if other.folder else None
    changed = differences(identity_of_branch(other.run.recipe), identity_of_branch(recipe)) if branched else None
    manifest = other.run.manifests.get("train")
    return Beginning(
        other.pinned,
        branched,
        other.run.name,
        manifest.fingerprint if manifest else other.prefix.rpartition("-")[2],
        step,
        cost.usd,
        cost.unpriced_hours,
        {name: list(pair) for name, pair in changed.items()} if changed is not None else None,
    )


def beginning_of_run(run: Run) -> Beginning | None:
    """Where a run on record began."""
    train = run.manifests.get("train")
    return beginning_of(run.store, run.recipe, train.facts if train else None)


def identity_of_branch(recipe: Recipe) -> dict[str, Any]:
    """The fields that a branch may change, by section."""
    values = {name: getattr(recipe, name).model_dump() for name in ("tokens", "model", "train")}
    values["train"] = {name: value for name, value in values["train"].items() if name not in FIELDS}
    return values


def cost_of(store: Store, other: Other) -> Cost:
    """The bill of the other run up to its commit; for final weights, of its training and the stages before."""
    account = other.run.account
    if other.folder:
        try:
            commit = Commit.decode(store.get(f"{other.folder}/COMMIT.json") or b"", other.folder)
        except (DamagedCommit, NotAFile):
            return Cost()
        return cost_until(account, commit.time)
    manifest = other.run.manifests.get("train")
    return cost_until(account, manifest.created) if manifest else Cost()
