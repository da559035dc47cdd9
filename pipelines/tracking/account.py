"""Where the seconds and the dollars of a run went: the ledger's attempts, added up.

Pure arithmetic over heartbeats. Every second of an attempt has a phase, and the phases of an attempt sum
to its wall time; an attempt's own clock measures it, so clocks that differ between machines do no harm.
Hours, and the seconds of phases once they are summed, are machine time: two nodes for an hour are two hours.
Hours whose price is unknown are kept apart in every sum.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipelines.tracking.ledger import HEARTBEAT_SECONDS
from pipelines.tracking.records import Heartbeat, Machine

# What an attempt has to do again, or sits through, because the one before it was cut off.
RECOVERY_PHASES = ("provision", "setup", "download", "compile", "idle")
WASTED_PHASES = ("redone", "lost")
# Between two attempts that wait for spot. Beyond that it was no look: the launch was taken down, and begun anew.
LONGEST_LOOK_SECONDS = 3600.0


@dataclass(frozen=True)
class StoredHeartbeat:
    """An attempt's heartbeat as it lies in the store."""

    prefix: str
    beat: Heartbeat
    stored: float | None = None  # unix seconds, by the store's clock
    alive: bool | None = None  # None: can't be told from here


@dataclass(frozen=True)
class Cost:
    """Machine time and what it costs."""

    hours: float = 0.0  # of all nodes together, at whatever price
    usd: float = 0.0  # of the hours whose price is known
    unpriced_hours: float = 0.0  # the others


@dataclass(frozen=True)
class AttemptAccount:
    """One attempt: when, where, at what price, what it did. Times in unix seconds by its own clock."""

    stage: str
    prefix: str
    number: int
    state: str  # running, done, interrupted, stopped, failed, stale; lost (it died without a word)
    started: float
    ended: float  # its last heartbeat, if it has not ended
    skew_seconds: float | None  # the store's clock minus its own, as its last heartbeat arrived (with its way there)
    host: str
    nodes: int
    machine: Machine
    price_per_hour: float | None  # of one node
    price_source: str
    phases: dict[str, float]  # seconds; they sum to ended - started
    bill: Cost
    resumed_from: int | None  # step; None if it never came to train
    step: int | None  # where it stood at last
    steps_done: int
    steps_kept: int  # of these, those that no later attempt has done again (yet)
    steps_redone: int  # of these, those that an earlier attempt had done already
    notice: str | None  # what asked it to leave
    waited: bool = False  # for a machine that trains, on one that doesn't


@dataclass(frozen=True)
class Account:
    """Everything a run cost, and for what."""

    run: str
    attempts: tuple[AttemptAccount, ...]  # in the order in which they started
    total: Cost
    by_stage: dict[str, Cost]
    by_phase: dict[str, Cost]
    by_market: dict[str, Cost]  # "own machine", "aws spot", "gcp on demand", …
    tokens: int  # trained on, steps that were done twice counted once
    goodput: float | None  # seconds of training, each step counted once, of all billed ones but those in waiting rooms
    usd_per_billion_tokens: float | None  # None while a price is unknown
    interruptions: Cost  # what being cut off cost: work done again, time lost, the way back to where it was
    savings_usd: float | None  # against the on-demand price of the same machines, where it is known
    deaths: int  # attempts that ended without a word
    unseen_seconds: float  # bound on what is missing from the bill: a heartbeat's interval for each of them
    faults: tuple[str, ...] = ()  # what could not be read, so is on no bill


def account(
    run: str,
    seen: Iterable[StoredHeartbeat],
    tokens_before: Callable[[int], int] = lambda step: 0,
    faults: Iterable[str] = (),
) -> Account:
    """Add up a run's attempts, in whatever order and however often their heartbeats are given.

    `tokens_before`: of all updates before one.
    """
    newest = newest_of_each(seen)
    by_prefix: dict[str, list[StoredHeartbeat]] = {}
    for one in newest:
        by_prefix.setdefault(one.prefix, []).append(one)
    mine: list[AttemptAccount] = []
    interruptions: list[Cost] = []
    kept: list[int] = []  # steps of each artifact, from its first
    for several in by_prefix.values():
        steps = steps_of([one.beat for one in several])
        kept.append(sum(of_one for _, of_one, _ in steps))
        cut_off = False
        for one, (done, kept_of_one, redone) in zip(several, steps, strict=True):
            superseded = one is not several[-1]
            mine.append(_attempt(one, superseded, done, kept_of_one, redone))
            wasted = WASTED_PHASES + (RECOVERY_PHASES if cut_off else ())
            interruptions += [_phase_bill(mine[-1], phase) for phase in wasted]
            if not mine[-1].waited:  # the wait is on the way back only if something was cut off before it
                cut_off = mine[-1].state in ("interrupted", "stale", "lost")
    mine.sort(key=lambda a: (a.started, a.prefix, a.number))
    total, tokens = total_cost(a.bill for a in mine), sum(tokens_before(steps) for steps in kept)
    trained = [_phase_bill(a, "train").hours for a in mine]
    at_work = math.fsum(a.bill.hours for a in mine if not a.waited)
    savings = [b for a in mine if (b := _savings(a)) is not None]
    deaths = sum(a.state == "lost" for a in mine)
    return Account(
        run=run,
        attempts=tuple(mine),
        total=total,
        by_stage=_sums((a.stage, a.bill) for a in mine),
        by_phase=_sums((phase, _phase_bill(a, phase)) for a in mine for phase in a.phases),
        by_market=_sums((market_of(a.machine), a.bill) for a in mine),
        tokens=tokens,
        goodput=math.fsum(trained) / at_work if at_work else None,
        usd_per_billion_tokens=total.usd / (tokens / 1e9) if tokens and not total.unpriced_hours else None,
        interruptions=total_cost(interruptions),
        savings_usd=math.fsum(savings) if savings else None,
        deaths=deaths,
        unseen_seconds=deaths * HEARTBEAT_SECONDS,
        faults=tuple(faults),
    )


def newest_of_each(seen: Iterable[StoredHeartbeat]) -> list[StoredHeartbeat]:
    """The last heartbeat of every attempt, in order of prefixes and numbers."""

    def age(one: StoredHeartbeat) -> tuple[Any, ...]:
        return one.beat.time, one.beat.state != "running", json.dumps(asdict(one), sort_keys=True)

    newest: dict[tuple[str, int], StoredHeartbeat] = {}
    for one in seen:
        key = (one.prefix, one.beat.attempt)
        newest[key] = max(one, newest.get(key, one), key=age)
    return [newest[key] for key in sorted(newest)]


def settled_phases(beat: Heartbeat) -> dict[str, float]:
    """Seconds by phase that sum to the attempt's wall time, whatever its process lived to tell.

    What no phase accounts for is idle. A clock that was set back in mid-attempt makes the phases longer than
    the whole: all of them shrink.
    """
    wall = 3600 * beat.billed_hours
    told = {phase: seconds for phase, seconds in beat.phases.items() if seconds > 0}
    whole = math.fsum(told.values())
    if whole > wall:
        told = {phase: seconds * (wall / whole) for phase, seconds in told.items()}
    rest = wall - math.fsum(told.values())
    if rest > 1e-6 * wall:
        told["idle"] = told.get("idle", 0.0) + rest
    return told


def steps_of(beats: list[Heartbeat]) -> list[tuple[int, int, int]]:
    """Of the attempts on one artifact, in order: steps done, kept and redone of each.

    Kept are those behind which no later attempt has gone back. An attempt that rolls back does so too. Where the
    next one went on, this one must have come, even if its last heartbeat says less.
    """
    rows: list[tuple[int, int, int]] = []
    later: int | None = None
    for beat in reversed(beats):
        progress = beat.progress
        if progress.resumed_from is None or progress.step is None:
            rows.append((0, 0, 0))
            continue
        low = progress.resumed_from if progress.lowest_step is None else progress.lowest_step
        kept = max(0, (progress.step if later is None else later) - low)
        done = max(kept, progress.step - low if progress.steps_done is None else progress.steps_done)
        rows.append((done, kept, progress.steps_redone or 0))
        later = low if later is None else min(later, low)
    return rows[::-1]


def market_of(machine: Machine) -> str:
    """Whose machine it is, and on what terms."""
    if not machine.cloud:
        return "own machine"
    return machine.cloud + ("" if machine.spot is None else " spot" if machine.spot else " on demand")


def in_rows(attempts: Iterable[AttemptAccount]) -> Iterator[tuple[str, AttemptAccount]]:
    """Attempts as they are shown: a number, and the attempt.

    Those in a row that waited for spot, a day of which are a hundred, are one: from the start of the first to the end
    of the last, with the phases and the bill of all of them.
    """
    rows: list[list[AttemptAccount]] = []
    for one in attempts:
        before = rows[-1][-1] if rows else None
        if before and before.waited and one.waited and one.started - before.ended < LONGEST_LOOK_SECONDS:
            rows[-1].append(one)
        else:
            rows.append([one])
    for row in rows:
        first, last = row[0], row[-1]
        if first is last:
            yield str(last.number), last
        else:
            phases = {phase: math.fsum(a.phases.get(phase, 0.0) for a in row) for a in row for phase in a.phases}
            bill = total_cost(a.bill for a in row)
            yield f"{first.number} to {last.number}", replace(last, started=first.started, phases=phases, bill=bill)


def total_cost(bills: Iterable[Cost]) -> Cost:
    several = list(bills)
    return Cost(
        math.fsum(b.hours for b in several),
        math.fsum(b.usd for b in several),
        math.fsum(b.unpriced_hours for b in several),
    )


def _sums(named: Iterable[tuple[str, Cost]]) -> dict[str, Cost]:
    groups: dict[str, list[Cost]] = {}
    for name, bill in named:
        groups.setdefault(name, []).append(bill)
    return {name: total_cost(bills) for name, bills in groups.items()}


def _attempt(one: StoredHeartbeat, superseded: bool, done: int, kept: int, redone: int) -> AttemptAccount:
    beat = one.beat
    died = beat.state == "running" and (superseded or one.alive is False)
    return AttemptAccount(
        stage=beat.stage,
        prefix=one.prefix,
        number=beat.attempt,
        state="lost" if died else beat.state,
        started=beat.started,
        ended=max(beat.time, beat.started),
        skew_seconds=None if one.stored is None else one.stored - beat.time,
        host=beat.process.host,
        nodes=beat.nodes,
        machine=beat.machine,
        price_per_hour=beat.price_per_hour,
        price_source=beat.price_source,
        phases=settled_phases(beat),
        bill=_bill(beat.billed_hours * beat.nodes, beat.price_per_hour),
        resumed_from=beat.progress.resumed_from,
        step=beat.progress.step,
        steps_done=done,
        steps_kept=kept,
        steps_redone=redone,
        notice=beat.progress.notice,
        waited=bool(beat.progress.waiting),
    )


def _bill(hours: float, price: float | None) -> Cost:
    return Cost(hours, 0.0, hours) if price is None else Cost(hours, hours * price)


def _phase_bill(attempt: AttemptAccount, phase: str) -> Cost:
    return _bill(attempt.phases.get(phase, 0.0) * attempt.nodes / 3600, attempt.price_per_hour)


def _savings(attempt: AttemptAccount) -> float | None:
    on_demand = attempt.machine.on_demand_per_hour
    if on_demand is None or attempt.price_per_hour is None:
        return None
    return attempt.bill.hours * (on_demand - attempt.price_per_hour)


def cost_until(bill: Account, moment: float) -> Cost:
    """What had been billed by some moment, unix seconds."""
    parts = []
    for a in bill.attempts:
        wall = a.ended - a.started
        share = min(1.0, max(0.0, (moment - a.started) / wall)) if wall else 0.0
        parts.append(_bill(share * a.bill.hours, a.price_per_hour))
    return total_cost(parts)


def costs(bill: Account) -> dict[str, float]:
    """An account as MLflow's metrics. What isn't known is no point."""
    values = {
        "cost/usd": None if nothing_priced(bill) else bill.total.usd,
        "time/billed_hours": bill.total.hours,
        "time/goodput": bill.goodput if "train" in bill.by_stage else None,
        "cost/usd_per_billion_tokens": bill.usd_per_billion_tokens,
    }
    if bill.total.unpriced_hours:
        values["time/unpriced_hours"] = bill.total.unpriced_hours
    return {name: value for name, value in values.items() if value is not None}


def nothing_priced(bill: Account) -> bool:
    """Whether the price of all hours is unknown, so that 0 dollars would be a lie."""
    return 0 < bill.total.hours == bill.total.unpriced_hours


def account_tags(bill: Account) -> dict[str, str]:
    """An account as tags of a run: sums by stage, phase and market, to search by and to read."""
    groups = {"stage": bill.by_stage, "phase": bill.by_phase, "market": bill.by_market}
    tags = {
        f"usd_by_{name}": ", ".join(f"{key} {part.usd:.4f}" for key, part in sorted(parts.items()))
        for name, parts in groups.items()
    }
    usd = "unknown" if nothing_priced(bill) else f"{bill.total.usd:.4f}"
    tags |= {"usd": usd, "billed_hours": f"{bill.total.hours:.4f}"}
    tags["unpriced_hours"] = f"{bill.total.unpriced_hours:.4f}"
    tags["usd_lost_to_interruptions"] = f"{bill.interruptions.usd:.4f}"
    if bill.savings_usd is not None:
        tags["usd_saved_against_on_demand"] = f"{bill.savings_usd:.4f}"
    return tags


def account_table(bill: Account) -> dict[str, list[Any]]:
    """An account as columns of a table, a row an attempt."""
    phases = sorted(bill.by_phase)
    columns: dict[str, list[Any]] = {}
    for a in bill.attempts:
        row = {"stage": a.stage, "attempt": a.number, "state": a.state, "host": a.host}
        row |= {"market": market_of(a.machine), "nodes": a.nodes, "price_per_hour": a.price_per_hour}
        row |= {"price_source": a.price_source, "started": a.started, "hours": a.bill.hours}
        row |= {"usd": None if a.price_per_hour is None else a.bill.usd}
        row |= {"steps_done": a.steps_done, "steps_kept": a.steps_kept, "steps_redone": a.steps_redone}
        row |= {f"{phase}_seconds": round(a.phases.get(phase, 0.0), 3) for phase in phases}
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns
