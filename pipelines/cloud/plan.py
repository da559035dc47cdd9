"""What a run would cost where, before a dollar is spent: `skytrain plan RECIPE --cloud`.

A candidate is a machine for training in one market of one cloud, at its cheapest place there; the other stages
run on the cheapest machine that will do. Each stage's course is estimated in closed form (`course`): its work,
starting up, and on spot what preemptions undo. Every number that was not measured is named in ASSUMED, and
shown; the bill of the run itself is kept by the ledger and owes nothing to any of this.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from rich.markup import escape
from rich.table import Table

from pipelines.artifacts.manifest import ArtifactPlan, find
from pipelines.cloud.prices import CLOUDS, Offer, offers
from pipelines.cloud.throughput import (
    SECONDS_PER_LAYER,
    Measurement,
    Speed,
    check_gpus,
    engine_of,
    gpus_of,
    mfu_of,
    peak_of,
    speed_on,
)
from pipelines.recipe import Recipe
from pipelines.stage import STAGES, plans_of
from pipelines.tracking.ledger import STEADY_SECONDS_BETWEEN_FAILURES, attempts, prior_seconds_between_failures
from pipelines.tracking.records import Machine
from trainer.commits import checkpoint_seconds, committed_state
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES, tokens_before
from trainer.errors import UserError
from trainer.store import Store

TRAIN_NODES = ("H100:8", "H200:8", "A100-80GB:8")  # what is looked at without --gpus
# As in sky/*.yaml.
SMALL_NODES = {"tokenize": ("cpus:16,memory:32",), "evaluate": ("L4:1", "A10:1"), "export": ("cpus:4,memory:16",)}
ON_DEMAND_ONLY = ("export",)

WAIT_SECONDS = 180.0  # until there is a node, first and after a preemption; on a local Slurm 25 to 40 s were measured
START_SECONDS = 120.0  # of the bill: boot, image, interpreter
FIRST_STEP_SECONDS = 34.1  # measured, 124M compiled on an H200 with empty caches; the fused engine has none to fill
STALL_BYTES_PER_SECOND = 18.69e9 / 0.05  # measured, what a save costs the steps beside it: docs/measurements.md
LEAST_STALL_SECONDS = 0.1  # what the trainer counts a save for at least
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # between the Hub or a bucket and a node
HELLASWAG_ITEMS, HELLASWAG_TOKENS = 10_042, 400  # an item is four endings of about 100 tokens
ASSUMED = (
    f"a spot node lasts {PRIOR_SECONDS_BETWEEN_FAILURES / 3600:g} h (2.1 in the traces of NSDI'24: AWS V100, 2022-23), "
    f"one on demand {STEADY_SECONDS_BETWEEN_FAILURES / 86_400:g} days",
    f"{WAIT_SECONDS / 60:.0f} min until there is a node, then {START_SECONDS / 60:.0f} min of start-up on the bill",
    f"text and weights travel at {BYTES_PER_SECOND / 1e6:.0f} MB/s",
    "MFU of evaluating as of eager training",
)
ASSUMED_BETWEEN_NODES = "no more is lost between nodes than between the GPUs of one, by NVLink; over TCP it is slower"

Market = dict[str, list[Offer]]  # by stage, in their order


@dataclass(frozen=True)
class Job:
    """What a stage has to do on some machine, in hours of undisturbed work."""

    work: float
    segment: float  # what a preemption undoes at most: the work between two commits
    stall: float = 0.0  # what a commit costs
    start: float = START_SECONDS / 3600


@dataclass(frozen=True)
class Course:
    """How a job is expected to go."""

    hours: float
    billed_hours: float  # without the waiting for nodes
    preemptions: float


@dataclass(frozen=True)
class Leg:
    """A stage on so many of a machine."""

    offer: Offer | None  # None: the artifact is there already
    hours: float
    usd: float  # of all nodes
    preemptions: float = 0.0
    nodes: int = 1


@dataclass(frozen=True)
class Candidate:
    """A way to make a run, with hours and dollars of all its stages."""

    offer: Offer
    nodes: int
    speed: Speed
    legs: dict[str, Leg]
    hours: float
    usd: float
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CloudPlan:
    """All candidates, the cheapest first, and what the user ought to know about them."""

    candidates: tuple[Candidate, ...]
    chosen: int | None  # the cheapest that meets the limits; without limits the cheapest; None: nothing meets them
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ASSUMED


@dataclass(frozen=True)
class Limits:
    """What the user has set."""

    hours: float | None = None
    usd: float | None = None

    def met_by(self, hours: float, usd: float) -> bool:
        return hours <= (self.hours or math.inf) and usd <= (self.usd or math.inf)

    def __str__(self) -> str:
        parts = [f"{self.hours:g} h" if self.hours else "", f"${self.usd:g}" if self.usd else ""]
        return " and ".join(filter(None, parts))


@dataclass(frozen=True)
class Workload:
    """What of a run is left to do."""

    recipe: Recipe
    todo: frozenset[str]  # stages
    steps_left: int
    own: list[Measurement] = field(default_factory=list)


def cloud_plan(
    recipe: Recipe,
    store: Store,
    limits: Limits = Limits(),
    train_nodes: Iterable[str] = TRAIN_NODES,
    nodes: int = 1,
    clouds: Iterable[str] = CLOUDS,
    plans: dict[str, ArtifactPlan] | None = None,
) -> CloudPlan:
    """Candidates for what is left of a run. UserError if there are no prices, or nothing that could train it.

    With a deadline the task evaluate is one that may have to finish training: on nodes as many and as large as train's,
    on demand.
    """
    found, notes = offers_of([*train_nodes, *(n for small in SMALL_NODES.values() for n in small)], clouds)
    places = best_places(offer for node in train_nodes for offer in found[node])
    if not places:
        raise UserError(f"plan --cloud: nobody in {', '.join(clouds)} offers {', '.join(train_nodes)}")
    market = dict.fromkeys(STAGES, places)
    for stage, kinds in SMALL_NODES.items():
        fitting = [o for node in kinds for o in found[node] if not (o.spot and stage in ON_DEMAND_ONLY)]
        market[stage] = fitting or places
    several = {"tokenize": recipe.tokens.parts, "train": nodes}
    work = workload(recipe, store, plans or plans_of(recipe))
    steady = [offer for offer in places if not offer.spot]
    if limits.hours and "train" in work.todo and steady and len(steady) < len(places):
        market["evaluate"], several["evaluate"] = steady, nodes
    return compared(work, market, several, limits, notes)


def compared(
    work: Workload, market: Market, several: dict[str, int], limits: Limits, notes: Iterable[str] = ()
) -> CloudPlan:
    """A candidate for every offer to train on, with the stages that the market is for, on `several` nodes where they
    are named there. UserError if these GPUs can't train it."""
    nodes = several["train"]
    found, faults = [], []
    for offer in market["train"]:
        try:
            found.append(candidate(work, offer, market, several))
        except UserError as error:
            faults.append(f"{nodes} x {offer.accelerators}: {error}")
    if not found:
        raise UserError("; ".join(dict.fromkeys(faults)))
    plan = marked(sorted(found, key=lambda c: (c.usd, c.hours)), limits, [*notes, *dict.fromkeys(faults)])
    guessed = nodes > 1 and any(c.speed.kind != "measured" for c in plan.candidates)
    return replace(plan, assumed=(*ASSUMED, ASSUMED_BETWEEN_NODES)) if guessed else plan


def offers_of(kinds: Iterable[str], clouds: Iterable[str]) -> tuple[dict[str, list[Offer]], list[str]]:
    """Offers by node, and what is to be said of clouds without a price list. UserError if none has one."""
    market: dict[str, list[Offer]] = {kind: [] for kind in kinds}
    faults: list[UserError] = []
    for cloud in (clouds := list(clouds)):
        try:
            for kind, found in market.items():
                found += offers(cloud, kind)
        except UserError as error:
            faults.append(error)
    if len(faults) == len(clouds):
        raise faults[0]
    return market, [str(fault) for fault in faults]


def best_places(found: Iterable[Offer]) -> list[Offer]:
    """Of each machine in each market the cheapest place."""
    best: dict[tuple[str, str, bool], Offer] = {}
    for offer in found:
        key = (offer.cloud, offer.instance, offer.spot)
        if key not in best or offer.usd_per_hour < best[key].usd_per_hour:
            best[key] = offer
    return list(best.values())


def workload(recipe: Recipe, store: Store, plans: dict[str, ArtifactPlan]) -> Workload:
    todo = frozenset(stage for stage, plan in plans.items() if find(store, plan) is None)
    left = recipe.train.max_steps
    prefix = plans["train"].prefix
    if "train" in todo and attempts(store, prefix):
        state = committed_state(store, prefix)
        left -= state.step if state else 0
    return Workload(recipe, todo, left, own_measurements(recipe, store, prefix))


def own_measurements(recipe: Recipe, store: Store, prefix: str) -> list[Measurement]:
    """What the attempts of a run were measured to do, the newest first."""
    speeds: dict[int, list[float]] = {}
    for entry in store.entries(f"{prefix}/metrics/"):  # step-<step>-a<attempt>.jsonl
        attempt = int(entry.key.rsplit("-a", 1)[1].removesuffix(".jsonl"))
        rows = [json.loads(line) for line in (store.get(entry.key) or b"").decode().splitlines()]
        speeds.setdefault(attempt, []).extend(r[SPEED] for r in rows if SPEED in r)
    found = []
    for beat in reversed(attempts(store, prefix)):
        machine, mine = beat.machine.accelerators, speeds.get(beat.attempt, [])[2:]  # the first steps compile
        if machine and mine:
            n, engine = recipe.model.parameters, engine_of(recipe.runtime, recipe.train.precision)
            where = f"measured by attempt {beat.attempt} of this run on {beat.nodes} x {machine}"
            found.append(Measurement(n, machine, beat.nodes, engine, 0.0, median(mine), where))
    return found


SPEED = "perf/tokens_per_second"


def candidate(work: Workload, offer: Offer, market: Market, several: dict[str, int]) -> Candidate:
    """A run that trains on `offer`. UserError if these GPUs can't share its batch, lack its precision, or nobody knows
    them."""
    recipe, nodes = work.recipe, several["train"]
    check_gpus(recipe.model, recipe.train, recipe.runtime, offer.accelerators or "", nodes)
    legs = legs_of(work, market | {"train": [offer]}, several)
    return Candidate(offer, nodes, speed_of(work, offer, nodes), legs, *sum_of(legs))


def legs_of(work: Workload, market: Market, several: dict[str, int]) -> dict[str, Leg]:
    """The stages that the market is for, each on the cheapest machine that it may have there. What nobody offers is
    left out."""
    legs: dict[str, Leg] = {}
    for stage, found in market.items():
        if stage not in work.todo:
            legs[stage] = Leg(None, 0.0, 0.0)
        elif found:
            offer, nodes = min(found, key=lambda o: o.usd_per_hour), several.get(stage, 1)
            legs[stage] = leg(job_of(stage, work, offer, nodes), offer, nodes)
    return legs


def sum_of(legs: dict[str, Leg]) -> tuple[float, float]:
    """Hours and dollars."""
    return sum(one.hours for one in legs.values()), sum(one.usd for one in legs.values())


def speed_of(work: Workload, offer: Offer, nodes: int) -> Speed:
    recipe = work.recipe
    return speed_on(recipe.model, recipe.runtime, offer.accelerators or "", nodes, work.own, recipe.train.precision)


def leg(job: Job, offer: Offer, nodes: int) -> Leg:
    went = course(job, hours_between(offer, nodes))
    return Leg(offer, went.hours, went.billed_hours * nodes * offer.usd_per_hour, went.preemptions, nodes)


def hours_between(offer: Offer, nodes: int) -> float:
    """How long a job on several nodes is undisturbed: the first that goes interrupts it."""
    return prior_seconds_between_failures(Machine(cloud=offer.cloud, spot=offer.spot), nodes) / 3600


def course(job: Job, m: float, wait: float = WAIT_SECONDS / 3600) -> Course:
    """A job on a machine that is taken away every `m` hours on average, at random.

    Source of the bill: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps": M · e^(S/M) · (e^((I+s)/M) - 1) · W/I for work W in segments I, each followed by a stall s, on machines
    that last M and need S to start. As M grows that goes to W · (1 + s/I). Preemptions are billed hours / M, and
    each of them costs a wait off the bill.
    """
    segments = job.work / job.segment if job.segment else 0.0
    billed = job.start + m * math.exp(job.start / m) * math.expm1((job.segment + job.stall) / m) * segments
    preemptions = billed / m
    return Course(billed + wait * (1 + preemptions), billed, preemptions)


def job_of(stage: str, work: Workload, offer: Offer, nodes: int) -> Job:
    """What a stage has to do on a machine."""
    recipe = work.recipe
    if stage == "tokenize":
        return tokenize_job(recipe, offer)
    if stage == "train":
        return train_job(work, offer, nodes)
    if stage == "evaluate":
        hours = evaluate_hours(recipe, offer)
    else:  # float32 comes, at most float32 goes
        hours = 2 * 4 * recipe.model.parameters / BYTES_PER_SECOND / 3600
    return Job(hours, segment=hours)


def tokenize_job(recipe: Recipe, offer: Offer) -> Job:
    cores = offer.vcpus / 2  # two threads of one core tokenize hardly more than one
    per_second = min(cores * TOKENS_PER_CORE_SECOND, BYTES_PER_SECOND / BYTES_PER_TOKEN)  # of a node; it has one part
    hours = tokens_of(recipe) / recipe.tokens.parts / per_second / 3600
    shard = min(hours, recipe.tokens.shard_tokens / per_second / 3600)
    return Job(hours, segment=shard)  # the shards go up while the next is made, or nearly so


def tokens_of(recipe: Recipe) -> int:
    """Tokens that tokenizing gives: as limited, as the sample's name says (sample-10BT), or what training reads."""
    t = recipe.tokens
    if t.max_tokens is not None:
        return t.max_tokens
    if billions := re.search(r"(\d+)BT\b", t.subset or ""):
        return int(billions[1]) * 1_000_000_000
    return recipe.train_tokens + t.val_shards * t.shard_tokens


def train_job(work: Workload, offer: Offer, nodes: int) -> Job:
    recipe, steps = work.recipe, work.steps_left
    train, runtime = recipe.train, recipe.runtime
    tokens = float(recipe.train_tokens - tokens_before(train.max_steps - steps, train))
    if train.val_every:  # the forward pass alone is a third of a step
        tokens += (steps // train.val_every) * train.val_tokens / 3
    stall = (
        12 * recipe.model.parameters / (nodes * gpus_of(offer.accelerators or ":1")) / STALL_BYTES_PER_SECOND
    )  # weights and two moments in float32
    if runtime.checkpoint_minutes == "auto":
        between = 3600 * hours_between(offer, nodes)
        segment = checkpoint_seconds(max(LEAST_STALL_SECONDS, stall), between) / 3600
    else:
        segment = runtime.checkpoint_minutes / 60
    hours = tokens / speed_of(work, offer, nodes).tokens_per_second / 3600
    start = START_SECONDS + (FIRST_STEP_SECONDS if engine_of(runtime, train.precision) == "compiled" else 0)
    return Job(hours, min(segment, hours), stall / 3600, start / 3600)


def evaluate_hours(recipe: Recipe, offer: Offer) -> float:
    """Val loss and HellaSwag on one GPU; on a CPU as if it had 1 TFLOP/s."""
    kind = f"{(offer.accelerators or '').partition(':')[0]}:1"
    eager = recipe.runtime.model_copy(update={"engine": "eager"})
    flops = (peak_of(kind) or 1e12) * mfu_of(recipe.model.parameters, eager, "auto")
    forward = recipe.model.flops_per_token / 3
    seconds = recipe.evaluate.val_tokens * forward / flops
    if recipe.evaluate.hellaswag:
        an_item = max(HELLASWAG_TOKENS * forward / flops, recipe.model.n_layer * SECONDS_PER_LAYER / 3)
        seconds += HELLASWAG_ITEMS * an_item
    return seconds / 3600


# --- choosing


def marked(candidates: list[Candidate], limits: Limits, notes: list[str]) -> CloudPlan:
    """Say which candidate is the cheapest, which the fastest, and which one to take under the limits."""
    fastest = min(range(len(candidates)), key=lambda i: (candidates[i].hours, candidates[i].usd))
    meeting = [i for i, c in enumerate(candidates) if limits.met_by(c.hours, c.usd)]
    marks: dict[int, list[str]] = {0: ["cheapest"]}
    marks.setdefault(fastest, []).append("fastest")
    if str(limits):
        if meeting:
            marks.setdefault(meeting[0], []).append(f"cheapest within {limits}")
        else:
            notes = [*notes, nearest(candidates, limits)]
    if limits.usd and meeting:
        quickest = min(meeting, key=lambda i: candidates[i].hours)
        marks.setdefault(quickest, []).append(f"fastest within {limits}")
    shown = tuple(replace(c, marks=tuple(marks.get(i, []))) for i, c in enumerate(candidates))
    return CloudPlan(shown, meeting[0] if meeting else None, tuple(notes))


def nearest(candidates: list[Candidate], limits: Limits) -> str:
    """Nothing meets the limits: what comes next to it."""

    def excess(c: Candidate) -> float:
        return max(c.hours / limits.hours if limits.hours else 0.0, c.usd / limits.usd if limits.usd else 0.0)

    next_best = min(candidates, key=excess)
    return (
        f"nothing is done within {limits}; the nearest is {next_best.offer.cloud} {next_best.offer.instance} "
        f"{next_best.offer.market}: {next_best.hours:.1f} h, ${next_best.usd:,.2f}"
    )


DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?")


def hours_of(text: str, option: str = "--deadline") -> float:
    """36h, 2d, 90m, 1d12h as hours."""
    found = DURATION.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise UserError(f"{option} {text}: no duration; write 36h, 2d, 90m or 1d12h")
    days, hours, minutes = (float(part or 0) for part in found.groups())
    total = 24 * days + hours + minutes / 60
    if total <= 0:
        raise UserError(f"{option} {text}: no time at all; write 36h, 2d, 90m or 1d12h")
    return total


# --- showing


def print_cloud_plan(plan: CloudPlan) -> None:
    from pipelines.show.console import console

    out = console()
    table = Table(box=None, pad_edge=False)
    for name in ("train on", "place", "machine", "GPUs", "market"):
        table.add_column(name)
    for name in ("$/h", "tokens/s", "train", "preempted", "in all"):
        table.add_column(name, justify="right")
    table.add_column("")
    for i, c in enumerate(plan.candidates):
        o, train = c.offer, c.legs["train"]
        cells = [o.cloud, o.zone or o.region, o.instance, f"{c.nodes} x {o.accelerators}", o.market]
        cells += [
            f"{c.nodes * o.usd_per_hour:,.2f}",
            f"{'' if c.speed.kind == 'measured' else '~'}{c.speed.tokens_per_second:,.0f}",
        ]
        cells += [shown(train), f"{train.preemptions:.1f} x" if o.spot else "", f"{c.hours:.2f} h  ${c.usd:,.2f}"]
        table.add_row(*map(escape, [*cells, ", ".join(c.marks)]), style="bold" if i == plan.chosen else None)
    out.print()
    out.print(table)
    if others := {stage: one for stage, one in plan.candidates[0].legs.items() if stage != "train"}:
        out.print("[dim]besides, and in the sums:[/]")
        out.print(table_of(others))
    for line in dict.fromkeys(f"{c.speed.kind}: {c.speed.source}" for c in plan.candidates):
        out.print(f"[dim]tokens/s {escape(line)}[/]")
    for line in plan.assumed:
        out.print(f"[dim]assumed: {escape(line)}[/]")
    for note in plan.notes:
        out.print(f"[yellow]{escape(note)}[/]")


def print_legs(legs: dict[str, Leg]) -> None:
    """The plan where nothing is left to train."""
    from pipelines.show.console import console

    out, (hours, usd) = console(), sum_of(legs)
    table = table_of(legs)
    table.add_row("in all", f"{hours:.2f} h  ${usd:,.2f}")
    out.print()
    out.print(table)
    for line in ASSUMED:
        out.print(f"[dim]assumed: {escape(line)}[/]")


def table_of(legs: dict[str, Leg]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for stage, one in legs.items():
        where = f"{one.offer.cloud} {one.offer.instance} {one.offer.market}" if one.offer else ""
        where = f"{one.nodes} x {where}" if one.nodes > 1 else where
        table.add_row(stage, shown(one), escape(where))
    return table


def shown(part: Leg) -> str:
    return "there" if part.offer is None else f"{part.hours:.2f} h  ${part.usd:,.2f}"
