"""The output of `plan --cloud`, and of a launch before its question."""

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from pipelines.cloud.checks import Finding
from pipelines.cloud.plan import Candidate, CloudPlan, PlanWithoutTraining, StageEstimate
from pipelines.show.console import console
from pipelines.show.findings import print_finding

LEFT = ("train on", "zone", "machine", "GPUs", "market")
RIGHT = ("$/h", "tokens/s", "train", "preempted", "in all")


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
    table = Table(box=None, pad_edge=False)
    for name in LEFT:
        table.add_column(name)
    for name in RIGHT:
        table.add_column(name, justify="right")
    table.add_column("")
    for i, candidate in enumerate(plan.candidates):
        table.add_row(*map(escape, cells(candidate)), style="bold" if i == plan.chosen else None)
    out.print()
    out.print(table)
    if others := {stage: one for stage, one in plan.candidates[0].estimates.items() if stage != "train"}:
        out.print("[dim]also included in the sums:[/]")
        out.print(stages_table(others))
    for line in dict.fromkeys(f"{c.speed.kind}: {c.speed.source}" for c in plan.candidates):
        out.print(f"[dim]tokens/s {escape(line)}[/]")
    for line in plan.assumed:
        out.print(f"[dim]assumed: {escape(line)}[/]")
    for note in plan.notes:
        out.print(f"[yellow]{escape(note)}[/]")


def cells(candidate: Candidate) -> list[str]:
    offer, train, speed = candidate.offer, candidate.estimates["train"], candidate.speed
    return [
        offer.cloud,
        offer.zone or offer.region,
        offer.instance,
        f"{candidate.nodes} x {offer.accelerators}",
        offer.market,
        f"{candidate.nodes * offer.usd_per_hour:,.2f}",
        f"{'' if speed.kind == 'measured' else '~'}{speed.tokens_per_second:,.0f}",
        estimate_text(train),
        f"{train.preemptions:.1f} x" if offer.spot else "",
        f"{candidate.hours:.2f} h  ${candidate.usd:,.2f}",
        ", ".join(candidate.marks),
    ]


def print_plan_without_training(plan: PlanWithoutTraining) -> None:
    out = console()
    table = stages_table(plan.estimates)
    table.add_row("in all", f"{plan.hours:.2f} h  ${plan.usd:,.2f}")
    out.print()
    out.print(table)
    for line in plan.assumed:
        out.print(f"[dim]assumed: {escape(line)}[/]")


def stages_table(estimates: Mapping[str, StageEstimate]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for stage, one in estimates.items():
        machine = f"{one.offer.cloud} {one.offer.instance} {one.offer.market}" if one.offer else ""
        machine = f"{one.nodes} x {machine}" if one.nodes > 1 else machine
        table.add_row(stage, estimate_text(one), escape(machine))
    return table


def estimate_text(estimate: StageEstimate) -> str:
    return "exists" if estimate.offer is None else f"{estimate.hours:.2f} h  ${estimate.usd:,.2f}"
