"""`skytrain launch`: check everything that the job needs, then submit it to SkyPilot as one managed job.

The job gets only the run's name and store (`skytrain job` with SKYTRAIN_RECIPE and SKYTRAIN_STORE): the recipe is in
`runs/<run>.json`. The launch is in `launches/<run>.json`, from which `resume` launches it again.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipelines.extras.bench.throughput import trains_on_a_small_gpu
from pipelines.extras.tune.tune import checked_rows
from pipelines.recipe.recipe import Recipe
from pipelines.run.plan import stage_plan
from pipelines.run.run_record import record
from pipelines.run.runs import find_run
from pipelines.run.stage import STAGES, TUNE, missing
from pipelines.run.text.tokenizer import store_tokenizer
from pipelines.store.layout import launch_claims, launch_key
from pipelines.store.ledger import Attempt, agreed_clock, claim, latest_number, working_attempt
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.meter import Meter
from pipelines.store.records import Billing
from pipelines.store.stop_request import stop_requests, withdraw_stop
from pipelines.store.store_id import new_store_id, read_store_id, settled_store_id
from pipelines.user.cloud.checks import Finding
from pipelines.user.cloud.control import on_another_server
from pipelines.user.cloud.planner import Report, limits_of, priced_job, workload
from pipelines.user.cloud.preflight import preflight, text_is_only_here
from pipelines.user.cloud.request import LaunchRecord, LaunchRequest, last_launch, write_launch
from pipelines.user.cloud.skypilot import (
    api_server_is_up,
    ask_optimizer,
    check_places,
    dag_of,
    enabled_clouds,
    managed_tasks,
    reach_api_server,
    server_name,
    skypilot_version,
    submit_job,
)
from pipelines.user.cloud.tasks import ManagedJob, make_work_tree, managed_job
from trainer.base.store import Entry, Store
from trainer.config.errors import UserError

if TYPE_CHECKING:
    from sky import Dag

OVER_FOR_GOOD = ("stopped", "failed")  # states of an attempt after which SkyPilot restarts no task


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
    stops: tuple[Entry, ...] = ()  # the requests to stop runs before this command

    def question(self, usd: float) -> str:
        """The question before anything is rented, with the expected dollars and the budget."""
        first = f"Run {', '.join(self.here)} here, then launch" if self.here else "Launch"
        expected = f"about ${usd:,.2f}" if usd < math.inf else "an unknown price"
        budget = "" if self.request.budget is None else f" of a budget of ${self.request.budget:,.2f}"
        if TUNE in self.job.stages:  # its speed is unknown
            known = any(stage in STAGES for stage in self.stages)
            expected = f"{expected} without tune" if known else "an unknown price"
        return f"{first} {self.request.run} ({', '.join(self.stages)}) for {expected}{budget}?"


def planned_launch(
    request: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    secrets: Mapping[str, str],
) -> Launch | None:
    """None if no stage is missing. UserError for a request that no machine can fulfil."""
    check_places(request.infra)
    stops, stages = tuple(stop_requests(store)), missing(store, plans, request.until)
    if not stages:
        return None
    request = replace(request, store_id=read_store_id(store) or new_store_id())
    job = managed_job(request, stages, trains_on_a_small_gpu(recipe))
    here = ("tokenize",) if "tokenize" in stages and text_is_only_here(recipe, job.clouds) else ()
    stages = [stage for stage in stages if stage not in here]
    if not stages:
        raise UserError(
            f"launch: only tokenize is missing, and its text is on this machine; make it here: "
            f"skytrain run RECIPE --stage tokenize --store {store.uri}"
        )
    job = replace(job, tasks=tuple(task for task in job.tasks if task.name not in here))
    return Launch(request, recipe, plans, store, secrets, stages, job, here, stops)


# Checks


def checked_job(
    launch: Launch, report: Report, note: Callable[[str], None], dry_run: bool = False
) -> "tuple[ManagedJob, Dag | None, float, list[Finding]]":
    """The job with its prices and without machines beyond the limits, in our types and in SkyPilot's, its expected
    dollars, and the findings that would keep it from running: only a dry run continues after those.

    `report` gets every finding and the plan, as they come; `note` gets a line when SkyPilot's API server starts.
    UserError for a request that can't be met. A dry run starts no server; without SkyPilot or a network it has no job
    in SkyPilot's types.
    """
    request, store, job, wrong = launch.request, launch.store, launch.job, list[Finding]()

    def check(findings: Iterable[Finding]) -> None:
        for finding in findings:
            report(finding)
            if finding.state == "broken":
                wrong.append(finding)
        if wrong and not dry_run:
            raise UserError(nothing_launched(wrong))

    if (training := stage_plan(store, launch.plans["train"])).other:
        report(Finding("train", training.why or "", "note"))
    check(preflight(job, request, launch.recipe, store, launch.secrets))
    if TUNE in job.stages:
        for name, rows in checked_rows(launch.recipe, store, launch.plans["tokenize"]).items():
            report(Finding(f"rows of tune.{name}", str(rows)))
    ask = not dry_run or api_server_is_up()
    if ask:
        reach_api_server(note)
        refuse_second_launch(store, request)
        job, findings = on_enabled_clouds(job)
        check(findings)
    elif skypilot_version():
        seen = "not up, so it is unknown which clouds are enabled and which machines are free"
        report(Finding("SkyPilot's server", seen, "note", "sky api start"))
    work = workload(launch.recipe, store, launch.plans, launch.stages, request.installs)
    job, usd = priced_job(job, request, limits_of(request, store), work, report, shipped=dry_run)
    dag = None
    with suppress(OSError) if dry_run else nullcontext():  # it may lack SkyPilot's price lists
        dag = dag_of(job.to_yaml(), launch.secrets) if skypilot_version() else None
    if dag and ask and not wrong:
        ask_optimizer(dag)
    return job, dag, usd, wrong


def nothing_launched(wrong: Iterable[Finding]) -> str:
    """The findings again, as the last lines that the user sees."""
    lines = (f"\n  {one.what}: {one.seen}" + (f"; {one.remedy}" if one.remedy else "") for one in wrong)
    return f"launch: the job would fail; nothing was launched:{''.join(lines)}"


def on_enabled_clouds(job: ManagedJob) -> tuple[ManagedJob, list[Finding]]:
    """The job without the machines of clouds that SkyPilot may not use, and a finding about those. With all machines if
    a task would have none."""
    enabled = enabled_clouds()
    names = {cloud: {"k8s": "kubernetes"}.get(cloud, cloud) for cloud in job.clouds}
    if not (lost := [cloud for cloud, name in names.items() if name not in enabled]):
        return job, []
    kept = [tuple(machine for machine in task.machines if machine.cloud not in lost) for task in job.tasks]
    seen = f"SkyPilot may use {', '.join(enabled) or 'no cloud'}, but not {', '.join(lost)}"
    remedy = f"sky check {' '.join(lost)} lists what each needs"
    if not all(kept):
        return job, [Finding("clouds", seen, "broken", remedy)]
    tasks = tuple(replace(task, machines=machines) for task, machines in zip(job.tasks, kept, strict=True))
    return replace(job, tasks=tasks), [Finding("clouds", seen, "note", remedy)]


# Submission


def write_store_id(launch: Launch) -> None:
    """Write the store's id, which the job's name has, before anything else is written."""
    if settled_store_id(launch.store, launch.request.store_id) != launch.request.store_id:
        raise UserError(f"launch: another command has just made {launch.store.uri} its own; launch again")


def submit(launch: Launch, dag: "Dag") -> LaunchRecord:
    """Claim and record the run, submit its job to SkyPilot, and record the launch.

    UserError if another launch of the run is not over.
    """
    request, store = launch.request, launch.store
    make_work_tree()
    with claim_launch(store, request):
        record(store, request.run, launch.recipe, launch.plans, request.until)
        store_tokenizer(launch.recipe, launch.plans["tokenize"], store)
        withdraw_stop(store, request.run, launch.stops)  # otherwise the job would end at once
        launched = LaunchRecord(request, launch.stages, [], sorted(launch.secrets), time.time(), server_name())
        # Written before the submission too: if this machine fails during it, `status` and `down` still know the job.
        write_launch(store, launched)
        launched = replace(launched, jobs=submit_job(dag, request.job_name))
        write_launch(store, launched)
        return launched


def claim_launch(store: Store, request: LaunchRequest) -> Attempt:
    """Claim the next launch of a run, as an attempt of the ledger. UserError if another launch is not over."""
    run = request.run
    number = latest_number(store, launch_claims(run)) + 1
    refuse_second_launch(store, request)
    attempt = claim(store, launch_claims(run), run, "launch", number, Billing(), meter=Meter(None))
    if attempt is None:
        raise UserError(f"launch: another launch of {run} started first; see `skytrain status {run}`")
    return attempt


def refuse_second_launch(store: Store, request: LaunchRequest) -> None:
    """UserError if a launch of the run is not over. SkyPilot's API server has to be up.

    Only the API server that has a job knows whether it is over. For a job of another server the store has to show it:
    the run is done, or its last attempt has ended for good.
    """
    run, before = request.run, last_launch(store, request.run)
    names, see = {request.job_name, before.request.job_name if before else run}, f"see `skytrain status {run}`"
    if jobs := [task.job for task in managed_tasks(unfinished=True) if task.name in names and not task.over]:
        raise UserError(
            f"launch: {run} has job {max(jobs)}, still running; {see}, or end it with `skytrain stop {run}`"
        )
    if launching := working_attempt(store, launch_claims(run), lambda: agreed_clock(store)):
        raise UserError(f"launch: {run} is being launched on {launching.process.host}; {see}")
    if before and (message := on_another_server(before)) and not has_ended_for_good(store, run):
        raise UserError(f"launch: {message}; if that job is over, remove {store.uri}/{launch_key(run)}")


def has_ended_for_good(store: Store, run: str) -> bool:
    """Whether the run has ended since its last launch, so that nothing restarts it."""
    (launched,) = store.entries(launch_key(run))
    found = find_run(store, run)
    newest = max(found.heartbeats, key=lambda one: one.stored or 0.0, default=None) if found else None
    if found is None or newest is None or (newest.stored or 0.0) < launched.modified:
        return False
    return found.state == "done" or newest.beat.state in OVER_FOR_GOOD
