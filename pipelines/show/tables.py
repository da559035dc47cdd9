"""What the verbs print: the run card, the plan, the table of runs, the recipes."""

import csv
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelines.artifacts.manifest import ArtifactPlan, Manifest, differences, find, read_manifest
from pipelines.recipe import Recipe, load_recipe, shipped
from pipelines.stage import plans_of, run_name
from pipelines.tracking.account import Account, AttemptAccount, Cost, market_of, merge_waits
from pipelines.tracking.audit import Audit
from pipelines.tracking.clusters import read_intervals, reconcile
from pipelines.tracking.compare import Comparison
from pipelines.tracking.ledger import attempts
from pipelines.tracking.runs import Summary
from trainer.store import LocalStore, Store

if TYPE_CHECKING:
    from pipelines.stage import Pipeline

# The arithmetic of `skytrain recipes`: 8xH100 at half of the dense bf16 peak, at Lambda's on-demand price.
# Source of the price: SkyPilot's catalog, read 2026-11; of the peak: NVIDIA's data sheet.
NODE_FLOPS, ASSUMED_MFU, NODE_USD_PER_HOUR = 8 * 989e12, 0.50, 31.92
SERIES = {  # CSV column -> metric
    "step": "step",
    "train/loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens/s": "perf/tokens_per_second",
}
PHASES_FIRST = (
    *("provision", "setup", "download", "tokenize", "compile", "train", "redone", "evaluate", "export"),
    *("checkpoint", "upload", "idle", "lost"),
)


def console() -> Console:
    """Standard output. A table takes what it needs of the width: a narrow terminal wraps, and cuts no name."""
    return Console(highlight=False, soft_wrap=True, width=240)


def print_card(pipeline: "Pipeline") -> None:
    """What a finished run was, made and cost, and where to look further."""
    run, out = pipeline.snapshot(), console()
    summary, bill = run.summary, run.account
    stages = Table("stage", "artifact", "time", "attempts", "dollars", box=None, pad_edge=False)
    for stage, manifest in pipeline.made.items():
        mine = bill.by_stage.get(stage, Cost())
        stages.add_row(
            stage,
            f"{manifest.prefix}" + (" [dim](skipped)[/]" if pipeline.skipped[stage] else ""),
            duration(3600 * mine.hours),
            str(sum(attempt.stage == stage and not attempt.waited for attempt in bill.attempts)),
            money(mine.usd, mine.unpriced_hours),
        )
    facts = Table.grid(padding=(0, 2))
    for name, value in card_facts(pipeline, summary):
        facts.add_row(f"[bold]{name}[/]", escape(value))
    out.print()
    out.print(f"[bold]{pipeline.run}[/]  {summary.state}")
    out.print("─" * 100)
    out.print(stages)
    out.print()
    out.print(facts)
    evaluated = pipeline.made.get("evaluate")
    if evaluated and evaluated.facts.get("sample"):
        text = Text(printable(evaluated.facts["sample"]))
        out.print(Panel(text, title="a sample, from nothing", title_align="left", width=100))
    out.print("[bold]Look further[/]")
    for command in next_commands(pipeline):
        out.print(f"  {escape(command)}")


def card_facts(pipeline: "Pipeline", summary: Summary) -> list[tuple[str, str]]:
    facts = [("store", pipeline.store.uri)]
    train = pipeline.made.get("train")
    if train:
        facts += [
            ("tokens", f"{summary.tokens:,} in {summary.steps:,} steps"),
            ("speed", f"{train.facts['perf/tokens_per_second']:,.0f} tokens/s (median step)"),
            ("train loss", f"{train.facts['train/loss']:.4f}"),
        ]
    if summary.val_loss is not None:
        facts.append(("val loss", f"{summary.val_loss:.4f}"))
    if summary.hellaswag_acc_norm is not None:
        facts.append(("HellaSwag", f"{summary.hellaswag_acc_norm:.4f} (completion style, acc_norm)"))
    order = {phase: i for i, phase in enumerate(PHASES_FIRST)}
    phases = sorted(summary.phases.items(), key=lambda item: order.get(item[0], len(order)))
    facts += [
        ("time", f"{duration(3600 * summary.billed_hours)} billed, in {summary.attempts} attempt(s)"),
        (
            "by phase",
            ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in phases if seconds >= 0.05),
        ),
        (
            "dollars",
            money(summary.usd, summary.unpriced_hours)
            + ("" if summary.usd else "  (--price-per-hour gives this machine a price)"),
        ),
    ]
    return facts


def next_commands(pipeline: "Pipeline") -> list[str]:
    """What to type next, as it can be typed here."""
    skytrain = program("skytrain")
    at_home = pipeline.store.uri == f"file://{pipeline.home / 'store'}"
    option = "" if at_home else f" --store {shlex.quote(pipeline.store.uri)}"
    commands = [
        f"{skytrain} report{option}",
        f"{skytrain} report {pipeline.run} --series{option}",
        f"{skytrain} report {pipeline.run} --html report.html{option}",
        f'{skytrain} sample {pipeline.run} --prompt "def "{option}',
    ]
    if not pipeline.tracker.off and pipeline.tracker.uri.startswith("sqlite:"):  # a server's URI may hold a password
        commands.append(f"{program('mlflow')} ui --backend-store-uri {shlex.quote(pipeline.tracker.uri)}")
    export = pipeline.made.get("export")
    if export and isinstance(pipeline.store, LocalStore):
        folder = pipeline.store.path_of(f"{export.prefix}/{export.files[0].key}").parent
        commands.append(f"transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    return commands


def program(name: str) -> str:
    """How a program of this environment is called from here: by name if that finds it, else by its path."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    return name if found and Path(found) == beside else shlex.quote(os.path.relpath(beside))


def plan_of(recipe: Recipe, store: Store, plans: dict[str, ArtifactPlan] | None = None) -> dict[str, Any]:
    """What `run` would make: per stage the artifact, whether it is there, and why not."""
    plans = plans or plans_of(recipe)
    return {
        "run": run_name(plans),
        "store": store.uri,
        "parameters": recipe.model.parameters,
        "steps": recipe.train.max_steps,
        "tokens": recipe.train_tokens,
        "flops": recipe.train_flops,
        "stages": {stage: _planned(store, plan) for stage, plan in plans.items()},
    }


def _planned(store: Store, plan: ArtifactPlan) -> dict[str, Any]:
    exists = find(store, plan) is not None
    shown: dict[str, Any] = {"artifact": plan.prefix, "fingerprint": plan.fingerprint, "exists": exists}
    if exists:
        return shown
    tried = attempts(store, plan.prefix)
    if tried:
        counts = {"step": tried[-1].progress.step, "tokens": tried[-1].progress.tokens}
        where = "".join(f", {name} {count:,}" for name, count in counts.items() if count is not None)
        shown["why"] = f"attempt {tried[-1].attempt} is {tried[-1].state}{where}: run goes on from its last commit"
        return shown
    sibling, different = nearest_sibling(store, plan)
    if sibling is None:
        shown["why"] = f"nothing like it in {plan.prefix.partition('/')[0]}/ yet"
    else:
        shown["sibling"] = sibling.prefix
        shown["differs"] = {field: {"here": a, "there": b} for field, (a, b) in different.items()}
        fields = [f"{field}: {_short(a)} here, {_short(b)} there" for field, (a, b) in different.items()]
        more = f" and {len(fields) - 3} more fields" if len(fields) > 3 else ""
        shown["why"] = f"differs from {sibling.prefix} in {'; '.join(fields[:3])}{more}"
    return shown


def nearest_sibling(store: Store, plan: ArtifactPlan) -> tuple[Manifest | None, dict[str, tuple[Any, Any]]]:
    """The finished artifact of the same stage that differs in the fewest fields, and those fields."""
    folder = plan.prefix.partition("/")[0]
    keys = (e.key for e in store.entries(f"{folder}/") if e.key.endswith("/MANIFEST.json"))
    others = [m for key in keys if (m := read_manifest(store, key.removesuffix("/MANIFEST.json")))]
    found = [(m, differences(plan.identity, m.identity)) for m in others]
    return min(found, key=lambda pair: len(pair[1]), default=(None, {}))


def print_plan(shown: dict[str, Any]) -> None:
    out = console()
    out.print(f"[bold]{shown['run']}[/] in {escape(shown['store'])}")
    out.print(
        f"{shown['parameters']:,} parameters, {shown['steps']:,} steps, {shown['tokens']:,} tokens, "
        f"{shown['flops']:.2e} FLOPs (tokens x (6N + 12·L·C·T))"
    )
    longest = max(len(plan["artifact"]) for plan in shown["stages"].values())
    for stage, plan in shown["stages"].items():
        state = "[green]✓ exists[/]" if plan["exists"] else f"to do: {escape(plan['why'])}"
        out.print(f"{stage:8}  {plan['artifact']:{longest}}  {state}")


def print_runs(summaries: list[Summary], where: str, notes: Iterable[str] = ()) -> None:
    if not summaries:
        console().print(f"no runs in {escape(where)} yet; `skytrain run smoke` makes one")
        return
    columns = ("run", "state", "attempts", "tokens", "val loss", "HellaSwag", "hours", "dollars", "goodput")
    table = Table(*columns, box=None)
    for s in summaries:
        table.add_row(
            s.run,
            s.state,
            str(s.attempts),
            f"{s.tokens:,}",
            _number(s.val_loss),
            _number(s.hellaswag_acc_norm),
            f"{s.billed_hours:.3f}",
            money(s.usd, s.unpriced_hours),
            "" if s.goodput is None else f"{s.goodput:.0%}",
        )
    console().print(table)
    for line in [*(fault for s in summaries for fault in s.faults), *notes]:
        console().print(escape(line))


def print_bill(bill: Account) -> None:
    """One run's bill: for what, at what price, and what of it was lost."""
    out = console()
    for title, parts in (("stage", bill.by_stage), ("phase", bill.by_phase), ("market", bill.by_market)):
        table = Table(title, "time", "dollars", box=None, pad_edge=False)
        for name, part in sorted(parts.items(), key=lambda item: -item[1].hours):
            table.add_row(name, duration(3600 * part.hours), money(part.usd, part.unpriced_hours))
        out.print(table)
        out.print()
    heads = ("attempt", "state", "on", "began (UTC)", "time", "price an hour", "dollars", "steps", "kept", "redone")
    table = Table(*heads, box=None, pad_edge=False)
    for number, attempt in merge_waits(bill.attempts):
        table.add_row(*attempt_row(number, attempt))
    out.print(table)
    out.print()
    lines = []
    if bill.goodput is not None:
        rooms = ", waiting for spot left out" if any(a.waited for a in bill.attempts) else ""
        lines.append(f"goodput {bill.goodput:.1%}: training, each step counted once, of all billed time{rooms}")
    if bill.usd_per_billion_tokens:
        lines.append(f"{bill.usd_per_billion_tokens:,.2f} dollars per billion tokens")
    if bill.interruptions.hours:
        lost = money(bill.interruptions.usd, bill.interruptions.unpriced_hours)
        lines.append(f"{lost} dollars lost to interruptions: work done again, and the way back to it")
    if bill.savings_usd is not None:
        lines.append(f"{bill.savings_usd:.2f} dollars saved against on-demand prices")
    if bill.deaths:
        lines.append(
            f"{bill.deaths} attempt(s) died without a word: up to {bill.unseen_seconds:.0f} s may be on no bill"
        )
    for line in lines:
        out.print(line)


def attempt_row(number: str, a: AttemptAccount) -> list[str]:
    return [
        f"{a.stage} {number}",
        ("waiting for spot" if a.waited else a.state) + (f" ({a.notice})" if a.notice else ""),
        (f"{a.nodes} x " if a.nodes > 1 else "") + f"{a.machine.instance or a.host}, {market_of(a.machine)}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(a.started)),
        duration(sum(a.phases.values())),
        f"{'unknown' if a.price_per_hour is None else f'{a.price_per_hour:.2f}'} ({a.price_source})",
        money(a.bill.usd, a.bill.unpriced_hours),
        *(str(steps) if a.steps_done else "" for steps in (a.steps_done, a.steps_kept, a.steps_redone)),
    ]


def sky_differences(store: Store, account: Account) -> Iterator[str]:
    """What SkyPilot's own book says, as it was last heard, beside the ledger: a line a cluster."""
    intervals = read_intervals(store, account.run)
    for one in reconcile(account, intervals, time.time()) if intervals else []:
        usd = "unknown dollars" if one.usd is None else f"{one.usd:+.2f} dollars"
        yield (
            f"{account.run}: cluster {one.cluster}: {one.sky_hours:.3f} h by SkyPilot, {one.ledger_hours:.3f} h "
            f"in the ledger ({usd})"
        )


def print_comparison(compared: Comparison) -> None:
    """What differs between two runs, and what came of it."""
    out = console()
    for title, rows in (("what differs", compared.differs), ("what came of it", compared.results)):
        table = Table(title, *compared.runs, box=None, pad_edge=False)
        for name, pair in rows.items():
            table.add_row(name, *(escape(_figure(value)) for value in pair))
        out.print(table)
        out.print()
    for title, levels in (("tokens", compared.at_equal_tokens), ("dollars", compared.at_equal_dollars)):
        table = Table(f"at equal {title}", "loss", *compared.runs, box=None, pad_edge=False)
        for level in levels:
            at = f"{level.at:,.0f}" if title == "tokens" else f"{level.at:.4g}"
            table.add_row(at, level.metric, *(_figure(value) for value in level.values))
        out.print(table if levels else f"at equal {title}: nothing to compare")
        out.print()


def print_series(run: str, rows: list[dict[str, Any]], as_json: bool, alone: bool) -> None:
    """The steps of a run as CSV (with a first column `run` if there are several), or a JSON line each."""
    steps = [row for row in rows if "train/loss" in row]
    if as_json:
        for row in steps:
            print(json.dumps({"run": run, **row}))
        return
    out = csv.writer(sys.stdout, lineterminator="\n")
    first = [] if alone else ["run"]
    out.writerow([*first, *SERIES])
    for row in steps:
        out.writerow([*([] if alone else [run]), *(row.get(metric) for metric in SERIES.values())])


def print_audit(audits: list[Audit]) -> None:
    for a in audits:
        faults = [
            f"{len(steps)} steps {what} (the first: {steps[0]:,})"
            for what, steps in (("read other text", a.wrong_steps), ("are missing", a.missing_steps))
            if steps
        ]
        verdict = "; ".join(faults) or "every step read exactly the windows that the recipe and the seed say"
        print(f"{a.run}: {a.steps:,} steps, {a.sequences:,} sequences: {verdict}")


def shipped_rows() -> list[dict[str, Any]]:
    """The shipped recipes with size, tokens, FLOPs, and hours and dollars by the arithmetic above."""
    rows = []
    for name in shipped():
        recipe = load_recipe(name)
        hours = recipe.train_flops / (NODE_FLOPS * ASSUMED_MFU) / 3600
        rows.append(
            {
                "recipe": name,
                "parameters": recipe.model.parameters,
                "tokens": recipe.train_tokens,
                "flops": recipe.train_flops,
                "node_hours": hours,
                "usd": hours * NODE_USD_PER_HOUR,
            }
        )
    return rows


def print_recipes() -> None:
    table = Table("recipe", "parameters", "tokens", "FLOPs", "hours", "dollars", box=None, pad_edge=False)
    for row in shipped_rows():
        table.add_row(
            row["recipe"],
            f"{row['parameters'] / 1e6:,.1f}M",
            f"{row['tokens'] / 1e9:,.2f}B",
            f"{row['flops']:.1e}",
            f"{row['node_hours']:,.1f}",
            f"{row['usd']:,.0f}",
        )
    console().print(table)
    console().print(
        f"[dim]hours = tokens x (6N + 12·L·C·T) / (8 x 989 TFLOP/s x {ASSUMED_MFU:.0%} MFU) on 8xH100; "
        f"dollars at ${NODE_USD_PER_HOUR}/h[/]"
    )


def money(usd: float, unpriced_hours: float) -> str:
    """1.23, or "1.23 + 0.4 h of unknown price"."""
    return f"{usd:.2f}" + (f" + {unpriced_hours:.2g} h of unknown price" if unpriced_hours else "")


def duration(seconds: float) -> str:
    """7.4 s, 3 min 12 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def printable(text: str) -> str:
    """Text of an untrained model may hold control characters that would upset a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:21] + "…"
