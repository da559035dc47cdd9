"""The plan of a recipe: its size, and the state of each artifact."""

from rich.markup import escape

from pipelines.plan import RunPlan
from pipelines.show.console import console


def print_plan(plan: RunPlan) -> None:
    out = console()
    out.print(f"[bold]{plan.run}[/] in {escape(plan.store)}")
    out.print(
        f"{plan.parameters:,} parameters, {plan.steps:,} steps, {plan.tokens:,} tokens, "
        f"{plan.flops:.2e} FLOPs (tokens x (6N + 12·L·C·T))"
    )
    longest = max(len(stage.artifact) for stage in plan.stages.values())
    for name, stage in plan.stages.items():
        state = "[green]✓ exists[/]" if stage.exists else f"to do: {escape(stage.why or '')}"
        out.print(f"{name:8}  {stage.artifact:{longest}}  {state}")
