"""The report page shows the data of the store; no text becomes markup; a browser draws it without the network."""

import base64
import hashlib
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import COMPLAINTS, Browser, open_browser
from hypothesis import given
from hypothesis import strategies as st

from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import RunRecord, record
from pipelines.run.runs import Run
from pipelines.run.stage import plans_of, run_name
from pipelines.store.layout import manifest_key
from pipelines.store.manifest import File, Manifest
from pipelines.store.records import Heartbeat, ProcessId, Progress
from pipelines.user.show.overlay import Overlay, read_overlay
from pipelines.user.show.page import overlay_data, page_of, run_data, thin
from pipelines.user.verbs.report import report
from trainer.base.store import LocalStore, Store
from trainer.config.errors import UserError

NOON = 1_800_000_000.0
STEPS = 400
HOSTILE = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'><!--<script>"
CHANGES = [
    f"tokens.source=hf://datasets/a/b@{'a' * 40}",
    f"tokens.subset={HOSTILE}",
    f"train.max_steps={STEPS}",
]


def attempted(store: Store, prefix: str, stage: str, number: int, start: float, end: float, **changes: Any) -> None:
    values: dict[str, Any] = {"state": "done", "price_per_hour": 36.0, "process": ProcessId(HOSTILE)}
    values |= {"run": changes.pop("run"), "phases": {"setup": 10.0, "train": end - start - 10}} | changes
    beat = Heartbeat(stage=stage, attempt=number, started=start, time=end, **values)
    store.put(f"{prefix}/attempts/{number:04d}/heartbeat.json", beat.to_json())


def run_in(
    store: Store,
    name: str = "quick",
    changes: Sequence[str] = (),
    more: Mapping[str, dict[str, Any]] = types.MappingProxyType({}),  # facts by stage
    jump: float = 0.0,  # of the clock, between the attempts
    shipped: str = "smoke",
    **prices: Any,
) -> RunRecord:
    """A run that was killed at step 250, after a commit at step 200, and resumed an hour later."""
    recipe = load_recipe(shipped, [f"name={name}", *CHANGES, *changes])
    plans = plans_of(recipe)
    run, train = run_name(plans), plans["train"].prefix
    again = NOON + 3850 + jump
    for attempt, first, last, start in ((1, 1, 200, NOON), (2, 201, STEPS, again)):
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
    resumed = replace(killed, resumed_from=200, step=STEPS)
    attempted(store, train, "train", 1, NOON, NOON + 250, run=run, state="running", progress=killed, **prices)
    attempted(store, train, "train", 2, again, again + 10 + STEPS - 200, run=run, progress=resumed, **prices)
    facts = {"steps": STEPS, "tokens": 2048 * STEPS, "train/loss": 2.0, "val/loss": 2.1, "skipped_updates": 0}
    made: dict[str, dict[str, Any]] = {
        "tokenize": {"tokens": 8_000_000},
        "train": facts | {"perf/tokens_per_second": 2048.0},
        "evaluate": {"val/loss": 2.0625, "sample": HOSTILE},
        "export": {"parameters": 7},
    }
    for stage in [stage for stage in plans if stage.startswith("tune.")]:
        made[stage] = {"method": "grpo"}
        rewards = [{"step": n, "time": NOON, f"{stage.replace('.', '/')}/reward": n / 50} for n in range(1, 51)]
        lines = "".join(json.dumps(row) + "\n" for row in rewards)
        store.put(f"{plans[stage].prefix}/metrics/step-00000050-a0001.jsonl", lines.encode())
    for stage, found in made.items():
        plan = plans[stage]
        origin = {"git_commit": "c0ffee", "git_dirty": True, "python": "3.11", "versions": {"torch": "2.13"}}
        files = (File("x", "a0001/x", 1000, "0" * 64),)
        made_by = "other-12345678" if stage == "tokenize" else run
        about = (plan.stage, plan.label, plan.fingerprint, plan.identity)
        manifest = Manifest(*about, {}, files, origin, found | more.get(stage, {}), made_by, 1, NOON)
        store.create(manifest_key(plan.prefix), manifest.to_json())
    return record(store, run, recipe, plans, list(plans)[-1])


def drawn(runs: Sequence[Run], *overlays: Overlay) -> str:
    return page_of([run_data(run) for run in runs], [overlay_data(one) for one in overlays])


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
    assert (data["state"], data["steps"], data["attempt_count"]) == ("done", 400, 2)
    assert data["account"]["total"] == asdict(account.total)
    assert account.total.usd == pytest.approx(36.0 * (250 + 210) / 3600)
    assert [(a["state"], a["resumed_from"], a["step"]) for a in data["attempts"]] == [
        ("lost", 0, 250),
        ("done", 200, 400),
    ]
    assert data["attempts"][1]["billed_before"]["usd"] == pytest.approx(2.5)
    assert data["series"]["train/loss"]["raw"]["step"] == list(range(1, 401))
    receipt = dict(data["receipt"])
    assert receipt["commit"] == "c0ffee with uncommitted changes"
    assert receipt["seed"] == "1337" and receipt["hardware"].startswith("1 x cpu, fp32; ")


def test_a_point_lies_at_the_hours_and_dollars_that_were_billed_when_it_was_logged(store: LocalStore) -> None:
    line = run_data(Run(store, run_in(store)))["series"]["val/loss"]["line"]
    bill = dict(zip(line["step"], zip(line["hours"], line["usd"], strict=True), strict=True))
    assert bill[50] == pytest.approx((60 / 3600, 0.6), abs=1e-5)
    # The second attempt did the final step 250; the first one, with its lost work, is on the bill before it.
    # The hour between them is on no bill.
    assert bill[250] == pytest.approx(((250 + 60) / 3600, 3.1), abs=1e-5)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_steps_between_two_attempts_moves_no_point(store: LocalStore, jump: float) -> None:
    steady, stepped = (run_data(Run(store, run_in(store, f"clock{by:.0f}", jump=by))) for by in (0.0, jump))
    assert stepped["series"] == steady["series"]
    assert [one["billed_before"] for one in stepped["attempts"]] == [one["billed_before"] for one in steady["attempts"]]
    assert steady["attempts"][1]["billed_before"]["usd"] == pytest.approx(2.5)


def test_a_tuned_run_leads_with_the_tuned_model(store: LocalStore, tmp_path: Path, browser: Browser) -> None:
    facts = {"tune/exact_before": 0.35, "tune/exact": 0.5, "sample": f"3+4 → {HOSTILE}"}
    made = run_in(store, "chat", more={"tune.grpo": facts}, shipped="smoke-chat")
    path = tmp_path / "report.html"
    path.write_text(drawn([Run(store, made)]))
    browser.screen(1200)
    browser.open(path)
    texts = "[...document.querySelectorAll('{}')].map((one) => one.innerText)"
    assert browser.js(texts.format("h2"))[0] == "Tuning" and browser.js(texts.format("h3")) == ["tune.grpo", "tune.sft"]
    assert "exact answers 0.3500 → 0.5000 by tune.grpo" in browser.js("document.querySelector('header').innerText")
    assert browser.js(texts.format(".tiles > div"))[0].split("\n") == ["35% before", "exact answers", "50%"]
    assert browser.js("document.querySelector('pre').innerText") == f"3+4 → {HOSTILE}"
    names = browser.js("[...document.querySelectorAll('svg[role=img]')].map((one) => one.getAttribute('aria-label'))")
    assert names[0].startswith("tune/grpo/reward against optimizer steps.") and names[0].endswith("to 1.0000.")
    browser.js(CHOOSE)  # dollars, which a step of tuning has not
    assert "to 1.0000." in browser.js("document.querySelector('svg[role=img]').getAttribute('aria-label')")
    assert browser.js("window.broken") is None and browser.heard(*COMPLAINTS) == []


def test_a_page_of_two_runs_lists_the_fields_that_differ(store: LocalStore) -> None:
    runs = [run_in(store), run_in(store, "other", changes=["train.learning_rate=0.5", f"tokens.text_column={HOSTILE}"])]
    data = json.loads(Parts(drawn([Run(store, one) for one in runs])).texts["script"][0])
    assert [field for field, _ in data["differences"]] == ["tokens.text_column", "train.learning_rate"]
    assert data["differences"][1][1] == ["0.003", "0.5"]


# --- curves


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(10, 300))
def test_a_thinned_curve_keeps_its_ends_and_extremes_within_the_limit(values: Sequence[float], limit: int) -> None:
    points = thin(values, limit)
    assert points == sorted(set(points)) and len(points) <= max(limit, 2)
    assert (points[0], points[-1]) == (0, len(values) - 1)
    left = [values[i] for i in points]
    assert (min(left), max(left)) == (min(values), max(values))


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
        ("", "contains no steps; a main.log of llm.c has lines like 's:250 tel:6.1565'"),
        ("s:1 trl:2.0\nstep 2: loss 3\n", "line 2: 'step 2: loss 3' is not a line of llm.c"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "main.log").write_text(text)
    with pytest.raises(UserError) as error:
        read_overlay(str(tmp_path / "main.log"))
    assert message in str(error.value) and "\n" not in str(error.value)


# --- one file, safe to open


def test_no_text_of_a_run_becomes_markup(store: LocalStore) -> None:
    page = drawn([Run(store, run_in(store))], Overlay(HOSTILE, 1, {"val/loss": {1: 2.0}}))
    parts = Parts(page)
    assert [script.get("type") for script in parts.all("script")] == ["application/json", None]
    assert parts.all("img") == [] and "window.broken" in page  # as text, escaped
    data = json.loads("".join(parts.texts["script"][:1]))
    assert data["runs"][0]["sample"] == HOSTILE and data["overlays"][0]["name"] == HOSTILE


def test_the_policy_admits_the_pages_own_style_and_script_and_nothing_else(store: LocalStore) -> None:
    parts = Parts(page_of([run_data(Run(store, run_in(store)))]))
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


def test_report_writes_the_page_to_the_given_path(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, nowhere = tmp_path / "report.html", tmp_path / "nowhere" / "report.html"
    with pytest.raises(UserError, match="no runs in .* yet; `skytrain run smoke` makes one"):
        report(store=store.uri, html=path)
    run = run_in(store).run
    report([run[:7]], store=store.uri, html=path)
    assert run in path.read_text() and str(path) in capsys.readouterr().out
    for wrong in (nowhere, Path()):
        with pytest.raises(UserError, match="cannot be written"):
            report([run], store=store.uri, html=wrong)
    report([run], store=store.uri, html=path, as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["run"] == run and str(path) in printed.err
    with pytest.raises(UserError, match="add --html FILE"):
        report(store=store.uri, overlay=["main.log"])


def test_a_page_of_all_runs_is_a_table_of_links_to_the_newest(
    store: LocalStore, tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [run_in(store, f"run{number}").run for number in range(3)]
    for number, name in enumerate(names):
        os.utime(store.path_of(f"runs/{name}.json"), (NOON + number, NOON + number))
    report(store=store.uri, html=tmp_path / "all runs.html", last=2)
    assert "1 older runs are not shown; --last 3 shows all" in capsys.readouterr().err
    browser.open(tmp_path / "all runs.html")
    links = browser.js("[...document.querySelectorAll('td a')].map((a) => [a.innerText, a.getAttribute('href')])")
    assert links == [[name, f"all%20runs/{name}.html"] for name in names[1:]]
    assert browser.js("document.querySelectorAll('figure').length") == 0
    browser.open(tmp_path / "all runs" / f"{names[2]}.html")
    assert browser.js("document.querySelector('h1').innerText").startswith(names[2])
    assert browser.heard(*COMPLAINTS) == []


# --- in a real browser

browser = open_browser


CHOOSE = """
const select = document.querySelector('select[name=axis]');
select.value = 'usd';
select.dispatchEvent(new Event('change'));
"""


def test_a_browser_draws_the_page_without_errors_and_without_the_network(
    store: LocalStore, tmp_path: Path, browser: Browser, shared_data: Path
) -> None:
    runs = [Run(store, made) for made in (run_in(store), run_in(store, "dear", price_per_hour=None))]
    path = tmp_path / "report.html"
    path.write_text(drawn(runs, read_overlay(str(shared_data / "llmc_124M_main.log"))))
    browser.screen(1200)
    browser.open(path)

    # Every figure is drawn, and has a name for those who don't see it.
    figures = browser.js(
        "[...document.querySelectorAll('figure')].map((f) => "
        "[f.querySelectorAll('path, rect').length, f.querySelector('svg[role=img]').getAttribute('aria-label')])"
    )
    assert len(figures) == 5  # loss, HellaSwag, throughput, learning rate, gradient norm
    assert all(marks > 1 and len(name) > 40 for marks, name in figures)
    assert "3.2731" in figures[0][1]
    text = browser.js("document.body.innerText")
    assert f"{HOSTILE}" in text and browser.js("window.broken") is None
    assert "crashed without a last heartbeat" in text

    # The bars of attempts are as long as they were billed.
    widths = "[...document.querySelectorAll('.attempts .bar')].map((bar) => parseFloat(bar.style.width))"
    lasted = [sum(one["phases"].values()) for one in json.loads(browser.js("data.textContent"))["runs"][0]["attempts"]]
    assert browser.js(widths)[: len(lasted)] == pytest.approx([100 * each / max(lasted) for each in lasted])
    assert "$4.60" in text and "unpriced" in text

    # The axis: dollars for the run that has a price; the others are named as missing.
    browser.js(CHOOSE)
    names = browser.js("document.querySelector('figure svg').getAttribute('aria-label')")
    assert names.startswith("Loss, nats per token against dollars") and "main.log" not in names and "dear" not in names
    message = browser.js("document.querySelector('figcaption').innerText")
    assert "Not drawn, without known dollars: dear-" in message and "main.log" in message

    # The keyboard reads values: Tab leads to the figure, arrows walk along it.
    browser.js("document.querySelector('select[name=scale]').focus()")
    browser.press("Tab")
    at_the_end = browser.js("document.activeElement.getAttribute('aria-valuetext')")
    browser.press("ArrowLeft")
    spoken = browser.js("document.activeElement.getAttribute('aria-valuetext')")
    assert spoken.startswith("$") and "quick-" in spoken and spoken != at_the_end
    assert browser.js("!document.querySelector('.tip').hidden")

    # Dark mode, by the system's setting; and a phone.
    ground = "getComputedStyle(document.body).backgroundColor"
    day = browser.js(ground)
    browser.screen(1200, "dark")
    assert day == "rgb(255, 255, 255)" and browser.js(ground) != day
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
