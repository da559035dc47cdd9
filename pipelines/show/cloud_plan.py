"""The output of `plan --cloud`, and of a launch before its question."""

from rich.markup import escape
from rich.table import Table

from pipelines.cloud.checks import Finding
from pipelines.cloud.planner import Candidate, CloudPlan, name_of, number_text
from pipelines.job.prices import price_of
from pipelines.show.console import console, wrapped
from pipelines.show.findings import print_finding
from pipelines.tracking.records import Machine


def print_launch_report(reported: Finding | CloudPlan) -> None:
    """One result of a launch's checks."""
    if isinstance(reported, Finding):
        print_finding(reported)
    else:
        print_cloud_plan(reported)


def print_cloud_plan(plan: CloudPlan) -> None:
    """Print each machine in its best place, the other stages, and what the plan assumes. The chosen machine is bold."""
    out, (first, *_) = console(), plan.candidates
    out.print()
    if first.machine:
        out.print(machines_table(plan))
    if plan.chosen is not None and (machine := plan.candidates[plan.chosen].machine):
        memory = plan.candidates[plan.chosen].memory
        out.print(wrapped(f"chosen: {name_of(machine)}{f'; {memory}' if memory else ''}"))
    stages = {name: one for name, one in first.stages.items() if name != "train" or first.machine is None}
    if first.machine and stages:
        out.print("[dim]also included in all hours and dollars:[/]")
    table = Table("stage", "h", "$", "machine", box=None, pad_edge=False)
    for name, one in stages.items():
        where = f"{one.nodes} x {name_of(one.machine)}" if one.nodes > 1 else name_of(one.machine)
        table.add_row(name, number_text(one.hours), number_text(one.usd), where)
    if first.machine is None:
        table.add_row("in all", number_text(first.hours), number_text(first.usd))
    if stages:
        out.print(table)
    for line in dict.fromkeys(f"{c.speed.kind}: {c.speed.source}" for c in plan.candidates if c.speed):
        out.print(f"[dim]{wrapped(f'tokens/s {line}')}[/]")
    for line in plan.assumed:
        out.print(f"[dim]{wrapped(f'assumed: {line}')}[/]")
    for note in plan.notes:
        out.print(f"[yellow]{wrapped(note)}[/]")


def machines_table(plan: CloudPlan) -> Table:
    """Make a row for each machine and market of a cloud. ~ marks an estimated speed, ? an assumed one."""
    best: dict[tuple[object, ...], Candidate] = {}
    for one in plan.candidates:
        best.setdefault(kind_of(one), one)
    chosen = None if plan.chosen is None else kind_of(plan.candidates[plan.chosen])
    table = Table("place", "machine", box=None, pad_edge=False)
    for head in ("$/h", "tokens/s", "traffic $", "all h", "all $"):
        table.add_column(head, justify="right", no_wrap=True)
    for kind, one in best.items():
        machine, train = one.machine or Machine(), one.stages["train"]
        mark = {"measured": "", "estimated": "~"}.get(one.speed.kind if one.speed else "", "?")
        gpus = machine.accelerators or ""
        table.add_row(
            escape(f"{machine.cloud} {machine.region or ''}"),
            f"{gpus if train.nodes == 1 else f'{train.nodes} x {gpus}'}{' spot' if machine.spot else ''}",
            number_text(train.nodes * price_of(machine)),
            f"{mark}{one.speed.tokens_per_second:,.0f}" if one.speed else "?",
            f"{train.traffic_usd:,.2f}",
            number_text(one.hours),
            number_text(one.usd),
            style="bold" if kind == chosen else None,
        )
    return table


def kind_of(one: Candidate) -> tuple[object, ...]:
    """Cloud, type, GPUs and market."""
    machine = one.machine or Machine()
    return machine.cloud, machine.instance, machine.accelerators, machine.spot
