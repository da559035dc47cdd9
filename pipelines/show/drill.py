"""The result of a drill in the terminal."""

from rich.table import Table

from pipelines.drill.verdict import DrillReport
from pipelines.show.console import console


def print_report(report: DrillReport) -> None:
    """Print each fault with its failpoint and its cost, then the comparisons."""
    faults = Table("#", "fault", "at", "stage", "attempt", "step", "redone", "seconds", box=None, pad_edge=False)
    for number, fault in enumerate(report.faults, 1):
        seconds = None if fault.seconds is None else f"{fault.seconds:.1f}"
        numbers = [fault.attempt, fault.at_step, fault.redone, seconds]
        cells = ("–" if value is None else str(value) for value in numbers)
        faults.add_row(str(number), fault.kind, fault.failpoint, fault.stage, *cells)
    marks = {True: "[green]equal[/]", False: "[red]NOT EQUAL[/]", None: "[dim]not compared[/]"}
    comparisons = Table(box=None, pad_edge=False, show_header=False)
    for verdict in report.verdicts:
        comparisons.add_row(verdict.what, marks[verdict.equal], verdict.detail)
    redone = sum(fault.redone or 0 for fault in report.faults)
    out = console()
    out.print(faults)
    out.print()
    out.print(comparisons)
    out.print()
    out.print(f"{len(report.faults)} faults, {redone} steps redone, {report.seconds:.0f} s, seed {report.seed}")
    if not report.passed:
        out.print(f"kept for inspection: {report.store}")
