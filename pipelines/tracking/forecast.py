"""Forecast of a run's remaining time and cost, with an interval, from its own attempts.

A few hundred draws simulate the rest of the run: it trains at its own speed until it loses the machine, waits for the
next one, starts up, repeats some steps, and continues. Losses are a Poisson process, as in the ledger: its rate has a
Gamma posterior from the attempts so far and a prior that counts as one loss. Waits are drawn from the waits so far
and a prior that counts as one wait (a Bayesian bootstrap: each draw has new weights). Real markets are calm for days
and then interrupt often, so the past predicts the future less well than in a Poisson process: any number of past losses
and waits narrows the spread of the draws as if there had been one.

The middle is the median; eight of ten runs should end between low and high. docs/measurements.md has
how often they did in a replay of recorded spot markets, and the error of the middle.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from pipelines.tracking.account import AttemptAccount
from pipelines.tracking.ledger import prior_seconds_between_failures

DRAWS = 200
LOW, HIGH = 0.1, 0.9
# On the recorded markets (one zone each) a machine was missing for 1.6 hours at a time. A launch in several zones
# waits less, and its first wait shows it.
PRIOR_WAIT_SECONDS = 1.6 * 3600
PRIOR_LOST_SECONDS = 60.0  # of training, with each machine: half an interval between commits, and the save after it
TRAINING_PHASES = ("train", "redone", "checkpoint", "evaluate")  # they make steps, or steps wait for them
TAKEN_AWAY = ("lost", "interrupted", "stale")
# At most so many past losses and waits narrow the spread. With all of them, three of five intervals held on the
# recorded markets for runs of a day; with one, four of five.
PAST_COUNTS = 1.0
RECENT_WAITS = 50
ENDLESS = 500  # losses in one draw: the run makes no progress


@dataclass(frozen=True)
class Range:
    """Eight of ten runs lie between low and high. Infinite if the run makes no progress."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """The rest of a stage, from now."""

    hours: Range  # by the calendar
    machine_hours: Range  # billed, of all nodes together
    usd: Range | None  # None: the price is unknown
    interruptions: Range


@dataclass(frozen=True)
class Past:
    """The attempts so far, as parameters of those to come. Seconds."""

    seconds_per_step: float
    start_up: float  # of a machine, until it trains
    lost: float  # training to repeat for each lost machine
    losses: int
    exposed: float  # on machines, altogether
    prior: float  # between losses
    waits: tuple[float, ...]
    waiting: bool  # for a machine now


def forecast(attempts: Iterable[AttemptAccount], steps_left: float, now: float) -> Forecast | None:
    """The rest of a training run, from its attempts on one artifact; None before the first step."""
    trained = sorted((a for a in attempts if not a.waited), key=lambda a: a.number)
    past = past_of(trained, now)
    if past is None:
        return None
    draw = random.Random(len(trained) + steps_left)  # equal inputs give equal forecasts
    drawn = [simulate(past, steps_left * past.seconds_per_step, draw) for _ in range(DRAWS)]
    calendar, billed, interruptions = (quantiles(values) for values in zip(*drawn, strict=True))
    last = trained[-1]
    price = None if last.price_per_hour is None else last.nodes * last.price_per_hour + traffic_per_hour(trained)
    return Forecast(
        hours=scaled(calendar, 1 / 3600),
        machine_hours=scaled(billed, last.nodes / 3600),
        usd=None if price is None else scaled(billed, price / 3600),
        interruptions=interruptions,
    )


def traffic_per_hour(attempts: Iterable[AttemptAccount]) -> float:
    """Dollars of traffic with the store, an hour of all nodes."""
    listed = list(attempts)
    hours = math.fsum(a.ended - a.started for a in listed) / 3600
    return math.fsum(a.traffic.usd for a in listed) / hours if hours else 0.0


def training_seconds(attempt: AttemptAccount) -> float:
    """Seconds of an attempt in the phases of training."""
    return math.fsum(attempt.phases.get(phase, 0.0) for phase in TRAINING_PHASES)


def past_of(attempts: list[AttemptAccount], now: float) -> Past | None:
    """The parameters of the attempts so far, at `now` (unix seconds); None before the first step."""
    steps, training = sum(a.steps_done for a in attempts), list(map(training_seconds, attempts))
    if not steps:
        return None
    lives = [a.ended - a.started for a in attempts]
    started_up = [life - busy for a, life, busy in zip(attempts, lives, training, strict=True) if a.steps_done]
    lost = [a for a in attempts if a.state in TAKEN_AWAY]
    repeated = math.fsum(a.phases.get("redone", 0.0) + a.phases.get("lost", 0.0) for a in attempts)
    waits = [max(0.0, b.started - a.ended) for a, b in zip(attempts, attempts[1:], strict=False) if a in lost]
    last = attempts[-1]
    if waiting := last.state != "running":
        waits.append(max(0.0, now - last.ended))
    return Past(
        seconds_per_step=math.fsum(training) / steps,
        start_up=math.fsum(started_up) / len(started_up),
        lost=(PRIOR_LOST_SECONDS + repeated) / (1 + len(lost)),
        losses=len(lost),
        exposed=math.fsum(lives),
        prior=prior_seconds_between_failures(last.machine, last.nodes),
        waits=tuple(waits[-RECENT_WAITS:]),
        waiting=waiting,
    )


def simulate(past: Past, training: float, draw: random.Random) -> tuple[float, float, float]:
    """One simulated course of the rest: seconds by the calendar, seconds billed, machines lost."""
    known = 1 + min(past.losses, PAST_COUNTS)
    rate = draw.gammavariate(known, (1 + past.losses) / (past.prior + past.exposed) / known)
    known = (1 + min(len(past.waits), PAST_COUNTS)) / (1 + len(past.waits))
    weights = list(accumulate(draw.gammavariate(known, 1.0) for _ in range(len(past.waits) + 1)))

    def wait() -> float:
        chosen = draw.choices(range(len(weights)), cum_weights=weights)[0]
        return past.waits[chosen] if chosen < len(past.waits) else draw.expovariate(1 / PRIOR_WAIT_SECONDS)

    waited, billed, start_up = 0.0, 0.0, 0.0
    if past.waiting:
        waited, start_up = wait(), past.start_up
    for losses in range(ENDLESS):
        life = draw.expovariate(rate)
        if life >= start_up + training:
            billed += start_up + training
            return waited + billed, billed, losses
        billed += life
        training = min(training, training - (life - start_up) + past.lost)
        waited += wait()
        start_up = past.start_up
    return math.inf, math.inf, math.inf


def quantiles(values: Iterable[float]) -> Range:
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (LOW, 0.5, HIGH))
    return Range(low, middle, high)


def scaled(several: Range, factor: float) -> Range:
    return Range(several.low * factor, several.middle * factor, several.high * factor)
