"""The card of a finished run: its artifacts, losses, time and cost, and the next commands."""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelines.extras.tune.tune import TUNED_METRICS
from pipelines.recipe.recipe import Recipe
from pipelines.run.runs import Summary
from pipelines.store.account import Account, total_cost
from pipelines.store.manifest import Manifest
from pipelines.user.show.console import columns, console, duration, money, several
from trainer.config.config import TARGETS

if TYPE_CHECKING:
    from pipelines.run.pipeline import Pipeline

LABEL = 12  # columns of a fact's label


def print_card(pipeline: "Pipeline", next_commands: Iterable[str]) -> None:
    """Print the card of a finished run, and the next commands."""
    run, out, width = pipeline.snapshot(), console(), columns()
    out.print(f"[bold]{pipeline.run}[/]  {run.summary.state}")
    out.print("─" * width)
    out.print(table_of_stages(pipeline, run.account))
    out.print("─" * width)
    for name, value in card_facts(pipeline, run.summary):
        lines = textwrap.wrap(value, width - LABEL, break_long_words=False, break_on_hyphens=False)
        for label, line in zip_longest([name], lines, fillvalue=""):
            out.print(f"[bold]{label:{LABEL - 1}}[/] {escape(line)}")
    titles = {stage: f"an answer after {stage}" for stage in pipeline.made if stage.startswith("tune.")}
    for stage, title in {**titles, "evaluate": "a sample without a prompt"}.items():
        sample = str(pipeline.made[stage].facts.get("sample") or "") if stage in pipeline.made else ""
        if lines := [line for line in sample.splitlines() if line.strip()]:
            out.print(Panel(Text("\n".join(lines)), title=title, title_align="left", width=width))
    out.print("[bold]Next[/]")
    for command in next_commands:
        out.print(f"  {escape(command)}")


TARGET_NAMES = {"hellaswag": "HellaSwag", "core": "CORE", "val_loss": "val loss"}
# By tuning: their labels, and their facts before and now.
CHANGES = [
    *((name, f"tune/{name}_before", f"tune/{name}") for name in TUNED_METRICS),
    *((TARGET_NAMES[name], key, key) for name, key in TARGETS.items()),
    ("HellaSwag as a chat", TARGETS["hellaswag"], "eval/hellaswag_chat_acc_norm"),
    ("CORE as a chat", TARGETS["core"], "eval/core_chat"),
]


def reached_target(recipe: Recipe, train: Manifest | None) -> str:
    """The target of train.stop_at that ended the training: "HellaSwag 0.2955"; nothing without one."""
    targets = recipe.train.stop_at.targets if recipe.train.stop_at else {}
    name = str(train.facts.get("stopped_by")) if train else ""
    return f"{TARGET_NAMES[name]} {targets[name]:g}" if name in targets else ""


def table_of_stages(pipeline: "Pipeline", account: Account) -> Table:
    table = Table("stage", "artifact", "time", "attempts", "dollars", box=None, pad_edge=False)
    for stage, manifest in pipeline.made.items():
        attempts = [one for one in account.attempts if one.prefix == manifest.prefix]  # not of an earlier evaluation
        cost = total_cost(one.bill for one in attempts)
        table.add_row(
            stage,
            f"{manifest.prefix}" + (" [dim](skipped)[/]" if pipeline.skipped[stage] else ""),
            duration(3600 * cost.hours),
            str(sum(not attempt.waited for attempt in attempts)),
            money(cost.usd, cost.unpriced_hours),
        )
    return table


def changes_by_tuning(made: Mapping[str, Manifest]) -> dict[str, list[str]]:
    """ "exact 0.300 → 0.500" and the like for each step of tuning, and for the scores of their model beside those
    of the trained weights."""
    before, found = made["evaluate"].facts if "evaluate" in made else {}, dict[str, list[str]]()
    for stage, one in made.items():
        if "." in stage:
            then = one.facts if stage.startswith("tune.") else before
            values = [(label, then.get(old), one.facts.get(new)) for label, old, new in CHANGES]
            found[stage] = [f"{label} {old:.3f} → {new:.3f}" for label, old, new in values if None not in (old, new)]
    return found


def card_facts(pipeline: "Pipeline", summary: Summary) -> list[tuple[str, str]]:
    """Labels and values of the card below the table of stages."""
    facts = [("store", pipeline.store.uri)]
    facts += [(stage, ", ".join(changes)) for stage, changes in changes_by_tuning(pipeline.made).items() if changes]
    train = pipeline.made.get("train")
    if first_weights := pipeline.recipe.first_weights:
        facts.append(("began with", first_weights))
    if train and summary.steps:
        facts += [
            ("tokens", f"{summary.tokens:,} in {summary.steps:,} steps"),
            ("speed", f"{train.fact('perf/tokens_per_second'):,.0f} tokens/s (median step)"),
            ("train loss", f"{train.fact('train/loss'):.4f}"),
        ]
    if summary.val_loss is not None:
        bits = "" if summary.bits_per_byte is None else f" ({summary.bits_per_byte:.4f} bits per byte)"
        facts.append(("val loss", f"{summary.val_loss:.4f}{bits}"))
    if summary.hellaswag_acc_norm is not None:
        facts.append(("HellaSwag", f"{summary.hellaswag_acc_norm:.4f} (completion style, acc_norm)"))
    if summary.core is not None:
        facts.append(("CORE", f"{summary.core:.4f} (centred accuracy, 22 tasks)"))
    if target := reached_target(pipeline.recipe, train):
        facts.append(("ended by", target))
    phases = sorted(summary.phases.items(), key=lambda item: -item[1])
    by_phase = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in phases if seconds >= 0.05)
    advice = "" if summary.usd else "  (--price-per-hour gives this machine a price)"
    return [
        *facts,
        ("time", f"{duration(3600 * summary.billed_hours)} billed, in {several(summary.attempts, 'attempt')}"),
        ("by phase", by_phase),
        ("dollars", money(summary.usd, summary.unpriced_hours) + advice),
    ]
