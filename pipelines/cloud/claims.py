"""One launch of a run at a time: the claim that a launch takes in the store before it submits a job.

Claim number n is `control/<run>/launches/<n>.json`. A launch creates it by a create-only put, so exactly one of several
launches gets it, and adds the job's id once SkyPilot has named it. The next launch takes number n + 1 when the job of
number n is over. Only the API server that has the job knows that. For a job of another server the store has to show it:
the run is done, or its last attempt has ended for good.
"""

import getpass
import json
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from pipelines.cloud.skypilot import TaskStatus, managed_tasks, server_name
from pipelines.tracking.ledger import process_exists, this_process
from pipelines.tracking.records import ProcessId
from pipelines.tracking.runs import find_run
from trainer.errors import UserError
from trainer.store import Entry, Store
from trainer.stored import Count, DamagedRecord, Key, Stored, UnixSeconds, record_in

OVER_FOR_GOOD = ("stopped", "failed")  # states of an attempt after which SkyPilot restarts no task


@dataclass(frozen=True)
class LaunchClaim(Stored):
    """The right to run a job for a run, taken by one launch."""

    run: Key
    number: Count
    by: str  # user@host
    server: str  # the API server that has the job
    time: UnixSeconds
    process: ProcessId = ProcessId()  # that submits the job
    jobs: list[Count] = field(default_factory=list)  # SkyPilot's ids of managed jobs; none until the submission

    @property
    def key(self) -> str:
        return f"{folder_of(self.run)}{self.number:04d}.json"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self) | {"process": self.process.to_json()}, indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a claim") -> Self:
        """DamagedRecord, or NewerRecord."""
        return record_in(cls, body, where)


def claim_launch(store: Store, run: str) -> LaunchClaim:
    """Take the next claim of a run. UserError with the launch that has the present one."""
    newest = newest_entry(store, run)
    refuse_second_launch(store, run)
    number = number_of(newest) + 1 if newest else 1
    by = f"{getpass.getuser()}@{platform.node()}"
    claim = LaunchClaim(run, number, by, server_name(), time.time(), this_process())
    if not store.create(claim.key, claim.to_json()):
        refuse_second_launch(store, run)
        raise UserError(f"launch: another launch of {run} started first; see `skytrain status {run}`")
    return claim


def name_jobs(store: Store, claim: LaunchClaim, jobs: list[int]) -> None:
    """Add the ids of the submitted jobs to a claim."""
    store.put(claim.key, replace(claim, jobs=jobs).to_json())


def refuse_second_launch(store: Store, run: str) -> None:
    """UserError if a launch of the run is not over. SkyPilot's API server has to be up."""
    entry, tasks = newest_entry(store, run), managed_tasks(run)
    claim = read_claim(store, entry) if entry else None
    unfinished = sorted({task.job for task in tasks if not task.over})
    if unfinished:
        ours = claim and (
            not claim.jobs or unfinished[-1] in claim.jobs
        )  # SkyPilot knows the job before its claim does
        by = f", launched by {claim.by}" if claim and ours else ""
        raise UserError(
            f"launch: {run} has job {unfinished[-1]}{by}, still running; see `skytrain status {run}`, or end it "
            f"with `skytrain stop {run}`"
        )
    if claim and entry and is_held(store, claim, entry, tasks):
        what = f"job {claim.jobs[-1]}" if claim.jobs else "being submitted"
        elsewhere = "" if claim.server == server_name() else f" on SkyPilot's server {claim.server}"
        raise UserError(
            f"launch: {run} is launched by {claim.by} already ({what}{elsewhere}); see `skytrain status {run}`; "
            f"if that launch is over, remove {store.uri}/{claim.key}"
        )


def is_held(store: Store, claim: LaunchClaim, entry: Entry, tasks: list[TaskStatus]) -> bool:
    """Whether the job of a claim may still run. `tasks`: of the run's jobs on this API server."""
    if claim.server != server_name():
        return not ended_for_good(store, claim.run, entry.modified)
    if claim.jobs:  # a job that SkyPilot does not know any more is over, too
        return any(task.job in claim.jobs and not task.over for task in tasks)
    return process_exists(claim) is not False  # it submits the job


def ended_for_good(store: Store, run: str, since: float) -> bool:
    """Whether the run has ended since then (unix seconds, by the store's clock), so that nothing restarts it."""
    found = find_run(store, run)
    if found is None:
        return False
    newest = max(found.heartbeats, key=lambda one: one.stored or 0.0, default=None)
    if newest is None or (newest.stored or 0.0) < since:
        return False
    return found.state == "done" or newest.beat.state in OVER_FOR_GOOD


def read_claim(store: Store, entry: Entry) -> LaunchClaim | None:
    """None if it was removed meanwhile. UserError for a damaged one, or one of a newer skytrain."""
    body, where = store.get(entry.key), f"{store.uri}/{entry.key}"
    remedy = f"remove it once no job of {run_of(entry)} runs"
    try:
        claim = None if body is None else LaunchClaim.from_json(body, where)
    except DamagedRecord as error:
        raise DamagedRecord(where, error.reason, remedy) from error
    if claim and claim.key != entry.key:
        raise DamagedRecord(where, f"it is number {claim.number} of {claim.run}", remedy)
    return claim


def newest_entry(store: Store, run: str) -> Entry | None:
    """The entry of the newest claim; None if the run was never launched. Other names are left out."""
    entries = (entry for entry in store.entries(folder_of(run)) if number_of(entry))
    return max(entries, key=number_of, default=None)


def number_of(entry: Entry) -> int:
    """The number of a claim, 0 for another name."""
    digits = entry.key.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdecimal() and len(digits) <= 9 else 0


def run_of(entry: Entry) -> str:
    return entry.key.split("/")[1]


def folder_of(run: str) -> str:
    return f"control/{run}/launches/"
