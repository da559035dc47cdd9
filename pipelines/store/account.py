"""The time and the dollars of a run: the sums over the ledger's attempts.

Pure arithmetic over heartbeats. Every second of an attempt has a phase, and the phases of an attempt sum to its wall
time. An attempt's own clock measures it, so differences between machines' clocks do no harm. Hours, and summed
seconds of phases, are machine time: two nodes for an hour are two hours. Every sum keeps hours of unknown price apart.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from pipelines.store.records import HEARTBEAT_SECONDS, Heartbeat, Machine
from pipelines.store.traffic import GB

# The phases that an attempt repeats or waits for because its predecessor was interrupted.
RECOVERY_PHASES = ("provision", "start", "setup", "download", "compile", "idle")
TRAFFIC = "traffic"  # a phase of the bill, of no time
TRAINING_PHASES = ("train", "redone", "checkpoint", "evaluate")  # they make steps, or steps wait for them
INTERRUPTED_STATES = ("interrupted", "stale", "lost")  # states of an attempt after which the run waits for a machine
WASTED_PHASES = ("redone", "lost")


@dataclass(frozen=True)
class StoredHeartbeat:
    """An attempt's heartbeat in the store."""

    prefix: str
    beat: Heartbeat
    stored: float | None = None  # unix seconds, by the store's clock
    alive: bool | None = None  # None: unknown on this machine


@dataclass(frozen=True)
class Cost:
    """Machine time and its cost."""

    hours: float = 0.0  # of all nodes together, of known and unknown price
    usd: float = 0.0  # of the hours of known price
    unpriced_hours: float = 0.0  # the hours of unknown price


@dataclass(frozen=True)
class TrafficCost:
    """Bytes between the machines and the store, and their cost."""

    sent_bytes: int = 0
    received_bytes: int = 0
    usd: float = 0.0  # of the bytes and requests of known price
    unpriced_bytes: int = 0  # the bytes of unknown price
    requests: int = 0  # that write, list or read


Total = TypeVar("Total", Cost, TrafficCost)


@dataclass(frozen=True, kw_only=True)
class AttemptAccount(Heartbeat):
    """One attempt: its last heartbeat, with the work and the bill that follow from it.

    `state` may also be lost: it crashed without a last heartbeat. `time` is never before `started`, and `phases` sum to
    the seconds between them.
    """

    prefix: str
    bill: Cost
    traffic: TrafficCost  # its dollars are part of the bill
    steps_done: int
    steps_kept: int  # of these, those that no later attempt rolled back
    steps_redone: int  # of these, those that an earlier attempt had done

    @property
    def waited(self) -> bool:
        """Whether it waited for spot, on a standby machine."""
        return bool(self.progress.waiting)


@dataclass(frozen=True)
class Account:
    """The cost of a run, and its parts."""

    attempts: tuple[AttemptAccount, ...]  # in the order in which they started
    total: Cost  # of all attempts
    waits: Cost  # of them, those that waited for spot on a standby machine
    by_stage: dict[str, Cost]
    by_phase: dict[str, Cost]
    by_market: dict[str, Cost]  # "own machine", "aws spot", "gcp on demand", …
    tokens: int  # of training, each step counted once
    goodput: float | None  # seconds of training, each step counted once, per billed second without waits for spot
    usd_per_billion_tokens: float | None  # None while a price is unknown
    interruptions: Cost  # repeated work, lost time, and the restart after each interruption
    savings_usd: float | None  # against the on-demand price of the same machines; None: unknown
    deaths: int  # attempts that crashed without a last heartbeat
    unseen_seconds: float  # at most so much is missing from the bill: a heartbeat interval for each
    unseen_usd: float  # the same in dollars, of known prices
    traffic: TrafficCost = TrafficCost()  # of the total: between the machines and the store


def account(heartbeats: Iterable[StoredHeartbeat], tokens_before: Callable[[int], int] = lambda step: 0) -> Account:
    """Add up a run's attempts, from the last heartbeat of each, in any order.

    `tokens_before`: tokens of all updates before a step.
    """
    by_prefix: dict[str, list[StoredHeartbeat]] = {}
    for one in sorted(heartbeats, key=lambda one: (one.prefix, one.beat.attempt)):
        by_prefix.setdefault(one.prefix, []).append(one)
    attempts: list[AttemptAccount] = []
    interruptions: list[Cost] = []
    tokens = 0
    for several in by_prefix.values():
        counts = zip(several, steps_of([one.beat for one in several]), strict=True)
        on_artifact = [_attempt(one, one is not several[-1], *steps) for one, steps in counts]
        attempts += on_artifact
        interruptions += _interruption_costs(on_artifact)
        tokens += tokens_before(sum(a.steps_kept for a in on_artifact))
    attempts.sort(key=lambda a: (a.started, a.prefix, a.attempt))
    traffic = _total(TrafficCost, (a.traffic for a in attempts))
    total = total_cost(a.bill for a in attempts)
    trained = [_phase_cost(a, "train").hours for a in attempts]
    without_waits = math.fsum(a.bill.hours for a in attempts if not a.waited)
    savings = [
        a.bill.hours * (a.machine.on_demand_per_hour - a.price_per_hour)
        for a in attempts
        if a.machine.on_demand_per_hour is not None and a.price_per_hour is not None
    ]
    lost = [a for a in attempts if a.state == "lost"]
    deaths = len(lost)
    return Account(
        attempts=tuple(attempts),
        total=total,
        waits=total_cost(a.bill for a in attempts if a.waited),
        by_stage=_sums((a.stage, a.bill) for a in attempts),
        by_phase=_sums((phase, _phase_cost(a, phase)) for a in attempts for phase in a.phases)
        | ({TRAFFIC: Cost(usd=traffic.usd)} if traffic.usd else {}),
        by_market=_sums((market_of(a.machine), a.bill) for a in attempts),
        tokens=tokens,
        goodput=math.fsum(trained) / without_waits if without_waits else None,
        usd_per_billion_tokens=total.usd / (tokens / 1e9) if tokens and not total.unpriced_hours else None,
        interruptions=total_cost(interruptions),
        savings_usd=math.fsum(savings) if savings else None,
        deaths=deaths,
        unseen_seconds=deaths * HEARTBEAT_SECONDS,
        unseen_usd=math.fsum(a.nodes * (a.price_per_hour or 0.0) * HEARTBEAT_SECONDS / 3600 for a in lost),
        traffic=traffic,
    )


def _interruption_costs(attempts: list[AttemptAccount]) -> Iterator[Cost]:
    """Costs of interruptions among the attempts on one artifact, in order."""
    interrupted = False
    for attempt in attempts:
        for phase in WASTED_PHASES + (RECOVERY_PHASES if interrupted else ()):
            yield _phase_cost(attempt, phase)
        if not attempt.waited:  # a wait belongs to the interruption before it, if there was one
            interrupted = attempt.state in INTERRUPTED_STATES


def settled_phases(beat: Heartbeat) -> dict[str, float]:
    """Seconds by phase that sum to the attempt's wall time.

    Seconds without a phase are idle. If the clock was set back during the attempt, the phases are longer than the
    wall time: all of them shrink.
    """
    wall = 3600 * beat.billed_hours
    phases = {phase: seconds for phase, seconds in beat.phases.items() if seconds > 0}
    reported = math.fsum(phases.values())
    if reported > wall:
        phases = {phase: seconds * (wall / reported) for phase, seconds in phases.items()}
    rest = wall - math.fsum(phases.values())
    if rest > 1e-6 * wall:
        phases["idle"] = phases.get("idle", 0.0) + rest
    return phases


def steps_of(beats: list[Heartbeat]) -> list[tuple[int, int, int]]:
    """Steps done, kept and redone by each attempt on one artifact; `beats` in order.

    Kept: steps that no later attempt rolled back. An attempt reached at least the step from which the next one resumed,
    even if its last heartbeat has fewer.
    """
    rows: list[tuple[int, int, int]] = []
    later: int | None = None
    for beat in reversed(beats):
        progress = beat.progress
        if progress.resumed_from is None or progress.step is None:
            rows.append((0, 0, 0))
            continue
        low = progress.resumed_from
        kept = max(0, (progress.step if later is None else later) - low)
        done = max(kept, progress.step - low if progress.steps_done is None else progress.steps_done)
        rows.append((done, kept, progress.steps_redone or 0))
        later = low if later is None else min(later, low)
    return rows[::-1]


def market_of(machine: Machine) -> str:
    """The owner of a machine and the kind of offer: "own machine", "aws spot", "gcp on demand"."""
    if not machine.cloud:
        return "own machine"
    return machine.cloud + ("" if machine.spot is None else " spot" if machine.spot else " on demand")


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The sum of several costs."""
    return _total(Cost, costs)


def _total(kind: type[Total], several: Iterable[Total]) -> Total:
    """The sum, field by field. That of floats is exact, so that their order does not matter."""
    columns = zip(*(vars(one).values() for one in several), strict=True)
    sums: list[Any] = [sum(one) if all(type(value) is int for value in one) else math.fsum(one) for one in columns]
    return kind(*sums)


def traffic_of(beat: Heartbeat) -> TrafficCost:
    """The traffic of an attempt between its machines and the store, by its last heartbeat."""
    progress, machine = beat.progress, beat.machine
    sent, received = progress.bytes_sent or 0, progress.bytes_received or 0
    writes, reads = progress.write_requests or 0, progress.read_requests or 0
    priced = [(sent, machine.usd_per_gb_sent), (received, machine.usd_per_gb_received)]
    usd = math.fsum(count / GB * price for count, price in priced if price is not None)
    usd += writes / 1000 * (machine.usd_per_1000_writes or 0.0) + reads / 1000 * (machine.usd_per_1000_reads or 0.0)
    return TrafficCost(sent, received, usd, sum(count for count, price in priced if price is None), writes + reads)


def traffic_seconds(size: int, beat: Heartbeat) -> float:
    """The seconds for which an attempt's machines cost as much as `size` bytes to the store; 0 while a price is
    unknown."""
    usd_per_second = (beat.price_per_hour or 0.0) * beat.nodes / 3600
    usd = size / GB * (beat.machine.usd_per_gb_sent or 0.0)
    return usd / usd_per_second if usd_per_second else 0.0


def _sums(named: Iterable[tuple[str, Cost]]) -> dict[str, Cost]:
    groups: dict[str, list[Cost]] = {}
    for name, cost in named:
        groups.setdefault(name, []).append(cost)
    return {name: total_cost(costs) for name, costs in groups.items()}


def _attempt(one: StoredHeartbeat, superseded: bool, done: int, kept: int, redone: int) -> AttemptAccount:
    beat = one.beat
    traffic = traffic_of(beat)
    crashed = beat.state == "running" and (superseded or one.alive is False)
    settled = {
        "state": "lost" if crashed else beat.state,
        "time": max(beat.time, beat.started),
        "phases": settled_phases(beat),
    }
    return AttemptAccount(
        **vars(beat) | settled,
        prefix=one.prefix,
        bill=total_cost([_cost(beat.billed_hours * beat.nodes, beat.price_per_hour), Cost(usd=traffic.usd)]),
        traffic=traffic,
        steps_done=done,
        steps_kept=kept,
        steps_redone=redone,
    )


def _cost(hours: float, price: float | None) -> Cost:
    return Cost(hours, 0.0, hours) if price is None else Cost(hours, hours * price)


def _phase_cost(attempt: AttemptAccount, phase: str) -> Cost:
    return _cost(attempt.phases.get(phase, 0.0) * attempt.nodes / 3600, attempt.price_per_hour)


class TrainingBill:
    """The cost of a run at each point of its training: of tokenize, of all attempts at training before, and of the
    attempt's own time until then. No two attempts' times are compared: the wall clock may step between them."""

    def __init__(self, account: Account) -> None:
        self.priced = bool(account.total.usd and not account.total.unpriced_hours)
        self.before: dict[int, Cost] = {}  # by attempt
        self.trained = sorted((a for a in account.attempts if a.stage == "train"), key=lambda a: a.attempt)
        spent = [a.bill for a in account.attempts if a.stage == "tokenize"]
        for one in self.trained:
            self.before[one.attempt] = total_cost(spent)
            spent.append(one.bill)

    def until(self, step: int, time: float) -> Cost:
        """The cost when a step was logged, at a time of its attempt's clock: of the last one that began before it."""
        for one in reversed(self.trained):
            if one.progress.resumed_from is not None and one.progress.resumed_from < step:
                wall = one.time - one.started
                share = min(1.0, max(0.0, (time - one.started) / wall)) if wall else 0.0
                own = Cost(share * one.bill.hours, share * one.bill.usd, share * one.bill.unpriced_hours)
                return total_cost([self.before[one.attempt], own])
        return Cost()


def cost_metrics(account: Account) -> dict[str, float]:
    """An account as metrics for MLflow; unknown values are left out, and dollars without any price."""
    values = {
        "cost/usd": account.total.usd or None,
        "time/billed_hours": account.total.hours,
        "time/goodput": account.goodput if "train" in account.by_stage else None,
        "cost/usd_per_billion_tokens": account.usd_per_billion_tokens or None,
    }
    if account.total.unpriced_hours:
        values["time/unpriced_hours"] = account.total.unpriced_hours
    return {name: value for name, value in values.items() if value is not None}


def nothing_priced(account: Account) -> bool:
    """Whether the price of all hours is unknown, so that 0 dollars would be wrong."""
    return 0 < account.total.hours == account.total.unpriced_hours


@dataclass(frozen=True)
class Forecast:
    """The rest of a training, if it goes on as so far."""

    hours: float  # by the calendar
    usd: float | None  # None: the price is unknown


def forecast(attempts: Iterable[AttemptAccount], steps_left: float) -> Forecast | None:
    """The rest of a training, from its attempts on one artifact; None before the first step.

    A step that is left takes as long as a step so far, with its share of the time after interruptions: repeated steps,
    start-ups, and waits for the next machine. The first start-up does not count.
    """
    trained = sorted((a for a in attempts if not a.waited), key=lambda a: a.attempt)
    steps = sum(a.steps_kept for a in trained)
    if not steps:
        return None
    lives = math.fsum(a.time - a.started for a in trained)
    first, last = trained[0], trained[-1]
    billed = lives - (first.time - first.started - training_seconds(first))
    waits = (max(0.0, b.started - a.time) for a, b in pairwise(trained) if a.state in INTERRUPTED_STATES)
    usd = None if last.price_per_hour is None else math.fsum(a.bill.usd for a in trained) * billed / lives
    share = steps_left / steps
    return Forecast(share * (billed + math.fsum(waits)) / 3600, None if usd is None else share * usd)


def training_seconds(attempt: AttemptAccount) -> float:
    """Seconds of an attempt in the phases of training."""
    return math.fsum(attempt.phases.get(phase, 0.0) for phase in TRAINING_PHASES)
