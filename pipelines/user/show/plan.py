"""The plan of a recipe: its size, and the state of each artifact."""

from rich.markup import escape

from pipelines.run.plan import RunPlan
from pipelines.user.show.console import console, wrapped


def print_plan(plan: RunPlan) -> None:
    out = console()
    out.print(wrapped(f"{plan.run} in {plan.store}"), style="bold")
    out.print(
        wrapped(f"{plan.parameters:,} parameters, {plan.steps:,} steps, {plan.tokens:,} tokens, {plan.flops:.2e} FLOPs")
    )
    if plan.growth:
        first, full, length = plan.growth
        out.print(wrapped(f"the batch grows from {first:,} to {full:,} tokens over the first {length:,} tokens"))
    if plan.first_weights:
        out.print(wrapped(f"begins with {plan.first_weights}"))
    if plan.rates:
        rates = ", ".join(f"{name} {value:.3g}" for name, value in plan.rates.items())
        out.print(wrapped(f"scaled rates at their peak: {rates}"))
    if plan.sources:
        train, val = sum(one.train_tokens for one in plan.sources), sum(one.val_tokens for one in plan.sources)
        size, most = f"text of {'about ' * plan.estimated}{train + val:,} tokens", "at most " * (len(plan.sources) > 1)
        epochs = f"{train:,} for training ({most}{max(one.epochs for one in plan.sources):,.2f} epochs)"
        out.print(wrapped(f"{size}: {epochs}, {val:,} for validation ({val / (train + val):.1%})"))
    for one in plan.sources:
        if len(plan.sources) > 1:
            read = f"{one.share:.1%}: {one.source}, {one.train_tokens:,} tokens, {one.epochs:,.2f} epochs"
            out.print(wrapped(f"  {read}", "    "))
        if one.cropped is not None:
            out.print(wrapped(f"rows begin with a document: {one.cropped:.1%} of the training split is cropped"))
        if one.warning:
            out.print(f"[yellow]![/] {wrapped(one.warning)}")
    if plan.validations:
        share = f"about {plan.val_share:.1%} of the training's time"
        out.print(wrapped(f"{plan.validations:,} validations of up to {plan.val_tokens:,} tokens: {share}"))
    if plan.evaluations:
        share = f"about {plan.evaluation_tokens:,} tokens, about {plan.evaluation_share:.1%} of the training's time"
        size = share if plan.evaluation_tokens else "samples of text"
        out.print(wrapped(f"{plan.evaluations:,} evaluations while training: {size}"))
    longest, wide = max(len(stage.artifact) for stage in plan.stages.values()), max(map(len, plan.stages))
    for name, stage in plan.stages.items():
        begin, state = f"{name:{wide}}  {stage.artifact:{longest}}", f"to do{f': {stage.why}' if stage.why else ''}"
        if stage.exists:
            out.print(f"{escape(begin)}  [green]✓ exists[/]")
        else:
            out.print(wrapped(f"{begin}  {state}", " " * 10))
