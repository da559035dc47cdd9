"""A run as the store has it: its record, attempts, artifacts and series. A report needs no tracking server."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from pipelines.recipe.loader import recorded_recipe
from pipelines.recipe.recipe import REWARD, Recipe
from pipelines.run.run_record import RunRecord, full_names, read_record, read_records
from pipelines.store.account import TRAFFIC, Account, Forecast, StoredHeartbeat, account, forecast
from pipelines.store.layout import run_key, summary_key
from pipelines.store.ledger import SILENT_SECONDS, attempt_entries, heartbeat_at, is_alive, is_over
from pipelines.store.manifest import DamagedArtifact, Manifest, read_manifest
from pipelines.store.process_id import process_exists
from pipelines.store.records import Heartbeat
from pipelines.store.releases import Release, read_releases, until_release
from pipelines.store.stop_request import StopRequest, read_stop_request
from trainer.base.record import DamagedRecord, NewerRecord, StoredRecord, reading, record_at
from trainer.base.store import Store, side_by_side
from trainer.checkpoint.commits import series
from trainer.config.amounts import steps_to_come, tokens_before, tokens_of_steps
from trainer.config.errors import NotAFile, UserError

FRESH_SECONDS = 3 * SILENT_SECONDS  # after a longer silence, a process elsewhere counts as lost


def tuned_model(store: Store, record: RunRecord) -> Manifest | None:
    """The last finished model of tuning; a reward model answers nothing."""
    steps = (read_manifest(store, prefix) for prefix in reversed(record.tunings.values()))
    return next((made for made in steps if made and made.facts.get("method") != REWARD), None)


@dataclass(frozen=True)
class Summary(StoredRecord):
    """A run in a row of a table. The summary of a run that has ended is in the store, too."""

    run: str
    # done, running, interrupted, stopped (on request), failed, lost (crashed without a last heartbeat), damaged
    state: str
    attempts: int  # starts and resumptions, without waits for spot: 1 if nothing interrupted the run
    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    bits_per_byte: float | None
    hellaswag_acc_norm: float | None
    core: float | None
    billed_hours: float
    usd: float  # of the hours of known price
    unpriced_hours: float
    phases: dict[str, float]  # seconds of machine time
    goodput: float | None
    usd_per_billion_tokens: float | None
    updated: float
    faults: list[str]  # unreadable objects


@dataclass(frozen=True)
class Run:
    """A snapshot of a run: every object is read at most once, on first use. Make a new one to see changes."""

    store: Store
    record: RunRecord
    in_list: bool = False  # one of many, so the summary that it stored when it ended is enough

    @property
    def name(self) -> str:
        return self.record.run

    @cached_property
    def recipe(self) -> Recipe:
        """UserError if this version cannot read it."""
        where = f"{self.store.uri}/{run_key(self.name)}"
        with reading(where):
            return recorded_recipe(self.record.recipe, where)

    @cached_property
    def _manifests(self) -> tuple[dict[str, Manifest | None], list[DamagedArtifact]]:
        found: dict[str, Manifest | None] = {}
        damage = []
        for stage, prefix in self.record.prefixes.items():
            found[stage] = None
            try:
                found[stage] = read_manifest(self.store, prefix)
            except DamagedArtifact as error:
                damage.append(error)
        return found, damage

    @property
    def manifests(self) -> dict[str, Manifest | None]:
        """The artifacts by stage; None for a missing or damaged one."""
        return self._manifests[0]

    @cached_property
    def _heartbeats(self) -> tuple[list[StoredHeartbeat], list[str]]:
        read = [
            read_heartbeats(self.store, self.name, prefix)
            for stage in self.record.stages
            for prefix in self.record.all_prefixes(stage)
        ]
        return [one for found, _ in read for one in found], [text for _, damage in read for text in damage]

    @property
    def heartbeats(self) -> list[StoredHeartbeat]:
        """The last heartbeat of every attempt, on the present artifacts and on earlier ones."""
        return self._heartbeats[0]

    @property
    def unreadable_attempts(self) -> list[str]:
        """A message for every attempt whose heartbeat is damaged, or of a newer skytrain."""
        return self._heartbeats[1]

    @cached_property
    def attempts(self) -> dict[str, list[Heartbeat]]:
        """The last heartbeats by stage, in order of attempts, on the present artifacts."""
        return {
            stage: [one.beat for one in self.heartbeats if one.prefix == prefix]
            for stage, prefix in self.record.prefixes.items()
        }

    @cached_property
    def releases(self) -> list[Release]:
        """The releases on record of its machines, which runs on own machines have none of."""
        rented = any(one.beat.machine.cluster for one in self.heartbeats)
        return read_releases(self.store, self.name) if rented else []

    @cached_property
    def _until_release(self) -> tuple[list[StoredHeartbeat], list[Heartbeat]]:
        return until_release(self.heartbeats, self.releases)

    @property
    def unreleased(self) -> list[Heartbeat]:
        """The last attempts on rented machines whose release is not on record, and so not on the bill."""
        return self._until_release[1]

    @property
    def unattempted(self) -> list[Release]:
        """The clusters on record that no attempt names: at most so long, a machine was up that is not on the bill."""
        known = {one.beat.machine.cluster for one in self.heartbeats}
        return [one for one in self.releases if one.cluster not in known]

    @cached_property
    def stop_request(self) -> StopRequest | None:
        return read_stop_request(self.store, self.name)

    @cached_property
    def account(self) -> Account:
        """The time and money of all attempts, and of their machines until SkyPilot released them."""
        of_steps = partial(tokens_of_steps, self.recipe.train)
        return account(self._until_release[0], of_steps)

    @cached_property
    def series(self) -> list[dict[str, Any]]:
        """The committed rows, one a step."""
        return series(self.store, self.record.prefixes["train"]) if "train" in self.record.prefixes else []

    @property
    def last_step(self) -> int:
        """The last step of the training: max_steps, unless a target has ended it earlier."""
        train = self.manifests.get("train")
        return train.fact("steps") if train else self.recipe.train.max_steps

    @cached_property
    def state(self) -> str:
        """done, running, interrupted, stopped, failed, lost or damaged."""
        made, damage = self._manifests
        if damage:
            return "damaged"
        if all(made.values()):
            return "done"
        prefixes = self.record.prefixes.values()
        present = ([one for one in self.heartbeats if one.prefix == prefix] for prefix in prefixes)
        return state_of(present, self.store.clock)

    @cached_property
    def stored_summary(self) -> Summary | None:
        """In a list of runs, the summary that the run stored when it ended; None once it has begun again."""
        with suppress(DamagedRecord, NewerRecord, NotAFile):
            stored = record_at(Summary, self.store, summary_key(self.name), polled=True) if self.in_list else None
            ours = stored and (stored.run, stored.updated) == (self.name, self.record.updated)
            if stored and ours and stored.state != "running":  # 0.2 stored one of a run that worked, too
                return stored
        return None

    @property
    def listed(self) -> Summary:
        """The summary for a list of runs: the stored one, if it holds."""
        return self.stored_summary or self.summary

    @property
    def places(self) -> list[str]:
        """Of the rented machines, in the order of time, each once."""
        machines = [attempt.machine for attempt in self.account.attempts]
        return list(dict.fromkeys(f"{one.cloud}/{one.location}" for one in machines if one.cloud and one.location))

    @property
    def newest(self) -> Heartbeat | None:
        """Of the newest attempt on the present artifacts."""
        return self._newest.beat if self._newest else None

    @cached_property
    def _newest(self) -> StoredHeartbeat | None:
        present = self.record.prefixes.values()
        return max(
            (one for one in self.heartbeats if one.prefix in present), key=lambda o: o.beat.started, default=None
        )

    @cached_property
    def silent_seconds(self) -> float | None:
        """Since the last heartbeat of the newest attempt, as it was when it was first asked for: SkyPilot's answer may
        take half a minute."""
        return max(0.0, self.store.clock() - (self._newest.stored or 0.0)) if self._newest else None

    @property
    def to_come(self) -> Forecast | None:
        """The forecast of the rest of the training; None if nothing is left or known."""
        train, prefix = self.recipe.train, self.record.prefixes.get("train")
        steps = max(self.summary.steps, train.first_step)
        if steps >= self.last_step or prefix is None:
            return None
        attempts = [attempt for attempt in self.account.attempts if attempt.prefix == prefix]
        return forecast(attempts, steps_to_come(steps, train))

    @cached_property
    def summary(self) -> Summary:
        step, metrics = 0, dict[str, float]()
        for beat in self.attempts.get("train", []):
            step = step if beat.progress.step is None else beat.progress.step
            metrics |= beat.progress.metrics
        train, evaluated = self.manifests.get("train"), self.manifests.get("evaluate")
        facts = {**metrics, **(train.facts if train else {}), **(evaluated.facts if evaluated else {})}
        worked = [attempt for attempt in self.account.attempts if not attempt.waited]
        steps = train.fact("steps") if train else step
        total = self.account.total
        return Summary(
            run=self.name,
            state=self.state,
            attempts=1 + len(worked) - len({attempt.prefix for attempt in worked}) if worked else 0,
            steps=steps,
            tokens=tokens_before(steps, self.recipe.train),
            train_loss=facts.get("train/loss"),
            val_loss=facts.get("val/loss"),
            bits_per_byte=facts.get("val/bits_per_byte"),
            hellaswag_acc_norm=facts.get("eval/hellaswag_acc_norm"),
            core=facts.get("eval/core"),
            billed_hours=total.hours,
            usd=total.usd,
            unpriced_hours=total.unpriced_hours,
            phases={phase: 3600 * cost.hours for phase, cost in self.account.by_phase.items() if phase != TRAFFIC},
            goodput=self.account.goodput,
            usd_per_billion_tokens=self.account.usd_per_billion_tokens,
            updated=self.record.updated,
            faults=[*map(str, self._manifests[1]), *self.unreadable_attempts],
        )


def read_heartbeats(store: Store, run: str, prefix: str) -> tuple[list[StoredHeartbeat], list[str]]:
    """A run's attempts on an artifact, and a message for each unreadable one.

    Another run pays for its own attempts on a shared artifact.
    """
    entries = attempt_entries(store, prefix)
    newest, claims = dict(entries), dict(reversed(entries))  # heartbeat.json sorts behind claim.json

    def read(number: int) -> tuple[StoredHeartbeat | None, str]:
        damage = ""
        # The claim names a rented machine, which the bill has until its release.
        for entry in dict.fromkeys((newest[number], claims[number])):
            try:
                beat = heartbeat_at(store, entry.key, number)
            except (DamagedRecord, NewerRecord, NotAFile) as error:
                damage = damage or f"{error}; the bill may miss this attempt"
                continue
            if beat is None:
                continue
            alive = is_alive(beat)
            if alive is None and is_over(beat, entry.modified, store.clock):
                alive = False
            return StoredHeartbeat(prefix, beat, entry.modified, alive), damage
        return None, damage

    found = side_by_side(read, sorted(newest))  # a launch that waits for spot has hundreds
    return [one for one, _ in found if one and one.beat.run == run], [damage for _, damage in found if damage]


def state_of(attempts: Iterable[list[StoredHeartbeat]], clock: Callable[[], float]) -> str:
    """The state of an unfinished run, from its attempts at each stage and the store's clock."""
    # The newest by heartbeat, not by start: the bill of a machine that waited may begin at its boot. A stale attempt
    # does not count: the attempt that replaced it does.
    current = ([one for one in stage if one.beat.state != "stale"] for stage in attempts)
    last = [stage[-1] for stage in current if stage]
    newest = max(reversed(last), key=lambda one: one.stored or 0.0, default=None)  # S3 has whole seconds
    if newest is None:
        return "interrupted"
    state, exists = newest.beat.state, process_exists(newest.beat.process)
    working = state in ("running", "done")  # done with one stage, about to start the next
    if working and (exists or (exists is None and clock() - (newest.stored or 0.0) < FRESH_SECONDS)):
        return "running"
    return {"running": "lost", "done": "interrupted"}.get(state, state)


def store_summary(run: Run) -> None:
    """Store the summary of a run that has ended and whose bill is complete: lists of many runs read this one object of
    each, not a dozen. A list of 500 runs then takes a sixth of the time."""
    if run.state != "running" and not run.unreleased:
        run.store.put(summary_key(run.name), json.dumps(asdict(run.summary)).encode())


def without_failed_trials(runs: Iterable[Run], skip: Callable[[str], None]) -> list[Run]:
    """Runs for a table, oldest first: a failed one leaves it once its recipe has begun a newer run. `skip` gets a
    message about them."""
    known = list(runs)
    newest = {run.record.run.rpartition("-")[0]: run for run in known}
    shown = [run for run in known if run.listed.state != "failed" or run in newest.values()]
    if len(shown) < len(known):
        skip(f"{len(known) - len(shown)} failed runs with a newer one of their recipe are not shown; name them")
    return shown


def read_runs(store: Store, names: Iterable[str] = ()) -> list[Run]:
    """Snapshots of the runs with these names or beginnings of names (all runs by default), oldest first."""
    return [Run(store, one) for one in read_records(store, names)]


def usable_runs(
    store: Store,
    names: Iterable[str],
    need: Callable[[Run], Any],
    skip: Callable[[str], None],
    last: int | None = None,
) -> list[Run]:
    """The runs with these names, or all runs whose `need` can be read; oldest first. Read side by side.

    Without names, only the `last` runs that began or resumed. `skip` gets a message for each run that is left out, and
    one for all older ones. UserError for a run that was named and cannot be read.
    """
    named = list(names)
    chosen = full_names(store, named)
    if not named and last and len(chosen) > last:
        skip(f"{len(chosen) - last} older runs are not shown; --last {len(chosen)} shows all")
        chosen = chosen[-last:]

    def read(name: str) -> Run | UserError | None:
        try:
            with reading(f"{store.uri}/{run_key(name)}"):
                if run := find_run(store, name, in_list=not named):
                    need(run)
                return run
        except UserError as error:
            return error

    found = side_by_side(read, chosen)
    for name, run in zip(chosen, found, strict=True):
        if isinstance(run, UserError):
            if named:
                raise run
            skip(f"{name}: left out: {run}")
    return sorted((run for run in found if isinstance(run, Run)), key=lambda run: run.record.updated)


def read_run(store: Store, name: str) -> Run:
    """A snapshot of the run with this name or beginning of a name. UserError if there is none, or several."""
    (one,) = read_runs(store, [name])
    return one


def find_run(store: Store, run: str, *, in_list: bool = False) -> Run | None:
    """A snapshot of the run with this full name; None if the store has none."""
    found = read_record(store, run)
    return Run(store, found, in_list) if found else None
