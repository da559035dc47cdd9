"""Tables, series and bills of runs show every value, for people and for programs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import PLANS, RUN, attempted, done_run, row, segment

from pipelines.run.runs import Summary, read_run
from pipelines.store.records import Machine, Progress
from pipelines.user.verbs.report import report
from pipelines.user.verbs.status import status
from trainer.base.store import LocalStore
from trainer.config.errors import UserError


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_report_continues_after_a_damaged_manifest_and_names_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    done_run(store)
    key = f"{PLANS[stage].prefix}/MANIFEST.json"
    store.put(key, b"{")
    report(None, store=store.uri)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:2] == [RUN, "damaged"] and f"{store.uri}/{key}: damaged" in out
    assert "20.00" in out


def test_the_report_of_one_run_shows_its_costs_by_purpose_and_price(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    done_run(store)
    spot = Machine(cloud="aws", spot=True, instance="p5.48xlarge", on_demand_per_hour=12.0)
    steps = Progress(resumed_from=0, step=70, notice="SIGTERM")
    half: dict[str, Any] = {"hours": 0.5, "price_per_hour": 10.0, "machine": spot, "price_source": "catalog aws"}
    attempted(store, "train", 1, state="interrupted", progress=steps, **half)
    attempted(store, "train", 2, price_per_hour=None, phases={"setup": 900.0, "train": 2700.0}, nodes=2)
    report([RUN], store=store.uri)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "aws spot 30 min 00 s 5.00" in lines
    assert "train 2 h 30 min 5.00 + 2 h of unknown price" in lines
    assert any(
        line.startswith("train 1 interrupted (SIGTERM) p5.48xlarge, aws spot ")
        and line.endswith(" 30 min 00 s 10.00 (catalog aws) 5.00 70 70 0")
        for line in lines
    ), lines
    assert "0.00 + 0.5 h of unknown price dollars lost to interruptions: repeated work, and the restarts" in lines
    assert "1.00 dollars saved against on-demand prices" in lines
    report(None, store=store.uri)
    assert "aws spot" not in capsys.readouterr().out  # this option is for one run


def test_report_prints_json_for_programs(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done_run(store)
    segment(store, 1, 1, [row(1, 2.0)])
    report([RUN[:7]], store=store.uri, as_json=True)
    (printed,) = json.loads(capsys.readouterr().out)
    account = printed.pop("account")
    assert Summary(**printed) == read_run(store, RUN).summary
    assert (len(account["attempts"]), account["total"]["usd"]) == (4, pytest.approx(20.0))
    assert account["by_phase"]["setup"]["usd"] == pytest.approx(4 * 60 / 3600 * 10)
    report(None, store=store.uri, series=True)
    assert json.loads(capsys.readouterr().out) == {"run": RUN, **row(1, 2.0)}


@pytest.mark.parametrize(
    ("key", "damage", "reason"),
    [
        ("runs/{}.json", lambda values: [], "input should be"),
        (
            "runs/{}.json",
            lambda values: values | {"format": 2},
            "written by a newer skytrain (format 2, this one reads",
        ),
        ("runs/{}.json", lambda v: v | {"recipe": v["recipe"] | {"mood": "good"}}, "mood: unknown field"),
        ("train/{}/MANIFEST.json", lambda values: {"format": 2}, "written by a newer skytrain (format 2, this one"),
    ],
)
@pytest.mark.parametrize(("command", "page"), [(report, False), (report, True), (status, False)])
def test_a_list_of_all_runs_names_an_unreadable_one_and_shows_the_others(
    store: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    damage: Callable[[dict[str, Any]], Any],
    reason: str,
    command: Callable[..., None],
    page: bool,
) -> None:
    done_run(store)
    values = json.loads(store.get(f"runs/{RUN}.json") or b"") | {"run": "other-12345678"}
    values["prefixes"]["train"] = "train/other-12345678"
    store.put("runs/other-12345678.json", json.dumps(values).encode())
    store.put(key.format("other-12345678"), json.dumps(damage(values)).encode())
    html = {"html": tmp_path / "page.html"} if page else {}
    command(None, store=store.uri, **html)
    out, err = capsys.readouterr()
    assert RUN in out + (html["html"].read_text() if html else "")
    assert err.startswith("other-12345678: left out: ") and reason in err.lower() and err.count("\n") == 1
    with pytest.raises(UserError, match=f"(?i){re.escape(reason)}"):
        command(["other"], store=store.uri, **html)
