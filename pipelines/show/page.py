"""`skytrain report --html`: runs on one page that explains itself, in one file that asks the network for nothing.

Python gathers, from the store alone, what the scripts in assets/ draw: series (thinned, with the hours and dollars
that were billed when each point was logged), attempts, the bill, lineage, receipt and samples. It travels as JSON
inside the page; the scripts put it there as text only, never as markup, and the page's own policy forbids all else.
"""

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pipelines.artifacts.manifest import Manifest
from pipelines.recipe import Recipe
from pipelines.show.overlay import Overlay, read_overlay
from pipelines.tracking.account import Account, AttemptAccount, Cost, cost_until, market_of, merge_waits
from pipelines.tracking.records import Heartbeat
from pipelines.tracking.runs import Run, RunRecord
from trainer.config import batch_stages
from trainer.errors import UserError
from trainer.metrics import MFU_FORMULA
from trainer.store import Store

SCRIPTS = ("elements.js", "figures.js", "bill.js", "page.js")  # one after the other
POINTS = 2000  # of a curve at most: more than a screen has columns, and 50 KB
METRICS = (
    "train/loss",
    "val/loss",
    "eval/hellaswag_acc_norm",
    "perf/tokens_per_second",
    "perf/mfu",
    "train/lr",
    "train/grad_norm",
)
SMOOTHED = ("train/loss", "perf/tokens_per_second", "perf/mfu", "train/grad_norm")

# GPT-2's and GPT-3's sizes (n_layer, n_head, n_embd) and what is known of them. Source: llm.c, dev/vislog.ipynb: the
# losses of OpenAI's GPT-2 weights on its FineWeb validation shard, their HellaSwag (completion style, acc_norm), and
# HellaSwag of GPT-3 as its paper has it (Brown et al. 2020, Small to XL; the models nearest to these sizes).
SHAPES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}
REFERENCES = {  # metric -> name, size, value
    "val/loss": [
        ("GPT-2 124M", "124M", 3.424958),
        ("GPT-2 350M", "350M", 3.083089),
        ("GPT-2 774M", "774M", 3.000580),
        ("GPT-2 1558M", "1558M", 2.831273),
    ],
    "eval/hellaswag_acc_norm": [
        ("GPT-2 124M", "124M", 0.294463),
        ("GPT-2 350M", "350M", 0.375224),
        ("GPT-2 774M", "774M", 0.431986),
        ("GPT-2 1558M", "1558M", 0.488946),
        ("GPT-3 125M", "124M", 0.337),
        ("GPT-3 350M", "350M", 0.436),
        ("GPT-3 760M", "774M", 0.510),
        ("GPT-3 1.3B", "1558M", 0.547),
    ],
}


def write_page(path: Path, store: Store, runs: Sequence[Run], overlays: Iterable[str]) -> None:
    """What `report --html` does. UserError if there is nothing to show, or no place for it."""
    if not runs:
        raise UserError(f"--html: no runs in {store.uri} yet; `skytrain run smoke` makes one")
    page = render(runs, [read_overlay(log) for log in overlays])
    try:
        path.write_text(page, encoding="utf8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror}); name a file that can be") from error
    print(f"{path}  ({len(page.encode()) / 1e6:.1f} MB; one file, made to be opened in a browser)")


def render(runs: Iterable[Run], overlays: Iterable[Overlay] = ()) -> str:
    """The page of some runs, with what others have recorded laid over their curves."""
    return bind(
        {
            "made": time.time(),
            "runs": [run_shown(run) for run in runs],
            "overlays": [overlay_shown(overlay) for overlay in overlays],
            "references": REFERENCES,
            "mfu": MFU_FORMULA,
        }
    )


def bind(data: dict[str, Any]) -> str:
    """One HTML file of the template, its style, its script and the data, under a policy that admits only these."""
    page, style, script = asset("page.html"), asset("page.css"), "\n".join(asset(name) for name in SCRIPTS)
    parts = {
        "{{policy}}": (
            f"default-src 'none'; style-src '{hash_source(style)}'; script-src '{hash_source(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "{{style}}": style,
        "{{script}}": script,
        # JSON has `<` in strings only, and escaped there it can't close the element that holds it.
        "{{data}}": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    for place, text in parts.items():  # the data last, so that nothing is looked for in what it says
        before, found, after = page.partition(place)
        assert found, place
        page = before + text + after
    return page


def asset(name: str) -> str:
    return (resources.files("pipelines.show") / "assets" / name).read_text(encoding="utf8")


def hash_source(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def run_shown(run: Run) -> dict[str, Any]:
    record, recipe, made, summary = run.record, run.recipe, run.manifests, run.summary
    rows, account = run.series, run.account
    size = next((size for size, shape in SHAPES.items() if shape == shape_of(recipe)), None)
    evaluated = made.get("evaluate")
    speeds, shares = ([row[k] for row in rows if k in row] for k in ("perf/tokens_per_second", "perf/mfu"))
    return {
        "name": record.run,
        "state": summary.state,
        "size": size,
        "batches": batch_stages(recipe.train),
        "max_steps": recipe.train.max_steps,
        "steps": summary.steps,
        "tokens": summary.tokens,
        "parameters": recipe.model.parameters,
        "text": text_name(recipe),
        "tokenizer": recipe.tokens.tokenizer,
        "train_loss": summary.train_loss,
        "val_loss": summary.val_loss,
        "final": {metric: evaluated.facts.get(metric) if evaluated else None for metric in REFERENCES},
        "hellaswag": summary.hellaswag_acc_norm,
        "tokens_per_second": median(speeds) if speeds else None,
        "mfu": median(shares) if shares else None,
        "starts": summary.attempts,
        "account": account_shown(account),
        "faults": summary.faults,
        "attempts": [attempt_shown(number, one, account) for number, one in merge_waits(account.attempts)],
        "series": series_shown(rows, account),
        "lineage": lineage(record, recipe, made, account),
        "targets": targets(recipe, size, summary.steps, summary.val_loss, summary.hellaswag_acc_norm),
        "receipt": receipt(recipe, made, account, run.attempts.get("train", [])),
        "recipe": yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True),
        "sample": evaluated.facts.get("sample") if evaluated else None,
    }


def overlay_shown(overlay: Overlay) -> dict[str, Any]:
    """An overlay has a series and its ends, and no time, money or text."""
    found = {metric: sorted(overlay.series[metric].items()) for metric in METRICS if metric in overlay.series}
    last = {metric: points[-1][1] for metric, points in found.items()}
    return {
        "name": overlay.name,
        "batches": [(0, 0, overlay.batch_tokens)],
        "steps": max(points[-1][0] for points in found.values()),
        "val_loss": last.get("val/loss"),
        "train_loss": last.get("train/loss"),
        "hellaswag": last.get("eval/hellaswag_acc_norm"),
        "series": {m: curve(m, [step for step, _ in points], [y for _, y in points]) for m, points in found.items()},
    }


# --- curves


def series_shown(rows: list[dict[str, Any]], account: Account) -> dict[str, Any]:
    shown = {}
    for metric in METRICS:
        if mine := [row for row in rows if metric in row]:
            steps, values, times = ([row[key] for row in mine] for key in ("step", metric, "time"))
            shown[metric] = curve(metric, steps, values, times, account)
    return shown


def curve(
    metric: str,
    steps: Sequence[int],
    values: Sequence[float],
    times: Sequence[float] = (),
    account: Account | None = None,
) -> dict[str, Any]:
    """A metric as the page draws it: a line, and for a noisy one what was measured, to stand behind its mean."""

    def columns(drawn: Sequence[float], limit: int) -> dict[str, Any]:
        kept = thin(drawn, limit)
        bills = [cost_until(account, times[i]) for i in kept] if account else []
        priced = account and account.total.usd and not account.total.unpriced_hours
        return {
            "step": [steps[i] for i in kept],
            "y": [float(f"{drawn[i]:.6g}") for i in kept],
            "hours": [round(bill.hours, 6) for bill in bills],
            "usd": [round(bill.usd, 6) for bill in bills] if priced else [],
        }

    reach = len(values) // 150 if metric in SMOOTHED else 0
    if not reach:
        return {"line": columns(values, POINTS)}
    return {"line": columns(smoothed(values, reach), POINTS // 2), "raw": columns(values, POINTS)}


def thin(values: Sequence[float], limit: int) -> list[int]:
    """The indices of at most `limit` values: the first, the last, and the extremes of every piece in between.

    The pieces are those of an even division and those of a geometric one: the page has a logarithmic axis, too.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    last, parts = len(values) - 1, (limit - 2) // 4  # two extremes of a piece, two divisions
    even = (part * last // parts for part in range(parts + 1))
    geometric = (int(last ** (part / parts)) for part in range(parts + 1))
    kept = {0, last}
    for low, high in pairwise(sorted({*even, *geometric})):
        piece = range(low, high)
        kept |= {min(piece, key=values.__getitem__), max(piece, key=values.__getitem__)}
    return sorted(kept)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """The mean over `reach` values on either side: over fewer where a curve has just begun and falls steeply."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        near = min(reach, i // 4)
        low, high = i - near, min(len(values), i + near + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means


# --- the account, lineage, receipt


def account_shown(account: Account) -> dict[str, Any]:
    return {
        "total": asdict(account.total),
        "by_phase": {phase: asdict(bill) for phase, bill in account.by_phase.items()},
        "by_market": {market: asdict(bill) for market, bill in account.by_market.items()},
        "goodput": account.goodput,
        "usd_per_billion_tokens": account.usd_per_billion_tokens,
        "interruptions": asdict(account.interruptions),
        "savings_usd": account.savings_usd,
        "deaths": account.deaths,
        "unseen_seconds": account.unseen_seconds,
    }


def attempt_shown(number: str, one: AttemptAccount, account: Account) -> dict[str, Any]:
    return {
        "stage": one.stage,
        "number": number,
        "state": one.state,
        "waited": one.waited,
        "started": one.started,
        "ended": one.ended,
        "machine": machine_name(one),
        "nodes": one.nodes,
        "price_per_hour": one.price_per_hour,
        "price_source": one.price_source,
        "bill": asdict(one.bill),
        "billed_before": asdict(cost_until(account, one.started)),
        "phases": one.phases,
        "from": one.resumed_from,
        "to": one.step,
        "redone": one.steps_redone,
        "notice": one.notice,
    }


def machine_name(one: AttemptAccount) -> str:
    """What it ran on, as one orders it; at home, the host's name."""
    machine = one.machine
    parts = [machine.instance or machine.accelerators, machine.zone or machine.region]
    return ", ".join([market_of(machine), *(part for part in parts if part)]) if machine.cloud else one.host


def lineage(
    record: RunRecord,
    recipe: Recipe,
    made: dict[str, Manifest | None],
    account: Account,
) -> list[dict[str, Any]]:
    """From the text to what was made of it: a box each, with its fingerprint and what is in it."""
    tokens = recipe.tokens
    of_text = [f"revision {tokens.revision[:12]}"] if tokens.revision else []
    boxes = [{"stage": "text", "name": text_name(recipe), "facts": [*of_text, f"tokenizer {tokens.tokenizer}"]}]
    for stage, prefix in record.prefixes.items():
        manifest = made.get(stage)
        box: dict[str, Any] = {
            "stage": stage,
            "name": prefix,
            "there": manifest is not None,
            "facts": contents(manifest) if manifest else ["not there yet"],
            "attempts": sum(one.stage == stage and not one.waited for one in account.attempts),
            "bill": asdict(account.by_stage.get(stage, Cost())),
        }
        if manifest:
            box |= {"fingerprint": manifest.fingerprint, "bytes": sum(file.size for file in manifest.files)}
            if manifest.run != record.run:
                box["facts"].append(f"made by {manifest.run}")
        boxes.append(box)
    return boxes


def contents(manifest: Manifest) -> list[str]:
    """What an artifact holds, in a few words."""
    facts = manifest.facts
    words = {
        "tokens": "{:,} tokens",
        "steps": "{:,} steps",
        "parameters": "{:,} parameters",
        "val/loss": "val loss {:.4f}",
        "eval/hellaswag_acc_norm": "HellaSwag {:.4f}",
    }
    said = [text.format(facts[name]) for name, text in words.items() if facts.get(name) is not None]
    return said if manifest.stage != "train" else [word for word in said if "parameters" not in word]


def targets(
    recipe: Recipe, size: str | None, steps: int, val_loss: float | None, hellaswag: float | None
) -> list[dict[str, Any]]:
    """What the run was meant to reach, and whether it did: its steps, and what OpenAI's weights of its size reach."""
    max_steps = recipe.train.max_steps
    rows: list[dict[str, Any]] = [
        {"what": "steps", "target": max_steps, "got": steps, "met": steps >= max_steps or None}
    ]
    if size and recipe.tokens.tokenizer == "gpt2":
        gpt2 = {
            metric: {s: value for name, s, value in known if "GPT-2" in name} for metric, known in REFERENCES.items()
        }
        loss, score = gpt2["val/loss"][size], gpt2["eval/hellaswag_acc_norm"][size]
        met = None if val_loss is None else val_loss <= loss
        rows.append({"what": f"val loss at most GPT-2 {size}'s", "target": loss, "got": val_loss, "met": met})
        met = None if hellaswag is None else hellaswag >= score
        rows.append({"what": f"HellaSwag at least GPT-2 {size}'s", "target": score, "got": hellaswag, "met": met})
    return rows


def receipt(
    recipe: Recipe, made: dict[str, Manifest | None], account: Account, beats: Sequence[Heartbeat]
) -> list[tuple[str, str]]:
    """What one needs to know to do it again."""
    train = made.get("train")
    origins = [manifest.provenance for manifest in made.values() if manifest]
    origin = train.provenance if train else origins[-1] if origins else {}
    versions = ", ".join(f"{name} {number}" for name, number in origin.get("versions", {}).items() if number)
    commit = origin.get("git_commit") or ""
    machines = dict.fromkeys(
        (f"{one.nodes} x " if one.nodes > 1 else "") + machine_name(one)
        for one in account.attempts
        if one.stage == "train" and not one.waited
    )
    devices = dict.fromkeys(
        f"{beat.progress.world_size} x {beat.progress.device}, {beat.progress.precision}"
        for beat in beats
        if beat.progress.device is not None
    )
    told = {
        "recipe": f"{recipe.name}, fingerprint {train.fingerprint}" if train else recipe.name,
        "text": " at ".join(filter(None, (text_name(recipe), recipe.tokens.revision))),
        "seed": str(recipe.train.seed),
        "commit": commit + (" with changes that no commit holds" if commit and origin.get("git_dirty") else ""),
        "image": origin.get("image") or ("none: it ran outside a container" if origin else ""),
        "hardware": "; ".join([*devices, *machines]),
        "versions": ", ".join(filter(None, (f"Python {origin.get('python')}" if origin else "", versions))),
        "platform": origin.get("platform", ""),
        "updates left out": str(train.facts["skipped_updates"]) if train else "",
        "rollbacks": str(len(train.facts["rollbacks"])) if train else "",
    }
    return [(label, value) for label, value in told.items() if value]


def text_name(recipe: Recipe) -> str:
    return " ".join(filter(None, (recipe.tokens.source.removeprefix("hf://datasets/"), recipe.tokens.subset)))


def shape_of(recipe: Recipe) -> tuple[int, int, int]:
    return recipe.model.n_layer, recipe.model.n_head, recipe.model.n_embd
