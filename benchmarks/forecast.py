"""How good is the forecast of what a run will still take and cost?

    python -m benchmarks.forecast --traces DIR

Replays recorded spot markets: runs of 6 and of 24 h of training, begun at many moments of each trace, on a
machine whenever there is one (start-up 60 s, a commit a minute, deaths without a word). At 25, 50 and 75% of
the steps pipelines.tracking.forecast is asked what is left, and told afterwards what it was. For machine hours
(so dollars, at a fixed price) and for hours by the calendar it prints

- covered: how many of the intervals, which promise 80%, held the truth,
- error: the median of |middle - truth| / truth of what is left, and in brackets of the whole run: what was
  there already and what is left together.
"""

from dataclasses import dataclass

from numpy import median

from benchmarks import spot_traces
from pipelines.tracking.account import AttemptAccount, StoredHeartbeat, account
from pipelines.tracking.forecast import Range, forecast
from pipelines.tracking.records import Heartbeat, Machine, Progress

START_UP, COMMIT_EVERY = 60.0, 60.0
WORK_HOURS = (6.0, 24.0)
AT = (0.25, 0.5, 0.75)
STARTS = 40  # of each trace


@dataclass(frozen=True)
class Moment:
    """Somewhere in a run: what the ledger knew there."""

    now: float
    billed: float
    steps_left: int
    attempts: tuple[AttemptAccount, ...]


def replay(spells: list[tuple[float, float]], work: float) -> tuple[list[Moment], Moment] | None:
    """The moments of a run at which it was asked, and its end; None if the trace was too short for it.

    A step takes a second.
    """
    beats: list[Heartbeat] = []
    asked: list[Moment] = []
    base = redo = billed = 0.0
    for begin, end in spells:
        for share in AT[len(asked) :]:
            at = begin + START_UP + share * work - base
            if at >= end:
                break
            now = beat(len(beats) + 1, begin, at, base, redo)
            asked.append(moment([*beats, now], at, billed + at - begin, round(work * (1 - share))))
        done = begin + START_UP + work - base
        if done <= end:
            return asked, moment([], done, billed + done - begin, 0)
        trained = max(0.0, end - begin - START_UP)
        beats.append(beat(len(beats) + 1, begin, end, base, redo))
        billed += end - begin
        committed = trained // COMMIT_EVERY * COMMIT_EVERY
        redo = trained - committed if trained else redo
        base += committed
    return None


def beat(number: int, begin: float, end: float, base: float, redo: float) -> Heartbeat:
    """An attempt's last words."""
    trained = max(0.0, end - begin - START_UP)
    redone = min(trained, redo)
    progress = Progress(resumed_from=base, step=base + trained, steps_done=trained, steps_redone=redone)
    phases = {"setup": min(end - begin, START_UP), "train": trained - redone, "redone": redone}
    machine = Machine(cloud="aws", spot=True)
    return Heartbeat(
        "run", "train", number, "running", begin, end, 1.0, phases=phases, progress=progress, machine=machine
    )


def moment(beats: list[Heartbeat], now: float, billed: float, steps_left: int) -> Moment:
    seen = [StoredHeartbeat("train/run", one, alive=one is beats[-1]) for one in beats]
    return Moment(now, billed, steps_left, account("run", seen).attempts)


@dataclass
class Scores:
    """Of many forecasts of one quantity."""

    held: list[bool]
    of_rest: list[float]
    of_all: list[float]

    def add(self, told: Range, truth: float, already: float) -> None:
        self.held.append(told.low <= truth <= told.high)
        self.of_rest.append(abs(told.middle - truth) / truth)
        self.of_all.append(abs(told.middle - truth) / (already + truth))

    def __str__(self) -> str:
        covered = sum(self.held) / len(self.held)
        return f"{covered:8.0%}{median(self.of_rest):8.1%} ({median(self.of_all):5.1%})"


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print(f"{'':52}{'dollars':>15}{'calendar':>24}")
    print(f"{'':44}" + f"{'covered':>8}{'error':>8}{'':8}" * 2)
    for hours in WORK_HOURS:
        everything = {share: (Scores([], [], []), Scores([], [], [])) for share in AT}
        for trace in traces:
            for share, (usd, calendar) in scores(trace, hours, everything).items():
                print(f"{f'{hours:g} h at {share:.0%}  {trace.name}':44}{usd}{calendar}", flush=True)
        for share, (usd, calendar) in everything.items():
            print(f"{f'{hours:g} h at {share:.0%}  all':44}{usd}{calendar}\n")


def scores(
    trace: spot_traces.Trace, hours: float, everything: dict[float, tuple[Scores, Scores]]
) -> dict[float, tuple[Scores, Scores]]:
    mine = {share: (Scores([], [], []), Scores([], [], [])) for share in AT}
    for start in trace.starts(STARTS, margin=trace.seconds / 3):
        went = replay(trace.spells(start), 3600 * hours)
        if went is None:
            continue
        asked, end = went
        for share, at in zip(AT, asked, strict=True):
            told = forecast(at.attempts, at.steps_left, at.now)
            assert told is not None and told.usd is not None
            for usd, calendar in (mine[share], everything[share]):
                usd.add(told.usd, (end.billed - at.billed) / 3600, at.billed / 3600)
                calendar.add(told.hours, (end.now - at.now) / 3600, at.now / 3600)
    return mine


if __name__ == "__main__":
    main()
