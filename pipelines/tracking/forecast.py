"""How long a run will still take and what that will cost, with an interval: from its own attempts so far.

What is left is drawn a few hundred times, as it may come: the run trains at its own speed until the machine
is taken away, waits for the next one, starts up, does a little again, and goes on. How often machines are taken
away is as the ledger estimates it, a Poisson process whose rate has a Gamma posterior from the attempts so far
and a prior that counts as one loss; waits are drawn from the waits so far and a prior that counts as one (a
Bayesian bootstrap: each draw weighs them anew). Real markets are calm for days and then flicker, so that the
past tells less of the future than in a Poisson process: however many losses and waits it had, it narrows the
spread of the draws as if it had been one.
The middle is the median; eight of ten runs should end between low and high. How often they do, and how far
off the middle is, benchmarks/forecast.py measures on recorded spot markets.
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
# On the recorded markets (one zone each) a machine was away for 1.6 hours at a time; a launch that may take
# any of several zones waits less, and says so with its first wait.
PRIOR_WAIT_SECONDS = 1.6 * 3600
PRIOR_LOST_SECONDS = 60.0  # of training, with a machine: half an interval between commits, and the save behind it
TRAINING_PHASES = ("train", "redone", "checkpoint", "evaluate")  # in which steps are made, or have to be waited for
TAKEN_AWAY = ("lost", "interrupted", "stale")
# Losses, waits: by how many at most the past narrows the spread. By all, three of five intervals held on the
# recorded markets with runs of a day; by one, four of five.
PAST_COUNTS = 1.0
RECENT_WAITS = 50
ENDLESS = 500  # losses in one draw: it gets nowhere


@dataclass(frozen=True)
class Range:
    """Eight of ten between low and high. Infinite where the run gets nowhere."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """What is left of a stage, from now."""

    hours: Range  # by the calendar
    machine_hours: Range  # on the bill, of all nodes together
    usd: Range | None  # None: the price is unknown
    interruptions: Range


@dataclass(frozen=True)
class Past:
    """What the attempts so far tell of those to come. Seconds."""

    seconds_per_step: float
    start_up: float  # of a machine, until it trains
    lost: float  # training that has to be done again for each machine that is taken away
    losses: int
    exposed: float  # on machines, altogether
    prior: float  # between losses
    waits: tuple[float, ...]
    waiting: bool  # for a machine, now


def forecast(attempts: Iterable[AttemptAccount], steps_left: float, now: float) -> Forecast | None:
    """The rest of a training run; None while no step was made. Of an account, the attempts of one artifact."""
    mine = sorted((a for a in attempts if not a.waited), key=lambda a: a.number)
    past = past_of(mine, now)
    if past is None:
        return None
    draw = random.Random(len(mine) + steps_left)  # the same question has the same answer
    drawn = [course(past, steps_left * past.seconds_per_step, draw) for _ in range(DRAWS)]
    calendar, billed, interruptions = (quantiles(values) for values in zip(*drawn, strict=True))
    last = mine[-1]
    price = None if last.price_per_hour is None else last.nodes * last.price_per_hour
    return Forecast(
        hours=scaled(calendar, 1 / 3600),
        machine_hours=scaled(billed, last.nodes / 3600),
        usd=None if price is None else scaled(billed, price / 3600),
        interruptions=interruptions,
    )


def training_seconds(attempt: AttemptAccount) -> float:
    return math.fsum(attempt.phases.get(phase, 0.0) for phase in TRAINING_PHASES)


def past_of(attempts: list[AttemptAccount], now: float) -> Past | None:
    steps, training = sum(a.steps_done for a in attempts), list(map(training_seconds, attempts))
    if not steps:
        return None
    lives = [a.ended - a.started for a in attempts]
    started_up = [life - busy for a, life, busy in zip(attempts, lives, training, strict=True) if a.steps_done]
    lost = [a for a in attempts if a.state in TAKEN_AWAY]
    again = math.fsum(a.phases.get("redone", 0.0) + a.phases.get("lost", 0.0) for a in attempts)
    waits = [max(0.0, b.started - a.ended) for a, b in zip(attempts, attempts[1:], strict=False) if a in lost]
    last = attempts[-1]
    if waiting := last.state != "running":
        waits.append(max(0.0, now - last.ended))
    return Past(
        seconds_per_step=math.fsum(training) / steps,
        start_up=math.fsum(started_up) / len(started_up),
        lost=(PRIOR_LOST_SECONDS + again) / (1 + len(lost)),
        losses=len(lost),
        exposed=math.fsum(lives),
        prior=prior_seconds_between_failures(last.machine, last.nodes),
        waits=tuple(waits[-RECENT_WAITS:]),
        waiting=waiting,
    )


def course(past: Past, training: float, draw: random.Random) -> tuple[float, float, float]:
    """One way it may go: seconds by the calendar, seconds billed, machines lost."""
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
