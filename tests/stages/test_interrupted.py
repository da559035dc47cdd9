"""A run that is killed, stopped, doubled or frozen in any stage and started again ends like an undisturbed one."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from pipeline_runs import (
    FOLDER_NAME,
    RUN_FIELDS,
    SHIPPED_CLI,
    STEPS,
    TINY,
    Project,
    assert_as_undisturbed,
    committed,
    ranks,
)

from pipelines.artifacts.manifest import Manifest
from pipelines.stage import STAGES
from pipelines.tracking.runs import read_runs
from trainer.store import PARTIAL

INTERRUPTED = "interrupted: run the same command to resume\n"
# It commits only when it is asked to stop.
PATIENT = "runtime.checkpoint_minutes=1000"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / FOLDER_NAME)


# --- killed at any time


def test_a_run_killed_in_every_stage_ends_like_an_undisturbed_one(
    project: Project, undisturbed: Callable[[int], Project]
) -> None:
    finished, moments = undisturbed(1), random.Random(1)
    first = moments.randint(1, 50)
    in_time = [
        killed(project, "tokenize", lambda: len(project.found("tokens/*/shards/*.json")) >= first),
        killed(project, "train", has_ranks(project, 1), moments.uniform(0, 0.4)),  # they import torch
        killed(project, "train", committed(project, moments.randint(5, 20)), moments.uniform(0, 0.1)),
        killed(project, "train", committed(project, moments.randint(25, 40)), moments.uniform(0, 0.1)),
        killed(project, "train", committed(project, STEPS)),  # training is done, the artifact is not committed
        killed(project, "evaluate", then_s=moments.uniform(0, 0.3)),
        killed(project, "export", then_s=moments.uniform(0, 0.01)),
    ]
    assert in_time[:6] == [True] * 6
    made = project.result()
    (audited,) = json.loads(project.run("report", "--audit", "--json").stdout)
    assert (audited["steps"], audited["wrong_steps"], audited["missing_steps"]) == (STEPS, [], [])
    assert (made["state"], made["attempts"]) == ("done", 1 + sum(in_time))
    assert_as_undisturbed(project, finished)
    assert project.rows_committed() == STEPS + redone(project)

    # gc can delete the leftovers of the killed attempts, and the finished artifacts still work.
    kept = {project.store.path_of(f"{m.prefix}/{file.key}") for m in manifests(project) for file in m.files}
    output = project.run("gc", "--older-than-days", "0").stdout
    assert re.search(r"^[1-9]\d* objects, .* removed", output, re.M), output
    left = {path for path in project.found("*/*/*/**/*") if path.is_file() and not path.name.startswith(PARTIAL)}
    assert left - kept == {path for path in left if path.parts[-3] == "attempts" or path.parts[-2] == "metrics"}
    assert project.run("gc", "--older-than-days", "0").stdout.startswith("0 objects, 0 bytes removed")
    again = project.result("--set", "export.dtype=float16", "--set", "evaluate.val_tokens=4096")
    assert [a["skipped"] for a in again["artifacts"].values()] == [True, True, False, False]
    assert project.series() == finished.series()


def manifests(project: Project) -> list[Manifest]:
    return [project.artifact(stage) for stage in STAGES]


def killed(project: Project, stage: str, condition: Callable[[], object] = lambda: True, then_s: float = 0.0) -> bool:
    """Kill the run, with all its processes, `then_s` after its new attempt at a stage meets a condition; True if
    the stage was still unfinished.

    The dead process is not waited for before the next command is done: a zombie is no living rival.
    """
    attempt = project.claims(stage) + 1
    with project.started("run", "tiny.yaml") as process:
        project.wait_until(lambda: project.claims(stage) == attempt and condition(), process)
        time.sleep(then_s)
        project.kill_all(process)
        unfinished = not project.artifacts(stage)
        assert (project.report()["state"] == "lost") == unfinished
    return unfinished


def has_ranks(project: Project, count: int) -> Callable[[], bool]:
    """The condition that the training processes have begun."""
    return lambda: sum("RANK" in process.environ() for process in project.alive()) == count


def redone(project: Project) -> int:
    """Steps that are in the series of more than one attempt."""
    rows = [json.loads(line) for path in project.found("train/*/metrics/*.jsonl") for line in path.open()]
    steps = [row["step"] for row in rows if "train/loss" in row]
    return len(steps) - len(set(steps))


@pytest.mark.slow
def test_two_training_processes_killed_early_late_and_at_the_end_learn_the_same(
    project: Project, undisturbed: Callable[[int], Project]
) -> None:
    recipe = project.folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {"runtime": TINY["runtime"] | {"processes": 2}}))
    moments = random.Random(2)
    assert killed(project, "train", has_ranks(project, 2), moments.uniform(0, 0.4))
    assert killed(project, "train", committed(project, moments.randint(5, 40)), moments.uniform(0, 0.1))
    assert killed(project, "train", committed(project, STEPS))
    assert project.result()["attempts"] == 4
    assert_as_undisturbed(project, undisturbed(2))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_training_processes_do_not_outlive_a_killed_command(
    project: Project, undisturbed: Callable[[int], Project], processes: int
) -> None:
    with project.started("run", "tiny.yaml", *ranks(processes)) as process:
        project.wait_until(committed(project, 10), process)
        assert len(project.alive()) >= 1 + 1 + processes  # the command, torchrun, the ranks
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while project.alive():
            assert time.monotonic() < deadline, [p.cmdline() for p in project.alive()]
            time.sleep(0.1)
    assert not project.artifacts("train")
    made = project.result(*ranks(processes))
    assert (made["state"], made["attempts"]) == ("done", 2)
    assert_as_undisturbed(project, undisturbed(processes))


# --- asked to stop


@pytest.mark.slow
def test_a_run_stopped_in_its_last_validation_commits_its_steps_and_the_next_command_validates(
    project: Project,
) -> None:
    command = ["run", "tiny.yaml", "--stage", "train", "--set", f"train.val_every={STEPS}"]
    command += ["--set", "train.val_tokens=32768", "--set", "runtime.micro_batch_size=1"]  # 1,024 batches
    with project.started(*command) as process:
        project.wait_until(lambda: project.rows_logged() == STEPS, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    (run,) = read_runs(project.store)
    assert run.series[-1]["step"] == STEPS and "val/loss" not in run.series[-1]
    assert project.result(*command[2:])["attempts"] == 2
    (run,) = read_runs(project.store)
    assert "val/loss" in run.series[-1] and project.rows_committed() == STEPS


SLOW_IMPORT = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and {where}:
            open("importing", "w").close()
            end = time.monotonic() + 100
            while time.monotonic() < end:
                time.sleep(0.01)
            open("imported", "w").close()
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("'RANK' not in os.environ and 'run' in sys.argv", ("evaluate.val_tokens=2048",)),
        ("'RANK' not in os.environ and 'run' in sys.argv", ("export.dtype=bfloat16",)),
        ("'RANK' in os.environ", ("evaluate.val_tokens=2048", "runtime.processes=2")),
        ("'RANK' in os.environ", ("train.seed=2",)),
    ],
    ids=["evaluate", "export", "ranks of evaluate", "ranks of train"],
)
def test_a_run_stopped_while_torch_is_imported_does_not_wait_for_it(
    tmp_path: Path, undisturbed: Callable[[int], Project], where: str, changed: tuple[str, ...]
) -> None:
    project = undisturbed(1).copy(tmp_path / FOLDER_NAME)
    (project.folder / "sitecustomize.py").write_text(SLOW_IMPORT.format(where=where))
    project.environment["PYTHONPATH"] += os.pathsep + str(project.folder)
    settings = [text for one in changed for text in ("--set", one)]
    with project.started("run", "tiny.yaml", *settings) as process:
        project.wait_until(lambda: any(tmp_path.rglob("importing")), process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and err.endswith(INTERRUPTED), err
    assert not any(tmp_path.rglob("imported")) and not project.alive()
    assert [beat["state"] for beat in project.heartbeats()].count("interrupted") == 1


SLOW_SAMPLE = """
import time
from trainer import sample
generate = sample.generate
def slow(*arguments, check, **named):
    def drawn():
        with open("drawn", "a") as file:
            file.write(".")
        time.sleep(0.1)
        check()
    return generate(*arguments, check=drawn, **named)
sample.generate = slow
"""


@pytest.mark.slow
def test_an_evaluation_stopped_while_it_samples_draws_no_more_than_a_few_tokens(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    project = undisturbed(1).copy(tmp_path / FOLDER_NAME)
    (project.folder / "sitecustomize.py").write_text(SLOW_SAMPLE)
    project.environment["PYTHONPATH"] += os.pathsep + str(project.folder)

    def drawn() -> int:
        return sum(len(file.read_text()) for file in tmp_path.rglob("drawn"))

    with project.started("run", "tiny.yaml", "--set", "evaluate.val_tokens=2048") as process:
        project.wait_until(lambda: drawn() >= 3, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert 3 <= drawn() < 100 and not project.alive()  # of 200, each of a tenth of a second
    assert len(project.artifacts("evaluate")) == 1  # the undisturbed one


@pytest.mark.slow
def test_a_run_stopped_while_torch_makes_the_graph_of_onnx_ends_and_the_next_command_exports(project: Project) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript (pip)")
    command = ["run", "tiny.yaml", "--set", "export.formats=[hf,onnx]"]

    def torch_works() -> bool:
        with suppress(psutil.Error):  # it has ended since
            makers = [one for one in project.alive() if "spawn_main" in " ".join(one.cmdline())]
            return any("libtorch_cpu" in one.path for maker in makers for one in maker.memory_maps())
        return False

    with project.started(*command) as process:
        project.wait_until(torch_works, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert not project.artifacts("export") and not project.alive()
    made = project.result(*command[2:])
    assert made["attempts"] == 2 and not made["artifacts"]["export"]["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes", "as_json"), [(signal.SIGINT, 1, True), (signal.SIGTERM, 2, False)])
def test_a_stopped_run_commits_its_last_step_and_resumes_after_it(
    project: Project, undisturbed: Callable[[int], Project], number: signal.Signals, processes: int, as_json: bool
) -> None:
    command = ["run", "tiny.yaml", "--set", PATIENT, *ranks(processes)]
    options = ["--json"] if as_json else []
    with project.started(*command, "--price-per-hour", "10", *options) as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    if as_json:
        printed = json.loads(out)
        assert list(printed) == RUN_FIELDS
        assert (printed["state"], printed["attempts"], list(printed["artifacts"])) == ("interrupted", 1, ["tokenize"])
        assert err == INTERRUPTED
    else:
        assert out == "" and err.endswith("\n" + INTERRUPTED) and "Traceback" not in err
    assert not project.alive()
    assert project.report()["state"] == "interrupted"
    (commit,) = project.found("train/*/checkpoints/*/COMMIT.json")
    step = json.loads(commit.read_text())["step"]
    assert 7 <= step == project.rows_logged() < STEPS
    plan_text = project.run("plan", "tiny.yaml").stdout
    assert re.search(rf"interrupted, step {step}\b.*; run resumes from its last commit", plan_text), plan_text

    made = json.loads(project.run(*command, "--price-per-hour", "20", "--json").stdout)
    assert (made["state"], made["attempts"]) == ("done", 2)
    assert project.rows_committed() == STEPS  # no step was done twice
    assert_as_undisturbed(project, undisturbed(processes))
    beats = project.heartbeats()
    assert {beat["price_per_hour"] for beat in beats} == {10.0, 20.0}
    dollars = sum((beat["time"] - beat["started"]) / 3600 * beat["price_per_hour"] for beat in beats)
    assert made["usd"] == pytest.approx(dollars)
    assert 10 * made["billed_hours"] < made["usd"] < 20 * made["billed_hours"]


@pytest.mark.slow
def test_a_run_stopped_before_training_resumes_too(project: Project) -> None:
    with project.started("run", "tiny.yaml") as process:
        project.wait_until(lambda: len(project.found("tokens/*/shards/*.json")) >= 5, process)
        process.terminate()
        assert process.wait(60) == 75
    assert project.claims("train") == 0
    done = len(project.found("tokens/*/shards/*.json"))
    output = project.run("run", "tiny.yaml", "--stage", "tokenize").stderr
    assert f"{done} shards exist from an earlier attempt" in output
    assert project.attempts()["tokenize"] == 2


# --- two at once


@pytest.mark.slow
def test_two_commands_at_once_make_each_artifact_once_and_the_second_reports_that_it_waits(
    project: Project, undisturbed: Callable[[int], Project]
) -> None:
    with project.started("run", "tiny.yaml") as one, project.started("run", "tiny.yaml") as other:
        output = [process.communicate(timeout=300)[1] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), output
    assert project.attempts() == dict.fromkeys(STAGES, 1)
    assert "is working; waiting" in "".join(output)
    assert "warning" not in "".join(output)
    assert_as_undisturbed(project, undisturbed(1))


ON_ANOTHER_MACHINE = f"import platform; platform.node = lambda: 'elsewhere'; {SHIPPED_CLI}"


@pytest.mark.slow
def test_a_frozen_attempt_on_another_machine_is_taken_over_and_does_no_harm_when_it_wakes(
    project: Project, undisturbed: Callable[[int], Project]
) -> None:
    with project.started("run", "tiny.yaml", code=ON_ANOTHER_MACHINE) as frozen:
        project.wait_until(committed(project, 20), frozen)
        for process in project.alive():
            process.suspend()
        sleepers = project.alive()
        assert not project.artifacts("train")
        with project.started("run", "tiny.yaml") as heir:
            project.wait_until(lambda: project.claims("train") == 2, heir)
            for process in sleepers:
                process.resume()
            output = [process.communicate(timeout=300)[1] for process in (frozen, heir)]
    assert (frozen.returncode, heir.returncode) == (0, 0), output
    assert "attempt 1 on elsewhere is working; waiting" in output[1]
    assert "train: a newer attempt has taken over; waiting for it" in output[0]
    assert project.attempts() == {**dict.fromkeys(STAGES, 1), "train": 2}
    assert_as_undisturbed(project, undisturbed(1))
