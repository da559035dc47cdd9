"""The whole pipeline through its command: real processes, real text, real servers. tests/crash kills it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pipeline_runs import FOLDER_NAME, PRICE, RUN_FIELDS, STEPS, Project, flip_a_bit, series_of, sums
from servers import LOOPBACK, S3Account, free_ports

from pipelines.recipe.recipe import Recipe
from pipelines.run.runs import read_runs
from pipelines.run.stage import STAGES, plans_of
from pipelines.run.stages import tokenize
from pipelines.store.manifest import read_manifest
from pipelines.store.s3_store import S3Store
from trainer.config.errors import ProcessKilled


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / FOLDER_NAME)


# --- stages, skipping, the card


def test_stages_are_made_up_to_the_requested_one(project: Project) -> None:
    for done, asked in enumerate(("tokenize", "train"), 1):
        made = project.result("--stage", asked)
        assert (made["state"], list(made["artifacts"])) == ("done", list(STAGES[:done]))
        assert [a["skipped"] for a in made["artifacts"].values()] == [True] * (done - 1) + [False]
    assert not project.found("evaluate/*") and not project.found("export/*")
    made = project.result()
    assert [a["skipped"] for a in made["artifacts"].values()] == [True, True, False, False]
    assert project.attempts() == dict.fromkeys(STAGES, 1) | {"tune": 0, "custom": 0}


def test_a_finished_run_is_found_and_nothing_is_done_again(undisturbed: Callable[[int], Project]) -> None:
    finished = undisturbed(1)
    before = {path: path.stat().st_mtime_ns for path in finished.found("**/*") if path.is_file()}
    output = finished.run("run", "tiny.yaml").stderr
    for stage in STAGES:
        assert f"{finished.artifact(stage).prefix} exists: skipped" in output
    made = finished.result()
    after = {path: path.stat().st_mtime_ns for path in finished.found("**/*") if path.is_file()}
    changed = {path.relative_to(finished.store.root).parts[0] for path in after if after[path] != before.get(path)}
    assert changed == {"runs"} and before.keys() == after.keys()

    plans = plans_of_recipe(finished)
    assert list(made) == RUN_FIELDS
    assert made["run"] == plans["train"].name
    assert (made["state"], made["attempts"]) == ("done", 1)
    hours = sum(beat["time"] - beat["started"] for beat in finished.heartbeats()) / 3600
    assert made["usd"] == finished.report()["usd"] == pytest.approx(PRICE * hours)
    assert made["val_loss"] == finished.artifact("evaluate").facts["val/loss"]
    assert made["artifacts"] == {
        stage: {"uri": f"{finished.store.uri}/{plan.prefix}", "fingerprint": plan.fingerprint, "skipped": True}
        for stage, plan in plans.items()
    }


def plans_of_recipe(project: Project) -> dict[str, Any]:
    values = yaml.safe_load((project.folder / "tiny.yaml").read_text())
    values["tokens"]["source"] = str(project.folder / values["tokens"]["source"])
    return plans_of(Recipe.model_validate(values))


@pytest.mark.parametrize("at_home", [True, False])
def test_the_card_shows_artifacts_and_commands_that_work(
    undisturbed: Callable[[int], Project], tmp_path: Path, at_home: bool
) -> None:
    finished = Project(undisturbed(1).folder)
    store = [] if at_home else ["--store", finished.store.uri]
    if not at_home:
        finished.environment["SKYTRAIN_HOME"] = str(tmp_path / "another home")
    card = finished.run("run", "tiny.yaml", *store).stdout
    for stage in STAGES:
        assert re.search(rf"^{stage} .*{re.escape(finished.artifact(stage).prefix)}", card, re.M), card
    assert f"{STEPS * 1024:,} in {STEPS} steps" in card
    assert f"val loss    {finished.artifact('evaluate').facts['val/loss']:.4f}" in card
    commands = [shlex.split(line) for line in card.splitlines() if re.search(r"skytrain'? (report|sample) ?", line)]
    assert [command[1] for command in commands] == ["report", "report", "sample"]
    for command in commands:
        assert command[-2:] == store or at_home
        assert finished.run(*command[1:]).stdout


# --- errors


@pytest.mark.parametrize(
    ("stage", "name", "damage", "then", "fault"),
    [
        ("tokenize", "train_000040.bin", flip_a_bit, ["--set", "train.seed=2"], "different from its manifest"),
        ("tokenize", "val_000003.bin", Path.unlink, ["--set", "evaluate.val_tokens=30000"], "missing"),
        ("train", "model.safetensors", flip_a_bit, ["--set", "export.dtype=float16"], "different from its manifest"),
    ],
)
def test_a_damaged_artifact_is_named_and_refused(
    undisturbed: Callable[[int], Project],
    tmp_path: Path,
    stage: str,
    name: str,
    damage: Callable[[Path], None],
    then: list[str],
    fault: str,
) -> None:
    project = undisturbed(1).copy(tmp_path / FOLDER_NAME)
    path = project.path(stage, name)
    damage(path)
    ended = project.run("run", "tiny.yaml", "--json", *then, expect=2)
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    key = path.relative_to(project.store.root)
    assert line.startswith("error: ") and str(key) in line and fault in line
    assert f"remove {project.artifact(stage).prefix}/MANIFEST.json to build it again" in line


def test_a_run_that_diverges_ends_with_a_diagnosis_and_state_failed(project: Project) -> None:
    ended = project.run("run", "tiny.yaml", "--set", "train.learning_rate=1.0e+30", expect=1)
    assert "Traceback" not in ended.stderr
    (diagnosis,) = [line for line in ended.stderr.splitlines() if line.startswith("failed: ")]
    assert "training diverged at step" in diagnosis and "not finite in 8 updates in a row" in diagnosis
    assert "Possible remedies: a lower train.learning_rate (now 1e+30)" in diagnosis
    assert project.report()["state"] == "failed"
    assert not project.artifacts("train")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_rented_node_without_usable_gpus_trains_and_evaluates_nothing_and_is_replaced_once(project: Project) -> None:
    command, rented = ["run", "tiny.yaml", "--set", "runtime.device=auto"], {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    project.run(*command, "--stage", "tokenize")
    project.environment |= rented
    first, second = (project.run(*command, expect=code).stderr.splitlines()[-1] for code in (75, 1))
    seen = "unfit machine: torch finds 0 of the 8 GPUs that SKYPILOT_NUM_GPUS_PER_NODE names; torch "
    assert first.startswith(f"interrupted ({seen}") and second.startswith(f"failed: {seen}"), (first, second)
    assert " has CUDA " in first and not project.rows_logged()
    project.environment |= {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}  # as on a machine for a task without GPUs
    project.run(*command, "--stage", "train")
    project.environment |= rented
    assert seen in project.run(*command, expect=75).stderr


def test_simulated_kills_of_a_process_that_tokenizes_end_the_run_after_four(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise ProcessKilled("a process of tokenize was killed")

    monkeypatch.setattr(tokenize, "work_for_source", killed)
    endings = [project.run("run", "tiny.yaml", expect=code).stderr.splitlines()[-1] for code in (75, 75, 75, 1)]
    assert "a process of tokenize was killed; attempts 1, 2, 3 also crashed" in endings[-1]


@pytest.mark.parametrize("as_json", [False, True])
def test_an_s3_server_that_stays_away_is_reported_and_interrupts(project: Project, as_json: bool) -> None:
    (port,) = free_ports(1)
    project.environment |= S3Account(f"http://{LOOPBACK}:{port}", "test", "testtesttest").environment
    project.environment["SKYTRAIN_STORE_SECONDS"] = "2"
    ended = project.run(
        *["run", "tiny.yaml", "--store", "s3://bucket/prefix", *(["--json"] if as_json else [])], expect=75
    )
    *_, last = ended.stderr.splitlines()
    assert re.match(rf"error: .*{port}.*no success within 2 s.*run the same command to resume", last), ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout == ""


def test_a_run_on_s3_makes_the_files_of_a_run_on_disk_and_finds_them_again(
    project: Project,
    moto_server: S3Account,
    fresh_s3_store: Callable[[S3Account], S3Store],
    undisturbed: Callable[[int], Project],
) -> None:
    store, finished = fresh_s3_store(moto_server), undisturbed(1)
    made = project.result("--store", store.uri)
    assert (made["state"], made["attempts"]) == ("done", 1)
    for stage in ("tokenize", "train", "export"):
        manifest = read_manifest(store, made["artifacts"][stage]["uri"].removeprefix(f"{store.uri}/"))
        assert manifest and sums(manifest) == sums(finished.artifact(stage)), stage
    assert series_of(store) == finished.series()
    (run,) = read_runs(store)
    for attempt in run.account.attempts:
        manifest = read_manifest(store, attempt.prefix)
        assert manifest
        stored = sum(file.size for file in manifest.files)
        assert stored < attempt.traffic.sent_bytes < 100 * stored + (1 << 20), attempt.stage  # and its commits
    again = project.result("--store", store.uri)
    assert all(artifact["skipped"] for artifact in again["artifacts"].values())
