"""The output of the verbs status and stop."""

import time
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from pipelines.run.stages.follow import describe
from pipelines.store.account import Forecast
from pipelines.store.ledger import SILENT_SECONDS
from pipelines.store.records import Heartbeat, Progress
from pipelines.user.cloud.control import Status
from pipelines.user.cloud.skypilot import TaskStatus
from pipelines.user.show.bill import over_budget
from pipelines.user.show.console import console, duration, money, printable, say, several
from trainer.base.record import LAST_SECOND
from trainer.config.errors import EXIT_STOPPED

STEPLESS_SECONDS = 120.0  # without a row, before `status` says so
ENDED = ("failed", "interrupted", "lost", "stopped")  # states in which nobody trains


def print_status(runs: list[Status], notes: Iterable[str] = ()) -> None:
    """A paragraph for each run."""
    out = console()
    for run in runs:
        summary, stage = run.summary, run.newest.stage if run.newest else None
        progress = run.newest.progress if run.newest else Progress()
        out.print(f"[bold]{shown(run.run)}[/]  {shown(run.state)}" + (f" in {shown(stage)}" if stage else ""))
        if run.budget and summary.usd > run.budget:
            out.print(f"  [bold red]{over_budget(summary.usd, run.budget)}[/]")
        tokens_per_second = progress.metrics.get("perf/tokens_per_second")
        speed = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else None
        losses = [("train", summary.train_loss), ("val", summary.val_loss)]
        known = [f"{name} loss {value:.4f}" for name, value in losses if value is not None]
        step = f"step {run.step:,} of {run.max_steps:,}" if run.max_steps else None  # none: without a training
        if facts := list(filter(None, [step, speed, *known])):
            out.print("  " + "  ".join(facts))
        if stage and stage.startswith("tune."):
            out.print(f"  {shown(stage)}: {describe(progress.step or 0, progress.metrics)}")
        where = f" on {shown(', then '.join(run.places))}" if run.places else ""
        recovered = f", {run.recoveries} recovered by SkyPilot" if run.tasks else ""
        spent = f"${money(summary.usd, summary.unpriced_hours)} so far"
        out.print(f"  {spent}, in {several(summary.attempts, 'attempt')}{where}{recovered}")
        if run.to_come:
            out.print(f"  {to_go(run, run.to_come)}")
        if run.silent_seconds and run.silent_seconds > SILENT_SECONDS:
            out.print(f"  [yellow]no heartbeat for {duration(run.silent_seconds)}[/]")
        if run.stepless_seconds and run.stepless_seconds > STEPLESS_SECONDS:
            out.print(f"  [yellow]no new step for {duration(run.stepless_seconds)}[/]")
        if run.unsaved_seconds is not None:
            since = duration(run.unsaved_seconds)
            out.print(f"  [bold red]NO CHECKPOINT IS SAVED for {since}:[/] {shown(progress.unsaved_because or '')}")
        if progress.killed:
            out.print(f"  [yellow]{shown(progress.killed)}[/]")
        if run.stop_request:
            out.print(f"  [yellow]stop requested:[/] {shown(str(run.stop_request))}")
        if progress.notice:
            out.print(f"  last asked to stop by: {shown(progress.notice)}")
        print_tasks(out, run)
    for note in notes:
        out.print(f"[yellow]{shown(note)}[/]")


def print_jobs(tasks: Iterable[TaskStatus]) -> None:
    """A line for each task, for a store that does not answer."""
    for task in tasks:
        console().print(f"job {task.job}  {shown(task.name)}  {shown(task.stage)}  {shown(task.status)}")


def print_tasks(out: Console, run: Status) -> None:
    for task in run.tasks:
        status, why = task.status, task.why
        if task.over and task.exit_code == EXIT_STOPPED:  # to SkyPilot, a failure of the program
            notice = run.newest.progress.notice if run.newest and run.state == "stopped" else None
            status, why = "stopped", notice or f"by request or its budget; `skytrain logs {run.run}` says which"
        recoveries = f", recovered {several(task.recoveries, 'time')}" if task.recoveries else ""
        reason = f": {shown(why)}" if why else ""
        out.print(f"  job {task.job}  {shown(task.stage):9} {shown(status)}{recoveries}{reason}")
    if run.tasks and all(task.over for task in run.tasks) and run.state != "done":
        out.print(shown(f"  the job is over and the run is not: skytrain resume {run.run} continues it"))


def print_stopped(run: str, before: Heartbeat | None, after: Heartbeat | None, launched: bool) -> None:
    """Print the result of a stop request. `before` and `after`: the running attempt before it, and after the wait."""
    if after is None:
        crashed = f"{before.stage}: attempt {before.attempt} has crashed; " if before else "no attempt runs; "
        removal = f"; skytrain down {run} removes its machines" if launched else ""
        text = f"{crashed}the stop request also stops a later launch{removal}"
    elif after.state == "running":
        text = f"{after.stage}: attempt {after.attempt} still runs; the stop request stands, and it will exit"
    else:
        step = "" if after.progress.step is None else f" at step {after.progress.step:,}"
        again = f"once its job is over, skytrain resume {run}" if launched else f"skytrain run run:{run}"
        text = f"{after.stage}: attempt {after.attempt} is {after.state}{step}; {again} continues"
    say(f"{run}: {text}")


def to_go(run: Status, rest: Forecast) -> str:
    """ "4 min 10 s and $0.31 to go; trained about Mon 30 Nov 12:00, $2.40 in all"."""
    end = time.strftime("%a %d %b %H:%M", time.localtime(min(LAST_SECOND, time.time() + rest.hours * 3600)))
    usd, total = (f" and ${rest.usd:,.2f}", f", ${run.summary.usd + rest.usd:,.2f} in all") if rest.usd else ("", "")
    return f"{duration(3600 * rest.hours)}{usd} to go" + ("" if run.state in ENDED else f"; trained about {end}{total}")


def shown(text: str) -> str:
    """Text from the store or from SkyPilot, without control characters and markup."""
    return escape(printable(text))
