"""The records of runs: the store's list of runs, and the artifacts of each.

Every start and resumption of a run rewrites `runs/<run>.json`. The record names the artifacts; their attempts and
manifests hold everything else.
"""

import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from pipelines.recipe.recipe import Recipe
from pipelines.store.layout import FOLDERS, RUNS, STAGES, run_key, run_of
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.store_id import StoreIdText, settled_store_id
from trainer.base.record import (
    DamagedRecord,
    Key,
    NewerRecord,
    StoredRecord,
    UnixSeconds,
    decoded_at,
    record_in,
)
from trainer.base.store import Store, side_by_side
from trainer.config.errors import UserError, shown

MOST_NAMES = 20  # in a message


@dataclass(frozen=True)
class RunRecord(StoredRecord):
    """A run as it was last started: its recipe, and the artifacts of its stages."""

    run: Key
    recipe: dict[str, Any]
    until: str  # the last stage that any start asked for
    prefixes: dict[str, Key]  # by stage, up to `until`
    updated: UnixSeconds
    # Artifacts before the evaluation or export changed: the run still pays for them.
    earlier: dict[str, list[Key]]
    experiment: str  # in MLflow
    store_id: StoreIdText

    def all_prefixes(self, stage: str) -> list[str]:
        """Every artifact of a stage that the run ever worked on, the present one last."""
        return [*self.earlier.get(stage, ()), *filter(None, [self.prefixes.get(stage)])]

    @property
    def tunings(self) -> dict[str, str]:
        """The artifacts of the steps of tuning, in order."""
        return {stage: prefix for stage, prefix in self.prefixes.items() if stage.startswith("tune.")}

    @property
    def stages(self) -> list[str]:
        """The stages, and the steps of tuning that the recipe no longer has."""
        return list(dict.fromkeys([*self.prefixes, *self.earlier]))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a run's record") -> Self:
        """DamagedRecord, or NewerRecord."""
        found = record_in(cls, body, where)
        folders = {stage: FOLDERS.get(stage.partition(".")[0]) for stage in {*found.stages, found.until}}
        if unknown := sorted(stage for stage, folder in folders.items() if folder is None):
            raise NewerRecord(f"{where}: written by a newer skytrain (stage {shown(unknown[0])}); upgrade skytrain")
        for stage, folder in folders.items():
            for prefix in found.all_prefixes(stage):
                if not re.fullmatch(f"{folder}/[^/]+", prefix):
                    raise DamagedRecord(where, f"{shown(prefix)} is not an artifact of {stage}")
        asked = [*STAGES[: list(FOLDERS).index(found.until.partition(".")[0])], found.until]
        if missing := [stage for stage in asked if stage not in found.prefixes]:
            raise DamagedRecord(where, f"it names no artifact of {missing[0]}")
        return found


def record(store: Store, run: str, recipe: Recipe, plans: dict[str, ArtifactPlan], until: str) -> RunRecord:
    """Record that a run starts or resumes. Stages of earlier starts stay in the record."""
    prefixes = {stage: plans[stage].prefix for stage in list(plans)[: list(plans).index(until) + 1]}
    earlier: dict[str, list[str]] = {}
    try:
        before = read_record(store, run)
    except DamagedRecord:  # this start writes it again, as the message advises
        before = None
    if before:
        earlier = dict(before.earlier)
        for stage in before.stages:
            now = prefixes.get(stage) if stage in plans else None
            if stage not in plans or now:
                earlier[stage] = [prefix for prefix in before.all_prefixes(stage) if prefix != now]
        prefixes = {stage: before.prefixes[stage] for stage in plans if stage in before.prefixes} | prefixes
    about = recipe.model_dump(), list(prefixes)[-1], prefixes, time.time(), earlier
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "skytrain"  # MLflow's own setting
    made = RunRecord(run, *about, experiment, settled_store_id(store))
    store.put(run_key(run), made.to_json())
    return made


def read_record(store: Store, run: str) -> RunRecord | None:
    """The record of the run with this full name; None if the store has none."""

    def decode(body: bytes, where: str) -> RunRecord:
        found = RunRecord.from_json(body, where)
        if found.run != run:
            raise DamagedRecord(where, f"it is that of {shown(found.run)}")
        return found

    return decoded_at(store, run_key(run), decode, remedy="run its recipe to write it again")


def read_records(store: Store, names: Iterable[str] = ()) -> list[RunRecord]:
    """The records of the runs with these names or beginnings of names (all runs by default), oldest first."""
    found = side_by_side(lambda run: read_record(store, run), full_names(store, names))
    return sorted((one for one in found if one), key=lambda one: one.updated)


def full_names(store: Store, names: Iterable[str] = ()) -> list[str]:
    """The full names of runs, by names or beginnings of names; of all runs by default, the newest last.

    The name of a recipe means its newest run, by the records: a copy of a store has other dates. UserError if a
    name fits no run, or several.
    """
    entries = sorted(store.entries(RUNS), key=lambda entry: entry.modified)
    runs = list(map(run_of, entries))
    return [_full_name(store, runs, name) for name in names] or runs


def _full_name(store: Store, runs: list[str], name: str) -> str:
    found = [name] if name in runs else [run for run in runs if name and run.startswith(name)]
    of_recipe = [run for run in found if run.rpartition("-")[0] == name]
    if len(found) == 1 or of_recipe:
        return read_records(store, of_recipe)[-1].run if len(of_recipe) > 1 else (of_recipe or found)[-1]
    known = ", ".join((found or runs)[-MOST_NAMES:]) or "none yet; `skytrain run RECIPE` makes one"
    reason = "the beginning of more than one run" if found else "no such run"
    raise UserError(f"{name or 'an empty name'}: {reason} in {store.uri}; known runs: {known}")
