"""The output of the verbs status and stop."""

import time
from collections.abc import Iterable

from rich.markup import escape

from pipelines.cloud.control import Status
from pipelines.show.console import console, duration, money, printable, say
from pipelines.tracking.ledger import SILENT_SECONDS
from pipelines.tracking.records import Heartbeat


def print_status(runs: list[Status], notes: Iterable[str] = ()) -> None:
    """A paragraph for each run."""
    out = console()
    for run in runs:
        out.print(f"[bold]{escape(run.run)}[/]  {run.state}" + (f" in {run.stage}" if run.stage else ""))
        speed = f"{run.tokens_per_second:,.0f} tokens/s" if run.tokens_per_second else None
        losses = [f"{n} loss {v:.4f}" for n, v in (("train", run.train_loss), ("val", run.val_loss)) if v is not None]
        out.print("  " + "  ".join(filter(None, [f"step {run.step:,} of {run.max_steps:,}", speed, *losses])))
        recovered = f", {run.recoveries} recovered by SkyPilot" if run.tasks else ""
        out.print(f"  ${money(run.usd, run.unpriced_hours)} so far, in {run.attempts} attempt(s){recovered}")
        if run.to_come:
            hours, usd = run.to_come.hours, run.to_come.usd
            cost = f" and ${_span(usd.low, usd.middle, usd.high)}" if usd else ""
            out.print(f"  training left: {_span(hours.low, hours.middle, hours.high)} hours{cost} (eight of ten)")
            end = time.strftime("%a %d %b %H:%M", time.localtime(time.time() + hours.middle * 3600))
            total = f", ${run.usd + usd.middle:,.2f} in all" if usd else ""
            out.print(f"  trained about {end}{total}")
        if run.silent_seconds and run.silent_seconds > SILENT_SECONDS:
            out.print(f"  [yellow]no heartbeat for {duration(run.silent_seconds)}[/]")
        if run.stop_request:
            out.print(f"  [yellow]to be stopped:[/] {escape(str(run.stop_request))}")
        if run.notice:
            out.print(f"  last asked to stop by: {escape(run.notice)}")
        for task in run.tasks:
            recoveries = f", recovered {task.recoveries} time(s)" if task.recoveries else ""
            why = f": {escape(printable(task.why))}" if task.why else ""
            out.print(f"  job {task.job}  {task.stage:9} {task.status}{recoveries}{why}")
    for note in notes:
        out.print(f"[yellow]{escape(printable(note))}[/]")


def print_stopped(run: str, before: Heartbeat | None, after: Heartbeat | None, launched: bool) -> None:
    """The result of a stop request. `before` and `after`: the running attempt before it, and at the end of the wait."""
    if after is None:
        died = f"{before.stage}: attempt {before.attempt} has died; " if before else "no attempt runs; "
        removal = f"; skytrain down {run} removes its machines" if launched else ""
        say(f"{run}: {died}the stop request also stops a later launch{removal}")
    elif after.state == "running":
        say(f"{run}: {after.stage}: attempt {after.attempt} still runs; the stop request stands, and it will exit")
    else:
        step = "" if after.progress.step is None else f" at step {after.progress.step:,}"
        again = f"resume {run}" if launched else f"run run:{run}"
        say(f"{run}: {after.stage}: attempt {after.attempt} is {after.state}{step}; skytrain {again} continues")


def _span(low: float, middle: float, high: float) -> str:
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
