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
    if text := plan.text:
        about = "about " if text.estimated else ""
        out.print(
            f"text of {about}{text.tokens:,} tokens: {text.train_tokens:,} for training ({text.epochs:,.2f} epochs), "
            f"{text.val_tokens:,} for validation ({text.val_tokens / text.tokens:.1%})"
        )
        if text.warning:
            out.print(f"[yellow]![/] {text.warning}")
    longest = max(len(stage.artifact) for stage in plan.stages.values())
    for name, stage in plan.stages.items():
        state = "[green]✓ exists[/]" if stage.exists else f"to do: {escape(stage.why or '')}"
        out.print(f"{name:8}  {stage.artifact:{longest}}  {state}")
