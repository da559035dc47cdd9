"""Packages of other people: each example of docs/extend.md, in a real run, and what is said of a wrong one."""

import importlib.metadata
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from pipeline_runs import SHIPPED_CLI, TINY, Project
from safetensors.torch import load_file

from pipelines.extras.bench.throughput import speed_on
from pipelines.extras.tune.rewards import score_of
from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import plans_of, stage_named
from pipelines.run.trackers import Guarded, Tracker
from pipelines.store.layout import STAGES
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.records import Heartbeat
from trainer.config import extensions
from trainer.config.errors import UserError

HERE = Path(__file__).parent
EXAMPLES = sorted(path for path in HERE.iterdir() if [*path.glob("*.dist-info")])
PATHS = os.pathsep.join([str(HERE.parents[1]), *map(str, EXAMPLES)])
OF_ALL = {
    "model": TINY["model"] | {"family": "squared"},
    "train": TINY["train"] | {"max_steps": 10},
    "runtime": TINY["runtime"] | {"engine": "watched"},
    "export": TINY["export"] | {"formats": ["hf", "npz"]},
    "custom": {"norms": {"order": 1}},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages on the path of this process."""
    for path in EXAMPLES:
        monkeypatch.syspath_prepend(path)


def test_a_run_takes_engine_family_format_stage_and_tracker_of_other_packages(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", TINY | OF_ALL)
    project.environment |= {"PYTHONPATH": PATHS, "SKYTRAIN_TRACKING": "loss_csv"}
    made = json.loads(project.run("run", "tiny.yaml", "--json", code=SHIPPED_CLI).stdout)
    weights = load_file(project.path("train", "model.safetensors"))
    exported = np.load(project.path("export", "npz/weights.npz"))
    assert all(np.array_equal(exported[name], weights[name][: len(exported[name])]) for name in exported)
    norms = json.loads(project.path("custom", "norms.json").read_text())
    assert norms == pytest.approx({name: float(weight.norm(1)) for name, weight in weights.items()})
    rows = project.found("train/*/metrics/*.jsonl")[0].read_text()
    assert rows.count("watched/largest_weight") == 10 and "custom.norms" in made["artifacts"]
    losses = (project.home / f"{made['run']}.csv").read_text().splitlines()
    assert losses[0] == "step,loss" and len(losses) == 11

    done = project.run("run", "tiny.yaml", code=SHIPPED_CLI)  # everything is found
    assert re.search(r"custom\.norms +\S+ \(skipped\)", done.stdout)
    project.environment["PYTHONPATH"] = str(HERE.parents[1])
    refused = project.run("plan", "tiny.yaml", code=SHIPPED_CLI, expect=2).stderr
    assert "tiny.yaml: model.family: unknown family 'squared'; installed are " in refused


def test_a_reward_of_another_package_gets_the_answers_and_its_name_is_in_the_fingerprint(installed: None) -> None:
    step: dict[str, Any] = {"name": "rl", "method": "grpo", "data": "addition", "max_answer": 4, "batch": 8}
    step |= {"rewards": [{"kind": "brevity"}]}
    recipe = Recipe.model_validate(TINY | {"tune": [step]})
    (reward,) = recipe.tune[0].rewards
    running: Any = SimpleNamespace(step=SimpleNamespace(name="rl"))
    score = score_of(reward, running)
    answers = [[{"role": "assistant", "content": text}] for text in ("a b c", "a")]
    assert score(completions=answers, answer=["a"] * 2, trainer_state=None) == [1 / 3, 1.0]
    plans = {stage: ArtifactPlan(stage, "tiny", {"stage": stage}) for stage in STAGES}
    assert stage_named("tune.rl").plan(recipe, plans).identity["rewards"] == [{"kind": "brevity"}]


def test_a_plan_expects_of_an_engine_that_was_never_measured_the_speed_of_compiled() -> None:
    watched, compiled = (load_recipe("gpt2-124m", [f"runtime.engine={name}"]) for name in ("watched", "compiled"))
    assert speed_on(watched, "H100:1") == speed_on(compiled, "H100:1")


def test_the_entry_points_are_those_that_importlib_finds(installed: None) -> None:
    for group in sorted({group for group in vars(extensions).values() if str(group).startswith("skytrain.")}):
        theirs = {(one.name, one.value) for one in importlib.metadata.entry_points(group=group)}
        ours = {point for point in extensions.entry_points(group) if point.package != extensions.OURS}
        assert {point[:2] for point in ours} == {
            one for one in theirs if one[1].split(".")[0] not in ("trainer", "pipelines")
        }


def declared(folder: Path, package: str, text: str) -> None:
    (folder / f"{package}-1.0.dist-info").mkdir()
    (folder / f"{package}-1.0.dist-info" / "entry_points.txt").write_text(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("runtime.engine=eagr", r"^runtime.engine: unknown engine 'eagr'; installed are eager, "),
        ("runtime.engine=broken", None),
        ("export.formats=[hf, ggfu]", r"^export.formats: unknown format 'ggfu'; installed are gguf, "),
        (
            "export.formats=[broken]",
            r"^export.formats: format broken: absent_module:Format of the package b-k cannot be imported \(Mod",
        ),
        (
            "export.formats=[twice]",
            r"^export.formats: format twice: b-k and other both declare it; uninstall one of them$",
        ),
        ("custom={train: {}}", r"^custom: train is a stage of skytrain itself"),
        ("custom={broken: {}}", r"^custom: unknown stage 'broken'; installed are "),
    ],
)
def test_a_name_that_is_unknown_broken_or_declared_twice_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, message: str | None
) -> None:
    lines = "[skytrain.engines]\nbroken = absent_module:Engine\n[skytrain.formats]\n# a comment\ntwice = os:getcwd\n"
    declared(tmp_path, "B.k", f"{lines}broken = absent_module:Format\n[console_scripts]\nx = y:z\n")
    declared(tmp_path, "other", "[skytrain.formats]\ntwice = sys:exit\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe("smoke", [wrong])
    if message is None:  # its import is for the ranks, and needs torch
        plans_of(recipe)
        return
    with pytest.raises(UserError, match=message) as error:
        plans_of(recipe)
    assert "\n" not in str(error.value)


def test_the_first_package_of_a_name_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("old", "gone"), ("new", "here")):
        (tmp_path / folder).mkdir()
        declared(tmp_path / folder, "mine", f"[skytrain.trackers]\n{name} = os:getcwd\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert "here" in extensions.names(extensions.TRACKERS) and "gone" not in extensions.names(extensions.TRACKERS)


def test_a_tracker_that_raises_or_hangs_costs_the_run_a_line() -> None:
    seen, hold = list[str](), threading.Event()

    class Wrong(Tracker):
        end_seconds = 0.5

        def start(self) -> None:
            seen.append("start")
            if self.run == "raises":
                raise ConnectionError("no server")
            hold.wait()

        def heartbeat(self, beat: Heartbeat) -> None:
            seen.append("heartbeat")

    for run, what in (("raises", "failed (ConnectionError: no server)"), ("hangs", "did not end within 0.5 s")):
        guarded = Guarded("mine", Wrong("file://store", run, Path()))
        guarded.start()
        for _ in range(3):
            guarded.heartbeat(mock.Mock())
        assert guarded.end(None) == f"the tracker mine {what}; the run went on without it"
    hold.set()
    assert seen.count("heartbeat") <= 1


def test_the_guide_shows_each_example_as_it_is() -> None:
    guide = (HERE.parents[1] / "docs" / "extend.md").read_text()
    for file in (file for example in EXAMPLES for file in example.rglob("*.*") if file.suffix in (".py", ".txt")):
        assert file.read_text().strip() in guide or file.suffix == ".txt", file
