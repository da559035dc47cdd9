"""The plan and the prices of a job: machines within its deadline and budget, and SKYTRAIN_PRICES for each task."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud.catalog import Offer, account_errors, offers
from pipelines.cloud.checks import Finding
from pipelines.cloud.deadline import least_slack_seconds
from pipelines.cloud.egress import Place, traffic_price
from pipelines.cloud.estimates import usd_to_train, workload
from pipelines.cloud.plan import (
    CloudPlan,
    Limits,
    PlanWithoutTraining,
    best_offers,
    compare_offers,
    plan_without_training,
    price_of,
)
from pipelines.cloud.prices import PriceRow, prices_json
from pipelines.cloud.request import WORK_TREE, LaunchRequest
from pipelines.cloud.skypilot import cluster_usd_per_hour
from pipelines.cloud.tasks import MachineRequest, ManagedJob, Task, in_trial_order
from pipelines.recipe import Recipe
from pipelines.tracking.runs import find_run
from trainer.errors import UserError
from trainer.store import Store

MOST_REGIONS = 5  # of a cloud, before the whole cloud: every trial takes its time
Report = Callable[[Finding | CloudPlan | PlanWithoutTraining], None]


# The plan, and the limits


def within_limits(
    job: ManagedJob,
    request: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    report: Report,
) -> ManagedJob:
    """Report the plan for the machines that have a price list. With a deadline or budget, the job keeps the training
    machines that are expected to meet it; UserError if none is."""
    limits = limits_of(request, store)
    offered = {task.name: list(dict.fromkeys(o for m in task.rented for o in offers_or_none(m))) for task in job.tasks}
    train = job.task("train")
    if limits.hours is not None and train and not offered["train"]:
        infras = ", ".join(dict.fromkeys(machine.infra for machine in train.machines))
        raise UserError(f"--deadline: can't be kept where train's machines have no price list ({infras}); leave it out")
    if not any(offered.values()):
        return job  # own machines: if SkyPilot knows their prices, its table shows them
    work = workload(recipe, store, plans, installs=installs(request))
    node_counts = {task.name: task.num_nodes for task in job.tasks}
    if not (train and offered["train"]):
        rest = plan_without_training(work, offered, node_counts)
        report(rest)
        if not limits.met_by(rest.hours, rest.usd):
            needs = f"{rest.hours:.1f} h and ${rest.usd:,.2f}"
            raise UserError(
                f"launch: {', '.join(rest.estimates)}: expected to take {needs}, which is not within {limits}"
            )
        return job
    usd = partial(usd_to_train, work, train.num_nodes)
    offered["train"] = best_offers(offered["train"], usd)
    try:
        plan = compare_offers(work, offered, node_counts, limits)
    except UserError as error:
        if str(limits):
            raise
        report(Finding("plan", str(error), "note", "the job can run; its hours and dollars are unknown"))
        return job
    report(plan)
    machines = train.machines
    if str(limits):
        machines = affordable_machines(train, plan, limits, request)
        if set(machines) <= set(train.standbys):
            raise UserError(f"launch: {plan.notes[-1] if plan.notes else f'no machine is within {limits}'}")
    train = replace(train, machines=tuple(best_places_first(machines, usd)), ordered=True)
    return replace(job, tasks=tuple(train if task.name == "train" else task for task in job.tasks))


def best_places_first(machines: Iterable[MachineRequest], usd: Callable[[Offer], float]) -> Iterator[MachineRequest]:
    """The machines in the order of the dollars that training is expected to cost on them; those without a price list
    last. SkyPilot tries a cloud's regions by price, so regions that promise to be cheaper come before their cloud.
    """
    scored: list[tuple[float, MachineRequest]] = []
    for machine in machines:
        by_region: dict[str, float] = {}
        for offer in (found := offers_or_none(machine)):
            by_region[offer.region] = min(usd(offer), by_region.get(offer.region, math.inf))
        first = usd(min(found, key=price_of)) if found else math.inf
        better = sorted((region for region in by_region if by_region[region] < first), key=lambda one: by_region[one])
        if machine.infra == machine.cloud:
            scored += [
                (by_region[region], replace(machine, infra=f"{machine.cloud}/{region}"))
                for region in better[:MOST_REGIONS]
            ]
        scored.append((first, machine))
    return (machine for _, machine in sorted(scored, key=lambda one: one[0]))


def limits_of(request: LaunchRequest, store: Store) -> Limits:
    """The hours until the deadline, and the rest of the budget. UserError if nothing is left."""
    spent = 0.0 if request.budget is None else usd_spent(store, request.run)
    if request.budget is not None and request.budget <= spent:
        raise UserError(
            f"--budget {request.budget:g}: the run has already cost ${spent:,.2f}; raise the budget to continue"
        )
    hours = None if request.deadline is None else (request.deadline - time.time()) / 3600
    if hours is not None and hours <= 0:
        raise UserError(f"launch: the deadline of {request.run} is over; launch the run again with another --deadline")
    return Limits(hours, None if request.budget is None else request.budget - spent)


def affordable_machines(
    train: Task, plan: CloudPlan, limits: Limits, request: LaunchRequest
) -> tuple[MachineRequest, ...]:
    """The rented machines of train that are expected to meet the limits, all own machines, and all standbys."""
    # A spot machine may be lost before any part of the job has checked the deadline.
    on_demand_hours = min((c.hours for c in plan.candidates if not c.offer.spot), default=0.0)
    slack_hours = math.inf if limits.hours is None else limits.hours - on_demand_hours
    least_hours = least_slack_seconds(installs(request)) / 3600
    no_spot = request.spot is None and slack_hours < least_hours
    met = (c.offer for c in plan.candidates if limits.met_by(c.hours, c.usd))
    good = {offer for offer in met if not (offer.spot and no_spot)}
    beyond = [machine for machine in train.rented if good.isdisjoint(offers_or_none(machine))]
    return tuple(machine for machine in train.machines if machine not in beyond)


def installs(request: LaunchRequest) -> bool:
    """Whether the nodes install the packages: without an image and without an environment of their own."""
    return request.image == WORK_TREE and "SKYTRAIN_VENV" not in request.variables


def usd_spent(store: Store, run: str) -> float:
    """The dollars that a run has cost so far."""
    found = find_run(store, run)
    return found.account.total.usd if found else 0.0


# The prices


def with_prices(job: ManagedJob, request: LaunchRequest, report: Report, place: Place | None = None) -> ManagedJob:
    """The job with SKYTRAIN_PRICES, with those of traffic to a bucket at `place`, and with its machines in the order in
    which SkyPilot is to try them.

    UserError for a budget if a price is unknown.
    """
    tasks = []
    unpriced: dict[str, list[str]] = {}  # tasks by reason: equal complaints are one
    for task in (in_trial_order(task, lowest_price) for task in job.tasks):
        rows: list[PriceRow] = []
        for machine in task.machines:
            try:
                rows += [with_traffic(row, place) for row in price_rows(machine)]
            except UserError as error:
                names = unpriced.setdefault(f"on {machine.infra}: {error}", [])
                names += [task.name] if task.name not in names else []
        tasks.append(replace(task, envs={**task.envs, "SKYTRAIN_PRICES": prices_json(rows)}))
    reasons = [f"{', '.join(names)} {where}" for where, names in unpriced.items()]
    if reasons and request.budget is not None:
        raise UserError(f"--budget: can't be promised where a price is unknown: {reasons[0]}")
    for reason in reasons:
        report(Finding("price", reason, "note", "every sum lists its hours separately"))
    for reason in account_errors.values():
        report(Finding("price", reason, "note"))
    return replace(job, tasks=tuple(tasks))


def with_traffic(row: PriceRow, store: Place | None) -> PriceRow:
    """A row with the price of traffic between its machine and the store."""
    price = traffic_price(Place(row.cloud, row.region), store)
    row = replace(row, usd_per_gb_sent=price.sent, usd_per_gb_received=price.received)
    return replace(row, usd_per_1000_writes=price.writes, usd_per_1000_reads=price.reads)


def lowest_price(machine: MachineRequest) -> float:
    """Dollars an hour of the cheapest offer; infinite if no price is known."""
    with suppress(UserError):
        return min(row.usd_per_hour for row in price_rows(machine))
    return math.inf


def price_rows(machine: MachineRequest) -> list[PriceRow]:
    """The rows of SKYTRAIN_PRICES for one of a task's machines. UserError if its price is unknown."""
    if machine.is_own:
        usd = cluster_usd_per_hour(machine)
        region = machine.infra.partition("/")[2] or None
        return [PriceRow(usd, machine.cloud, region, on_demand_usd_per_hour=usd, accelerators=machine.accelerators)]
    return [PriceRow.of(offer) for offer in offers_for(machine)]


def offers_for(machine: MachineRequest) -> list[Offer]:
    """A cloud's offers for one of a task's machines. UserError if there is no price list, or no offer in it."""
    _, region, zone = [*machine.infra.split("/"), "", ""][:3]
    found: Iterable[Offer] = offers(machine.cloud, machine.node, region or None)
    fitting = [o for o in found if o.spot == machine.use_spot and zone in ("", o.zone or zone)]
    if not fitting:
        raise UserError(f"its price list has no {machine.node}" + (" on spot" if machine.use_spot else ""))
    return fitting


def offers_or_none(machine: MachineRequest) -> list[Offer]:
    """A cloud's offers for one of a task's machines; none where no price is known, which `with_prices` reports."""
    with suppress(UserError):
        return offers_for(machine)
    return []
