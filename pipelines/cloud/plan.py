"""The expected time and cost of a run on rented machines: `skytrain plan RECIPE --cloud`.

A candidate is a machine for training in one market of one cloud, where it is cheapest there. The other stages run on
the cheapest machine that is large enough. `expected_time` estimates each stage in closed form: its work, its start-up,
and on spot the work that preemptions undo. ASSUMED names every number that was not measured, and the plan shows it. The
ledger keeps the run's actual cost; nothing here enters it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from pipelines.artifacts.manifest import ArtifactPlan, find
from pipelines.artifacts.traffic import GB
from pipelines.cloud.catalog import CLOUDS, Offer, account_errors, offers
from pipelines.cloud.egress import Place, TrafficPrice, place_of, traffic_price
from pipelines.cloud.preflight import text_is_only_here
from pipelines.cloud.start_up import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS
from pipelines.cloud.throughput import (
    MeasuredRun,
    Throughput,
    available_gib,
    check_gpus,
    engine_of,
    fitting_micro_batch,
    gpu_count,
    memory_gib,
    mfu_of,
    peak_of,
    speed_on,
    trains_on_a_small_gpu,
)
from pipelines.recipe import Recipe
from pipelines.stage import STAGES, plans_of
from pipelines.text.sources import declared_tokens
from pipelines.tracking.ledger import STEADY_SECONDS_BETWEEN_FAILURES, attempts, prior_seconds_between_failures
from pipelines.tracking.records import Machine
from pipelines.weights import relative_size
from trainer.amounts import state_bytes, tokens_before, val_tokens
from trainer.commits import checkpoint_seconds, committed_state, rows_of
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.errors import UserError
from trainer.store import Store

WITHOUT_QUOTA = ("lambda",)  # clouds that let a new account rent any GPU that is free
TRAIN_NODES = ("H100:8", "H200:8", "A100-80GB:8")  # the default of --gpus
# As in sky/*.yaml.
SMALL_NODES = {"tokenize": ("cpus:16,memory:32",), "evaluate": ("L4:1", "A10:1"), "export": ("cpus:4,memory:16",)}
ON_DEMAND_ONLY = ("export",)

FIRST_STEP_SECONDS = 34.1  # measured, 124M compiled on an H200 with empty caches; the fused engine has none to fill
STALL_BYTES_PER_SECOND = 18.69e9 / 0.05  # measured: how long a save delays the steps; docs/measurements.md
LEAST_STALL_SECONDS = 0.1  # the least delay that the trainer assumes for a save
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # between the Hub or a bucket and a node
ASSUMED = (
    f"a spot node lasts {PRIOR_SECONDS_BETWEEN_FAILURES / 3600:g} h (2.1 in the traces of NSDI'24: AWS V100, 2022-23), "
    f"one on demand {STEADY_SECONDS_BETWEEN_FAILURES / 86_400:g} days",
    f"{WAIT_SECONDS / 60:.0f} min until there is a node, then {START_SECONDS / 60:.0f} min of billed start-up",
    f"text and weights are transferred at {BYTES_PER_SECOND / 1e6:.0f} MB/s",
    "evaluation has the MFU of eager training",
)
ASSUMED_INSTALL = f"{INSTALL_SECONDS / 60:.0f} min more on each node, which installs the packages (no image)"
ASSUMED_BETWEEN_NODES = "nodes scale as well as the GPUs of one node over NVLink; over TCP they are slower"

OffersByStage = Mapping[str, list[Offer]]  # in the order of the stages


@dataclass(frozen=True)
class StageWork:
    """The work of a stage on some machine, in hours without interruptions."""

    work: float
    segment: float  # the work between two commits, the most that a preemption undoes
    stall: float = 0.0  # the delay of a commit
    start: float = START_SECONDS / 3600


@dataclass(frozen=True)
class ExpectedTime:
    """The expected time of a stage's work."""

    hours: float
    billed_hours: float  # without the waits for nodes
    preemptions: float


@dataclass(frozen=True)
class StageEstimate:
    """The expected time and cost of a stage on `nodes` of an offer."""

    offer: Offer | None  # None: the artifact exists
    hours: float
    usd: float  # of all nodes
    preemptions: float = 0.0
    nodes: int = 1
    traffic_usd: float = 0.0  # of `usd`: between the machines and the store, as far as its price is known


@dataclass(frozen=True)
class Candidate:
    """A machine to train on, with the estimates of all stages, and their sums."""

    offer: Offer
    nodes: int
    speed: Throughput
    estimates: Mapping[str, StageEstimate]  # by stage
    hours: float
    usd: float
    marks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {"legs" if name == "estimates" else name: value for name, value in values.items()}


@dataclass(frozen=True)
class CloudPlan:
    """All candidates, the cheapest first, and notes for the user."""

    candidates: tuple[Candidate, ...]
    chosen: int | None  # the cheapest candidate within the limits; None: no candidate is
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ASSUMED

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"candidates": [candidate.to_json() for candidate in self.candidates]}


@dataclass(frozen=True)
class PlanWithoutTraining:
    """The estimates where nothing is left to train, and their sums."""

    estimates: Mapping[str, StageEstimate]  # by stage
    hours: float
    usd: float
    assumed: tuple[str, ...] = ASSUMED


@dataclass(frozen=True)
class Limits:
    """The limits that the user set, for the whole run."""

    hours: float | None = None
    usd: float | None = None

    def met_by(self, hours: float, usd: float) -> bool:
        return hours <= (self.hours or math.inf) and usd <= (self.usd or math.inf)

    def __str__(self) -> str:
        parts = [
            hours_text(self.hours) if self.hours else "",
            f"${self.usd:,.2f}".removesuffix(".00") if self.usd else "",
        ]
        return " and ".join(filter(None, parts))


@dataclass(frozen=True)
class Workload:
    """The work that is left of a run."""

    recipe: Recipe
    stages: frozenset[str]  # that are missing
    steps_left: int
    own: list[MeasuredRun] = field(default_factory=list)  # speeds of this run's attempts on GPUs, the newest first
    own_on_cpu: list[MeasuredRun] = field(default_factory=list)
    installs: bool = False  # a node without an image installs the packages first
    place: Place | None = None  # of the store


def cloud_plan(
    recipe: Recipe,
    store: Store,
    limits: Limits = Limits(),
    train_nodes: Iterable[str] | None = None,
    nodes: int = 1,
    clouds: Iterable[str] = CLOUDS,
    plans: dict[str, ArtifactPlan] | None = None,
    installs: bool = False,
) -> CloudPlan:
    """Candidates for the rest of a run. UserError without prices, or without a machine that can train it.

    Without `train_nodes`: TRAIN_NODES, or the small ones for a small training, as a launch takes them.

    With a deadline the task evaluate may have to finish the training: on as many and as large nodes as train's, on
    demand.
    """
    train_nodes = list(train_nodes or (SMALL_NODES["evaluate"] if trains_on_a_small_gpu(recipe) else TRAIN_NODES))
    clouds, single = list(clouds), list(dict.fromkeys(f"{node.partition(':')[0]}:1" for node in train_nodes))
    small_nodes = (node for kinds in SMALL_NODES.values() for node in kinds)
    found, notes = offers_by_node(dict.fromkeys([*train_nodes, *single, *small_nodes]), clouds)
    for_training = cheapest_offers((offer for node in train_nodes for offer in found[node]), place_of(store))
    if not for_training:
        raise UserError(f"plan --cloud: none of {', '.join(clouds)} offers {', '.join(train_nodes)}")
    by_stage = dict.fromkeys(STAGES, for_training)
    for stage, kinds in SMALL_NODES.items():
        fitting = [o for node in kinds for o in found[node] if not (o.spot and stage in ON_DEMAND_ONLY)]
        by_stage[stage] = fitting or for_training
    if text_is_only_here(recipe, clouds):  # `launch` tokenizes it here
        del by_stage["tokenize"]
    node_counts = {"tokenize": recipe.tokens.parts, "train": nodes}
    work = workload(recipe, store, plans or plans_of(recipe), installs)
    on_demand = [offer for offer in for_training if not offer.spot]
    if limits.hours and "train" in work.stages and on_demand and len(on_demand) < len(for_training):
        by_stage["evaluate"], node_counts["evaluate"] = on_demand, nodes
    plan = compare_offers(work, by_stage, node_counts, limits, notes)
    if nodes > 1 or set(single) <= set(train_nodes):
        return plan
    alone = cheapest_offers(offer for node in single for offer in found[node] if offer.cloud in WITHOUT_QUOTA)
    return replace(plan, notes=(*plan.notes, *single_gpu_note(work, alone, by_stage, node_counts, limits)))


def single_gpu_note(
    work: Workload, found: list[Offer], by_stage: OffersByStage, node_counts: Mapping[str, int], limits: Limits
) -> Iterator[str]:
    """The cheapest machine with one GPU within the limits, for users without a quota for more."""
    fitting = []
    for offer in found:
        with suppress(UserError):
            fitting.append(candidate(work, offer, by_stage, node_counts))
    if fitting := [one for one in fitting if limits.met_by(one.hours, one.usd)]:
        best = min(fitting, key=lambda one: one.usd)
        yield (
            f"without a quota: one {(best.offer.accelerators or '').partition(':')[0]} at {best.offer.cloud}, "
            f"{hours_text(best.hours)} and ${best.usd:,.2f} in all: --gpus {best.offer.accelerators} "
            f"--infra {best.offer.cloud}"
        )


def compare_offers(
    work: Workload, by_stage: OffersByStage, node_counts: Mapping[str, int], limits: Limits, notes: Iterable[str] = ()
) -> CloudPlan:
    """A candidate for every offer to train on, with the stages of `by_stage`; `node_counts`: 1 where it has no stage.

    UserError if no offer can train the run.
    """
    nodes = node_counts["train"]
    candidates, unfit = [], []
    for offer in by_stage["train"]:
        try:
            candidates.append(candidate(work, offer, by_stage, node_counts))
        except UserError as error:
            unfit.append(f"{nodes} x {offer.accelerators}: {error}")
    if not candidates:
        raise UserError("; ".join(dict.fromkeys(unfit)))
    plan = choose(sorted(candidates, key=lambda c: (c.usd, c.hours)), limits, [*notes, *dict.fromkeys(unfit)])
    plan = replace(plan, notes=(*plan.notes, *traffic_notes(work, plan.candidates)))
    guessed = nodes > 1 and any(c.speed.kind != "measured" for c in plan.candidates)
    between = (ASSUMED_BETWEEN_NODES,) if guessed else ()
    return replace(plan, assumed=(*memory_lines(work.recipe, plan.candidates), *assumptions(work), *between))


def traffic_notes(work: Workload, candidates: Iterable[Candidate]) -> Iterator[str]:
    """The clouds from which a training on the wrong side of the bucket pays more than a dollar for its traffic."""
    dearest: dict[str, Candidate] = {}
    for one in sorted(candidates, key=lambda c: c.estimates["train"].traffic_usd):
        dearest[one.offer.cloud] = one
    for one in dearest.values():
        usd, where = one.estimates["train"].traffic_usd, Place(one.offer.cloud, one.offer.region)
        if usd >= 1:
            per_gb = price_of_traffic(one.offer, work.place).sent
            yield f"from {where} to the bucket in {work.place}: ${usd:,.2f} of traffic at ${per_gb:g} a GB"


def assumptions(work: Workload) -> tuple[str, ...]:
    priced = (f"traffic with the bucket in {work.place}, at the price of the first terabytes of a month",)
    return (*ASSUMED, *((ASSUMED_INSTALL,) if work.installs else ()), *(priced if work.place else ()))


def memory_lines(recipe: Recipe, candidates: Iterable[Candidate]) -> Iterator[str]:
    """The expected memory on each kind of GPU, with the micro-batch that the recipe names or that fits."""
    known: dict[str, list[str]] = {}
    for one in candidates:
        gpus, ranks = one.offer.accelerators or "", one.nodes * gpu_count(one.offer.accelerators or ":1")
        if recipe.runtime.device == "cpu" or (available := available_gib(gpus)) is None:
            continue
        size = recipe.runtime.micro_batch_size
        if size == "auto":
            size = fitting_micro_batch(recipe.model, recipe.train, recipe.runtime, gpus, ranks)
        needed = memory_gib(recipe.model, recipe.train, recipe.runtime, gpus, ranks, size)
        line = f"{gpus.partition(':')[0]} {needed:.0f} of {available:.0f} GiB"
        known.setdefault(f"memory with micro-batches of {size}", []).append(line)
    for what, lines in known.items():
        yield f"{what}: {', '.join(dict.fromkeys(lines))}"


def plan_without_training(
    work: Workload, by_stage: OffersByStage, node_counts: Mapping[str, int]
) -> PlanWithoutTraining:
    """The estimates of the missing stages for a run whose training is complete."""
    estimates = estimate_stages(work, by_stage, node_counts)
    return PlanWithoutTraining(estimates, *totals(estimates), assumptions(work))


def offers_by_node(kinds: Iterable[str], clouds: Iterable[str]) -> tuple[dict[str, list[Offer]], list[str]]:
    """Offers by node, and a note for each cloud without a price list. UserError if no cloud has one."""
    found: dict[str, list[Offer]] = {kind: [] for kind in kinds}
    errors: list[UserError] = []
    for cloud in (clouds := list(clouds)):
        try:
            for kind, of_kind in found.items():
                of_kind += offers(cloud, kind)
        except UserError as error:
            errors.append(error)
    if len(errors) == len(clouds):
        raise errors[0]
    return found, [*map(str, errors), *account_errors.values()]


def cheapest_offers(found: Iterable[Offer], place: Place | None = None) -> list[Offer]:
    """The cheapest offer of each machine in each market, and the cheapest one at `place`."""
    best: dict[tuple[str, str, bool, bool], Offer] = {}
    for offer in found:
        near = Place(offer.cloud, offer.region) == place
        key = (offer.cloud, offer.instance, offer.spot, near)
        if key not in best or offer.usd_per_hour < best[key].usd_per_hour:
            best[key] = offer
    return list(best.values())


def workload(recipe: Recipe, store: Store, plans: dict[str, ArtifactPlan], installs: bool = False) -> Workload:
    """The work that is left of a run, by the artifacts and commits in the store."""
    stages = frozenset(stage for stage, plan in plans.items() if find(store, plan) is None)
    steps_left = recipe.train.max_steps - recipe.train.first_step
    prefix = plans["train"].prefix
    if "train" in stages and attempts(store, prefix):
        state = committed_state(store, prefix)
        if state:
            steps_left = 0 if state.has_ended(recipe.train) else recipe.train.max_steps - state.step
    own = measurements_of_run(recipe, store, prefix)
    on_gpus, on_cpu = [known for known in own if known.gpu], [known for known in own if not known.gpu]
    return Workload(recipe, stages, steps_left, on_gpus, on_cpu, installs, place_of(store))


def measurements_of_run(recipe: Recipe, store: Store, prefix: str) -> list[MeasuredRun]:
    """The speeds of a run's attempts, the newest first; `gpu` is empty on a CPU."""
    segments: dict[int, list[str]] = {}
    for entry in store.entries(f"{prefix}/metrics/"):
        if named := SEGMENT.search(entry.key):
            segments.setdefault(int(named[1]), []).append(entry.key)
    found = []
    for beat in reversed(attempts(store, prefix)):
        keys = segments.get(beat.attempt, [])[-SEGMENTS:]
        rows = [row for key in keys for row in rows_of(f"{store.uri}/{key}", store.get(key) or b"")]
        machine, steps = beat.machine.accelerators, [row[SPEED] for row in rows if SPEED in row][2:]  # two may compile
        if steps:
            n, precision = recipe.model.parameters, recipe.train.precision
            engine = engine_of(recipe.model, recipe.runtime, precision, machine or "")
            where = f"measured by attempt {beat.attempt} of this run on {beat.nodes} x {machine or 'CPU'}"
            found.append(MeasuredRun(n, machine or "", beat.nodes, engine, 0.0, median(steps), where))
        if len(found) == MOST_ATTEMPTS:
            break
    return found


SPEED = "perf/tokens_per_second"
MOST_ATTEMPTS = 10  # of a run that was preempted often
SEGMENT, SEGMENTS = re.compile(r"/step-\d+-a(\d+)\.jsonl$"), 10  # of metrics; a day of a run writes thousands


def candidate(work: Workload, offer: Offer, by_stage: OffersByStage, node_counts: Mapping[str, int]) -> Candidate:
    """A run that trains on `offer`. UserError if its GPUs are too many, lack the precision, or are unknown."""
    recipe, nodes = work.recipe, node_counts["train"]
    check_gpus(recipe.model, recipe.train, recipe.runtime, offer.accelerators or "", nodes)
    estimates = estimate_stages(work, {**by_stage, "train": [offer]}, node_counts)
    return Candidate(offer, nodes, speed_of(work, offer, nodes), estimates, *totals(estimates))


def estimate_stages(
    work: Workload, by_stage: OffersByStage, node_counts: Mapping[str, int]
) -> dict[str, StageEstimate]:
    """Each stage of `by_stage` on its cheapest offer. A stage without offers is left out."""
    estimates: dict[str, StageEstimate] = {}
    for stage, found in by_stage.items():
        if stage not in work.stages:
            estimates[stage] = StageEstimate(None, 0.0, 0.0)
        elif found:
            offer, nodes = min(found, key=lambda o: o.usd_per_hour), node_counts.get(stage, 1)
            job = stage_work(stage, work, offer, nodes)
            job = replace(job, start=job.start + (INSTALL_SECONDS / 3600 if work.installs else 0.0))
            estimates[stage] = with_traffic(estimate_stage(job, offer, nodes), stage, work, job)
    return estimates


def totals(estimates: Mapping[str, StageEstimate]) -> tuple[float, float]:
    """Hours and dollars."""
    return sum(one.hours for one in estimates.values()), sum(one.usd for one in estimates.values())


def speed_of(work: Workload, offer: Offer, nodes: int) -> Throughput:
    """The training speed of a run on `nodes` of an offer. UserError for an unknown GPU."""
    recipe = work.recipe
    found = speed_on(recipe.model, recipe.runtime, offer.accelerators or "", nodes, work.own, recipe.train.precision)
    if recipe.train.optimizer == "muon" and not work.own:
        source = f"{found.source}, with AdamW; Muon was measured on no GPU"
        return Throughput(found.tokens_per_second, "assumed", source)
    return found


def estimate_stage(work: StageWork, offer: Offer, nodes: int) -> StageEstimate:
    """The expected hours and dollars of a stage's work on `nodes` of an offer."""
    time = expected_time(work, hours_between(offer, nodes))
    return StageEstimate(offer, time.hours, time.billed_hours * nodes * offer.usd_per_hour, time.preemptions, nodes)


def with_traffic(estimate: StageEstimate, stage: str, work: Workload, job: StageWork) -> StageEstimate:
    """The estimate with the dollars of the stage's traffic."""
    assert estimate.offer
    price = price_of_traffic(estimate.offer, work.place)
    parameters, state = work.recipe.model.parameters, state_bytes(work.recipe.model, work.recipe.train)
    sent, received = 0.0, 4.0 * parameters  # the weights, in float32
    if stage == "tokenize":
        sent, received = 2 * tokens_of(work.recipe), 0.0
    elif stage == "export":
        sent = 4.0 * parameters
    elif stage == "train":
        saves = job.work / job.segment if job.segment else 0.0
        sent = saves * state + 4 * parameters
        received = estimate.preemptions * state + 2 * training_tokens(work)  # a token has two bytes
    usd = (sent * (price.sent or 0.0) + received * (price.received or 0.0)) / GB
    return replace(estimate, usd=estimate.usd + usd, traffic_usd=usd)


def price_of_traffic(offer: Offer, place: Place | None) -> TrafficPrice:
    return traffic_price(Place(offer.cloud, offer.region), place)


def hours_between(offer: Offer, nodes: int) -> float:
    """Mean time between interruptions: the loss of any node interrupts all of them."""
    return prior_seconds_between_failures(Machine(cloud=offer.cloud, spot=offer.spot), nodes) / 3600


def expected_time(job: StageWork, m: float, wait: float = WAIT_SECONDS / 3600) -> ExpectedTime:
    """Work on machines that are lost at random, on average after `m` hours.

    Source of the billed hours: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps": M · e^(S/M) · (e^((I+s)/M) - 1) · W/I for work W in segments I, each followed by a stall s, on machines
    that last M and need S to start. For large M this is W · (1 + s/I). Preemptions are billed hours / M, and
    each of them costs a wait that is not billed.
    """
    segments = job.work / job.segment if job.segment else 0.0
    billed = job.start + m * math.exp(job.start / m) * math.expm1((job.segment + job.stall) / m) * segments
    preemptions = billed / m
    return ExpectedTime(billed + wait * (1 + preemptions), billed, preemptions)


def stage_work(stage: str, work: Workload, offer: Offer, nodes: int) -> StageWork:
    """The work of a stage on `nodes` of an offer."""
    recipe = work.recipe
    if stage == "tokenize":
        return tokenize_work(recipe, offer)
    if stage == "train":
        return train_work(work, offer, nodes)
    if stage == "evaluate":
        hours = evaluate_hours(recipe, offer)
    else:  # it downloads float32 weights, and uploads at most float32
        hours = 2 * 4 * recipe.model.parameters / BYTES_PER_SECOND / 3600
    return StageWork(hours, segment=hours)


def tokenize_work(recipe: Recipe, offer: Offer) -> StageWork:
    """The work of one node that makes one part of the text."""
    cores = offer.vcpus / 2  # two threads of a core are hardly faster than one
    hours = tokenize_seconds(tokens_of(recipe) / recipe.tokens.parts, cores) / 3600
    shard = min(hours, tokenize_seconds(recipe.tokens.shard_tokens, cores) / 3600)
    return StageWork(hours, segment=shard)  # a shard is uploaded while the next one is made


def tokenize_seconds(tokens: float, cores: float) -> float:
    """The time that one node needs to make so many tokens."""
    return tokens / min(cores * TOKENS_PER_CORE_SECOND, BYTES_PER_SECOND / BYTES_PER_TOKEN)


def tokens_of(recipe: Recipe) -> int:
    """Tokens to make: the recipe's limit, the number in the subset's name (sample-10BT), or all that training reads."""
    declared = [declared_tokens(one) for one in recipe.tokens.each()]
    if all(count is not None for count in declared):
        return sum(count or 0 for count in declared)
    return recipe.train_tokens + recipe.tokens.held_out(recipe.train_tokens)


def train_work(work: Workload, offer: Offer, nodes: int) -> StageWork:
    """The steps and validations that are left, on `nodes` of an offer."""
    recipe = work.recipe
    train, runtime, tokens = recipe.train, recipe.runtime, training_tokens(work)
    gpus = nodes * gpu_count(offer.accelerators or ":1")
    stall = state_bytes(recipe.model, train) / gpus / STALL_BYTES_PER_SECOND
    if runtime.checkpoint_minutes == "auto":
        between = 3600 * hours_between(offer, nodes)
        usd = state_bytes(recipe.model, train) / GB * (price_of_traffic(offer, work.place).sent or 0.0)
        traffic = usd / (nodes * offer.usd_per_hour) * 3600 if offer.usd_per_hour else 0.0
        segment = checkpoint_seconds(max(LEAST_STALL_SECONDS, stall), between, traffic_seconds=traffic) / 3600
    else:
        segment = runtime.checkpoint_minutes / 60
    hours = tokens / speed_of(work, offer, nodes).tokens_per_second / 3600
    engine = engine_of(recipe.model, runtime, train.precision, offer.accelerators or "")
    start = START_SECONDS + (FIRST_STEP_SECONDS if engine == "compiled" else 0)
    return StageWork(hours, min(segment, hours), stall / 3600, start / 3600)


def training_tokens(work: Workload) -> float:
    """The tokens that are left to train on, and a third of those to measure on, the share of the forward pass."""
    train, steps = work.recipe.train, work.steps_left
    tokens = float(tokens_before(train.max_steps, train) - tokens_before(train.max_steps - steps, train))
    measured = work.recipe.evaluations(steps) * work.recipe.benchmark_tokens
    if train.val_every:
        measured += (steps // train.val_every) * val_tokens(work.recipe.model, train)
    return tokens + measured / 3


def evaluate_hours(recipe: Recipe, offer: Offer) -> float:
    """Val loss, benchmarks and harness on the GPUs of a node; a CPU counts as 1 TFLOP/s."""
    kind, gpus = f"{(offer.accelerators or '').partition(':')[0]}:1", gpu_count(offer.accelerators or ":1")
    eager = recipe.runtime.model_copy(update={"engine": "eager"})
    flops = gpus * (peak_of(kind) or 1e12) * mfu_of(recipe.model, eager, "auto", kind)
    forward = recipe.model.flops_per_token / 3
    return evaluated_tokens(recipe, gpus) * forward / flops / 3600


def evaluated_tokens(recipe: Recipe, gpus: int) -> float:
    """What the stage evaluate computes, as tokens of the recipe's model that all GPUs read together; an estimate.

    A baseline's tokens count by its size. The harness reads on one of the GPUs, while the others wait.
    """
    evaluate = recipe.evaluate
    models = 1 + sum(relative_size(source, recipe) for source in evaluate.baselines)
    return models * (evaluate.val_tokens + recipe.benchmark_tokens) + gpus * recipe.harness_tokens


# --- choosing


def choose(candidates: list[Candidate], limits: Limits, notes: list[str]) -> CloudPlan:
    """Mark the cheapest and the fastest candidate, and choose one within the limits. They come cheapest first."""
    fastest = min(range(len(candidates)), key=lambda i: (candidates[i].hours, candidates[i].usd))
    meeting = [i for i, c in enumerate(candidates) if limits.met_by(c.hours, c.usd)]
    marks: dict[int, list[str]] = {0: ["cheapest"]}
    marks.setdefault(fastest, []).append("fastest")
    if str(limits):
        if meeting:
            marks.setdefault(meeting[0], []).append(f"cheapest within {limits}")
        else:
            notes = [*notes, nearest_note(candidates, limits)]
    if limits.usd and meeting:
        quickest = min(meeting, key=lambda i: candidates[i].hours)
        marks.setdefault(quickest, []).append(f"fastest within {limits}")
    marked = tuple(replace(c, marks=tuple(marks.get(i, []))) for i, c in enumerate(candidates))
    return CloudPlan(marked, meeting[0] if meeting else None, tuple(notes))


def nearest_note(candidates: list[Candidate], limits: Limits) -> str:
    """The note where no candidate is within the limits: it names the nearest one."""

    def excess(c: Candidate) -> float:
        return max(c.hours / limits.hours if limits.hours else 0.0, c.usd / limits.usd if limits.usd else 0.0)

    next_best = min(candidates, key=excess)
    return (
        f"no machine is within {limits}; the nearest is {next_best.offer.cloud} {next_best.offer.instance} "
        f"{next_best.offer.market}: {hours_text(next_best.hours)}, ${next_best.usd:,.2f}"
    )


def hours_text(hours: float) -> str:
    """36 h, 1 h 30 min or 5 min: to the minute, because seconds pass between a request and its check."""
    whole, minutes = divmod(round(60 * hours), 60)
    return " ".join(filter(None, [f"{whole} h" if whole else "", f"{minutes} min" if minutes or not whole else ""]))


DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?")


def parse_hours(text: str, option: str = "--deadline") -> float:
    """36h, 2d, 90m, 1d12h as hours. UserError for other text."""
    found = DURATION.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise UserError(f"{option} {text}: not a duration; write 36h, 2d, 90m or 1d12h")
    days, hours, minutes = (float(part or 0) for part in found.groups())
    total = 24 * days + hours + minutes / 60
    if total <= 0:
        raise UserError(f"{option} {text}: the duration is 0; write 36h, 2d, 90m or 1d12h")
    return total
