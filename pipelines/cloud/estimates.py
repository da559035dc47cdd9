"""The expected time and cost of a run's stages on a machine, in closed form.

A stage has its work, its start-up, and on spot the work that preemptions undo. `plan.py` compares the machines.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from pipelines.artifacts.manifest import ArtifactPlan, find
from pipelines.artifacts.traffic import GB
from pipelines.cloud.catalog import Offer
from pipelines.cloud.egress import Place, TrafficPrice, place_of, traffic_price
from pipelines.cloud.start_up import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS
from pipelines.cloud.throughput import (
    MeasuredRun,
    Throughput,
    engine_of,
    gpu_count,
    mfu_of,
    peak_of,
    speed_on,
)
from pipelines.recipe import Recipe
from pipelines.text.sources import declared_tokens
from pipelines.tracking.ledger import attempts, prior_seconds_between_failures
from pipelines.tracking.records import Machine
from pipelines.weights import relative_size
from trainer.amounts import state_bytes, tokens_before, val_tokens
from trainer.commits import checkpoint_seconds, committed_state, rows_of
from trainer.store import Store

FIRST_STEP_SECONDS = 34.1  # measured, 124M compiled on an H200 with empty caches; the fused engine has none to fill
STALL_BYTES_PER_SECOND = 18.69e9 / 0.05  # measured: how long a save delays the steps; docs/measurements.md
LEAST_STALL_SECONDS = 0.1  # the least delay that the trainer assumes for a save
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # between the Hub or a bucket and a node

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
class Workload:
    """The work that is left of a run."""

    recipe: Recipe
    stages: frozenset[str]  # that are missing
    steps_left: int
    own: list[MeasuredRun] = field(default_factory=list)  # speeds of this run's attempts on GPUs, the newest first
    own_on_cpu: list[MeasuredRun] = field(default_factory=list)
    installs: bool = False  # a node without an image installs the packages first
    place: Place | None = None  # of the store


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
