"""The plan and the prices of a job: machines within its deadline and budget, and SKYTRAIN_PRICES for each task."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud.catalog import Place, offers, with_traffic
from pipelines.cloud.checks import Finding
from pipelines.cloud.planner import CloudPlan, Limits, plan_run, workload
from pipelines.cloud.request import WORK_TREE, LaunchRequest
from pipelines.cloud.skypilot import cluster_usd_per_hour
from pipelines.cloud.tasks import MachineRequest, ManagedJob, Task, in_trial_order
from pipelines.job.deadline import least_slack_seconds
from pipelines.job.prices import price_of, prices_json
from pipelines.recipe import Recipe
from pipelines.tracking.records import Machine
from pipelines.tracking.runs import find_run
from trainer.errors import UserError
from trainer.store import Store

MOST_PLACES = 10  # for a machine of a cloud: every trial takes its time
Report = Callable[[Finding | CloudPlan], None]


def within_limits(
    job: ManagedJob,
    request: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    report: Report,
) -> ManagedJob:
    """Report the plan for the machines that have a price list. The job keeps the training machines that are expected to
    meet its deadline and budget, each in its regions, the cheapest training first; UserError if none is."""
    limits = limits_of(request, store)
    offered = {task.name: [one for m in task.rented for _, one in priced_or_none(m)] for task in job.tasks}
    train = job.task("train")
    if limits.hours is not None and train and not offered["train"]:
        infras = ", ".join(dict.fromkeys(machine.infra for machine in train.machines))
        raise UserError(
            f"--deadline: needs a price list of train's machines, which is missing for {infras}; leave it out"
        )
    if not any(offered.values()):
        return job  # own machines: if SkyPilot knows their prices, its table shows them
    work = workload(recipe, store, plans, installs=installs(request))
    try:
        plan = plan_run(work, offered, {task.name: task.num_nodes for task in job.tasks}, limits)
    except UserError as error:
        if str(limits):
            raise
        report(Finding("plan", str(error), "note", "the job can run; its hours and dollars are unknown"))
        return job
    report(plan)
    if not (train and offered["train"]):
        if plan.chosen is None:
            raise UserError(f"launch: {plan.notes[-1]}")
        return job
    machines = affordable_machines(train, plan, limits, request)
    if str(limits) and set(machines) <= set(train.standbys):
        raise UserError(f"launch: {plan.notes[-1] if plan.notes else f'no machine is within {limits}'}")
    train = replace(train, machines=machines, ordered=True)
    return replace(job, tasks=tuple(train if task.name == "train" else task for task in job.tasks))


def limits_of(request: LaunchRequest, store: Store) -> Limits:
    """The hours until the deadline, and the rest of the budget. UserError if nothing is left."""
    spent = 0.0 if request.budget is None else usd_spent(store, request.run)
    if request.budget is not None and request.budget <= spent:
        raise UserError(
            f"--budget {request.budget:g}: the run has already cost ${spent:,.2f}; raise the budget to continue"
        )
    hours = None if request.deadline is None else (request.deadline - time.time()) / 3600
    if hours is not None and hours <= 0:
        raise UserError(
            f"launch: the deadline of {request.run} has passed; launch the run again with a later --deadline"
        )
    return Limits(hours, None if request.budget is None else request.budget - spent)


def affordable_machines(
    train: Task, plan: CloudPlan, limits: Limits, request: LaunchRequest
) -> tuple[MachineRequest, ...]:
    """The rented machines of train that are expected to meet the limits, in the plan's order, and all other machines:
    own ones, standbys, and those without a price."""
    # A spot machine may be lost before any part of the job has checked the deadline.
    on_demand_hours = min((c.hours for c in plan.candidates if c.machine and not c.machine.spot), default=0.0)
    slack_hours = math.inf if limits.hours is None else limits.hours - on_demand_hours
    no_spot = request.spot is None and slack_hours < least_slack_seconds(installs(request)) / 3600
    met = (c.machine for c in plan.candidates if limits.met_by(c))
    place_in_order = {machine: i for i, machine in enumerate(met) if machine and not (machine.spot and no_spot)}
    places = {m: priced_or_none(m) for m in train.rented}
    good = [
        (place_in_order[one], pinned) for found in places.values() for pinned, one in found if one in place_in_order
    ]
    rented = [pinned for _, pinned in sorted(good, key=lambda pair: pair[0])]
    return tuple(dict.fromkeys([*rented, *(m for m in train.machines if not places.get(m))]))


def installs(request: LaunchRequest) -> bool:
    """Whether the nodes install the packages: without an image and without an environment of their own."""
    return request.image == WORK_TREE and "SKYTRAIN_VENV" not in request.variables


def usd_spent(store: Store, run: str) -> float:
    """The dollars that a run has cost so far."""
    found = find_run(store, run)
    return found.account.total.usd if found else 0.0


def with_prices(job: ManagedJob, request: LaunchRequest, report: Report, place: Place | None = None) -> ManagedJob:
    """The job with its machines' types and regions in the order in which SkyPilot is to try them, and with their prices
    in SKYTRAIN_PRICES, those of traffic to a bucket at `place` included.

    UserError for a budget if a price is unknown.
    """
    tasks, reasons = [], dict[str, None]()
    for task in job.tasks:
        prices: dict[MachineRequest, Machine | None] = {}
        for machine in task.machines:
            try:
                prices |= priced(machine)
            except UserError as error:
                prices[machine] = None
                reasons[f"{task.name} on {machine.infra}: {error}"] = None
        usd = {machine: price_of(found) if found else math.inf for machine, found in prices.items()}
        task = in_trial_order(replace(task, machines=tuple(prices)), usd.__getitem__)
        rows = (with_traffic(found, place) for found in map(prices.get, task.machines) if found)
        tasks.append(replace(task, envs={**task.envs, "SKYTRAIN_PRICES": prices_json(rows)}))
    if reasons and request.budget is not None:
        raise UserError(f"--budget: can't be promised where a price is unknown: {next(iter(reasons))}")
    for reason in reasons:
        report(Finding("price", reason, "note", "every sum lists its hours separately"))
    return replace(job, tasks=tuple(tasks))


def priced(machine: MachineRequest) -> Iterable[tuple[MachineRequest, Machine]]:
    """One of a task's machines with its type and region pinned, and its price: the cheapest places of a cloud.

    UserError if there is no price list, or no such machine in it.
    """
    if machine.is_own:
        usd, region = cluster_usd_per_hour(machine), machine.infra.partition("/")[2] or None
        row = Machine(
            machine.cloud, region, accelerators=machine.accelerators, usd_per_hour=usd, on_demand_per_hour=usd
        )
        return [(machine, row)]
    region = machine.infra.partition("/")[2].partition("/")[0]
    found = [o for o in offers(machine.cloud, machine.node, region or None) if o.spot == machine.use_spot]
    found = [one for one in found if machine.instance_type in (None, one.instance)]
    if not found:
        raise UserError(f"its price list has no {machine.node}" + (" on spot" if machine.use_spot else ""))
    return [
        (
            replace(
                machine, infra=machine.infra if region else f"{one.cloud}/{one.region}", instance_type=one.instance
            ),
            one,
        )
        for one in found[:MOST_PLACES]
    ]


def priced_or_none(machine: MachineRequest) -> Iterable[tuple[MachineRequest, Machine]]:
    """As `priced`; none where no price is known, which `with_prices` reports."""
    try:
        return priced(machine)
    except UserError:
        return ()
