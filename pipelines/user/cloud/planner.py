"""The expected hours and dollars of a run on rented machines, for `plan --cloud` and `launch`.

Hours are tokens / speed (throughput.py), dollars are hours x catalog price + traffic with the store. Preemptions add to
both by one formula, `billed_per_useful_hour`, with the lifetimes that ASSUMED states. The ledger keeps the run's actual
cost; nothing here enters it.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from pipelines.extras.bench.gpus import MOST_NODES, check_gpus, fewest_nodes, gpu_count, gpu_of, memory_on, peak_of
from pipelines.extras.bench.throughput import (
    TCP_BYTES_PER_SECOND,
    Throughput,
    nearest_step,
    speed_on,
    trains_on_a_small_gpu,
)
from pipelines.job.deadline import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS, least_slack_seconds
from pipelines.job.prices import price_of, prices_json
from pipelines.recipe.recipe import Recipe
from pipelines.run.runs import find_run
from pipelines.run.stage import STAGES, missing, plans_of, run_name
from pipelines.run.text.mixture import sources_planned
from pipelines.store.crashes import STEADY_SECONDS_BETWEEN_FAILURES, prior_seconds_between_failures
from pipelines.store.ledger import attempts
from pipelines.store.manifest import ArtifactPlan, find
from pipelines.store.records import Machine
from pipelines.store.traffic import GB
from pipelines.user.cloud.catalog import (
    CLOUDS,
    CloudRegion,
    MachineRequest,
    is_cluster,
    offers_of_all,
    place_of,
    with_traffic,
)
from pipelines.user.cloud.checks import Finding
from pipelines.user.cloud.preflight import slow_cards, text_is_only_here
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import ManagedJob, in_trial_order, managed_job
from trainer.base.store import Store
from trainer.checkpoint.commits import checkpoint_seconds, committed_state
from trainer.config.amounts import state_bytes, tokens_before, val_tokens
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.config.errors import UserError

TRAIN_NODES = ("H100:8", "H200:8", "A100-80GB:8")  # the default of `plan --gpus`
STALL_SECONDS = 0.1  # for which a save delays the steps: the least that the trainer assumes
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # of text and weights, between the Hub or a bucket and a node
HARNESS_TASK_TOKENS = 1_000_000  # of a task of EleutherAI's harness, all choices of all items; estimated
CHECKPOINT_BYTES_PER_SECOND = 1e9  # from a bucket in the region; from a local disk 2.3 GB/s were measured

ASSUMED = (
    f"a spot node lasts {PRIOR_SECONDS_BETWEEN_FAILURES / 3600:g} h (2.1 in the traces of NSDI'24: AWS V100, 2022-23), "
    f"one on demand {STEADY_SECONDS_BETWEEN_FAILURES / 86_400:g} days",
    f"{WAIT_SECONDS / 60:.0f} min until there is a node, then {START_SECONDS / 60:.0f} min of billed start-up, "
    f"{INSTALL_SECONDS / 60:.0f} more where it installs the packages (no image)",
    f"text and weights are transferred at {BYTES_PER_SECOND / 1e6:.0f} MB/s, checkpoints at "
    f"{CHECKPOINT_BYTES_PER_SECOND / 1e6:.0f} MB/s",
    "evaluation has the MFU of eager training",
)

Report = Callable[["Finding | CloudPlan"], None]
Offered = dict[str, dict[MachineRequest, Machine]]  # by stage, with type and region, and prices


@dataclass(frozen=True)
class Workload:
    """The work that is left of a run."""

    recipe: Recipe
    stages: list[str]  # that are missing
    steps_left: int
    own: Mapping[tuple[str, int], Throughput] = field(default_factory=dict)  # of its attempts, by GPUs and nodes
    installs: bool = False  # a node without an image installs the packages first
    place: CloudRegion | None = None  # of the store
    text: int = 0  # tokens to make, and those of them that are held out, as far as the text is known
    held_out: int = sys.maxsize
    between: float = TCP_BYTES_PER_SECOND  # that a node sends to the others


@dataclass(frozen=True)
class StageEstimate:
    """The expected time and cost of a stage on `nodes` machines."""

    machine: Machine
    nodes: int
    hours: float = math.inf
    usd: float = math.inf  # of all nodes; infinite: the machine's price or its speed is unknown
    preemptions: float = 0.0
    traffic_usd: float = 0.0  # of `usd`: between the machines and the store, as far as its price is known


@dataclass(frozen=True)
class Candidate:
    """A machine to train on, with the estimates of all missing stages."""

    machine: Machine | None  # None: nothing is left to train
    speed: Throughput | None
    stages: Mapping[str, StageEstimate]
    hours: float
    usd: float  # infinite: a price is unknown
    memory: str | None = None  # of a GPU, and the engine


@dataclass(frozen=True)
class CloudPlan:
    """A candidate for each place of each machine, the cheapest first, and notes for the user."""

    candidates: list[Candidate]
    chosen: int | None  # the cheapest candidate within the limits; None: no candidate is
    notes: list[str]
    assumed: tuple[str, ...] = ASSUMED

    def to_json(self) -> Any:
        """An unknown price is null."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)


class Limits(NamedTuple):
    """The limits that the user set, for the whole run."""

    hours: float = math.inf
    usd: float = math.inf
    spot_slack: float = 0.0  # hours; a spot machine may be lost before any part of the job has checked the deadline

    def allow(self, one: Candidate) -> bool:
        slack = self.spot_slack if one.machine and one.machine.spot else 0.0
        return one.hours + slack <= self.hours and one.usd <= self.usd

    def __str__(self) -> str:
        left = {"h until the deadline": self.hours, "dollars of the budget": self.usd}
        return f"the limits ({', '.join(f'{value:,.2f} {name}' for name, value in left.items() if value < math.inf)})"


NO_LIMITS = Limits()


def cloud_plan(
    recipe: Recipe,
    store: Store,
    limits: Limits = NO_LIMITS,
    train_nodes: Iterable[str] = (),
    nodes: int | None = None,
    places: Iterable[str] = CLOUDS,
    plans: dict[str, ArtifactPlan] | None = None,
    installs: bool = False,
    network: float | None = None,
) -> CloudPlan:
    """Candidates for the rest of a run, on spot and on demand, with shipped prices where today's can't be
    fetched. UserError without prices, or without a machine that can train it.

    Without `nodes`: the fewest that have the memory. Without `train_nodes`: TRAIN_NODES, or what a launch takes for a
    small training and for private clusters. `network`: Gbit/s between nodes, in each direction; None: TCP's.
    """
    plans, places, small = plans or plans_of(recipe), list(places), trains_on_a_small_gpu(recipe)
    stages = missing(store, plans, [*plans][-1])
    if text_is_only_here(recipe, places) and "tokenize" in stages:  # `launch` tokenizes it on this machine
        stages.remove("tokenize")
    work = workload(recipe, store, plans, stages, installs)
    work = work if network is None else replace(work, between=network * 1e9 / 8)
    name, infra = run_name(plans), ",".join(places)
    jobs = [
        managed_job(LaunchRequest(name, store.uri, infra=infra, spot=spot, gpus=gpus), work.stages, small)
        for gpus in (*train_nodes,) or ((None,) if small or all(map(is_cluster, places)) else TRAIN_NODES)
        for spot in (False, True)
    ]
    offered, notes = offers_of(jobs, work, shipped=True)
    notes += (f"{one.seen}; use {one.remedy}" for one in slow_cards(jobs))
    return plan_run(work, offered, {"train": nodes} if nodes else {}, limits, notes)


def workload(
    recipe: Recipe, store: Store, plans: dict[str, ArtifactPlan], stages: list[str], installs: bool = False
) -> Workload:
    """The work that is left of a run that lacks `stages`, by the artifacts and commits in the store."""
    steps_left = recipe.train.max_steps - recipe.train.first_step
    own = {
        (beat.machine.accelerators or "", beat.nodes): Throughput(
            speed, "measured", f"attempt {beat.attempt} of this run"
        )
        for beat in attempts(store, plans["train"].prefix)  # the newest counts
        if (speed := beat.progress.metrics.get("perf/tokens_per_second"))
    }
    if "train" in stages and (state := committed_state(store, plans["train"].prefix)):
        steps_left = 0 if state.has_ended(recipe.train) else recipe.train.max_steps - state.step
    sources = sources_planned(recipe, find(store, plans["tokenize"]))
    trained, held_out = sum(one.train_tokens for one in sources), sum(one.val_tokens for one in sources)
    text = trained + held_out or recipe.train_tokens + recipe.tokens.held_out(recipe.train_tokens)
    return Workload(recipe, stages, steps_left, own, installs, place_of(store), text, held_out or sys.maxsize)


def offers_of(jobs: Iterable[ManagedJob], work: Workload, shipped: bool) -> tuple[Offered, list[str]]:
    """The machines of each task that are sold, with the prices of their traffic, and notes on clouds without prices of
    the day. Evaluate's are those whose GPU holds all weights in float32, if there are any. UserError for a task without
    any. `shipped`: as for `offers_of_all`."""
    tasks, offered = [task for job in jobs for task in job.tasks], Offered()
    found, failed, notes = offers_of_all(((one, task.num_nodes) for task in tasks for one in task.machines), shipped)
    for task in tasks:
        sold = offered.setdefault(task.name, {})
        for machine in task.machines:
            sold |= {one: with_traffic(row, work.place) for one, row in found[machine, task.num_nodes].items()}
    for task in tasks:
        if not offered[task.name]:
            several = f", or not {task.num_nodes} that share a network" if task.num_nodes > 1 else ""
            unsold = (failed.get(one.cloud, f"{one.infra} sells no {one}{several}") for one in task.machines)
            raise UserError(f"no machine for {task.name}: {'; '.join(dict.fromkeys(unsold))}")
    large = {one: sold for one, sold in offered.get("evaluate", {}).items() if fits_in_memory(sold, work.recipe)}
    return offered | ({"evaluate": large} if large else {}), notes


def plan_run(
    work: Workload, offered: Offered, node_counts: Mapping[str, int], limits: Limits, notes: Iterable[str] = ()
) -> CloudPlan:
    """A candidate for every machine that is offered for training, with the other stages on their cheapest machines.

    Without machines to train on: one candidate of the other stages. `node_counts`: 1 where it has no stage, and for a
    training the fewest that have the memory. An export that is not offered is on evaluate's machine. UserError if no
    machine can train the run.
    """
    recipe, found_notes = work.recipe, dict.fromkeys(notes)
    others: dict[str, StageEstimate] = {}
    for stage in (stage for stage in work.stages if stage != "train"):
        if stage not in STAGES:
            found_notes["all hours and dollars are without tune, whose speed is unknown"] = None
            continue
        is_up = stage == "export" and stage not in offered
        if not (sold := offered.get("evaluate" if is_up else stage)):
            continue
        cheapest = min(sold.values(), key=price_of)
        if stage == "evaluate" and not fits_in_memory(cheapest, recipe):
            found_notes["evaluate is left out: no GPU here holds all weights in float32"] = None
        else:
            others[stage] = estimate_stage(stage, work, cheapest, node_counts.get(stage, 1), is_up)
    candidates: list[Candidate] = []
    for machine in offered["train"].values() if "train" in offered else [None]:
        known, speed, memory = others, None, None
        if machine and not (gpus := machine.accelerators or ""):  # a standby
            continue
        if machine:
            nodes = node_counts.get("train")
            try:
                nodes = nodes or fewest_nodes(recipe, gpus)
                memory = check_gpus(recipe, gpus, nodes)
            except UserError as error:
                found_notes[f"{nodes or MOST_NODES} x {gpus}: {error}"] = None
                continue
            with suppress(UserError):  # a GPU of unknown speed
                speed = work.own.get((gpus, nodes)) or speed_on(recipe, gpus, nodes, work.between)
            known = others | {"train": estimate_stage("train", work, machine, nodes, speed=speed)}
        stages = {stage: known[stage] for stage in work.stages if stage in known}
        hours, usd = (sum(getattr(one, name) for one in stages.values()) for name in ("hours", "usd"))
        candidates.append(Candidate(machine, speed, stages, hours, usd, memory))
    if not candidates:
        raise UserError("; ".join(found_notes) or "no machine for train: none has GPUs")
    candidates.sort(key=lambda one: (one.usd, one.hours))
    chosen = next((i for i, one in enumerate(candidates) if limits.allow(one)), None)
    if chosen is None:
        found_notes[f"no machine is within {limits}; raise them, or try more --nodes"] = None
    network = f"{'TCP at ' if work.between == TCP_BYTES_PER_SECOND else ''}{8 * work.between / 1e9:g} Gbit/s"
    scale = f"several nodes scale as the GPUs of one, as far as {network} between them (plan --network) allows"
    return CloudPlan(candidates, chosen, list(found_notes), (*ASSUMED, scale))


def fits_in_memory(machine: Machine, recipe: Recipe) -> bool:
    """Whether a GPU holds all float32 weights, as evaluate does. An unknown one may."""
    return 4 * recipe.model.parameters <= (memory_on(machine.accelerators or "") or math.inf)


def estimate_stage(
    stage: str, work: Workload, machine: Machine, nodes: int, is_up: bool = False, speed: Throughput | None = None
) -> StageEstimate:
    """The expected hours and dollars of a stage on `nodes` machines, which an earlier stage has started if they are up.

    A training has a speed; if that is unknown, its hours and dollars are infinite.
    """
    recipe, between = work.recipe, prior_seconds_between_failures(machine, nodes) / 3600
    usd_per_hour, usd_per_byte = nodes * (machine.usd_per_hour or 0.0), (machine.usd_per_gb_sent or 0.0) / GB
    weights = 4.0 * recipe.model.parameters  # bytes, in float32
    state, sent, received = 0.0, 0.0, weights  # bytes of a checkpoint, and of all other traffic
    if stage == "tokenize":
        cores = (machine.vcpus or 2.0) / 2  # two threads of a core are hardly faster than one
        per_hour = 3600 * min(cores * TOKENS_PER_CORE_SECOND, BYTES_PER_SECOND / BYTES_PER_TOKEN)
        hours = work.text / per_hour
        segment = recipe.tokens.shard_tokens / per_hour  # a shard is uploaded while the next one is made
        sent, received = 2.0 * work.text, 0.0
    elif stage == "train":
        if speed is None:
            return StageEstimate(machine, nodes)
        tokens = training_tokens(work)
        hours = tokens / speed.tokens_per_second / 3600
        state, sent, received = float(state_bytes(recipe.model, recipe.train)), weights, 2 * tokens
        traffic = 3600 * state * usd_per_byte / usd_per_hour if usd_per_hour else 0.0
        auto = checkpoint_seconds(STALL_SECONDS, 3600 * between, traffic_seconds=traffic)
        minutes = recipe.runtime.checkpoint_minutes
        segment = auto / 3600 if minutes == "auto" else minutes / 60
    elif stage == "evaluate":
        hours = segment = evaluate_hours(work, machine)
    else:  # it downloads float32 weights, and uploads at most float32
        hours = segment = 2 * weights / BYTES_PER_SECOND / 3600
        sent = weights
    segment = min(segment, hours)
    start = (START_SECONDS + (INSTALL_SECONDS if work.installs else 0.0)) / 3600
    restart, stall = start + state / CHECKPOINT_BYTES_PER_SECOND / 3600, STALL_SECONDS / 3600 if state else 0.0
    billed = hours * billed_per_useful_hour(between, segment, restart, stall) if hours else 0.0
    billed += 0.0 if is_up else start
    preemptions, saves = billed / between, hours / segment if hours else 0.0
    received_usd = (machine.usd_per_gb_received or 0.0) / GB * (received + state * preemptions)
    traffic_usd = usd_per_byte * (sent + state * saves) + received_usd
    in_all = billed + WAIT_SECONDS / 3600 * (preemptions + (not is_up))
    usd = math.inf if machine.usd_per_hour is None else billed * usd_per_hour + traffic_usd
    return StageEstimate(machine, nodes, in_all, usd, preemptions, traffic_usd)


def billed_per_useful_hour(between: float, segment: float, restart: float, stall: float = 0.0) -> float:
    """Expected billed hours for an hour of work that is kept, on machines that last `between` hours on average.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps":
    M · e^(S/M) · (e^((I+s)/M) - 1) / I for work in segments I, each followed by a stall s, on machines that last M and
    need S to start. For large M this is 1 + s/I.
    """
    return between * math.exp(restart / between) * math.expm1((segment + stall) / between) / segment


def training_tokens(work: Workload) -> float:
    """The tokens that are left to train on, and a third of those to measure on, the share of the forward pass."""
    train, steps = work.recipe.train, work.steps_left
    tokens = float(tokens_before(train.max_steps, train) - tokens_before(train.max_steps - steps, train))
    measured = work.recipe.evaluations(steps) * work.recipe.benchmark_tokens
    if train.val_every:
        measured += (steps // train.val_every) * min(val_tokens(work.recipe.model, train), work.held_out)
    return tokens + measured / 3


def evaluate_hours(work: Workload, machine: Machine) -> float:
    """Val loss, benchmarks and harness on the GPUs of a node; a CPU counts as 1 TFLOP/s.

    The harness reads on one of the GPUs, while the others wait.
    """
    recipe, kind, gpus = work.recipe, machine.accelerators or ":1", gpu_count(machine.accelerators or ":1")
    flops = (peak_of(kind) or gpus * 1e12) * nearest_step(recipe.model, "eager", gpu_of(kind))[1]
    harness = HARNESS_TASK_TOKENS * len(recipe.evaluate.lm_eval or ())
    tokens = min(recipe.evaluate.val_tokens, work.held_out) + recipe.benchmark_tokens + gpus * harness
    return tokens * recipe.model.flops_per_token / 3 / flops / 3600


def priced_job(
    job: ManagedJob, request: LaunchRequest, limits: Limits, work: Workload, report: Report, shipped: bool = False
) -> tuple[ManagedJob, float]:
    """Report the job's plan, and pin its machines' types and regions, in the order in which SkyPilot is to try them.

    Each task gets their prices in SKYTRAIN_PRICES, with the prices of traffic with the store. Train keeps the machines
    that are expected to meet the deadline and the budget, the cheapest training first. UserError if there is none, for
    a task without a machine, or for a budget if a price is unknown. Returns the expected dollars, too. `shipped`: for a
    dry run, which submits no prices.
    """
    offered, notes = offers_of([job], work, shipped)
    unpriced = [one.infra for sold in offered.values() for one in sold if sold[one].usd_per_hour is None]
    if unpriced and request.budget is not None:
        raise UserError(f"--budget: can't be promised where SkyPilot's config has no price: {unpriced[0]}")
    for note in notes:
        report(Finding("machines", note, "note"))
    plan = plan_run(work, offered, {task.name: task.num_nodes for task in job.tasks}, limits)
    report(plan)
    if plan.chosen is None:
        raise UserError(f"launch: {plan.notes[-1]}")
    met = {one.machine: rank for rank, one in enumerate(plan.candidates) if limits.allow(one)}
    tasks = []
    for task in job.tasks:
        order = {one: price_of(machine) for one, machine in offered[task.name].items()}
        if task.name == "train":  # a standby stays
            order = {
                one: met.get(m, order[one]) for one, m in offered["train"].items() if m in met or not m.accelerators
            }
        task = in_trial_order(replace(task, machines=tuple(order)), order.__getitem__)
        rows = (offered[task.name][one] for one in task.machines)
        prices = prices_json(one for one in rows if one.usd_per_hour is not None)
        tasks.append(replace(task, envs={**task.envs, "SKYTRAIN_PRICES": prices}))
    return replace(job, tasks=tuple(tasks)), plan.candidates[plan.chosen].usd


def limits_of(request: LaunchRequest, store: Store) -> Limits:
    """The hours until the deadline, and the rest of the budget, below 0 where nothing is left."""
    found = None if request.budget is None else find_run(store, request.run)
    usd = math.inf if request.budget is None else request.budget - (found.account.total.usd if found else 0.0)
    if request.deadline is None:
        return Limits(usd=usd)
    return Limits((request.deadline - time.time()) / 3600, usd, least_slack_seconds(request.installs) / 3600)
