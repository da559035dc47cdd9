"""Real processes that are killed: the run resumes, and ends like an undisturbed one, bit for bit.

test_interleavings.py has every interleaving of the store's operations; here are the signals, the processes and the
servers that a simulation cannot have. A full disk: test_disk.py. A lost node: tests/nodes.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import trainer_runs
from faulty_proxy import Fault, FaultyProxy
from killed_ranks import whole_and_killed
from pipeline_runs import (
    FOLDER_NAME,
    STEPS,
    Project,
    assert_as_undisturbed,
    committed,
    ranks,
    series_of,
)
from servers import S3Account
from waiting import until

from pipelines.run.nodes.launcher_process import LAUNCHER_MODULE
from pipelines.run.stage import STAGES
from pipelines.store.s3_store import S3Store
from trainer.base.store import PARTIAL

PATIENT = ("--set", "runtime.checkpoint_minutes=1000")  # commits only when it is asked to stop
INTERRUPTED = "interrupted: run the same command to resume\n"

data = trainer_runs.data


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / FOLDER_NAME)


def processes(project: Project, *words: str) -> list[psutil.Process]:
    return [one for one in project.alive() if set(words) <= set(one.cmdline())]


def launcher_and_ranks(project: Project) -> tuple[psutil.Process, list[psutil.Process]]:
    found = processes(project, LAUNCHER_MODULE)
    (launcher,) = (one for one in found if one.parent() not in found)
    return launcher, [one for one in found if one != launcher]


# --- a rank, the launcher, the command


GPUS = """
import sys
if "pipelines.run.nodes.launcher" in sys.orig_argv:
    from pipelines.run.nodes import address
    address.nvidia_gpus = lambda: 3
"""


@pytest.mark.parametrize(
    ("count", "on_node", "options"),
    [
        (1, "", ()),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, GPUS, ()), (1, "", PATIENT))),
    ],
    ids=["one", "two that a mock of three GPUs starts early", "one before the first commit"],
)
def test_a_run_whose_rank_is_killed_resumes_from_its_commit_or_starts_over(
    project: Project, undisturbed: Callable[[int], Project], count: int, on_node: str, options: tuple[str, ...]
) -> None:
    project.environment["PET_NNODES"] = "2"  # torchrun's; nothing of ours may wait for a second node
    project.home.mkdir(parents=True, exist_ok=True)
    (project.home / "sitecustomize.py").write_text(on_node)
    project.environment["PYTHONPATH"] += os.pathsep + str(project.home)
    with project.started("run", "tiny.yaml", *ranks(count), *options) as process:
        project.wait_until((lambda: project.rows_logged() >= 3) if options else committed(project, 10), process)
        launcher_and_ranks(project)[1][-1].kill()
        _, err = process.communicate()
    assert process.returncode == 75, err
    assert (
        " was killed by SIGKILL after step " in err
        and "run the same command to resume" in err
        and "Traceback" not in err
    )
    assert project.report()["state"] == "interrupted"
    assert project.result(*ranks(count))["attempts"] == 2
    assert_as_undisturbed(project, undisturbed(count))


@pytest.mark.slow
def test_when_the_launcher_is_killed_its_ranks_commit_before_the_command_leaves(project: Project) -> None:
    with project.started("run", "tiny.yaml", *PATIENT) as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        launcher_and_ranks(project)[0].kill()
        _, err = process.communicate()
    assert process.returncode == 75 and "the launcher of node 0 was killed by SIGKILL" in err, err
    assert not project.alive() and len(project.found("train/*/checkpoints/*/COMMIT.json")) == 1


CHATTY = """
import sys
if "pipelines.run.nodes.launcher" in sys.orig_argv:
    sys.stderr.write("import time:" * 100_000)
"""
WATCHED = ("--set", "runtime.watchdog_minutes=0.1")  # 6 s


@pytest.mark.parametrize("whose", ["launcher", pytest.param("rank", marks=pytest.mark.slow)])
def test_a_process_that_sigstop_has_stopped_is_ended_by_the_command_as_a_hang(
    project: Project, undisturbed: Callable[[int], Project], whose: str
) -> None:
    project.home.mkdir(parents=True)
    (project.home / "sitecustomize.py").write_text(CHATTY)  # which fills a pipe that nobody reads
    project.environment["PYTHONPATH"] += os.pathsep + str(project.home)
    with project.started("run", "tiny.yaml", *WATCHED) as process:
        project.wait_until(committed(project, 10), process)
        launcher, (rank,) = launcher_and_ranks(project)
        {"launcher": launcher, "rank": rank}[whose].suspend()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 75 and re.search(rf"{whose}.*: no progress for \d+ s", err) and "Trace" not in err, err
    assert not project.alive() and "no progress" in project.heartbeats()[-1]["progress"]["killed"]
    assert project.result()["attempts"] == 2
    assert_as_undisturbed(project, undisturbed(1))


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stop_reaches_ranks_whose_launcher_is_stopped_and_ends_all_once_the_grace_is_over(
    project: Project, again: bool
) -> None:
    project.environment["SKYTRAIN_GRACE_SECONDS"] = "2"
    with project.started("run", "tiny.yaml", *PATIENT) as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        launcher, (rank,) = launcher_and_ranks(project)
        launcher.suspend()
        process.send_signal(signal.SIGTERM)
        while again and process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                launcher.suspend()
                rank.suspend()
            time.sleep(0.001)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 75 and err.endswith(INTERRUPTED) and not project.alive(), err
    assert len(project.found("train/*/checkpoints/*/COMMIT.json")) == (0 if again else 1)


@pytest.mark.slow
def test_two_ranks_killed_in_every_way_end_bit_for_bit_like_undisturbed_ones(data: Path, tmp_path: Path) -> None:
    whole, killed = whole_and_killed(data, tmp_path, trainer_runs.configured(**trainer_runs.LONG), ranks=2, between=8)
    assert killed.rows() == whole.rows() and killed.model_sha256() == whole.model_sha256()
    assert killed.rows_logged() > whole.rows_logged() == trainer_runs.STEPS


def test_a_run_killed_in_every_stage_ends_like_an_undisturbed_one(
    project: Project, undisturbed: Callable[[int], Project]
) -> None:
    for stage, condition in (
        ("tokenize", lambda: len(project.found("tokens/*/shards/*.json")) >= 5),
        ("train", committed(project, 20)),
        ("evaluate", lambda: True),
    ):
        with project.started("run", "tiny.yaml") as process:
            project.wait_until(lambda: project.claims(stage) and condition(), process)  # noqa: B023
            project.kill_all(process)
        assert not project.artifacts(stage) and project.report()["state"] == "lost"
    made = project.result()
    assert (made["state"], made["attempts"]) == ("done", 4)
    assert_as_undisturbed(project, undisturbed(1))

    # gc can delete the leftovers of the killed attempts, and the finished artifacts still work.
    manifests = [project.artifact(stage) for stage in STAGES]
    used = {project.store.path_of(f"{made.prefix}/{file.key}") for made in manifests for file in made.files}
    output = project.run("gc", "--older-than-days", "0").stdout
    assert re.search(r"^[1-9]\d* objects, .* removed", output, re.M), output
    left = {path for path in project.found("*/*/*/**/*") if path.is_file() and not path.name.startswith(PARTIAL)}
    assert left - used == {path for path in left if path.parts[-3] == "attempts" or path.parts[-2] == "metrics"}
    again = project.result("--set", "export.dtype=float16")
    assert [artifact["skipped"] for artifact in again["artifacts"].values()] == [True, True, True, False]


@pytest.mark.parametrize("killed", ["run", "run, asked to stop before", "supervisor"])
def test_a_job_goes_on_after_its_run_is_killed_and_commits_after_its_supervisor_is(
    project: Project, undisturbed: Callable[[int], Project], killed: str
) -> None:
    project.environment |= {"HOME": str(project.folder), "SKYTRAIN_HOME": str(project.home)}
    with project.started("job", "tiny.yaml", "--stage", "train") as process:
        project.wait_until(committed(project, 10), process)
        (run,) = (one for one in psutil.Process(process.pid).children())
        if killed == "supervisor":
            process.kill()
        elif killed == "run":
            run.kill()
        else:
            run.suspend()  # it does not see the request
            process.terminate()
            until(lambda: signal.SIGTERM in pending(run), "the request has been passed on")
            run.kill()
        _, err = process.communicate()
    until(lambda: not project.alive(), "all processes have left")
    first, *others = (beat for beat in project.heartbeats() if beat["stage"] == "train")
    assert first["state"] == "interrupted"
    if killed == "supervisor":
        assert process.returncode == -signal.SIGKILL and first["progress"]["notice"] == "SIGTERM"
        assert committed(project, first["progress"]["step"])()  # its last step: nothing is done again
        return
    cause = "the run's command was killed by SIGKILL"
    assert first["progress"]["killed"] == cause
    if killed == "run":
        assert f"{cause}; starting again on this machine" in err and process.returncode == 0
        assert [beat["state"] for beat in others] == ["done"] and project.series() == undisturbed(1).series()
    else:
        assert err.endswith(f"interrupted ({cause}): run the same command to resume\n") and process.returncode == 75
        assert not others


def pending(process: psutil.Process) -> set[int]:
    """The signals that a process has not taken yet."""
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.M)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


# --- asked to stop


@pytest.mark.slow
@pytest.mark.parametrize(("number", "count"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stopped_run_commits_its_last_step_and_resumes_after_it(
    project: Project, undisturbed: Callable[[int], Project], number: signal.Signals, count: int
) -> None:
    command = ["run", "tiny.yaml", *PATIENT, *ranks(count)]
    with project.started(*command, "--price-per-hour", "10") as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 75, err
    assert out == "" and err.endswith("\n" + INTERRUPTED) and "Traceback" not in err
    assert not project.alive() and project.report()["state"] == "interrupted"
    (commit,) = project.found("train/*/checkpoints/*/COMMIT.json")
    step = json.loads(commit.read_text())["step"]
    assert 7 <= step == project.rows_logged() < STEPS

    made = json.loads(project.run(*command, "--price-per-hour", "20", "--json").stdout)
    assert (made["state"], made["attempts"]) == ("done", 2)
    assert project.rows_committed() == STEPS  # no step was done twice
    assert_as_undisturbed(project, undisturbed(count))
    beats = project.heartbeats()
    dollars = sum((beat["time"] - beat["started"]) / 3600 * beat["price_per_hour"] for beat in beats)
    assert made["usd"] == pytest.approx(dollars)


SLOW_IMPORT = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "pipelines.run.nodes.launcher" in sys.orig_argv:
            open("importing", "w").close()
            end = time.monotonic() + 1000
            while time.monotonic() < end:
                time.sleep(0.01)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
def test_a_run_stopped_while_torch_is_imported_does_not_wait_for_it(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    project = undisturbed(1).copy(tmp_path / FOLDER_NAME)
    (project.home / "sitecustomize.py").write_text(SLOW_IMPORT)
    project.environment["PYTHONPATH"] += os.pathsep + str(project.home)
    with project.started("run", "tiny.yaml", "--set", "train.seed=2") as process:
        project.wait_until(lambda: any(tmp_path.rglob("importing")), process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75 and err.endswith(INTERRUPTED), err
    assert not project.alive()


# --- S3


@pytest.mark.slow
def test_an_s3_server_that_fails_during_training_interrupts_and_loses_nothing(
    project: Project,
    moto_server: S3Account,
    fresh_s3_store: Callable[[S3Account], S3Store],
    undisturbed: Callable[[int], Project],
) -> None:
    store = fresh_s3_store(moto_server)
    project.environment |= {"SKYTRAIN_STORE_SECONDS": "3", "SKYTRAIN_STORE": store.uri}
    with FaultyProxy(moto_server.endpoint) as proxy:
        project.environment["AWS_ENDPOINT_URL"] = proxy.endpoint
        with project.started("run", "tiny.yaml") as process:
            project.wait_until(lambda: commits_asked(proxy) >= 3, process)
            proxy.fail(*[Fault(503, "SlowDown")] * 10_000)
            project.wait_until(project.has_unsaved_state, process)
            process.terminate()  # a training that has ended waits for the store, the others stop by themselves in time
            out, err = process.communicate()
    assert process.returncode == 75, err
    assert re.match(r"error: .*no success within 3 s.*; run the same command to resume", err.splitlines()[-1]), err
    assert out == "" and "Traceback" not in err

    project.environment["AWS_ENDPOINT_URL"] = moto_server.endpoint
    made = project.result()
    assert (made["state"], made["attempts"]) == ("done", 2)
    assert series_of(store) == undisturbed(1).series()


def commits_asked(proxy: FaultyProxy) -> int:
    return sum(method == "PUT" and path.endswith("/COMMIT.json") for method, path in list(proxy.requests))
