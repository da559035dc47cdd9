"""The plan and the prices of a job: machines within its deadline and budget, and SKYTRAIN_PRICES for each task."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pipelines.cloud.catalog import MachineRequest, offers, with_traffic
from pipelines.cloud.checks import Finding
from pipelines.cloud.planner import CloudPlan, Limits, Workload, plan_run
from pipelines.cloud.request import WORK_TREE, LaunchRequest
from pipelines.cloud.skypilot import cluster_usd_per_hour
from pipelines.cloud.tasks import ManagedJob, in_trial_order
from pipelines.job.deadline import least_slack_seconds
from pipelines.job.prices import price_of, prices_json
from pipelines.tracking.records import Machine
from pipelines.tracking.runs import find_run
from trainer.errors import UserError
from trainer.store import Store

MOST_PLACES = 10  # for a machine of a cloud: every trial takes its time
Report = Callable[[Finding | CloudPlan], None]
Prices = Mapping[MachineRequest, Machine | None]  # of a task's machines; None: unknown


def priced_job(job: ManagedJob, request: LaunchRequest, limits: Limits, work: Workload, report: Report) -> ManagedJob:
    """Report the job's plan, and pin its machines' types and regions, in the order in which SkyPilot is to try them.

    Each task gets their prices in SKYTRAIN_PRICES, those of traffic with the store included. Train keeps the machines
    that are expected to meet the deadline and the budget, the cheapest training first. UserError if there is none, or
    for a budget if a price is unknown.
    """
    prices: dict[str, dict[MachineRequest, Machine | None]] = {task.name: {} for task in job.tasks}
    reasons = dict[str, None]()
    for task in job.tasks:
        for machine in task.machines:
            try:
                prices[task.name] |= priced(machine)
            except UserError as error:
                prices[task.name][machine] = None
                reasons[f"{task.name} on {machine.infra}: {error}"] = None
    if reasons and request.budget is not None:
        raise UserError(f"--budget: can't be promised where a price is unknown: {next(iter(reasons))}")
    for reason in reasons:
        report(Finding("price", reason, "note", "every sum lists its hours separately"))
    job = replace(job, tasks=tuple(replace(task, machines=tuple(prices[task.name])) for task in job.tasks))
    rank = {
        task: {machine: price_of(found) if found else math.inf for machine, found in known.items()}
        for task, known in prices.items()
    }
    best = within_limits(job, prices, request, limits, work, report)
    if best is not None and (train := job.task("train")):
        known = prices["train"]
        beyond = {machine for machine in train.rented if (found := known[machine]) and found not in best}
        rank["train"] = {
            machine: float(best.index(found)) if (found := known[machine]) in best else usd
            for machine, usd in rank["train"].items()
            if machine not in beyond
        }
    tasks = []
    for task in job.tasks:
        order = rank[task.name]
        task = in_trial_order(replace(task, machines=tuple(order)), order.__getitem__)
        rows = (with_traffic(found, work.place) for found in map(prices[task.name].get, task.machines) if found)
        tasks.append(replace(task, envs={**task.envs, "SKYTRAIN_PRICES": prices_json(rows)}))
    return replace(job, tasks=tuple(tasks))


def within_limits(
    job: ManagedJob,
    prices: Mapping[str, Prices],
    request: LaunchRequest,
    limits: Limits,
    work: Workload,
    report: Report,
) -> list[Machine | None] | None:
    """Report the plan. The machines for train that are expected to meet the limits, the cheapest training first.

    None if no machine that trains has a price list; UserError if none meets the limits.
    """
    train = job.task("train")
    offered = {task.name: [one for m in task.rented if (one := prices[task.name][m])] for task in job.tasks}
    if request.until == "export" and "evaluate" in offered:
        offered.setdefault("export", offered["evaluate"])
    if limits.hours is not None and train and not offered["train"]:
        infras = ", ".join(dict.fromkeys(machine.infra for machine in train.machines))
        raise UserError(
            f"--deadline: needs a price list of train's machines, which is missing for {infras}; leave it out"
        )
    if not any(offered.values()):
        return None  # own machines: if SkyPilot knows their prices, its table shows them
    try:
        plan = plan_run(work, offered, {task.name: task.num_nodes for task in job.tasks}, limits)
    except UserError as error:
        if str(limits):
            raise
        report(Finding("plan", str(error), "note", "the job can run; its hours and dollars are unknown"))
        return None
    report(plan)
    # A spot machine may be lost before any part of the job has checked the deadline.
    on_demand_hours = min((c.hours for c in plan.candidates if c.machine and not c.machine.spot), default=0.0)
    slack_hours = math.inf if limits.hours is None else limits.hours - on_demand_hours
    no_spot = request.spot is None and slack_hours < least_slack_seconds(work.installs) / 3600
    met = [c.machine for c in plan.candidates if limits.met_by(c) and not (c.machine and c.machine.spot and no_spot)]
    if not met:
        raise UserError(f"launch: {plan.notes[-1] if plan.notes else f'no machine is within {limits}'}")
    return met if train and offered["train"] else None


def limits_of(request: LaunchRequest, store: Store) -> Limits:
    """The hours until the deadline, and the rest of the budget. UserError if nothing is left."""
    found = find_run(store, request.run) if request.budget is not None else None
    spent = found.account.total.usd if found else 0.0
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


def installs(request: LaunchRequest) -> bool:
    """Whether the nodes install the packages: without an image and without an environment of their own."""
    return request.image == WORK_TREE and "SKYTRAIN_VENV" not in request.variables


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
    found = offers(machine)
    if not found:
        wanted = machine.accelerators or f"machine with {machine.cpus} CPUs"
        raise UserError(f"its price list has no {wanted}" + (" on spot" if machine.use_spot else ""))
    pinned_region = "/" in machine.infra
    return [
        (
            replace(
                machine,
                infra=machine.infra if pinned_region else f"{one.cloud}/{one.region}",
                instance_type=one.instance,
            ),
            one,
        )
        for one in found[:MOST_PLACES]
    ]
