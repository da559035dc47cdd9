"""The output of `plan --cloud`, and of a launch before its question."""

from rich.markup import escape
from rich.table import Table

from pipelines.job.prices import description_of, price_of
from pipelines.user.cloud.checks import Finding
from pipelines.user.cloud.planner import Candidate, CloudPlan
from pipelines.user.show.console import console, wrapped
from pipelines.user.show.findings import print_finding

MARKS = {"measured": "", "estimated": "~"}  # of a speed; others: ?


def print_launch_report(reported: Finding | CloudPlan) -> None:
    """One result of a launch's checks."""
    print_finding(reported) if isinstance(reported, Finding) else print_cloud_plan(reported)


def print_cloud_plan(plan: CloudPlan) -> None:
    """Print each machine in its best place, the other stages, and what the plan assumes. The chosen machine is bold."""
    out, (first, *_) = console(), plan.candidates
    out.print()
    if first.machine:
        out.print(machines_table(plan))
    if plan.chosen is not None and (machine := plan.candidates[plan.chosen].machine):
        memory = plan.candidates[plan.chosen].memory
        out.print(wrapped(f"chosen: {description_of(machine)}{f'; {memory}' if memory else ''}"))
    stages = {name: one for name, one in first.stages.items() if name != "train"}
    if first.machine and stages:
        out.print("[dim]also included in all hours and dollars:[/]")
    table = Table("stage", "h", "$", "machine", box=None, pad_edge=False)
    for name, one in stages.items():
        table.add_row(name, number_text(one.hours), number_text(one.usd), escape(description_of(one.machine)))
    if first.machine is None:
        table.add_row("in all", number_text(first.hours), number_text(first.usd))
    if table.row_count:
        out.print(table)
    lines = dict.fromkeys(f"tokens/s {c.speed.kind}: {c.speed.source}" for c in plan.candidates if c.speed)
    for line in (*lines, *(f"assumed: {line}" for line in plan.assumed)):
        out.print(f"[dim]{wrapped(line)}[/]")
    for note in plan.notes:
        out.print(f"[yellow]{wrapped(note)}[/]")


def machines_table(plan: CloudPlan) -> Table:
    """Make a row for each machine and market of a cloud. ~ marks an estimated speed, ? an assumed one."""
    best: dict[tuple[object, ...], Candidate] = {}
    for one in plan.candidates:
        if machine := one.machine:
            best.setdefault((machine.cloud, machine.instance, machine.accelerators, machine.spot), one)
    chosen = None if plan.chosen is None else plan.candidates[plan.chosen]
    table = Table("place", "machine", box=None, pad_edge=False)
    for head in ("$/h", "tokens/s", "all h", "all $"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in best.values():
        train = one.stages["train"]
        machine, nodes = train.machine, f"{train.nodes} x " if train.nodes > 1 else ""
        table.add_row(
            escape(f"{machine.cloud} {machine.region or ''}"),
            f"{nodes}{machine.accelerators}{' spot' if machine.spot else ''}",
            number_text(train.nodes * price_of(machine)),
            f"{MARKS.get(one.speed.kind, '?')}{one.speed.tokens_per_second:,.0f}" if one.speed else "?",
            number_text(one.hours),
            number_text(one.usd),
            style="bold" if one is chosen else None,
        )
    return table


def number_text(number: float) -> str:
    """12.34, or ? if it is unknown."""
    return f"{number:,.2f}".replace("inf", "?")
