"""The accuracy of the forecast of a run's remaining time and cost.

    python -m benchmarks.forecast --traces DIR

Replays recorded spot markets. A run trains for 6 or 24 h, starts at many points of each trace, and has a machine
whenever one is available (start-up 60 s, a commit a minute, preemption without notice). pipelines.tracking.forecast
predicts the rest at 25, 50 and 75% of the steps. For machine hours (dollars, at a fixed price) and for calendar hours,
the benchmark prints

- covered: the fraction of the intervals, nominally 80%, that contain the truth,
- error: the median of |middle - truth| / truth of the rest, and in brackets of the whole run (past and rest together).
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
class Snapshot:
    """The content of the ledger at one point of a run."""

    now: float
    billed: float
    steps_left: int
    attempts: tuple[AttemptAccount, ...]


def replay(spells: list[tuple[float, float]], work: float) -> tuple[list[Snapshot], Snapshot] | None:
    """The snapshots of a run at the shares AT, and at its end; None if the trace is too short. A step takes 1 s."""
    beats: list[Heartbeat] = []
    snapshots: list[Snapshot] = []
    base = redo = billed = 0.0
    for begin, end in spells:
        for share in AT[len(snapshots) :]:
            at = begin + START_UP + share * work - base
            if at >= end:
                break
            now = last_heartbeat(len(beats) + 1, begin, at, base, redo)
            snapshots.append(snapshot([*beats, now], at, billed + at - begin, round(work * (1 - share))))
        done = begin + START_UP + work - base
        if done <= end:
            return snapshots, snapshot([], done, billed + done - begin, 0)
        trained = max(0.0, end - begin - START_UP)
        beats.append(last_heartbeat(len(beats) + 1, begin, end, base, redo))
        billed += end - begin
        committed = trained // COMMIT_EVERY * COMMIT_EVERY
        redo = trained - committed if trained else redo
        base += committed
    return None


def last_heartbeat(number: int, begin: float, end: float, base: float, redo: float) -> Heartbeat:
    """The last heartbeat of an attempt."""
    trained = max(0.0, end - begin - START_UP)
    redone = min(trained, redo)
    steps = [round(seconds) for seconds in (base, base + trained, trained, redone)]
    progress = Progress(resumed_from=steps[0], step=steps[1], steps_done=steps[2], steps_redone=steps[3])
    phases = {"setup": min(end - begin, START_UP), "train": trained - redone, "redone": redone}
    machine = Machine(cloud="aws", spot=True)
    return Heartbeat(
        "run", "train", number, "running", begin, end, 1.0, phases=phases, progress=progress, machine=machine
    )


def snapshot(beats: list[Heartbeat], now: float, billed: float, steps_left: int) -> Snapshot:
    stored = [StoredHeartbeat("train/run", one, alive=one is beats[-1]) for one in beats]
    return Snapshot(now, billed, steps_left, account("run", stored).attempts)


@dataclass
class Scores:
    """The scores of many forecasts of one quantity."""

    held: list[bool]
    of_rest: list[float]
    of_all: list[float]

    def add(self, predicted: Range, truth: float, already: float) -> None:
        self.held.append(predicted.low <= truth <= predicted.high)
        self.of_rest.append(abs(predicted.middle - truth) / truth)
        self.of_all.append(abs(predicted.middle - truth) / (already + truth))

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
    in_trace = {share: (Scores([], [], []), Scores([], [], [])) for share in AT}
    for start in trace.starts(STARTS, margin=trace.seconds / 3):
        replayed = replay(trace.spells(start), 3600 * hours)
        if replayed is None:
            continue
        snapshots, end = replayed
        for share, at in zip(AT, snapshots, strict=True):
            predicted = forecast(at.attempts, at.steps_left, at.now)
            assert predicted is not None and predicted.usd is not None
            for usd, calendar in (in_trace[share], everything[share]):
                usd.add(predicted.usd, (end.billed - at.billed) / 3600, at.billed / 3600)
                calendar.add(predicted.hours, (end.now - at.now) / 3600, at.now / 3600)
    return in_trace


if __name__ == "__main__":
    main()
