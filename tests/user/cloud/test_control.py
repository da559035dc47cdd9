"""`skytrain stop`, `status` and `down` work from every machine that reaches the store."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, TINY, Project
from sky_server import SkyServer, job_record
from stage_work import NoSignals

from pipelines.run.run_record import RunRecord, read_records
from pipelines.run.runs import Run, read_run
from pipelines.run.watch import StopRequests
from pipelines.store.ledger import claim
from pipelines.store.records import Billing, Heartbeat, Machine, ProcessId, Progress
from pipelines.store.releases import Release, read_releases, write_releases
from pipelines.store.stop_request import (
    read_stop_request,
    request_stop,
    stop_requests,
    withdraw_stop,
)
from pipelines.user.cloud import control
from pipelines.user.cloud.control import status_of
from pipelines.user.cloud.request import LaunchRecord, LaunchRequest, write_launch
from pipelines.user.cloud.skypilot import Cluster, TaskStatus
from pipelines.user.show.status import print_status
from pipelines.user.verbs.down import down
from pipelines.user.verbs.logs import logs
from pipelines.user.verbs.status import status
from trainer.base.store import LocalStore
from trainer.config.errors import StoreUnavailable, UserError

RUN = "tiny-01234567"
ELSEWHERE = ProcessId("far/away", 1)
OURS, THEIRS = "0123abcd", "4567abcd"  # ids of stores
JOB = f"{RUN}-{OURS}"


def recorded(store: LocalStore) -> RunRecord:
    """A recorded run without any attempt."""
    recipe = {
        "name": "tiny",
        "tokens": {"source": "texts/*.txt", "tokenizer": "bytes"},
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "vocab_size": 257},
        "train": {"batch_tokens": 1024, "max_steps": 100, "learning_rate": 0.1, "warmup_steps": 1},
    }
    prefixes = {"tokenize": "tokens/t-0", "train": f"train/{RUN}"}
    record = RunRecord(RUN, recipe, "train", prefixes, time.time(), {}, "skytrain", OURS)
    store.put(f"runs/{RUN}.json", json.dumps(record.__dict__).encode())
    return record


def launched(store: LocalStore, server: str = "here") -> None:
    write_launch(store, LaunchRecord(LaunchRequest(RUN, store.uri, store_id=OURS), ["train"], [1], [], 0.0, server))


def put_beat(store: LocalStore, attempt: int = 1, state: str = "running", began: float = 0.0, **more: Any) -> None:
    beat = Heartbeat(RUN, "train", attempt, state, began, time.time(), 10.0, ELSEWHERE, **more)
    store.put(f"train/{RUN}/attempts/{attempt:04d}/heartbeat.json", beat.to_json())


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> SkyServer:
    return SkyServer(monkeypatch)


def test_stopping_waits_for_the_attempt_and_not_for_a_crashed_one(store: LocalStore) -> None:
    record, requests = recorded(store), StopRequests(store, RUN, stop := NoSignals())
    assert control.stop(store, record, "enough", 10, lambda text: None) is None  # no attempt runs
    withdraw_stop(store, RUN, stop_requests(store))
    messages: list[str] = []

    def asked(message: str) -> None:
        messages.append(message)
        attempt.report_soon()

    def leave_on_request(beat: Heartbeat) -> None:
        requests.heartbeat(beat)
        if stop.asked and attempt.latest.state == "running":
            attempt.update(state="stopped", progress=Progress(step=17))
            attempt.report_soon()

    claimed = claim(store, f"train/{RUN}", RUN, "train", 1, Billing(), leave_on_request)
    assert claimed
    with claimed as attempt:
        ended = control.stop(store, record, "enough", 600, asked)
    assert ended and (ended.state, ended.progress.step) == ("stopped", 17)
    assert messages == ["train: attempt 1 is asked to commit and exit"]

    put_beat(store, 2)
    assert control.stop(store, record, "enough", 600, messages.append, silent_seconds=0.5) is None
    assert read_stop_request(store, RUN)


def test_a_status_has_progress_cost_and_skypilots_jobs(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    record, now = recorded(store), time.time()
    so_far = Progress(
        50, now - 400, highest_step=50, resumed_from=0, metrics={"train/loss": 2.5, "perf/tokens_per_second": 1e3}
    )
    so_far = replace(so_far, unsaved_since=now - 700, unsaved_because="the key is refused", killed="rank 1 was killed")
    machine = Machine(cloud="slurm", region="north", zone="gpu")
    phases = {"setup": 500.0, "train": 3000.0}
    put_beat(store, began=now - 3600, phases=phases, progress=so_far, nodes=2, machine=machine)
    request = request_stop(store, RUN, "enough")
    job = TaskStatus(3, JOB, "RECOVERING", 2, "train-3", "preempted", over=False, name=JOB)
    last = LaunchRecord(LaunchRequest(RUN, store.uri, budget=19.5, store_id=OURS), ["train"], [3], [], 0.0, "here")
    run = Run(store, record)
    assert run.silent_seconds is not None and run.silent_seconds < 10
    store.clock = lambda: time.time() + 30  # type: ignore[method-assign]  # SkyPilot's answer took half a minute
    found = status_of(run, last, [job])
    del store.clock
    assert found.silent_seconds == run.silent_seconds
    assert found.newest and (found.newest.stage, found.step, found.max_steps) == ("train", 50, 100)
    assert (found.summary.train_loss, found.recoveries) == (2.5, 2)
    assert found.summary.usd == pytest.approx(2 * 10.0 * 3600 / 3600, rel=0.01)
    assert found.stop_request == request and found.to_come
    print_status([found, replace(found, state="lost", tasks=[replace(job, over=True)])])
    running, _, lost = capsys.readouterr().out.partition("lost")
    assert "OVER ITS BUDGET: $20 of $19.5\n" in running
    assert "in 1 attempt on slurm/north, 2 recovered by SkyPilot\n" in running and "to go; trained about " in running
    assert "NO CHECKPOINT IS SAVED for 11 min 40 s: the key is refused\n  rank 1 was killed\n" in running
    assert "no new step for 6 min 40 s" in running and "job 3  train     RECOVERING" in running
    put_beat(store, 2, "stopped")
    states = [replace(job, status=status) for status in ("RUNNING", "STARTING")]
    assert [status_of(Run(store, record), last, [one]).state for one in states] == ["stopped", "waiting"]
    stopped = replace(found.tasks[0], status="FAILED", why="exit codes [76, 137] (user program failure)", over=True)
    print_status([replace(found, state="stopped", tasks=[stopped])])
    assert "train     stopped, recovered 2 times: by request or its budget; `skytrain logs" in capsys.readouterr().out
    assert "trained about" not in lost and f"resume {RUN} continues it" in lost  # nobody trains


def test_machines_without_a_live_run_are_found(
    store: LocalStore, sky: SkyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(store)
    launched(store)
    store.put("runs/newer-01234567.json", b'{"format": 2}')
    long_ago = time.time() - 7200
    sky.jobs += [
        job_record(1, JOB, "RUNNING", long_ago, "train-1"),
        job_record(2, JOB, "SUCCEEDED", long_ago, "train-2"),
        job_record(3, JOB, "PENDING", long_ago),
        job_record(4, "somebody-elses", "RUNNING", long_ago, "theirs-4"),
        job_record(5, JOB, "RECOVERING", long_ago),
        job_record(7, f"{RUN}-{THEIRS}", "RUNNING", long_ago, "train-7"),  # of a run of that name in another store
        job_record(6, "newer-01234567", "RUNNING", long_ago, "train-6"),
    ]
    sky.clusters += [
        Cluster("train-1", JOB, long_ago),  # of the job, which is listed already
        Cluster("train-2", JOB, long_ago),
        Cluster("new", JOB, time.time() - 60),  # it is being set up
        Cluster("by-hand", None, long_ago),
        Cluster("train-9", JOB, long_ago, None, "sky-jobs-controller-1"),
        Cluster("train-5", JOB, long_ago),  # its job, whose record does not name it now, would bring it back
    ]

    def orphans() -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            status(store=store.uri, orphans=True, as_json=True)
        found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
        assert ended.value.code == bool(found)
        return found

    found = orphans()
    jobs_found = [f"job 1 ({RUN}, train)", f"job 5 ({RUN}, train)"]
    assert list(found) == [*jobs_found, "cluster train-2", "cluster by-hand", "cluster train-9"]
    assert found["cluster train-9"]["remedy"].startswith("ssh sky-jobs-controller-1 ")
    assert "sky jobs cancel 1" in found[jobs_found[0]]["remedy"]
    put_beat(store, machine=Machine(cluster="by-hand"))
    sky.jobs.pop()
    assert orphans() == {}  # the run is alive and may need them


def test_a_run_is_taken_down_and_never_below_its_controller(
    store: LocalStore, tmp_path: Path, sky: SkyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    nowhere = LocalStore(tmp_path / "never-written").uri  # without a store, SkyPilot's own record suffices
    sky.jobs += [job_record(8, JOB, "RECOVERING", now, store=nowhere), job_record(10, "theirs", "RUNNING", now)]
    sky.clusters += [Cluster("train-8", JOB, now), Cluster("train-9", "other", now)]
    with pytest.raises(UserError, match=f"job 8 belongs to the store {nowhere}, not to {store.uri}; name it"):
        down(RUN, store=store.uri)
    down(RUN, store=nowhere)
    assert sky.removed == ["job 8"] and capsys.readouterr().out.endswith(f"{RUN}: no job and no cluster left\n")
    with pytest.raises(UserError, match="SkyPilot has no job of tiny in .*; give the run's whole name"):
        down("tiny", store=nowhere)
    recorded(store)
    launched(store)
    sky.clusters.append(Cluster("by-hand", JOB, now))
    down(RUN, store=store.uri)
    assert sky.removed[1:] == ["cluster by-hand"]
    # The controller, on a machine of its own, has yet to take down the cluster.
    sky.jobs.append(job_record(11, JOB, "SUCCEEDED", now, "train-11", up=True))
    sky.on_queue += [lambda: None, sky.jobs.pop]
    down(RUN, store=store.uri)
    assert sky.removed[2:] == [] and len(sky.jobs) == 1  # it waited


def test_a_run_of_that_name_in_another_store_and_its_machines_are_left_alone(
    store: LocalStore, sky: SkyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(store)
    launched(store)
    theirs = f"{RUN}-{THEIRS}"
    sky.jobs += [job_record(1, JOB, "SUCCEEDED"), job_record(2, theirs, "RUNNING", 1e9, "train-2")]
    sky.clusters.append(Cluster("train-2", theirs, 1e9))
    down(RUN, store=store.uri)
    status([RUN], store=store.uri, as_json=True)
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sky.removed == [] and [task["job"] for task in found["tasks"]] == [1]


def test_a_job_of_another_api_server_is_named_and_no_job_of_its_number_is_taken_for_it(
    store: LocalStore, sky: SkyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(store)
    launched(store, server="ann@box-89abcdef")
    before = job_record(2, JOB, "SUCCEEDED")  # an earlier launch, which is over
    sky.jobs += [job_record(1, "another-run", "RUNNING", 1e9, "train-1"), before]
    message = f"{RUN} has job 1 on SkyPilot's API server ann@box-89abcdef; ask there, not on here"
    for verb in (down, logs):
        with pytest.raises(UserError, match=f"{verb.__name__}: {message}"):
            verb(RUN, store=store.uri)
    status([RUN], store=store.uri)
    assert message in " ".join(capsys.readouterr().out.split()) and sky.removed == []


def test_a_run_that_works_is_called_removed_only_if_its_job_is_seen_to_be_over(
    store: LocalStore, sky: SkyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(store)
    launched(store)
    put_beat(store, machine=Machine(cluster="train-1"))
    with pytest.raises(UserError, match="attempt 1 runs on train-1, and SkyPilot shows no job of .* --refresh` starts"):
        down(RUN, store=store.uri)
    sky.jobs.append(job_record(1, JOB, "SUCCEEDED"))  # `down` has just ended it
    down(RUN, store=store.uri)
    assert capsys.readouterr().out.endswith("no job and no cluster left\n")


def test_status_records_the_release_of_a_machine_once_and_the_bill_ends_there(
    store: LocalStore, sky: SkyServer
) -> None:
    recorded(store)
    launched(store)
    now = time.time()
    put_beat(store, 1, "stopped", now - 3600, machine=Machine(cluster="train-1"), phases={"provision": 10.0})
    of_store, of_another = (Cluster("train-1", name, now - 3700, now + 90) for name in (JOB, f"{RUN}-{THEIRS}"))
    sky.jobs.append(job_record(1, JOB, "FAILED", now))
    sky.clusters += [of_store, of_another._replace(until=now + 9)]
    store.path_of(f"control/{RUN}/releases.json").mkdir(parents=True)  # a store that may not be written
    status([RUN], store=store.uri)
    store.path_of(f"control/{RUN}/releases.json").rmdir()
    other = Release("train-1", now - 9000, now - 8000)  # of another server, which records it at the same time
    sky.on_clusters.append(lambda: write_releases(store, RUN, [other]))
    status([RUN], store=store.uri)
    assert read_releases(store, RUN) == [other, Release("train-1", now - 3700, now + 90)]
    assert read_run(store, RUN).account.total.hours == pytest.approx(3690 / 3600)
    sky.on_clusters.append(lambda: None)
    status([RUN], store=store.uri)
    assert len(sky.on_clusters) == 1  # it is on record


def test_without_an_answer_of_the_store_status_and_logs_show_what_skypilot_knows(
    sky: SkyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = "s3://bucket/silent"
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"SKYTRAIN_S3_{name}", value)
    monkeypatch.setenv("SKYTRAIN_STORE_SECONDS", "0.1")
    sky.jobs += [job_record(1, JOB, "RUNNING", store=silent), job_record(2, "another", "RUNNING", store=silent)]
    with pytest.raises(StoreUnavailable):
        status([RUN], store=silent)
    assert capsys.readouterr().out == f"job 1  {JOB}  train  RUNNING\n"
    with pytest.raises(SystemExit) as ended:
        logs(RUN, store=silent)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("tails", "code"),
    [
        ([("1", "RECOVERING", 0, None), ("2", "SUCCEEDED", 1, None)], 0),
        ([("12", "SUCCEEDED", 1, None)], 0),  # it went on with the second machine's log itself
        ([("1", "FAILED", 0, "Job exited with exit code 76 (user program failure). For logs, …")], 76),
        ([("1", "FAILED", 0, "Job exited with exit codes [0, 2] (user program failure)")], 2),
        ([("1", "FAILED_NO_RESOURCE", 0, "no machine")], 1),
        ([("1", "CANCELLED", 0, None)], 75),
        # SkyPilot would print the same log again at once, until the machine is gone.
        ([("1", "CANCELLING", 0, None)], 75),
    ],
)
def test_a_followed_log_has_every_machine_and_ends_with_the_code_of_the_job(
    store: LocalStore, sky: SkyServer, capsys: pytest.CaptureFixture[str], tails: Any, code: int
) -> None:
    recorded(store)
    launched(store)
    left = list(tails)
    sky.jobs.append(job_record(1, JOB, "STARTING"))

    def becomes(status: str, recoveries: int = 0, why: str | None = None) -> None:
        sky.jobs[:] = [job_record(1, JOB, status, recovery_count=recoveries, failure_reason=why)]

    def tail(job: int, output: Any) -> int:
        """SkyPilot ends the log of the first machine, which exited with 75, before it recovers."""
        machines, status, recoveries, why = left.pop(0)
        becomes(status, recoveries, why)
        for pid in machines:
            print(f"(train, pid={pid}) log", file=output)
        if status == "CANCELLING":
            sky.on_queue.extend([lambda: None, lambda: becomes("CANCELLED")])
        return 101 if status in ("RECOVERING", "CANCELLING") else 0

    sky.log = tail
    with pytest.raises(SystemExit):
        logs(RUN, store=store.uri)  # it would wait for the machine
    assert (left, capsys.readouterr().out) == (tails, "job 1 has no machine yet: STARTING\n")
    becomes("RUNNING")
    with pytest.raises(SystemExit) as ended:
        logs(RUN, store=store.uri, follow=True)
    assert (left, ended.value.code) == ([], code)
    assert capsys.readouterr().out.count("log\n") == sum(len(machines) for machines, *_ in tails)


def test_verbs_for_runs_that_were_not_launched_name_the_remedy(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    recorded(project.store)
    output = project.run("resume", RUN, expect=2).stderr
    assert output == f"error: resume: {RUN} was never launched; skytrain run run:{RUN} continues it here\n"
    assert "was not launched" in project.run("logs", RUN, expect=2).stderr
    assert "no attempt runs" in project.run("stop", RUN).stdout
    assert "stop requested" in project.run("status").stdout


def test_the_store_takes_no_other_secret_of_the_shell_and_no_image_without_a_word(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    recorded(project.store)
    request = LaunchRequest(RUN, project.store.uri, infra="slurm/here", image="evil/x@sha256:" + "ab" * 32)
    record = LaunchRecord(replace(request, variables={"A": "1"}), ["train"], [1], ["HOME"], 0.0, "here")
    write_launch(project.store, record)
    refused = project.run("resume", RUN, "--yes", expect=2)
    assert refused.stderr.endswith("names the secret HOME; if you named it then, add --secret HOME\n")
    agreed = project.run("resume", RUN, "--yes", "--secret", "HOME", expect=2)
    assert f"image {request.image}; variables: A=1; secrets: HOME" in agreed.stdout
    other = replace(request, store="s3://elsewhere/x")
    project.store.put(f"launches/{RUN}.json", replace(record, request=other).to_json())
    assert "damaged (it launches " in project.run("resume", RUN, "--yes", expect=2).stderr


def test_a_stopped_run_commits_exits_with_76_and_stays_stopped_until_it_is_resumed(tmp_path: Path) -> None:
    # So long that only the stop request ends it, and the only commits are due to the request.
    endless = TINY | {
        "train": TINY["train"] | {"max_steps": 50_000},
        "runtime": TINY["runtime"] | {"checkpoint_minutes": 1000},
    }
    project = Project(tmp_path / FOLDER_NAME, endless)
    project.environment |= {"HOME": str(tmp_path), "SKYTRAIN_HOME": str(project.home)}
    command = ("tiny.yaml", "--stage", "train")
    with project.started("job", *command) as process:
        project.wait_until(project.rows_logged, process)
        (record,) = read_records(project.store)
        output = Project(project.folder).run("stop", record.run, "--reason", "lunch").stdout
        assert process.wait() == 76
    stopped_at = project.rows_committed()
    assert stopped_at > 0 and f"attempt 1 is stopped at step {stopped_at}" in output

    with project.started("job", *command) as process:
        _, output = process.communicate()
    assert process.returncode == 76
    assert "lunch): nothing restarts this run automatically" in output
    assert project.claims("train") == 1
    (found,) = json.loads(project.run("status", record.run, "--json").stdout)
    assert (found["state"], found["step"], found["stop_request"]["reason"]) == ("stopped", stopped_at, "lunch")

    with project.started("run", *command) as process:  # by hand: the user wants the run to continue
        project.wait_until(lambda: project.claims("train") == 2, process)
    assert read_stop_request(project.store, record.run) is None
