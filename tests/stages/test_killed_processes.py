"""After a signal has killed a rank, torchrun or the command itself, a run with a commit is interrupted, not failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from pipeline_runs import FOLDER_NAME, REPOSITORY, SHIPPED_CLI, Project, assert_as_undisturbed, committed, ranks

from pipelines.nodes.ranks import RANK_MODULE
from pipelines.stage import STAGES
from pipelines.tracking.deaths import MOST_DEATHS

TORCHRUN = "pipelines.nodes.torchrun"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / FOLDER_NAME)


@contextmanager
def job(project: Project, stage: str, code: str = SHIPPED_CLI) -> Iterator[subprocess.Popen[str]]:
    """The script of a task in sky/ as a job runs it on its node, with this code as `skytrain`."""
    script = yaml.safe_load((REPOSITORY / "sky" / f"{stage}.yaml").read_text())["run"]
    program = project.folder / ".local" / "bin" / "skytrain"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    environment = {
        "HOME": str(project.folder),
        "SKYTRAIN_HOME": str(project.home),
        "SKYTRAIN_RECIPE": "tiny.yaml",
        "SKYTRAIN_STORE": project.store.uri,
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "MLFLOW_"))}
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=project.folder,
        env=inherited | project.environment | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        project.kill_all(process)
        process.communicate()


def processes(project: Project, *words: str) -> list[psutil.Process]:
    return [one for one in project.alive() if set(words) <= set(one.cmdline())]


def rank_processes(project: Project) -> list[psutil.Process]:
    return [one for one in processes(project, RANK_MODULE) if TORCHRUN not in one.cmdline()]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_a_commit_is_interrupted_by_the_death_of_a_rank_and_resumes(
    project: Project, undisturbed: Callable[[int], Project], count: int
) -> None:
    with project.started("run", "tiny.yaml", *ranks(count)) as process:
        project.wait_until(committed(project, 10), process)
        rank_processes(project)[-1].kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert " was killed by SIGKILL" in err and "run the same command to resume" in err and "Traceback" not in err
    assert project.report()["state"] == "interrupted"
    assert project.result(*ranks(count))["attempts"] == 2
    assert_as_undisturbed(project, undisturbed(count))


@pytest.mark.slow
def test_when_torchrun_is_killed_its_ranks_commit_before_the_command_leaves(project: Project) -> None:
    patient = ("--set", "runtime.checkpoint_minutes=1000")
    with project.started("run", "tiny.yaml", *patient) as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        processes(project, TORCHRUN)[0].kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "torchrun on node 0 was killed by SIGKILL" in err, err
    assert not project.alive() and len(project.found("train/*/checkpoints/*/COMMIT.json")) == 1


@pytest.mark.slow
def test_a_run_without_a_commit_fails_by_the_death_of_a_rank_with_the_cause(project: Project) -> None:
    with project.started("run", "tiny.yaml", "--set", "runtime.checkpoint_minutes=1000") as process:
        project.wait_until(lambda: project.rows_logged() >= 3, process)
        rank_processes(project)[0].send_signal(signal.SIGSEGV)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "failed: rank 0 was killed by SIGSEGV after step " in err and "there is no commit to resume from" in err
    assert project.report()["state"] == "failed"


def test_a_job_whose_command_is_killed_exits_resumable_after_its_ranks_committed(project: Project) -> None:
    project.run("run", "tiny.yaml", "--stage", "tokenize")
    with job(project, "train") as process:
        project.wait_until(committed(project, 10), process)
        processes(project, "run", "tiny.yaml")[0].kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        assert not project.alive()
    assert "interrupted (the run's command was killed by SIGKILL): run the same command to resume" in err
    (beat,) = (beat for beat in project.heartbeats() if beat["stage"] == "train")
    assert (beat["state"], beat["progress"]["killed"]) == ("interrupted", "the run's command was killed by SIGKILL")
    assert time.time() - beat["time"] < 60


@pytest.mark.slow
def test_a_job_whose_command_always_dies_ends_after_some_attempts(project: Project) -> None:
    dies = f"import os, sys; '--exited' in sys.argv or os.kill(os.getpid(), 11); {SHIPPED_CLI}"
    codes = []
    for _ in range(MOST_DEATHS + 1):
        with job(project, "tokenize", dies) as process:
            _, err = process.communicate(timeout=60)
        codes.append(process.returncode)
    assert codes == [75] * MOST_DEATHS + [1], err


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76])
def test_a_job_exits_with_the_code_of_its_command(tmp_path: Path, code: int) -> None:
    for stage in STAGES:
        script = yaml.safe_load((REPOSITORY / "sky" / f"{stage}.yaml").read_text())["run"]
        program = tmp_path / ".local" / "bin" / "skytrain"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\ncase "$*" in *--exited*) exit 9 ;; esac\nexit {code}\n')
        program.chmod(0o755)
        environment = os.environ | {"HOME": str(tmp_path), "SKYTRAIN_RECIPE": "run:a", "SKYTRAIN_STORE": "s3://a/b"}
        assert subprocess.run(["bash", "-c", script], env=environment, timeout=30).returncode == code


def test_a_job_that_is_asked_to_stop_waits_for_its_command(tmp_path: Path) -> None:
    script = yaml.safe_load((REPOSITORY / "sky" / "train.yaml").read_text())["run"]
    program = tmp_path / ".local" / "bin" / "skytrain"
    program.parent.mkdir(parents=True)
    program.write_text(
        '#!/bin/bash\ncase "$*" in *--exited*) exit 9 ;; esac\n'
        f"trap 'stopped=1' TERM; touch {tmp_path}/ready\n"
        "until [ $stopped ]; do sleep 0.1; done; sleep 0.3; exit 75\n"
    )
    program.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "SKYTRAIN_RECIPE": "run:a", "SKYTRAIN_STORE": "s3://a/b"}
    with subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm: every process of the job
        assert process.wait(30) == 75
