"""Where the seconds and the dollars of a run went: the ledger's attempts, added up.

Pure arithmetic over heartbeats. Every second of an attempt has a phase, and the phases of an attempt sum
to its wall time; an attempt's own clock measures it, so clocks that differ between machines do no harm.
Hours, and the seconds of phases once they are summed, are machine time: two nodes for an hour are two hours.
Hours whose price is unknown are kept apart in every sum.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.tracking.ledger import HEARTBEAT_SECONDS, Heartbeat

# What an attempt has to do again, or sits through, because the one before it was cut off.
RECOVERY_PHASES = ("provision", "setup", "download", "compile", "idle")
WASTED_PHASES = ("redone", "lost")


@dataclass(frozen=True)
class Seen:
    """An attempt's heartbeat as it lies in the store."""

    prefix: str
    beat: Heartbeat
    stored: float | None = None  # unix seconds, by the store's clock
    alive: bool | None = None  # None: can't be told from here


@dataclass(frozen=True)
class Bill:
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
    machine: dict[str, Any]  # cloud, region, instance, spot, accelerators, …: as far as they are known
    price_per_hour: float | None  # of one node
    price_source: str
    phases: dict[str, float]  # seconds; they sum to ended - started
    bill: Bill
    resumed_from: int | None  # step; None if it never came to train
    step: int | None  # where it stood at last
    steps_done: int
    steps_kept: int  # of these, those that no later attempt has done again (yet)
    steps_redone: int  # of these, those that an earlier attempt had done already
    notice: str | None  # what asked it to leave


@dataclass(frozen=True)
class Account:
    """Everything a run cost, and for what."""

    run: str
    attempts: tuple[AttemptAccount, ...]  # in the order in which they started
    total: Bill
    by_stage: dict[str, Bill]
    by_phase: dict[str, Bill]
    by_market: dict[str, Bill]  # "own machine", "aws spot", "gcp on demand", …
    tokens: int  # trained on, steps that were done twice counted once
    goodput: float | None  # seconds of training, each step counted once, of all billed seconds
    usd_per_billion_tokens: float | None  # None while a price is unknown
    interruptions: Bill  # what being cut off cost: work done again, time lost, the way back to where it was
    savings_usd: float | None  # against the on-demand price of the same machines, where it is known
    deaths: int  # attempts that ended without a word
    unseen_seconds: float  # bound on what is missing from the bill: a heartbeat's interval for each of them
    faults: tuple[str, ...] = ()  # what could not be read, so is on no bill
