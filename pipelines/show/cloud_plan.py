"""The output of `plan --cloud`, and of a launch before its question."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from pipelines.cloud.checks import Finding
from pipelines.cloud.estimates import StageEstimate
from pipelines.cloud.plan import Candidate, CloudPlan, PlanWithoutTraining
from pipelines.show.console import console, terminal_width, wrapped
from pipelines.show.findings import print_finding


@dataclass(frozen=True)
class Column:
    """A column of a table. A terminal that is too narrow for all does without the one of the highest rank first."""

    head: str
    cells: list[str]
    rank: int = 0  # 0: always shown
    right: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.head, *self.cells)))


GAP = 2  # between two columns


def print_launch_report(reported: Finding | CloudPlan | PlanWithoutTraining) -> None:
    """One result of a launch's checks."""
    if isinstance(reported, Finding):
        print_finding(reported)
    elif isinstance(reported, CloudPlan):
        print_cloud_plan(reported)
    else:
        print_plan_without_training(reported)


def print_cloud_plan(plan: CloudPlan) -> None:
    out = console()
    out.print()
    out.print(table_within(terminal_width(), columns_of(plan.candidates), bold=plan.chosen))
    for candidate in plan.candidates:
        if candidate.marks:
            out.print(wrapped(f"{', '.join(candidate.marks)}: {name_of(candidate)}"))
    if others := {stage: one for stage, one in plan.candidates[0].estimates.items() if stage != "train"}:
        out.print("[dim]also included in all hours and dollars:[/]")
        out.print(stages_table(others))
    for line in dict.fromkeys(f"{c.speed.kind}: {c.speed.source}" for c in plan.candidates):
        out.print(f"[dim]{wrapped(f'tokens/s {line}')}[/]")
    for line in plan.assumed:
        out.print(f"[dim]{wrapped(f'assumed: {line}')}[/]")
    for note in plan.notes:
        out.print(f"[yellow]{wrapped(note)}[/]")


def columns_of(candidates: Iterable[Candidate]) -> list[Column]:
    """The table of a plan. Hours and dollars are of all stages, but for those of training."""
    rows = [(c, c.offer, c.estimates["train"]) for c in candidates]
    return [
        Column("cloud", [offer.cloud for _, offer, _ in rows]),
        Column("zone", [offer.zone or offer.region for _, offer, _ in rows], 5),
        Column("machine", [offer.instance for _, offer, _ in rows], 3),
        Column("GPUs", [gpus_of(c) for c, _, _ in rows]),
        Column("market", [offer.market for _, offer, _ in rows]),
        Column("$/h", [f"{c.nodes * offer.usd_per_hour:,.2f}" for c, offer, _ in rows], 0, True),
        Column("tokens/s", [speed_text(c) for c, _, _ in rows], 0, True),
        Column("preempted", [f"{train.preemptions:.1f} x" if offer.spot else "" for _, offer, train in rows], 4, True),
        Column("train h", [f"{train.hours:.2f}" for _, _, train in rows], 2, True),
        Column("train $", [f"{train.usd:,.2f}" for _, _, train in rows], 1, True),
        *([traffic_column([train for _, _, train in rows])] if any(t.traffic_usd for _, _, t in rows) else []),
        Column("all h", [f"{c.hours:.2f}" for c, _, _ in rows], 0, True),
        Column("all $", [f"{c.usd:,.2f}" for c, _, _ in rows], 0, True),
    ]


def traffic_column(estimates: list[StageEstimate]) -> Column:
    """The part of the dollars of training that traffic with the store takes."""
    return Column("traffic $", [f"{one.traffic_usd:,.2f}" for one in estimates], 1, True)


def table_within(width: int, shown: list[Column], bold: int | None = None) -> Table:
    """A table of at most `width` characters, as long as its columns of rank 0 fit."""
    while (widest := max(shown, key=lambda column: column.rank)).rank:
        if sum(column.width + GAP for column in shown) - GAP <= width:
            break
        shown = [column for column in shown if column is not widest]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in shown:
        table.add_column(column.head, justify="right" if column.right else "left", no_wrap=True)
    for i, row in enumerate(zip(*(column.cells for column in shown), strict=True)):
        table.add_row(*map(escape, row), style="bold" if i == bold else None)
    return table


def name_of(candidate: Candidate) -> str:
    return f"{candidate.offer.cloud} {candidate.offer.instance} {candidate.offer.market}"


def gpus_of(candidate: Candidate) -> str:
    """H100:8, or 2 x H100:8."""
    gpus = candidate.offer.accelerators or ""
    return gpus if candidate.nodes == 1 else f"{candidate.nodes} x {gpus}"


def speed_text(candidate: Candidate) -> str:
    """~ marks an estimate, ? an assumption: no such GPU was ever measured."""
    mark = {"measured": "", "estimated": "~"}.get(candidate.speed.kind, "?")
    return f"{mark}{candidate.speed.tokens_per_second:,.0f}"


def print_plan_without_training(plan: PlanWithoutTraining) -> None:
    out = console()
    out.print()
    out.print(stages_table(plan.estimates, ["in all", f"{plan.hours:.2f}", f"{plan.usd:,.2f}", ""]))
    for line in plan.assumed:
        out.print(f"[dim]{wrapped(f'assumed: {line}')}[/]")


def stages_table(estimates: Mapping[str, StageEstimate], *more: list[str]) -> Table:
    """Hours, dollars and machine of each stage, and more rows."""
    rows = [[stage, *estimate_cells(one)] for stage, one in estimates.items()]
    heads = ("stage", "h", "$", "machine")
    cells = zip(heads, map(list, zip(*rows, *more, strict=True)), strict=True)
    return table_within(terminal_width(), [Column(head, column, right=head in "h$") for head, column in cells])


def estimate_cells(one: StageEstimate) -> list[str]:
    if one.offer is None:
        return ["exists", "", ""]
    machine = f"{one.offer.cloud} {one.offer.instance} {one.offer.market}"
    return [f"{one.hours:.2f}", f"{one.usd:,.2f}", f"{one.nodes} x {machine}" if one.nodes > 1 else machine]
