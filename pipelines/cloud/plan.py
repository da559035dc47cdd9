"""The expected time and cost of a run on rented machines: `skytrain plan RECIPE --cloud`.

A candidate is a machine for training in one market of one cloud, in the place where training is expected to cost least,
and in the one with the lowest price. The other stages run on the cheapest machine that is large enough. `estimates.py`
has the hours and dollars of each stage. ASSUMED names every number that was not measured, and the plan shows it. The
ledger keeps the run's actual cost; nothing here enters it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud.catalog import CLOUDS, Offer, account_errors, offers
from pipelines.cloud.egress import Place
from pipelines.cloud.estimates import (
    BYTES_PER_SECOND,
    NEAR_BYTES_PER_SECOND,
    OffersByStage,
    StageEstimate,
    Workload,
    estimate_stages,
    price_of_traffic,
    speed_of,
    totals,
    usd_to_train,
    workload,
)
from pipelines.cloud.lifetimes import lifetime_notes
from pipelines.cloud.preflight import text_is_only_here
from pipelines.cloud.start_up import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS
from pipelines.cloud.throughput import (
    Throughput,
    available_gib,
    check_gpus,
    fitting_micro_batch,
    gpu_count,
    memory_gib,
    trains_on_a_small_gpu,
)
from pipelines.recipe import Recipe
from pipelines.stage import STAGES, plans_of
from pipelines.tracking.ledger import STEADY_SECONDS_BETWEEN_FAILURES
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.errors import UserError
from trainer.store import Store

WITHOUT_QUOTA = ("lambda",)  # clouds that let a new account rent any GPU that is free
TRAIN_NODES = ("H100:8", "H200:8", "A100-80GB:8")  # the default of --gpus
# As in sky/*.yaml.
SMALL_NODES = {"tokenize": ("cpus:16,memory:32",), "evaluate": ("L4:1", "A10:1"), "export": ("cpus:4,memory:16",)}
ON_DEMAND_ONLY = ("export",)

ASSUMED = (
    f"a spot node lasts {PRIOR_SECONDS_BETWEEN_FAILURES / 3600:g} h (2.1 in the traces of NSDI'24: AWS V100, 2022-23), "
    f"one on demand {STEADY_SECONDS_BETWEEN_FAILURES / 86_400:g} days",
    f"{WAIT_SECONDS / 60:.0f} min until there is a node, then {START_SECONDS / 60:.0f} min of billed start-up",
    f"text and weights are transferred at {BYTES_PER_SECOND / 1e6:.0f} MB/s",
    "evaluation has the MFU of eager training",
)
ASSUMED_INSTALL = f"{INSTALL_SECONDS / 60:.0f} min more on each node, which installs the packages (no image)"
ASSUMED_BETWEEN_NODES = "nodes scale as well as the GPUs of one node over NVLink; over TCP they are slower"


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
    work = workload(recipe, store, plans or plans_of(recipe), installs)
    usd = partial(usd_to_train, work, nodes)
    for_training = best_offers((offer for node in train_nodes for offer in found[node]), usd)
    if not for_training:
        raise UserError(f"plan --cloud: none of {', '.join(clouds)} offers {', '.join(train_nodes)}")
    by_stage = dict.fromkeys(STAGES, for_training)
    for stage, kinds in SMALL_NODES.items():
        fitting = [o for node in kinds for o in found[node] if not (o.spot and stage in ON_DEMAND_ONLY)]
        by_stage[stage] = fitting or for_training
    if text_is_only_here(recipe, clouds):  # `launch` tokenizes it here
        del by_stage["tokenize"]
    node_counts = {"tokenize": 1, "train": nodes}
    on_demand = [offer for offer in for_training if not offer.spot]
    if limits.hours and "train" in work.stages and on_demand and len(on_demand) < len(for_training):
        by_stage["evaluate"], node_counts["evaluate"] = on_demand, nodes
    plan = compare_offers(work, by_stage, node_counts, limits, notes)
    if nodes > 1 or set(single) <= set(train_nodes):
        return plan
    alone = best_offers((offer for node in single for offer in found[node] if offer.cloud in WITHOUT_QUOTA), usd)
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
    lives = lifetime_notes((one.offer for one in plan.candidates), work.lived)
    plan = replace(plan, notes=(*plan.notes, *traffic_notes(work, plan.candidates), *lives))
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
    priced = (
        f"traffic with the bucket in {work.place}, at the price of the first terabytes of a month",
        f"after a preemption the checkpoint comes at {NEAR_BYTES_PER_SECOND / 1e6:.0f} MB/s in the bucket's region, "
        f"from elsewhere at {BYTES_PER_SECOND / 1e6:.0f} MB/s",
    )
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


def best_offers(found: Iterable[Offer], usd: Callable[[Offer], float]) -> list[Offer]:
    """Of each machine in each market of a cloud: the offer of lowest `usd`, and the one of the lowest price."""
    groups: dict[tuple[str, str, bool], list[Offer]] = {}
    for offer in found:
        groups.setdefault((offer.cloud, offer.instance, offer.spot), []).append(offer)
    best = (min(group, key=key) for group in groups.values() for key in (usd, price_of))
    return list(dict.fromkeys(best))


def price_of(offer: Offer) -> float:
    return offer.usd_per_hour


def candidate(work: Workload, offer: Offer, by_stage: OffersByStage, node_counts: Mapping[str, int]) -> Candidate:
    """A run that trains on `offer`. UserError if its GPUs are too many, lack the precision, or are unknown."""
    recipe, nodes = work.recipe, node_counts["train"]
    check_gpus(recipe.model, recipe.train, recipe.runtime, offer.accelerators or "", nodes)
    estimates = estimate_stages(work, {**by_stage, "train": [offer]}, node_counts)
    return Candidate(offer, nodes, speed_of(work, offer, nodes), estimates, *totals(estimates))


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
