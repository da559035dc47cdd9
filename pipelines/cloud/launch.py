"""`skytrain launch`: check everything that the job needs, then submit it to SkyPilot as one managed job.

The job gets only the run's name and store (`skytrain run run:NAME --store …`): the recipe is in `runs/<run>.json`. The
launch is in `launches/<run>.json`, from which `resume` launches it again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.bench.throughput import trains_on_a_small_gpu
from pipelines.cloud.catalog import place_of
from pipelines.cloud.checks import Finding
from pipelines.cloud.preflight import preflight, text_is_only_here
from pipelines.cloud.pricing import Report, with_prices, within_limits
from pipelines.cloud.request import LaunchRecord, LaunchRequest, key_of, last_launch, write_launch
from pipelines.cloud.skypilot import (
    api_server_is_up,
    ask_optimizer,
    check_places,
    dag_of,
    enabled_clouds,
    managed_tasks,
    reach_api_server,
    server_name,
    submit_job,
)
from pipelines.cloud.tasks import CLUSTERS, MachineRequest, ManagedJob, managed_job
from pipelines.recipe import Recipe
from pipelines.stage import STAGES, check_export, missing
from pipelines.text.tokenizer import keep_tokenizer
from pipelines.tracking.ledger import Attempt, Meter, claim, latest_number, working_attempt
from pipelines.tracking.records import Billing
from pipelines.tracking.runs import find_run, record
from pipelines.tracking.stop_request import clear_stop_request
from trainer.errors import UserError
from trainer.store import LocalStore, Store

if TYPE_CHECKING:
    from sky import Dag

OVER_FOR_GOOD = ("stopped", "failed")  # states of an attempt after which SkyPilot restarts no task
NOTHING = LocalStore(Path("no such folder"))  # a store without anything; nobody writes to it


@dataclass(frozen=True)
class Launch:
    """A launch before it is submitted."""

    request: LaunchRequest
    recipe: Recipe
    plans: dict[str, ArtifactPlan]
    store: Store
    secrets: Mapping[str, str]
    stages: list[str]  # that are missing, without those of `here`
    job: ManagedJob  # as requested, with all machines and without prices
    here: tuple[str, ...] = ()  # missing stages for which only this machine has the text: they run before the launch
    unread: bool = False  # the store can't be read, and every stage counts as missing

    @property
    def question(self) -> str:
        first = f"Run {', '.join(self.here)} here, then launch" if self.here else "Launch"
        return f"{first} {self.request.run}: {', '.join(self.stages)}?"


def planned_launch(
    request: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    secrets: Mapping[str, str],
    unread: bool = False,
) -> Launch | None:
    """None if no stage is missing. UserError for a request that no machine can fulfil."""
    check_places(request.infra)
    check_export(recipe, request.until)
    stages = list(STAGES[: STAGES.index(request.until) + 1]) if unread else missing(store, plans, request.until)
    if not stages:
        return None
    job = managed_job(request, stages, trains_on_a_small_gpu(recipe))
    here = ("tokenize",) if "tokenize" in stages and text_is_only_here(recipe, job.clouds) else ()
    stages = [stage for stage in stages if stage not in here]
    if not stages:
        raise UserError(
            f"launch: only tokenize is missing, and its text is on this machine; make it here: "
            f"skytrain run RECIPE --stage tokenize --store {store.uri}"
        )
    job = replace(job, tasks=tuple(task for task in job.tasks if task.name in stages))
    return Launch(request, recipe, plans, store, secrets, stages, job, here, unread)


# Checks


def checked_job(
    launch: Launch, report: Report, note: Callable[[str], None], errors: list[UserError] | None = None
) -> "tuple[ManagedJob, list[Dag]]":
    """The job with its prices and without machines beyond the limits, in our types and in SkyPilot's.

    `report` gets every finding and the plan, as they come; `note` gets a line when SkyPilot's API server starts.
    UserError for a problem that would keep the job from running. A dry run gives a list for these `errors`: then all
    checks are made, the prices too, and no server starts.
    """
    request, store = launch.request, launch.store
    with collected(errors):
        report_all(preflight(launch.job, request, launch.recipe, store, launch.secrets), report)
    job, ask = launch.job, errors is None or api_server_is_up()
    dags: list[Dag] = []
    if ask:
        with collected(errors):
            reach_api_server(note)
            refuse_second_launch(store, request.run)
            enabled, findings = on_enabled_clouds(job)
            report_all(findings, report)
            job = enabled
    else:
        seen = "not up, so it is unknown which clouds are enabled and which machines are free"
        report(Finding("SkyPilot's server", seen, "note", "sky api start"))
    if launch.unread:
        report(Finding("store", "it can't be read, so the plan counts every stage as missing", "note"))
    with collected(errors):
        state = NOTHING if launch.unread else store
        job = within_limits(job, request, launch.recipe, launch.plans, state, report)
    with collected(errors):
        job = with_prices(job, request, report, None if launch.unread else place_of(store))
    with collected(errors):
        dags = [dag_of(job, launch.secrets)]
        for dag in dags if ask and not errors else []:
            ask_optimizer(dag, quiet=any(cloud not in CLUSTERS for cloud in job.clouds))  # their plan was reported
    return job, dags


@contextmanager
def collected(errors: list[UserError] | None) -> Iterator[None]:
    """Add a UserError of the block to `errors`; None: it is raised."""
    try:
        yield
    except UserError as error:
        if errors is None:
            raise
        errors.append(error)


def report_all(findings: Iterable[Finding], report: Report) -> None:
    """Report each finding as it comes. UserError at the end if some are broken."""
    broken = 0
    for finding in findings:
        report(finding)
        broken += finding.state == "broken"
    if broken:
        raise UserError(f"launch: {broken} of the findings above would make the job fail; nothing was launched")


def on_enabled_clouds(job: ManagedJob) -> tuple[ManagedJob, list[Finding]]:
    """The job without the machines of clouds that SkyPilot may not use, and what is left."""
    enabled = enabled_clouds()

    def usable(machine: MachineRequest) -> bool:
        return {"k8s": "kubernetes"}.get(machine.cloud, machine.cloud) in enabled

    tasks = tuple(replace(task, machines=tuple(filter(usable, task.machines))) for task in job.tasks)
    usable_job = replace(job, tasks=tasks)
    if lost := [cloud for cloud in job.clouds if cloud not in usable_job.clouds]:
        seen = f"SkyPilot may use {', '.join(enabled) or 'no cloud'}, but not {', '.join(lost)}"
        remedy = f"sky check {' '.join(lost)} lists what each needs"
        return usable_job, [
            Finding("clouds", seen, "note" if all(task.machines for task in tasks) else "broken", remedy)
        ]
    return usable_job, []


# Submission


def submit(launch: Launch, dags: "Iterable[Dag]") -> LaunchRecord:
    """Claim and record the run, submit its job to SkyPilot, and record the launch.

    UserError if another launch of the run is not over.
    """
    request, store = launch.request, launch.store
    with claim_launch(store, request.run):
        record(store, request.run, launch.recipe, launch.plans, request.until)
        keep_tokenizer(launch.recipe, launch.plans["tokenize"], store)
        clear_stop_request(store, request.run)  # otherwise the job would end at once
        launched = LaunchRecord(request, launch.stages, [], sorted(launch.secrets), time.time(), server_name())
        # Written before the submission too: if this machine fails during it, `status` and `down` still know the job.
        write_launch(store, launched)
        for dag in dags:
            launched = replace(launched, jobs=[*launched.jobs, *submit_job(dag, request.run)])
            write_launch(store, launched)
        return launched


def claim_launch(store: Store, run: str) -> Attempt:
    """Claim the next launch of a run, as an attempt of the ledger. UserError if another launch is not over."""
    number = latest_number(store, claims_of(run)) + 1
    refuse_second_launch(store, run)
    attempt = claim(store, claims_of(run), run, "launch", number, Billing(), meter=Meter(None))
    if attempt is None:
        raise UserError(f"launch: another launch of {run} started first; see `skytrain status {run}`")
    return attempt


def claims_of(run: str) -> str:
    return f"control/{run}"


def refuse_second_launch(store: Store, run: str) -> None:
    """UserError if a launch of the run is not over. SkyPilot's API server has to be up.

    Only the API server that has a job knows whether it is over. For a job of another server the store has to show it:
    the run is done, or its last attempt has ended for good.
    """
    see = f"see `skytrain status {run}`"
    if jobs := [task.job for task in managed_tasks(run) if not task.over]:
        raise UserError(
            f"launch: {run} has job {max(jobs)}, still running; {see}, or end it with `skytrain stop {run}`"
        )
    if launching := working_attempt(store, claims_of(run)):
        raise UserError(f"launch: {run} is being launched on {launching.process.host}; {see}")
    before = last_launch(store, run)
    if before and before.server not in ("", server_name()) and not has_ended_for_good(store, run):
        job = f"job {before.jobs[-1]}" if before.jobs else "a job"
        raise UserError(
            f"launch: {run} has {job} on SkyPilot's server {before.server}; {see}; "
            f"if that job is over, remove {store.uri}/{key_of(run)}"
        )


def has_ended_for_good(store: Store, run: str) -> bool:
    """Whether the run has ended since its last launch, so that nothing restarts it."""
    (launched,) = store.entries(key_of(run))
    found = find_run(store, run)
    newest = max(found.heartbeats, key=lambda one: one.stored or 0.0, default=None) if found else None
    if found is None or newest is None or (newest.stored or 0.0) < launched.modified:
        return False
    return found.state == "done" or newest.beat.state in OVER_FOR_GOOD
