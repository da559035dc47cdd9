"""The plan of a recipe: its size, and the state of each artifact."""

from rich.markup import escape

from pipelines.plan import RunPlan
from pipelines.show.console import columns, console, wrapped


def print_plan(plan: RunPlan) -> None:
    out = console()
    out.print(wrapped(f"{plan.run} in {plan.store}"), style="bold")
    out.print(
        wrapped(f"{plan.parameters:,} parameters, {plan.steps:,} steps, {plan.tokens:,} tokens, {plan.flops:.2e} FLOPs")
    )
    if plan.first_weights:
        out.print(wrapped(f"begins with {plan.first_weights}"))
    if text := plan.text:
        size = f"text of {'about ' if text.estimated else ''}{text.tokens:,} tokens"
        most = "at most " if text.sources else ""
        train = f"{text.train_tokens:,} for training ({most}{text.epochs:,.2f} epochs)"
        val = f"{text.val_tokens:,} for validation ({text.val_tokens / text.tokens:.1%})"
        out.print(wrapped(f"{size}: {train}, {val}"))
        for one in text.sources:
            read = f"{one.share:.1%}: {one.source}, {one.train_tokens:,} tokens, {one.epochs:,.2f} epochs"
            out.print(wrapped(f"  {read}", "    "))
        if text.cropped is not None:
            out.print(wrapped(f"rows begin with a document: {text.cropped:.1%} of the training split is cropped"))
        if text.warning:
            out.print(f"[yellow]![/] {wrapped(text.warning)}")
    if plan.validations:
        share = f"about {plan.val_share:.1%} of the training's time"
        out.print(wrapped(f"{plan.validations:,} validations of up to {plan.val_tokens:,} tokens: {share}"))
    if plan.evaluations:
        share = f"about {plan.evaluation_share:.1%} of the training's time"
        size = f"about {plan.evaluation_tokens:,} tokens" if plan.evaluation_tokens else "samples of text alone"
        out.print(wrapped(f"{plan.evaluations:,} evaluations while training, of {size}: {share}"))
    longest = max(len(stage.artifact) for stage in plan.stages.values())
    for name, stage in plan.stages.items():
        begin, state = f"{name:8}  {stage.artifact:{longest}}", f"to do{f': {stage.why}' if stage.why else ''}"
        if stage.exists:
            out.print(f"{escape(begin)}  [green]✓ exists[/]")
        elif len(begin) + 2 + len(state) <= columns():
            out.print(escape(f"{begin}  {state}"))
        else:
            out.print(escape(begin.rstrip()))
            out.print(wrapped(f"{'':10}{state}", " " * 10))
