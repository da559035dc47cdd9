"""The expected time and cost of a run's stages on a machine, in closed form.

A stage has its work, its start-up, and on spot the work that preemptions undo. `usd_per_useful_hour` is the score of a
place: `plan.py` compares machines by it, and a launch tries them in its order.
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
from pipelines.cloud.lifetimes import Lived, Market, hours_between, lifetimes
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
from pipelines.tracking.ledger import attempts
from pipelines.weight_sources import relative_size
from trainer.amounts import state_bytes, tokens_before, val_tokens
from trainer.commits import checkpoint_seconds, committed_state, rows_of
from trainer.errors import UserError
from trainer.store import Store

FIRST_STEP_SECONDS = 34.1  # measured, 124M compiled on an H200 with empty caches; the fused engine has none to fill
STALL_BYTES_PER_SECOND = 18.69e9 / 0.05  # measured: how long a save delays the steps; docs/measurements.md
LEAST_STALL_SECONDS = 0.1  # the least delay that the trainer assumes for a save
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # between the Hub or a bucket and a node
NEAR_BYTES_PER_SECOND = 1e9  # of a checkpoint from a bucket in the region; from a local disk 2.3 GB/s were measured

OffersByStage = Mapping[str, list[Offer]]  # in the order of the stages


@dataclass(frozen=True)
class StageWork:
    """The work of a stage on some machine, in hours without interruptions."""

    work: float
    segment: float  # the work between two commits, the most that a preemption undoes
    stall: float = 0.0  # the delay of a commit
    start: float = START_SECONDS / 3600
    fetch: float = 0.0  # of the last checkpoint, after each preemption

    @property
    def restart(self) -> float:
        return self.start + self.fetch


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
    lived: Mapping[Market, Lived] = field(default_factory=dict)  # how long spot machines lasted, where that is known


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
    return Workload(recipe, stages, steps_left, on_gpus, on_cpu, installs, place_of(store), lifetimes(store))


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
            estimates[stage] = estimate_stage(stage, work, offer, nodes)
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


def usd_per_useful_hour(
    job: StageWork, usd_per_hour: float, between: float, usd_per_save: float = 0.0, usd_per_restart: float = 0.0
) -> float:
    """Expected dollars for an hour of work that is kept, at a place where all machines of the job cost `usd_per_hour`
    and one of them is lost every `between` hours on average; without the first start-up."""
    if not job.segment:
        return 0.0
    billed = billed_per_useful_hour(job, between)
    return billed * (usd_per_hour + usd_per_restart / between) + usd_per_save / job.segment


def estimate_stage(stage: str, work: Workload, offer: Offer, nodes: int) -> StageEstimate:
    """The expected hours and dollars of a stage on `nodes` of an offer. UserError for an unknown GPU."""
    job = stage_work(stage, work, offer, nodes)
    job = replace(job, start=job.start + (INSTALL_SECONDS / 3600 if work.installs else 0.0))
    between, usd_per_hour = hours_between(offer, nodes, work.lived), nodes * offer.usd_per_hour
    time = expected_time(job, between)
    price = price_of_traffic(offer, work.place)
    per_gb_sent, per_gb_received = (price.sent or 0.0) / GB, (price.received or 0.0) / GB
    state = state_bytes(work.recipe.model, work.recipe.train) if stage == "train" else 0.0
    sent, received = traffic_once(stage, work)
    once = sent * per_gb_sent + received * per_gb_received
    save, restart = state * per_gb_sent, state * per_gb_received

    def usd(save: float, restart: float) -> float:
        start = job.start * (usd_per_hour + restart / between)
        return start + job.work * usd_per_useful_hour(job, usd_per_hour, between, save, restart)

    traffic = once + usd(save, restart) - usd(0.0, 0.0)
    return StageEstimate(offer, time.hours, once + usd(save, restart), time.preemptions, nodes, traffic)


def traffic_once(stage: str, work: Workload) -> tuple[float, float]:
    """Bytes that a stage sends to the store and receives from it, without those of checkpoints."""
    weights = 4.0 * work.recipe.model.parameters  # in float32
    if stage == "tokenize":
        return 2.0 * tokens_of(work.recipe), 0.0
    if stage == "train":
        return weights, 2 * training_tokens(work)  # a token has two bytes
    return weights if stage == "export" else 0.0, weights


def usd_to_train(work: Workload, nodes: int, offer: Offer) -> float:
    """The expected dollars of the rest of the training at an offer's place; infinite on GPUs of unknown speed."""
    try:
        return estimate_stage("train", work, offer, nodes).usd
    except UserError:
        return math.inf


def price_of_traffic(offer: Offer, place: Place | None) -> TrafficPrice:
    return traffic_price(Place(offer.cloud, offer.region), place)


def expected_time(job: StageWork, m: float, wait: float = WAIT_SECONDS / 3600) -> ExpectedTime:
    """Work on machines that are lost at random, on average after `m` hours.

    Preemptions are billed hours / M, and each of them costs a wait that is not billed.
    """
    billed = job.start + (job.work * billed_per_useful_hour(job, m) if job.segment else 0.0)
    preemptions = billed / m
    return ExpectedTime(billed + wait * (1 + preemptions), billed, preemptions)


def billed_per_useful_hour(job: StageWork, m: float) -> float:
    """Expected billed hours for an hour of work that is kept, on machines that last `m` hours on average.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps":
    M · e^(S/M) · (e^((I+s)/M) - 1) / I for work in segments I, each followed by a stall s, on machines that last M and
    need S to start. For large M this is 1 + s/I.
    """
    return m * math.exp(job.restart / m) * math.expm1((job.segment + job.stall) / m) / job.segment


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
    hours = tokenize_seconds(tokens_of(recipe), cores) / 3600
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
        between = 3600 * hours_between(offer, nodes, work.lived)
        usd = state_bytes(recipe.model, train) / GB * (price_of_traffic(offer, work.place).sent or 0.0)
        traffic = usd / (nodes * offer.usd_per_hour) * 3600 if offer.usd_per_hour else 0.0
        segment = checkpoint_seconds(max(LEAST_STALL_SECONDS, stall), between, traffic_seconds=traffic) / 3600
    else:
        segment = runtime.checkpoint_minutes / 60
    hours = tokens / speed_of(work, offer, nodes).tokens_per_second / 3600
    engine = engine_of(recipe.model, runtime, train.precision, offer.accelerators or "")
    start = START_SECONDS + (FIRST_STEP_SECONDS if engine == "compiled" else 0)
    near = work.place in (None, Place(offer.cloud, offer.region))
    fetch = state_bytes(recipe.model, train) / (NEAR_BYTES_PER_SECOND if near else BYTES_PER_SECOND)
    return StageWork(hours, min(segment, hours), stall / 3600, start / 3600, fetch / 3600)


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
