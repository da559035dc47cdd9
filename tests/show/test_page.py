"""The report page shows the data of the store; no text becomes markup; a browser draws it without the network."""

import base64
import hashlib
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from browser import COMPLAINTS, Browser, open_browser
from hypothesis import given
from hypothesis import strategies as st

from pipelines.artifacts.manifest import File, Manifest, key_of
from pipelines.recipe import SourceConfig, load_recipe
from pipelines.show.bill import print_bill
from pipelines.show.card import passed_text
from pipelines.show.overlay import Overlay, read_overlay
from pipelines.show.page import (
    REFERENCES,
    SHAPES,
    bind,
    overlay_data,
    page_data,
    render,
    run_data,
    smoothed,
    targets,
    thin,
)
from pipelines.stage import plans_of, run_name
from pipelines.tracking.records import Heartbeat, ProcessId, Progress
from pipelines.tracking.runs import Passed, Run, RunRecord, record
from pipelines.verbs.report import report
from trainer.errors import UserError
from trainer.store import LocalStore, Store

NOON = 1_800_000_000.0
HOSTILE = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'><!--<script>"
CHANGES = [
    "tokens.source=hf://datasets/a/b",
    f"tokens.subset={HOSTILE}",
    f"tokens.revision={'a' * 40}",
    "train.max_steps=400",
]


def attempted(store: Store, prefix: str, stage: str, number: int, start: float, end: float, **changes: Any) -> None:
    values: dict[str, Any] = {"state": "done", "price_per_hour": 36.0, "process": ProcessId(HOSTILE)}
    values |= {"run": changes.pop("run"), "phases": {"setup": 10.0, "train": end - start - 10}} | changes
    beat = Heartbeat(stage=stage, attempt=number, started=start, time=end, **values)
    store.put(f"{prefix}/attempts/{number:04d}/heartbeat.json", beat.to_json())


def run_in(
    store: Store,
    name: str = "quick",
    steps: int = 400,
    finished: bool = True,
    changes: Sequence[str] = (),
    more: Mapping[str, dict[str, Any]] = types.MappingProxyType({}),  # facts by stage
    **prices: Any,
) -> RunRecord:
    """A run that was killed at step 250, after a commit at step 200, and resumed an hour later."""
    recipe = load_recipe("smoke", [f"name={name}", *CHANGES, *changes])
    plans = plans_of(recipe)
    run, train = run_name(plans), plans["train"].prefix
    for attempt, first, last, start in ((1, 1, 200, NOON), (2, 201, steps, NOON + 3850)):
        rows = [
            {
                "step": step,
                "time": start + 10 + step - first + 1,
                "train/loss": 5 * math.exp(-step / 100) + 2 + 0.1 * math.sin(step),
                "train/lr": 1e-3,
                "train/grad_norm": 1.0,
                "perf/tokens_per_second": 2048.0,
                **({"val/loss": 5 * math.exp(-step / 100) + 2.1} if step % 50 == 0 else {}),
                **({"eval/hellaswag_acc_norm": 0.25 + step / 10_000} if step % 100 == 0 else {}),
                **({"samples": [f"{HOSTILE} after {step} steps"]} if step % 100 == 0 else {}),
            }
            for step in range(first, last + 1)
        ]
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        store.put(f"{train}/metrics/step-{last:08d}-a{attempt:04d}.jsonl", body)
    killed = Progress(resumed_from=0, step=250, device="cpu", world_size=1, precision="fp32")
    resumed = replace(killed, resumed_from=200, step=steps)
    attempted(store, train, "train", 1, NOON, NOON + 250, run=run, state="running", progress=killed, **prices)
    start = NOON + 3850
    attempted(store, train, "train", 2, start, start + 10 + steps - 200, run=run, progress=resumed, **prices)
    if finished:
        facts = {"steps": steps, "tokens": 2048 * steps, "train/loss": 2.0, "val/loss": 2.1, "skipped_updates": 0}
        made: dict[str, dict[str, Any]] = {
            "tokenize": {"tokens": 8_000_000},
            "train": facts | {"perf/tokens_per_second": 2048.0, "rollbacks": []},
            "evaluate": {"val/loss": 2.0625, "sample": HOSTILE},
            "export": {"parameters": 7},
        }
        for stage, found in made.items():
            plan = plans[stage]
            origin = {"git_commit": "c0ffee", "git_dirty": True, "python": "3.11", "versions": {"torch": "2.13"}}
            files = (File("x", "a0001/x", 1000, "0" * 64),)
            made_by = "other-12345678" if stage == "tokenize" else run
            about = (plan.stage, plan.label, plan.fingerprint, plan.identity)
            manifest = Manifest(*about, {}, files, origin, found | more.get(stage, {}), made_by, 1, NOON)
            store.create(key_of(plan.prefix), manifest.to_json())
    return record(store, run, recipe, plans, "export")


def run_that_waited(store: Store, scale: float = 1.0) -> RunRecord:
    """An attempt at training, 59 waits for spot, and another: 26.4 hours, or `scale` times as long."""
    record_of_run = run_in(store, f"patient-{scale}", steps=300, finished=False)
    start, numbers = NOON, range(1, 62)
    for number in numbers:
        waits = number not in (numbers[0], numbers[-1])
        seconds = scale * (600 if waits else 6_000 if number == 1 else 36_000)
        progress = Progress(waiting=True, notice=f"look {number}") if waits else Progress(resumed_from=0, step=250)
        rest = {"progress": progress, "price_per_hour": 0.6 if waits else 36.0, "run": record_of_run.run}
        phases = {"idle" if waits else "train": seconds}
        attempted(
            store, record_of_run.prefixes["train"], "train", number, start, start + seconds, phases=phases, **rest
        )
        start += seconds + (300 * scale if waits else 0)
    return record_of_run


class Parts(HTMLParser):
    """The active elements of a page, as a browser's parser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip() and self.found:
            self.texts.setdefault(self.found[-1][0], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


# --- what the page shows


def test_a_page_shows_the_data_of_the_store(store: LocalStore) -> None:
    record_of_run = run_in(store)
    data, account = run_data(Run(store, record_of_run)), Run(store, record_of_run).account
    assert (data["state"], data["steps"], data["starts"]) == ("done", 400, 2)
    assert data["account"]["total"] == asdict(account.total)
    assert account.total.usd == pytest.approx(36.0 * (250 + 210) / 3600)
    assert [(a["state"], a["from"], a["to"]) for a in data["attempts"]] == [("lost", 0, 250), ("done", 200, 400)]
    assert data["attempts"][1]["billed_before"]["usd"] == pytest.approx(2.5)
    assert data["series"]["train/loss"]["raw"]["step"] == list(range(1, 401))
    boxes = {box["stage"]: box for box in data["lineage"]}
    assert list(boxes) == ["text", "tokenize", "train", "evaluate", "export"]
    assert boxes["tokenize"]["facts"] == ["8,000,000 tokens", "made by other-12345678"]
    assert boxes["evaluate"]["facts"] == ["val loss 2.0625"]
    receipt = dict(data["receipt"])
    assert receipt["commit"] == "c0ffee with uncommitted changes"
    assert receipt["seed"] == "1337" and receipt["hardware"].startswith("1 x cpu, fp32; ")


BASELINES = {"openai-community/gpt2": {"val/loss": 3.1, "eval/hellaswag_acc_norm": 0.2945}}


def test_the_lineage_has_the_parent_of_a_branch_and_the_baselines_of_its_evaluation(store: LocalStore) -> None:
    branch = f"train.branch_from=run:wsd-1a2b3c4d@50@sha256:{'d' * 64}"
    made = run_in(store, changes=[branch], more={"evaluate": {"baselines": BASELINES}})
    boxes = {box["stage"]: box for box in run_data(Run(store, made))["lineage"]}
    assert list(boxes) == ["text", "branched from", "tokenize", "train", "evaluate", "export"]
    parent = boxes["branched from"]
    assert (parent["name"], parent["fingerprint"], parent["facts"]) == (
        *("run:wsd-1a2b3c4d@50", "d" * 64),
        ["whole state"],
    )
    assert boxes["evaluate"]["facts"][1:] == ["beside openai-community/gpt2: val loss 3.1000, HellaSwag 0.2945"]

    tuned = run_in(store, "tuned", changes=[f"train.init_from=openai-community/gpt2@{'e' * 40}"], finished=False)
    boxes = {box["stage"]: box for box in run_data(Run(store, tuned))["lineage"]}
    assert boxes["begins with"]["name"] == f"openai-community/gpt2@{'e' * 40}"
    assert boxes["begins with"]["facts"] == ["weights alone"] and "fingerprint" not in boxes["begins with"]


def test_consecutive_waits_for_spot_are_one_row_of_the_page_as_in_the_bill(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_of_run = run_that_waited(store)
    data = run_data(Run(store, record_of_run))
    assert [a["number"] for a in data["attempts"]] == ["1", "2 to 60", "61"]
    wait = data["attempts"][1]
    assert wait["waited"] and wait["notice"] == "look 60" and wait["phases"] == {"idle": 59 * 600.0}
    assert (wait["started"], wait["ended"]) == (NOON + 6_000, NOON + 6_000 + 59 * 900 - 300)
    assert wait["bill"]["usd"] == pytest.approx(59 * 0.1)
    assert {box["stage"]: box.get("attempts") for box in data["lineage"]}["train"] == data["starts"] == 2
    monkeypatch.setenv("COLUMNS", "200")
    print_bill(Run(store, record_of_run).account)
    bill = "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    rows = ["train 1 done", "train 2 to 60 waiting for spot (look 60)", "train 61 done"]
    assert [bill.count(f"\n{row} ") for row in rows] == [1, 1, 1] and "\ntrain 3" not in bill


def test_a_point_lies_at_the_hours_and_dollars_that_were_billed_when_it_was_logged(store: LocalStore) -> None:
    line = run_data(Run(store, run_in(store)))["series"]["val/loss"]["line"]
    bill = dict(zip(line["step"], zip(line["hours"], line["usd"], strict=True), strict=True))
    assert bill[50] == pytest.approx((60 / 3600, 0.6), abs=1e-5)
    # The second attempt did the final step 250; the first one, with its lost work, is on the bill before it.
    # The hour between them is on no bill.
    assert bill[250] == pytest.approx(((250 + 60) / 3600, 3.1), abs=1e-5)


def test_a_passed_target_is_told_with_its_tokens_hours_and_dollars(store: LocalStore) -> None:
    aimed = run_in(store, "aimed", changes=["train.stop_at={val_loss: 3.0}"], price_per_hour=36.0)
    run = Run(store, aimed)
    assert run.passed == Passed("val_loss", 3.0, ANY, 200, 200 * 2048, ANY)
    assert run.passed.value == pytest.approx(2.7767, abs=1e-4)
    assert passed_text(run.passed) == "val loss 3 after 409,600 tokens (step 200), 3 min 30 s, $2.10"
    first = page_data([run])["runs"][0]["targets"][0]
    assert (first["what"], first["met"]) == (f"passed {passed_text(run.passed)}", True)
    never = Run(store, run_in(store, "never", changes=["train.stop_at={val_loss: 1.0}"]))
    assert never.passed is None and page_data([never])["runs"][0]["targets"][0]["met"] is None


def test_scores_and_samples_of_a_training_are_on_its_page(store: LocalStore) -> None:
    (data,) = page_data([Run(store, run_in(store))])["runs"]
    assert data["series"]["eval/hellaswag_acc_norm"]["line"]["step"] == [100, 200, 300, 400]
    assert [step for step, _ in data["samples"]] == [100, 200, 300, 400]


def test_a_run_without_a_known_price_has_hours_and_no_dollars(store: LocalStore) -> None:
    data = run_data(Run(store, run_in(store, price_per_hour=None)))
    line = data["series"]["val/loss"]["line"]
    assert line["usd"] == [] and len(line["hours"]) == len(line["step"])
    assert data["account"]["total"]["usd"] == 0 and data["account"]["total"]["unpriced_hours"] > 0


def test_an_unfinished_run_has_a_page_too(store: LocalStore) -> None:
    data = run_data(Run(store, run_in(store, steps=300, finished=False)))
    assert [box.get("there") for box in data["lineage"]] == [None, False, False, False, False]
    assert data["targets"] == [{"what": "steps", "target": 400, "got": 300, "met": None}]
    assert data["sample"] is None


def test_targets_are_met_missed_or_not_yet_measured() -> None:
    recipe = load_recipe("gpt2-124m")
    verdicts = [row["met"] for row in targets(recipe, "124M", recipe.train.max_steps, 3.5, 0.30)]
    assert verdicts == [True, False, True]
    assert [row["met"] for row in targets(recipe, "124M", 5, None, None)] == [None, None, None]
    measured = load_recipe("gpt2-124m", ["evaluate.core=bundle"])
    assert [row["met"] for row in targets(measured, "124M", 5, None, None)] == [None] * 4
    assert [row["met"] for row in targets(measured, "124M", 5, None, None, 0.12)][3] is True
    assert [row["met"] for row in targets(recipe, "350M", 5, None, None, 0.12)][3] is False
    assert len(targets(load_recipe("smoke"), None, 600, 1.0, None)) == 1  # OpenAI has no weights of that size


def test_the_loss_of_gpt2_is_no_target_on_another_text() -> None:
    code = load_recipe("gpt2-124m", ["tokens.source=code/*.txt"])
    rows = targets(code, "124M", code.train.max_steps, 1.2, 0.25)
    assert [(row["what"], row["met"]) for row in rows] == [("steps", True), ("HellaSwag at least GPT-2 124M's", False)]
    web, other = (SourceConfig(source=name, weight=1) for name in ("hf://datasets/HuggingFaceFW/fineweb", "code/*.txt"))
    for sources, compares in (([web, web], True), ([web, other], False)):
        tokens = code.tokens.model_copy(update={"source": "", "sources": sources})
        mixture = code.model_copy(update={"tokens": tokens})
        assert any("val loss" in row["what"] for row in targets(mixture, "124M", 5, 1.2, None)) is compares


@pytest.mark.parametrize("size", SHAPES)
def test_every_size_of_gpt2_is_that_of_a_shipped_recipe_and_has_its_references(size: str) -> None:
    model = load_recipe(f"gpt2-{size.lower()}").model
    assert SHAPES[size] == (model.n_layer, model.n_head, model.n_embd)
    assert {metric: sum(s == size for _, s, _ in known) for metric, known in REFERENCES.items()} == {
        "val/loss": 1,
        "eval/hellaswag_acc_norm": 2,
        "eval/core": 1,
    }


# --- curves


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(10, 300))
def test_a_thinned_curve_keeps_its_ends_and_extremes_within_the_limit(values: Sequence[float], limit: int) -> None:
    points = thin(values, limit)
    assert points == sorted(set(points)) and len(points) <= max(limit, 2)
    assert (points[0], points[-1]) == (0, len(values) - 1)
    left = [values[i] for i in points]
    assert (min(left), max(left)) == (min(values), max(values))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300), st.integers(0, 50))
def test_a_running_mean_is_the_mean_of_the_neighbours(values: Sequence[float], reach: int) -> None:
    means = smoothed(values, reach)
    assert len(means) == len(values)
    for i, mean in enumerate(means):
        near = min(reach, i // 4)
        window = values[i - near : i + near + 1]
        assert mean == pytest.approx(sum(window) / len(window), abs=1e-6)


# --- overlays


def test_a_log_of_llmc_is_read_with_its_values(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text("s:0 tel:11.0\ns:0 trl:11.5 lr:0.000001 norm:14.96\ns:1 trl:9.0 lr:0.1 norm:nan\ns:1 eval:0.25\n")
    assert read_overlay(str(log)) == Overlay(
        "main.log",
        524_288,
        {
            "val/loss": {0: 11.0},
            "train/loss": {0: 11.5, 1: 9.0},
            "train/lr": {0: 1e-6, 1: 0.1},
            "train/grad_norm": {0: 14.96},  # values that are not finite are left out
            "eval/hellaswag_acc_norm": {1: 0.25},
        },
    )
    assert read_overlay(f"{log}@1048576").batch_tokens == 1_048_576
    log.write_text("s:5 trl:3.0\ns:6 trl:2.9\ns:5 trl:3.1\n")  # it was resumed, and redid step 5
    assert read_overlay(str(log)).series["train/loss"] == {5: 3.1, 6: 2.9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "holds no step; a main.log of llm.c has lines like 's:250 tel:6.1565'"),
        ("s:1 trl:2.0\nstep 2: loss 3\n", "line 2: 'step 2: loss 3' is not a line of llm.c"),
        ("s:1 trl:2.0\ntrl:3.0\n", "line 2: 'trl:3.0' is not a line of llm.c"),
        ("s:1 trl:two\n", "line 1: 's:1 trl:two' is not a line of llm.c"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "main.log").write_text(text)
    with pytest.raises(UserError) as error:
        read_overlay(str(tmp_path / "main.log"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_recorded_log_of_a_real_llmc_run_is_read_completely(shared_data: Path) -> None:
    overlay = read_overlay(str(shared_data / "llmc_124M_main.log"))
    assert {metric: len(points) for metric, points in overlay.series.items()} == {
        "train/loss": 19_552,
        "train/lr": 19_552,
        "train/grad_norm": 19_552,
        "val/loss": 80,
        "eval/hellaswag_acc_norm": 79,
    }
    assert (overlay.series["val/loss"][19_552], overlay.series["eval/hellaswag_acc_norm"][19_552]) == (3.2731, 0.3054)


# --- one file, safe to open


def test_no_text_of_a_run_becomes_markup(store: LocalStore) -> None:
    page = render([Run(store, run_in(store))], [Overlay(HOSTILE, 1, {"val/loss": {1: 2.0}})])
    parts = Parts(page)
    assert [script.get("type") for script in parts.all("script")] == ["application/json", None]
    assert parts.all("img") == [] and "window.broken" in page  # as text, escaped
    data = json.loads("".join(parts.texts["script"][:1]))
    assert data["runs"][0]["sample"] == HOSTILE and data["overlays"][0]["name"] == HOSTILE


def test_data_that_looks_like_the_template_is_not_substituted() -> None:
    page = bind({"runs": [{"name": "{{script}}{{style}}{{data}}"}]})
    assert page.count('"use strict"') == 1 and '"name":"{{script}}{{style}}{{data}}"' in page


def test_the_policy_admits_the_pages_own_style_and_script_and_nothing_else(store: LocalStore) -> None:
    parts = Parts(render([Run(store, run_in(store))]))
    (policy,) = [m["content"] for m in parts.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    digests = {
        kind: "sha256-" + base64.b64encode(hashlib.sha256(parts.texts[kind][-1].encode()).digest()).decode()
        for kind in ("style", "script")
    }
    assert policy == (
        f"default-src 'none'; style-src '{digests['style']}'; script-src '{digests['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not any(attributes.get("src") or attributes.get("href") for _, attributes in parts.found)


def test_a_long_run_makes_a_page_of_less_than_a_megabyte(store: LocalStore, shared_data: Path) -> None:
    page = render([Run(store, run_in(store, steps=20_000))], [read_overlay(str(shared_data / "llmc_124M_main.log"))])
    assert len(page) < 1_000_000


def test_report_writes_the_page_to_the_given_path(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(UserError, match="no runs in .* yet; `skytrain run smoke` makes one"):
        report(store=store.uri, html=path)
    run = run_in(store).run
    report([run[:7]], store=store.uri, html=path)
    assert run in path.read_text() and str(path) in capsys.readouterr().out
    with pytest.raises(UserError, match="cannot be written"):
        report(store=store.uri, html=tmp_path / "nowhere" / "report.html")
    report([run], store=store.uri, html=path, as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["run"] == run and str(path) in printed.err
    with pytest.raises(UserError, match="add --html FILE"):
        report(store=store.uri, overlay=["main.log"])


# --- in a real browser

browser = open_browser


def ticks_of(browser: Browser, figure: int) -> list[str]:
    """The tick labels of the x axis of a figure whose axis has no title."""
    clock = f"document.querySelectorAll('figure')[{figure}]"
    return browser.js(f"[...{clock}.querySelectorAll('line.axis + text')].map((text) => text.textContent)")


def test_the_time_axis_has_round_numbers_of_one_unit_and_consecutive_waits_are_one_bar(
    store: LocalStore, tmp_path: Path, browser: Browser
) -> None:
    expected = {
        0.0005: ["10 s", "20 s", "30 s", "40 s"],
        0.002: ["0.5 min", "1 min", "1.5 min", "2 min", "2.5 min", "3 min"],
        0.01: ["2 min", "4 min", "6 min", "8 min", "10 min", "12 min", "14 min"],
        0.05: ["10 min", "20 min", "30 min", "40 min", "50 min", "60 min", "70 min"],
        0.1: ["0.5 h", "1 h", "1.5 h", "2 h", "2.5 h"],
        1.0: ["3 h", "6 h", "9 h", "12 h", "15 h", "18 h", "21 h", "24 h"],
        10.0: ["2 d", "4 d", "6 d", "8 d", "10 d"],
    }
    path = tmp_path / "report.html"
    path.write_text(render([Run(store, run_that_waited(store, scale)) for scale in expected]))
    browser.screen(1200)
    browser.open(path)
    first = browser.js("document.querySelectorAll('figure').length") - len(expected)
    assert [ticks_of(browser, first + i) for i in range(len(expected))] == [
        ["0", *ticks] for ticks in expected.values()
    ]
    bars = browser.js("[...document.querySelectorAll('figure g[class^=s-]')].map((bar) => bar.textContent)")
    assert bars == ["#1✓", "#2 to 60…", "#61✓"] * len(expected)
    assert browser.heard(*COMPLAINTS) == []


FINEWEB = {"source": "hf://datasets/HuggingFaceFW/fineweb-edu", "revision": "0" * 40}


def busy_page(store: LocalStore, path: Path, log: Path, text: dict[str, str] = FINEWEB) -> None:
    """A page whose references have little room: GPT-2's shape, losses near all of them, and llm.c's curve."""
    run = run_in(store, "crowded", steps=400)
    recipe = run.recipe | {"model": run.recipe["model"] | {"n_layer": 12, "n_head": 12, "n_embd": 768}}
    recipe["tokens"] = recipe["tokens"] | text
    data = json.loads(json.dumps(run_data(Run(store, replace(run, recipe=recipe)))))
    data["size"], data["tokenizer"] = "124M", "gpt2"
    for metric, values in data["series"].items():
        for curve in values.values():
            curve["y"] = [y + 0.9 if metric.endswith("loss") else y for y in curve["y"]]
    hellaswag = {"step": [1, 200, 400], "y": [0.25, 0.36, 0.44], "hours": [0.1, 0.2, 0.3], "usd": [1, 2, 3]}
    data["series"]["eval/hellaswag_acc_norm"] = {"line": hellaswag}
    overlay = json.loads(json.dumps(overlay_data(read_overlay(f"{log}@2048"))))
    values = {"made": NOON, "runs": [data], "overlays": [overlay], "references": REFERENCES, "mfu": "MFU"}
    path.write_text(bind(values))


# Each label of a reference; what it overlaps; and the references that have no label.
OVERLAPS = """
[...document.querySelectorAll('figure')].slice(0, 2).map((figure) => {
  const box = (text) => text.getBBox(), labels = [...figure.querySelectorAll('text.halo:not(.end)')];
  const others = (label) => [...figure.querySelectorAll('text')].filter((text) => text !== label);
  const meet = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  const points = ({ x, y, width, height }) => [...Array(Math.ceil(width / 3)).keys()].flatMap((i) =>
    [...Array(Math.ceil(height / 3)).keys()].map((j) => new DOMPoint(x + 3 * i, y + 3 * j)));
  const lines = [...figure.querySelectorAll('path.line, path.raw, path.final')];
  const atOf = (line) => (({ x, y, width }) => ({ x, y, width }))(box(line));
  const rings = [...figure.querySelectorAll('circle')];
  const dotted = [...figure.querySelectorAll('line.reference')];
  const covers = (label) => {
    const area = box(label), inside = points(area);
    return others(label).filter((text) => meet(area, box(text))).map((text) => text.textContent)
      .concat(lines.filter((line) => inside.some((point) => line.isPointInStroke(point))).map((line) => 'a line'))
      .concat(rings.filter((ring) => meet(area, box(ring))).map(() => 'a ring'))
      .concat(dotted.filter((line) => meet(area, { ...atOf(line), height: 0.1 }))
        .map(() => 'a dotted line'));
  };
  const named = [...figure.querySelector('figcaption').innerText.matchAll(/GPT-[23] [0-9.]+[MB]: /g)].length;
  return { labels: labels.length, named, dotted: dotted.length, covers: labels.flatMap(covers) };
})
"""


def test_the_names_of_references_overlap_nothing_at_any_width(
    store: LocalStore, tmp_path: Path, browser: Browser, shared_data: Path
) -> None:
    path = tmp_path / "report.html"
    busy_page(store, path, shared_data / "llmc_124M_main.log")
    browser.screen(1400)
    browser.open(path)
    labelled = []
    for width, scale in ((1400, "linear"), (800, "log"), (600, "linear"), (400, "log"), (400, "linear")):
        browser.screen(width)
        browser.js("new Promise((done) => setTimeout(done, 100))")
        browser.js(f"document.querySelector('input[name=scale][value={scale}]').click()")
        for figure in browser.js(OVERLAPS):
            assert figure["covers"] == [], (width, scale)
            assert figure["dotted"] == figure["labels"] + figure["named"] > 0  # each has a name
            labelled.append(figure["labels"])
    assert sum(labelled) > len(labelled)  # most names stand at their lines
    assert browser.heard(*COMPLAINTS) == []


def test_the_losses_of_gpt2_are_not_drawn_beside_another_text(
    store: LocalStore, tmp_path: Path, browser: Browser, shared_data: Path
) -> None:
    path = tmp_path / "report.html"
    busy_page(store, path, shared_data / "llmc_124M_main.log", {"source": "code/*.txt"})
    browser.screen(1400)
    browser.open(path)
    loss, hellaswag = browser.js(OVERLAPS)
    assert loss["dotted"] == 0 and hellaswag["dotted"] > 0
    assert "FineWeb" not in browser.js("document.querySelector('figure figcaption').innerText")
    assert browser.heard(*COMPLAINTS) == []


X_TICKS = (
    "[...document.querySelector('figure').querySelectorAll('line.axis + text.middle')]"
    ".map((text) => text.textContent).slice(0, -1)"  # the last one is the axis's title
)


def test_a_page_with_another_curve_counts_it_and_zooms_by_drag(
    store: LocalStore, tmp_path: Path, browser: Browser, shared_data: Path
) -> None:
    path = tmp_path / "report.html"
    log = read_overlay(f"{shared_data / 'llmc_124M_main.log'}@2048")
    path.write_text(render([Run(store, run_in(store))], [replace(log, series={"val/loss": {0: 9.0, 300: 2.5}})]))
    browser.screen(1200)
    browser.open(path)
    chosen = "document.querySelector('input[name=axis]:checked').value"
    assert browser.js(chosen) == "step"  # equal batches
    assert browser.js("document.querySelector('h1').innerText") == "1 run and 1 log of llm.c"
    sentence = browser.js("document.querySelector('header p').innerText")
    assert sentence.endswith(
        "Beside it: llmc_124M_main.log of llm.c, with a validation loss of 2.5000 after 614k tokens."
    ) and sentence.startswith("A GPT-2 of ")

    whole = browser.js(X_TICKS)
    assert whole[0] == "0" and whole[-1] == "400"
    plot = json.loads(browser.js("JSON.stringify(document.querySelector('.plot').getBoundingClientRect())"))
    left, right = plot["x"] + 52, plot["x"] + plot["width"] - 62

    def mouse(kind: str, share: float, **more: Any) -> None:
        x, y = left + share * (right - left), plot["y"] + 150
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    mouse("mousePressed", 0.5, clickCount=1)
    mouse("mouseMoved", 0.6, buttons=1)
    mouse("mouseMoved", 0.75, buttons=1)
    assert browser.js("document.querySelector('.chosen').getAttribute('width') > 100")
    mouse("mouseReleased", 0.75, clickCount=1)
    zoomed = [int(tick) for tick in browser.js(X_TICKS)]
    assert len(zoomed) > 3 and min(zoomed) >= 195 and max(zoomed) <= 305
    assert "200" in browser.js("document.querySelector('.range').innerText")
    assert browser.js("document.querySelectorAll('.chosen').length") == 0
    for count in (1, 2):
        mouse("mousePressed", 0.5, clickCount=count)
        mouse("mouseReleased", 0.5, clickCount=count)
    assert browser.js(X_TICKS) == whole

    # The keyboard zooms, too: + around the cursor, Escape back to the whole.
    browser.js("document.querySelector('.plot input').focus()")
    dispatch = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    browser.js(dispatch % "ArrowLeft")
    browser.js(dispatch % "+")
    assert int(browser.js(X_TICKS)[0]) >= 200
    browser.js(dispatch % "Escape")
    assert browser.js(X_TICKS) == whole
    assert browser.heard(*COMPLAINTS) == []

    # Tokens are the axis where equal steps are different amounts of training.
    path.write_text(render([Run(store, run_in(store))], [replace(log, batch_tokens=4096)]))
    browser.events.clear()
    browser.open(path)
    assert browser.js(chosen) == "tokens"


# --- report --live


def test_a_browser_draws_the_page_without_errors_and_without_the_network(
    store: LocalStore, tmp_path: Path, browser: Browser, shared_data: Path
) -> None:
    runs = [Run(store, made) for made in (run_in(store), run_in(store, "dear", price_per_hour=None))]
    path = tmp_path / "report.html"
    path.write_text(render(runs, [read_overlay(str(shared_data / "llmc_124M_main.log"))]))
    browser.screen(1200)
    browser.open(path)

    # Every figure is drawn, has a name for those who don't see it, and its numbers in a table.
    figures = browser.js(
        "[...document.querySelectorAll('figure')].map((f) => { f.querySelector('details').open = true; return ["
        "f.querySelectorAll('path, rect').length, f.querySelector('svg[role=img]').getAttribute('aria-label')]; })"
    )
    assert len(figures) == 7  # loss, HellaSwag, throughput, learning rate, gradient norm; two timelines
    assert all(marks > 1 and len(name) > 40 for marks, name in figures)
    assert "3.2731" in figures[0][1] and "died without a last heartbeat" in figures[5][1]
    minutes = ["0", "1 min", "2 min", "3 min"]  # and again after the hour between the attempts, which is shortened
    assert ticks_of(browser, 5) == [*minutes, "4 min", *minutes]
    browser.screen(1200)
    assert browser.js("document.querySelectorAll('figure table').length") == 7
    text = browser.js("document.body.innerText")
    assert f"{HOSTILE}" in text and browser.js("window.broken") is None
    assert "$4.60" in text and "unpriced" in text

    # The axis: dollars for the run that has a price; the others are named as missing.
    browser.js("document.querySelector('input[name=axis][value=usd]').click()")
    names = browser.js("document.querySelector('figure svg').getAttribute('aria-label')")
    assert names.startswith("Loss, nats per token against dollars") and "main.log" not in names and "dear" not in names
    message = browser.js("document.querySelector('figcaption').innerText")
    assert "No price is known for dear-" in message and "has neither time nor cost" in message

    # The keyboard reads values: Tab leads to the figure, arrows walk along it.
    browser.js("document.querySelector('.check input').focus()")
    browser.press("Tab")
    at_the_end = browser.js("document.activeElement.getAttribute('aria-valuetext')")
    browser.press("ArrowLeft")
    spoken = browser.js("document.activeElement.getAttribute('aria-valuetext')")
    assert spoken.startswith("$") and "quick-" in spoken and spoken != at_the_end
    assert browser.js("!document.querySelector('.tip').hidden")

    # Dark mode, by the system's setting and by the page's own switch; and a phone.
    ground = "getComputedStyle(document.body).backgroundColor"
    day = browser.js(ground)
    browser.screen(1200, "dark")
    night = browser.js(ground)
    browser.js("document.querySelector('input[name=theme][value=light]').click()")
    assert day == "rgb(255, 255, 255)" and night != day and browser.js(ground) == day
    browser.screen(375)
    wide = "document.documentElement.scrollWidth > 375"
    frames = f"(async () => {{ for (let i = 0; i < 300 && {wide}; i++) await new Promise(requestAnimationFrame); }})()"
    browser.js(frames)  # a page that becomes narrower is redrawn in a later frame
    assert browser.js("document.documentElement.scrollWidth") == 375

    asked = {request["request"]["url"] for request in browser.heard("Network.requestWillBeSent")}
    assert asked == {path.as_uri()}
    assert browser.heard(*COMPLAINTS) == []

    # The policy also stops every script from elsewhere, and every request.
    tried = "fetch('data:text/plain,x').then(() => 'went', () => 'stopped')"
    assert browser.js(tried) == "stopped"
    browser.js("document.body.append(Object.assign(document.createElement('script'), {text: 'window.broken = 1'}))")
    assert browser.js("window.broken") is None
