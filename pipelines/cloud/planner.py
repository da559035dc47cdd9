"""The expected hours and dollars of a run on rented machines, for `plan --cloud` and `launch`.

Hours are tokens / speed (throughput.py), dollars are hours x catalog price + traffic with the store. Preemptions add to
both by one formula, `billed_per_useful_hour`, with the lifetimes that ASSUMED states. The ledger keeps the run's actual
cost; nothing here enters it.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pipelines.artifacts.manifest import ArtifactPlan, find
from pipelines.artifacts.traffic import GB
from pipelines.bench.throughput import (
    Throughput,
    check_gpus,
    gpu_count,
    mfu_of,
    peak_of,
    speed_on,
    trains_on_a_small_gpu,
)
from pipelines.cloud.catalog import CLOUDS, MachineRequest, Place, offers, place_of, with_traffic
from pipelines.cloud.preflight import text_is_only_here
from pipelines.job.deadline import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS
from pipelines.job.prices import price_of
from pipelines.recipe import Recipe
from pipelines.stage import STAGES, plans_of
from pipelines.text.mixture import sources_planned
from pipelines.text.sources import declared_tokens
from pipelines.tracking.ledger import STEADY_SECONDS_BETWEEN_FAILURES, attempts, prior_seconds_between_failures
from pipelines.tracking.records import Machine
from trainer.amounts import state_bytes, val_tokens
from trainer.checkpoint.commits import checkpoint_seconds, committed_state
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.errors import UserError
from trainer.store import Store

TRAIN_NODES = ("H100:8", "H200:8", "A100-80GB:8")  # the default of --gpus
SMALL_NODES = ("L4:1", "A10:1")
# As in sky/*.yaml.
OTHER_NODES = {
    "tokenize": [{"cpus": "16+", "memory": "32+"}],
    "evaluate": [{"accelerators": gpus} for gpus in SMALL_NODES],
    "export": [{"cpus": "4+", "memory": "16+"}],
}
ON_DEMAND_ONLY = ("export",)
STALL_SECONDS = 0.1  # for which a save delays the steps: the least that the trainer assumes
TOKENS_PER_CORE_SECOND = 4.8e6  # tiktoken on English text: 4.8 to 5.5 M
BYTES_PER_TOKEN = 4.3  # of English text
BYTES_PER_SECOND = 100e6  # of text and weights, between the Hub or a bucket and a node
CHECKPOINT_BYTES_PER_SECOND = 1e9  # from a bucket in the region; from a local disk 2.3 GB/s were measured

ASSUMED = (
    f"a spot node lasts {PRIOR_SECONDS_BETWEEN_FAILURES / 3600:g} h (2.1 in the traces of NSDI'24: AWS V100, 2022-23), "
    f"one on demand {STEADY_SECONDS_BETWEEN_FAILURES / 86_400:g} days",
    f"{WAIT_SECONDS / 60:.0f} min until there is a node, then {START_SECONDS / 60:.0f} min of billed start-up",
    f"text and weights are transferred at {BYTES_PER_SECOND / 1e6:.0f} MB/s, checkpoints at "
    f"{CHECKPOINT_BYTES_PER_SECOND / 1e6:.0f} MB/s",
    "evaluation has the MFU of eager training; nodes scale as the GPUs of one node do",
)
ASSUMED_INSTALL = f"{INSTALL_SECONDS / 60:.0f} min more on each node, which installs the packages (no image)"

Offered = Mapping[str, list[Machine]]  # by stage


@dataclass(frozen=True)
class Workload:
    """The work that is left of a run."""

    recipe: Recipe
    stages: frozenset[str]  # that are missing
    steps_left: int
    own: Mapping[tuple[str, int], Throughput] = field(default_factory=dict)  # of its attempts, by GPUs and nodes
    installs: bool = False  # a node without an image installs the packages first
    place: Place | None = None  # of the store
    held_out: int = sys.maxsize  # tokens, as far as the text is known


@dataclass(frozen=True)
class StageEstimate:
    """The expected time and cost of a stage on `nodes` machines."""

    machine: Machine | None  # None: the artifact exists
    hours: float = 0.0
    usd: float = 0.0  # of all nodes
    preemptions: float = 0.0
    nodes: int = 1
    traffic_usd: float = 0.0  # of `usd`: between the machines and the store, as far as its price is known


@dataclass(frozen=True)
class Candidate:
    """A machine to train on, with the estimates of all stages."""

    machine: Machine | None  # None: nothing is left to train, or its price is unknown
    speed: Throughput | None
    stages: Mapping[str, StageEstimate]

    @property
    def hours(self) -> float:
        return sum(one.hours for one in self.stages.values())

    @property
    def usd(self) -> float:
        return sum(one.usd for one in self.stages.values())


@dataclass(frozen=True)
class CloudPlan:
    """A candidate for each place of each machine, the cheapest first, and notes for the user."""

    candidates: tuple[Candidate, ...]
    chosen: int | None  # the cheapest candidate within the limits; None: no candidate is
    notes: tuple[str, ...]
    assumed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        sums = ({"hours": candidate.hours, "usd": candidate.usd} for candidate in self.candidates)
        candidates = [asdict(one) | more for one, more in zip(self.candidates, sums, strict=True)]
        return asdict(self) | {"candidates": candidates}


class Limits(NamedTuple):
    """The limits that the user set, for the whole run."""

    hours: float | None = None
    usd: float | None = None

    def met_by(self, one: Candidate) -> bool:
        return one.hours <= (self.hours or math.inf) and one.usd <= (self.usd or math.inf)

    def __str__(self) -> str:
        usd = f"${self.usd:,.2f}".removesuffix(".00") if self.usd else ""
        return " and ".join(filter(None, [hours_text(self.hours) if self.hours else "", usd]))


NO_LIMITS = Limits()


def cloud_plan(
    recipe: Recipe,
    store: Store,
    limits: Limits = NO_LIMITS,
    train_nodes: Iterable[str] | None = None,
    nodes: int = 1,
    clouds: Iterable[str] = CLOUDS,
    plans: dict[str, ArtifactPlan] | None = None,
    installs: bool = False,
) -> CloudPlan:
    """Candidates for the rest of a run. UserError without prices, or without a machine that can train it.

    Without `train_nodes`: TRAIN_NODES, or the small ones for a small training, as a launch takes them.
    """
    train_nodes = list(train_nodes or (SMALL_NODES if trains_on_a_small_gpu(recipe) else TRAIN_NODES))
    clouds, kinds = list(clouds), {**OTHER_NODES, "train": [{"accelerators": gpus} for gpus in train_nodes]}
    work = workload(recipe, store, plans or plans_of(recipe), installs)
    offered: dict[str, list[Machine]] = {stage: [] for stage in STAGES}
    errors: list[UserError] = []
    for cloud in clouds:
        try:
            for stage, found in offered.items():
                for spot in (False,) if stage in ON_DEMAND_ONLY else (False, True):
                    found += [one for node in kinds[stage] for one in offers(MachineRequest(cloud, spot, **node))]
        except UserError as error:
            errors.append(error)
    if len(errors) == len(clouds):
        raise errors[0]
    if not offered["train"]:
        raise UserError(f"plan --cloud: none of {', '.join(clouds)} offers {', '.join(train_nodes)}")
    if text_is_only_here(recipe, clouds):  # `launch` tokenizes it here
        del offered["tokenize"]
    if "evaluate" in work.stages:
        offered["export"] = offered["evaluate"]
    whole = {stage: found or offered["train"] for stage, found in offered.items()}
    return plan_run(work, whole, {"train": nodes}, limits, map(str, errors))


def workload(recipe: Recipe, store: Store, plans: dict[str, ArtifactPlan], installs: bool = False) -> Workload:
    """The work that is left of a run, by the artifacts and commits in the store."""
    stages = frozenset(stage for stage, plan in plans.items() if find(store, plan) is None)
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
    held_out = sum(one.val_tokens for one in sources_planned(recipe, find(store, plans["tokenize"])))
    return Workload(recipe, stages, steps_left, own, installs, place_of(store), held_out or sys.maxsize)


def plan_run(
    work: Workload, offered: Offered, node_counts: Mapping[str, int], limits: Limits, notes: Iterable[str] = ()
) -> CloudPlan:
    """A candidate for every machine that is offered for training, with the other stages on their cheapest machines.

    Without machines to train on, or with trained weights: one candidate of the other stages. `node_counts`: 1 where it
    has no stage. Export on the machines of evaluate is on the same one. UserError if no machine can train the run.
    """
    recipe, nodes = work.recipe, node_counts.get("train", 1)
    exports = offered.get("export") == offered.get("evaluate") and "evaluate" in work.stages
    other = {
        stage: estimate_stage(
            stage, work, min(offered[stage], key=price_of), node_counts.get(stage, 1), exports and stage == "export"
        )
        for stage in STAGES
        if stage != "train" and offered.get(stage)
    }
    candidates, unfit = [], dict[str, None]()
    for machine in offered.get("train", []) if "train" in work.stages else []:
        gpus = machine.accelerators or ""
        try:
            check_gpus(recipe.model, recipe.train, recipe.runtime, gpus, nodes)
            train = estimate_stage("train", work, machine, nodes)
            speed = speed_on(recipe.model, recipe.runtime, gpus, nodes, work.own, recipe.train.precision)
        except UserError as error:
            unfit[f"{nodes} x {gpus}: {error}"] = None
        else:
            stages = {
                stage: train if stage == "train" else other[stage] for stage in STAGES if stage in {"train", *other}
            }
            candidates.append(Candidate(machine, speed, stages))
    if unfit and not candidates:
        raise UserError("; ".join(unfit))
    candidates.sort(key=lambda one: (one.usd, one.hours))
    candidates = candidates or [Candidate(None, None, other)]
    notes = [*notes, *unfit]
    chosen = next((i for i, one in enumerate(candidates) if limits.met_by(one)), None)
    if chosen is None:
        hours, usd = limits.hours or math.inf, limits.usd or math.inf
        nearest = min(candidates, key=lambda one: max(one.hours / hours, one.usd / usd))
        least = f"the least for {', '.join(nearest.stages)} is"
        what = f"the nearest is {name_of(nearest.machine)}:" if nearest.machine else least
        notes.append(f"no machine is within {limits}; {what} {hours_text(nearest.hours)}, ${nearest.usd:,.2f}")
    assumed = (*ASSUMED, ASSUMED_INSTALL) if work.installs else ASSUMED
    return CloudPlan(tuple(candidates), chosen, tuple(notes), assumed)


def estimate_stage(stage: str, work: Workload, machine: Machine, nodes: int, is_up: bool = False) -> StageEstimate:
    """The expected hours and dollars of a stage on `nodes` machines, which an earlier stage has started if they are up.

    UserError for an unknown GPU.
    """
    if stage not in work.stages:
        return StageEstimate(None)
    recipe, between = work.recipe, prior_seconds_between_failures(machine, nodes) / 3600
    priced, usd_per_hour = with_traffic(machine, work.place), nodes * (machine.usd_per_hour or 0.0)
    usd_per_byte_sent, usd_per_byte_received = (
        (usd or 0.0) / GB for usd in (priced.usd_per_gb_sent, priced.usd_per_gb_received)
    )
    weights = 4.0 * recipe.model.parameters  # bytes, in float32
    state, sent, received = 0.0, 0.0, weights  # bytes of a checkpoint, and of all other traffic
    if stage == "tokenize":
        cores = (machine.vcpus or 2.0) / 2  # two threads of a core are hardly faster than one
        hours = tokenize_hours(tokens_of(recipe), cores)
        segment = tokenize_hours(recipe.tokens.shard_tokens, cores)  # a shard is uploaded while the next one is made
        sent, received = 2.0 * tokens_of(recipe), 0.0
    elif stage == "train":
        gpus, tokens = machine.accelerators or "", training_tokens(work)
        speed = speed_on(recipe.model, recipe.runtime, gpus, nodes, work.own, recipe.train.precision)
        hours = tokens / speed.tokens_per_second / 3600
        state, sent, received = float(state_bytes(recipe.model, recipe.train)), weights, 2 * tokens
        minutes, traffic = recipe.runtime.checkpoint_minutes, state * usd_per_byte_sent
        seconds = 3600 * traffic / usd_per_hour if usd_per_hour else 0.0
        auto = checkpoint_seconds(STALL_SECONDS, 3600 * between, traffic_seconds=seconds) / 3600
        segment = auto if minutes == "auto" else minutes / 60
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
    usd_of_traffic = usd_per_byte_sent * (sent + state * saves) + usd_per_byte_received * (
        received + state * preemptions
    )
    in_all = billed + WAIT_SECONDS / 3600 * (preemptions + (not is_up))
    return StageEstimate(machine, in_all, billed * usd_per_hour + usd_of_traffic, preemptions, nodes, usd_of_traffic)


def billed_per_useful_hour(between: float, segment: float, restart: float, stall: float = 0.0) -> float:
    """Expected billed hours for an hour of work that is kept, on machines that last `between` hours on average.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps":
    M · e^(S/M) · (e^((I+s)/M) - 1) / I for work in segments I, each followed by a stall s, on machines that last M and
    need S to start. For large M this is 1 + s/I.
    """
    return between * math.exp(restart / between) * math.expm1((segment + stall) / between) / segment


def tokenize_hours(tokens: float, cores: float) -> float:
    """The hours that one node needs to make so many tokens."""
    return tokens / min(cores * TOKENS_PER_CORE_SECOND, BYTES_PER_SECOND / BYTES_PER_TOKEN) / 3600


def tokens_of(recipe: Recipe) -> int:
    """Tokens to make: the recipe's limit, the number in the subset's name (sample-10BT), or all that training reads."""
    declared = [declared_tokens(one) for one in recipe.tokens.each()]
    if all(count is not None for count in declared):
        return sum(count or 0 for count in declared)
    return recipe.train_tokens + recipe.tokens.held_out(recipe.train_tokens)


def training_tokens(work: Workload) -> float:
    """The tokens that are left to train on, and a third of those to measure on, the share of the forward pass."""
    train, steps = work.recipe.train, work.steps_left
    tokens = float(steps * train.batch_tokens)
    measured = work.recipe.evaluations(steps) * work.recipe.benchmark_tokens
    if train.val_every:
        measured += (steps // train.val_every) * min(val_tokens(work.recipe.model, train), work.held_out)
    return tokens + measured / 3


def evaluate_hours(work: Workload, machine: Machine) -> float:
    """Val loss, benchmarks and harness on the GPUs of a node; a CPU counts as 1 TFLOP/s.

    The harness reads on one of the GPUs, while the others wait.
    """
    recipe, kind, gpus = work.recipe, machine.accelerators or ":1", gpu_count(machine.accelerators or ":1")
    eager = recipe.runtime.model_copy(update={"engine": "eager"})
    flops = (peak_of(kind) or gpus * 1e12) * mfu_of(recipe.model, eager, "auto", kind)
    tokens = min(recipe.evaluate.val_tokens, work.held_out) + recipe.benchmark_tokens + gpus * recipe.harness_tokens
    return tokens * recipe.model.flops_per_token / 3 / flops / 3600


def name_of(machine: Machine) -> str:
    """aws p5.48xlarge spot."""
    return f"{machine.cloud} {machine.instance} {'spot' if machine.spot else 'on demand'}"


def hours_text(hours: float) -> str:
    """36 h, 1 h 30 min or 5 min: to the minute, because seconds pass between a request and its check."""
    whole, minutes = divmod(round(60 * hours), 60)
    return " ".join(filter(None, [f"{whole} h" if whole else "", f"{minutes} min" if minutes or not whole else ""]))


def parse_hours(text: str, option: str = "--deadline") -> float:
    """36h, 2d, 90m, 1d12h as hours. UserError for other text."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhm])", text)
    hours = sum(float(number) * {"d": 24, "h": 1, "m": 1 / 60}[unit] for number, unit in parts)
    if not hours or "".join(map("".join, parts)) != text.strip():
        raise UserError(f"{option} {text}: not a duration; write 36h, 2d, 90m or 1d12h")
    return hours
