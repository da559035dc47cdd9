"""`skytrain report --html`: runs on one page with explanations, in one file that makes no network request.

Python gathers the data from the store alone: series (thinned, each point with the hours and dollars billed until then),
attempts, the bill, receipt and samples. The page holds the data as JSON, and the scripts in assets/ draw it.
They insert data as text only, never as markup; the page's content security policy forbids everything else.
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
from urllib.parse import quote

import yaml

from pipelines.recipe.recipe import Recipe
from pipelines.run.runs import Run
from pipelines.store.account import AttemptAccount, TrainingBill, market_of
from pipelines.store.manifest import differences, flat
from pipelines.user.show.card import changes_by_tuning, reached_target
from pipelines.user.show.console import say
from pipelines.user.show.overlay import Overlay, read_overlay
from trainer.base.metrics import MFU_FORMULA
from trainer.base.store import Store
from trainer.checkpoint.commits import series
from trainer.config.amounts import batch_stages
from trainer.config.errors import UserError

SCRIPTS = ("elements.js", "figures.js", "bill.js", "page.js")  # in this order
MOST_SAMPLES = 12  # of the evaluations while a run trains, the latest ones
POINTS = 2000  # most points of a curve: more than the columns of a screen, and 50 KB
METRICS = (
    "train/loss",
    "val/loss",
    "eval/hellaswag_acc_norm",
    "eval/core",
    "perf/tokens_per_second",
    "perf/mfu",
    "train/lr",
    "train/grad_norm",
)
ATTEMPT_FIELDS = ("stage", "attempt", "state", "started", "nodes", "phases", "price_per_hour", "price_source")
SMOOTHED = ("train/loss", "perf/tokens_per_second", "perf/mfu", "train/grad_norm")

# Sizes of GPT-2 (n_layer, n_head, n_embd) and published results. Source: llm.c, dev/vislog.ipynb: losses of OpenAI's
# GPT-2 weights on its FineWeb validation shard, their HellaSwag (completion style, acc_norm), and HellaSwag of GPT-3
# from its paper (Brown et al. 2020, Small to XL; the models nearest to these sizes). CORE of OpenAI's weights:
# nanochat, dev/estimate_gpt3_core.ipynb.
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
    "eval/core": [
        ("GPT-2 124M", "124M", 0.1139),
        ("GPT-2 350M", "350M", 0.1849),
        ("GPT-2 774M", "774M", 0.2146),
        ("GPT-2 1558M", "1558M", 0.2565),
    ],
}


def write_page(
    path: Path, store: Store, runs: Sequence[Run], overlays: Iterable[str], one_each: bool, on_stderr: bool = False
) -> None:
    """Write the page to a file, and say so; with `one_each`, several runs get a page each, in a folder beside it, and
    the file is a table of links to them. UserError without any run, or if a file cannot be written."""
    if not runs:
        raise UserError(f"--html: no runs in {store.uri} yet; `skytrain run smoke` makes one")
    logs, made = [overlay_data(read_overlay(log)) for log in overlays], [run_data(run) for run in runs]
    folder = path.with_suffix("") if path.suffix else Path(f"{path}-runs")
    links = one_each and len(runs) > 1
    try:
        if links:
            folder.mkdir(exist_ok=True)
            for data in made:
                (folder / f"{data['name']}.html").write_text(page_of([data], logs), encoding="utf8")
                page = f"{quote(folder.name)}/{quote(data['name'])}.html"
                data |= {"page": page} | dict.fromkeys(("series", "attempts", "receipt", "recipe", "samples"), ())
        page = page_of(made, [] if links else logs, links)
        path.write_text(page, encoding="utf8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror}); name a file that can be") from error
    what = f"links to {len(made)} pages in {folder}/" if links else "one file"
    say(f"{path}  ({len(page.encode()) / 1e6:.1f} MB; {what}; open it in a browser)", on_stderr)


def page_of(runs: Sequence[dict[str, Any]], overlays: Sequence[dict[str, Any]] = (), links: bool = False) -> str:
    """The page of some runs and other trainers' logs, or a table of links to pages, as `run_data` and `overlay_data`
    gathered them."""
    of_all = {"made": time.time(), "references": REFERENCES, "mfu": MFU_FORMULA}
    of_all["differences"] = differing([yaml.safe_load(run["recipe"]) for run in runs if run["recipe"]])
    return bind(of_all | {"runs": runs, "overlays": overlays, "links": links})


def bind(data: dict[str, Any]) -> str:
    """One HTML file: the template with its style, its scripts and the data, under a policy that permits only these."""
    page, style, script = asset("page.html"), asset("page.css"), "\n".join(asset(name) for name in SCRIPTS)
    parts = {
        "{{policy}}": (
            f"default-src 'none'; style-src '{hash_source(style)}'; script-src '{hash_source(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "{{style}}": style,
        "{{script}}": script,
        # JSON has `<` in strings only. Escaped, it cannot close the script element.
        "{{data}}": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    for mark, text in parts.items():  # the data last, so that no mark in the data is replaced
        before, found, after = page.partition(mark)
        assert found, mark
        page = before + text + after
    return page


def differing(recipes: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The fields in which the recipes of runs differ, with the value of each run."""
    fields = {field for other in recipes[1:] for field in differences(recipes[0], other)} - {"name"}
    return [(field, [json.dumps(flat(recipe).get(field)) for recipe in recipes]) for field in sorted(fields)]


def asset(name: str) -> str:
    return (resources.files("pipelines.user.show") / "assets" / name).read_text(encoding="utf8")


def hash_source(text: str) -> str:
    """The name of an inline style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def run_data(run: Run) -> dict[str, Any]:
    """A run as the scripts of the page read it."""
    record, recipe, made, summary = run.record, run.recipe, run.manifests, run.summary
    rows, account, bill = run.series, run.account, TrainingBill(run.account)
    model = recipe.model
    shape = model.n_layer, model.n_head, model.n_embd
    size = next((size for size, known in SHAPES.items() if model.family == "gpt2" and known == shape), None)
    evaluated = made.get("evaluate")
    speeds, shares = ([row[k] for row in rows if k in row] for k in ("perf/tokens_per_second", "perf/mfu"))
    curves = {}
    for metric in METRICS:
        if logged := [row for row in rows if metric in row]:
            steps, values, times = ([row[key] for row in logged] for key in ("step", metric, "time"))
            curves[metric] = curve(metric, steps, values, times, bill)
    tunings = [tuning(run, stage, curves) for stage in run.record.tunings]
    return asdict(summary) | {
        "name": record.run,
        "size": size,
        "batches": batch_stages(recipe.train),
        "max_steps": run.last_step,
        "parameters": model.parameters,
        "text": text_name(recipe),
        "fineweb": all("fineweb" in one.named.lower() for one in recipe.tokens.each()),
        "tokenizer": str(recipe.tokens.tokenizer),
        "final": {metric: evaluated.facts.get(metric) if evaluated else None for metric in REFERENCES},
        "tokens_per_second": median(speeds) if speeds else None,
        "mfu": median(shares) if shares else None,
        "attempt_count": summary.attempts,
        "tunings": tunings,
        "account": asdict(account) | {"attempts": ()},
        "attempts": [
            {name: getattr(one, name) for name in ATTEMPT_FIELDS}
            | {name: getattr(one.progress, name) for name in ("notice", "resumed_from", "step")}
            | {
                "machine": machine_name(one),
                "bill": asdict(one.bill),
                "billed_before": asdict(bill.before[one.attempt]) if one.stage == "train" else None,
            }
            for one in account.attempts
            if not one.waited
        ],
        "series": curves,
        "receipt": receipt(run),
        "recipe": yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True),
        "sample": evaluated.facts.get("sample") if evaluated else None,
        "samples": [(row["step"], row["samples"]) for row in rows if "samples" in row][-MOST_SAMPLES:],
    }


def tuning(run: Run, stage: str, curves: dict[str, Any]) -> dict[str, Any]:
    """What a step of tuning made. Adds its reward, or its loss without one, to the curves."""
    rows, made = series(run.store, run.record.tunings[stage]), run.manifests.get(stage)
    metrics = (f"{stage.replace('.', '/', 1)}/{name}" for name in ("reward", "loss"))
    metric = next((name for name in metrics if any(name in row for row in rows)), None)
    if metric:
        steps, values = zip(*((row["step"], row[metric]) for row in rows if metric in row), strict=True)
        curves[metric] = curve(metric, steps, values)
    facts, changes = (made.facts, changes_by_tuning({stage: made})[stage]) if made else ({}, [])
    return {"stage": stage, "metric": metric, "changes": changes, "facts": facts}


def overlay_data(overlay: Overlay) -> dict[str, Any]:
    """An overlay has series and their last values, but no time, cost or text."""
    series = {metric: sorted(overlay.series[metric].items()) for metric in METRICS if metric in overlay.series}
    last = {metric: points[-1][1] for metric, points in series.items()}
    return {
        "name": overlay.name,
        "batches": [(0, 0, overlay.batch_tokens)],
        "steps": max(points[-1][0] for points in series.values()),
        "val_loss": last.get("val/loss"),
        "train_loss": last.get("train/loss"),
        "hellaswag_acc_norm": last.get("eval/hellaswag_acc_norm"),
        "series": {m: curve(m, [step for step, _ in points], [y for _, y in points]) for m, points in series.items()},
    }


# --- curves


def curve(
    metric: str,
    steps: Sequence[int],
    values: Sequence[float],
    times: Sequence[float] = (),
    bill: TrainingBill | None = None,
) -> dict[str, Any]:
    """A metric for the page: a line; for a noisy metric its running mean as the line, and the raw values behind it."""

    def columns(drawn: Sequence[float], limit: int) -> dict[str, Any]:
        points = thin(drawn, limit)
        costs = [bill.until(steps[i], times[i]) for i in points] if bill else []
        return {
            "step": [steps[i] for i in points],
            "y": [float(f"{drawn[i]:.6g}") for i in points],
            "hours": [round(cost.hours, 6) for cost in costs],
            "usd": [round(cost.usd, 6) for cost in costs] if bill and bill.priced else [],
        }

    reach = len(values) // 150 if metric in SMOOTHED or metric.startswith("tune/") else 0
    if not reach:
        return {"line": columns(values, POINTS)}
    return {"line": columns(smoothed(values, reach), POINTS // 2), "raw": columns(values, POINTS)}


def thin(values: Sequence[float], limit: int) -> list[int]:
    """The indices of at most `limit` values: the first, the last, and the extremes of every interval in between.

    The intervals come from an even and a geometric division, because the page also has a logarithmic axis.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    last, count = len(values) - 1, (limit - 2) // 4  # two extremes an interval, two divisions
    even = (i * last // count for i in range(count + 1))
    geometric = (int(last ** (i / count)) for i in range(count + 1))
    points = {0, last}
    for low, high in pairwise(sorted({*even, *geometric})):
        interval = range(low, high)
        points |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return sorted(points)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """The mean over `reach` values on either side; over fewer near the start, where a curve falls steeply."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        near = min(reach, i // 4)
        low, high = i - near, min(len(values), i + near + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means


# --- the receipt


def machine_name(one: AttemptAccount) -> str:
    """Market, instance type and place of a rented machine; the host name of an own machine."""
    machine = one.machine
    parts = [machine.instance or machine.accelerators, machine.location]
    return ", ".join([market_of(machine), *(part for part in parts if part)]) if machine.cloud else one.process.host


def receipt(run: Run) -> list[tuple[str, str]]:
    """The facts for a repetition of the run."""
    recipe, train = run.recipe, run.manifests.get("train")
    read = {stage: manifest for stage, manifest in run.manifests.items() if manifest}
    made = train or next(reversed(read.values()), None)
    origin = made.provenance if made else {}
    commit = origin.get("git_commit") or ""
    machines = dict.fromkeys(
        (f"{one.nodes} x " if one.nodes > 1 else "") + machine_name(one)
        for one in run.account.attempts
        if one.stage == "train" and not one.waited
    )
    devices = dict.fromkeys(
        f"{beat.progress.world_size} x {beat.progress.device}, {beat.progress.precision}"
        for beat in run.attempts.get("train", [])
        if beat.progress.device is not None
    )
    facts = {
        "recipe": f"{recipe.name}, fingerprint {train.fingerprint}" if train else recipe.name,
        "text": recipe.tokens.source or text_name(recipe),
        "began with": recipe.first_weights or "",
        "artifacts": ", ".join(manifest.prefix for manifest in read.values()),
        "ended by": reached_target(recipe, train),
        "seed": str(recipe.train.seed),
        "commit": f"{commit} with uncommitted changes" if commit and origin.get("git_dirty") else commit,
        "image": origin.get("image") or ("none: the run used no container" if origin else ""),
        "hardware": "; ".join([*devices, *machines]),
        "CPU threads": f"{threads} a rank" if train and (threads := train.facts.get("threads")) else "",
        "versions": f"Python {origin.get('python')}, {made.versions}" if made else "",
        "platform": origin.get("platform", ""),
        **{stage: ", ".join(changes) for stage, changes in changes_by_tuning(read).items()},
        "skipped updates": str(train.facts.get("skipped_updates", "")) if train else "",
    }
    return [(label, value) for label, value in facts.items() if value]


def text_name(recipe: Recipe) -> str:
    return recipe.tokens.named.replace("hf://datasets/", "")
