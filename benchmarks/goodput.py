"""The fraction of the paid seconds that a run keeps: `auto` checkpoints against fixed intervals.

    python -m benchmarks.goodput --traces DIR

Replays recorded spot markets. The run has a machine whenever one is available, and loses it without notice otherwise.
(That is the worst case: with the cloud's notice, no step is redone at any interval.) trainer.save_clock gives the
interval, pipelines.tracking.ledger the estimate of the time between failures, from the attempts so far. Stalls,
background saves and start-up are measured values (docs/measurements.md, one H200).
"""

from dataclasses import dataclass, field

from benchmarks import spot_traces
from pipelines.tracking.ledger import seconds_between_failures
from pipelines.tracking.records import Heartbeat
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES, RuntimeConfig
from trainer.save_clock import SaveClock

RULES: tuple[float | str, ...] = ("auto", 1.0, 5.0, 10.0, 30.0, 60.0)  # runtime.checkpoint_minutes
STARTS = 60  # of the short runs, in each trace


@dataclass(frozen=True)
class Size:
    """The cost of saving and loading a model's state, in seconds."""

    name: str
    stall: float  # of a save: training waits for it
    first_stall: float  # of an attempt's first save, which pins the memory
    background: float  # of a save, until it is committed
    load: float  # from the process's start until the clock of saves starts
    compile: float  # the first step


# Measured on an H200: the first step ends 7.7 and 12.2 s after the start of the process (about 2 s of it are that
# step). A copy of 124M's state takes 0.029 s. A save costs the training of 1558M 0.05 s. Loading the state of 1558M was
# not measured; the value is the time of writing it. The last two sizes differ in the first save: before or after its
# memory is pinned.
SIZES = (
    Size("124M", stall=0.029, first_stall=0.816, background=1.815, load=5.7, compile=2.0),
    Size("1558M", stall=0.05, first_stall=10.470, background=24.7, load=10.2 + 16.8, compile=2.0),
    Size("1558M, pinned in time", stall=0.05, first_stall=0.05, background=24.7, load=10.2 + 16.8, compile=2.0),
)


@dataclass
class Tally:
    """The use of the paid seconds."""

    billed: float = 0.0
    useful: float = 0.0  # training that a commit or the end of the run kept
    stalled: float = 0.0
    redone: float = 0.0
    started: float = 0.0  # start-up
    attempts: list[Heartbeat] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.useful / self.billed


def replay(
    spells: list[tuple[float, float]], rule: float | str, size: Size, machine_seconds: float = float("inf")
) -> Tally:
    """A run in a market, or its first `machine_seconds` on a machine."""
    runtime = RuntimeConfig.model_validate({"checkpoint_minutes": rule})
    tally = Tally()
    for begin, end in spells:
        between = seconds_between_failures(tally.attempts, PRIOR_SECONDS_BETWEEN_FAILURES)
        left = machine_seconds - tally.billed
        attempt(
            min(left, end - begin), SaveClock(runtime, between, rollbacks=False), size, tally, dies=end - begin < left
        )
        tally.attempts.append(last_heartbeat(len(tally.attempts) + 1, begin, end))
        if end - begin >= left:
            break
    return tally


def attempt(seconds: float, clock: SaveClock, size: Size, tally: Tally, dies: bool) -> None:
    """Add an attempt of `seconds` on one machine to the tally. `dies`: the machine is lost at the end."""
    last = free_at = size.load  # the clock of saves starts before the first step
    now = size.load + size.compile
    tally.billed += seconds
    tally.started += min(seconds, now)
    trained = 0.0
    saves: list[tuple[float, float]] = []  # (time of the commit, seconds of training in it)
    stall = size.first_stall
    while now < seconds:
        due = min(seconds, max(now, last + clock.interval, free_at))
        trained += due - now
        now = due + stall
        tally.stalled += min(stall, seconds - due)
        clock.saved(stall)
        clock.uploaded(size.background)  # known once the save is complete, before which no other one is due
        last, free_at, stall = now, now + size.background, size.stall
        saves.append((free_at, trained))
    useful = max((committed for at, committed in saves if at <= seconds), default=0.0) if dies else trained
    tally.useful += useful
    tally.redone += trained - useful


def last_heartbeat(number: int, started: float, ended: float) -> Heartbeat:
    """The last heartbeat of an attempt that lost its machine without notice."""
    return Heartbeat("run", "train", number, "running", started, ended, price_per_hour=0.0)


def row(name: str, goodputs: dict[float | str, float]) -> str:
    best = max((minutes for minutes in goodputs if minutes != "auto"), key=lambda m: goodputs[m])
    ratio = goodputs["auto"] / goodputs[best]
    cells = "".join(f"{goodputs[rule]:8.4f}" for rule in RULES)
    return f"{name:44}{cells}   {ratio:7.4f} of {best:g} min{'' if ratio >= 0.98 else '   MISSED'}"


def over_starts(trace: spot_traces.Trace, rule: float | str, size: Size, hours: float) -> float:
    """Goodput of the first `hours` on a machine, over runs that start at many points."""
    starts = trace.starts(STARTS, margin=trace.seconds / 2)
    tallies = [replay(trace.spells(start), rule, size, 3600 * hours) for start in starts]
    return sum(tally.useful for tally in tallies) / sum(tally.billed for tally in tallies)


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print(f"{'goodput at checkpoint_minutes':44}" + "".join(f"{rule:>8}" for rule in RULES) + "   auto / best fixed")
    for size in SIZES:
        for what, hours in (("the whole trace", None), ("the first 2 h", 2.0), ("the first 24 h", 24.0)):
            print(f"\n{size.name}, {what}")
            for trace in traces:
                goodputs = {
                    rule: replay(trace.spells(), rule, size).goodput
                    if hours is None
                    else over_starts(trace, rule, size, hours)
                    for rule in RULES
                }
                print(row(trace.name, goodputs))


if __name__ == "__main__":
    main()
