"""`skytrain stop` and `status` work from every machine that reaches the store."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, Project

from pipelines.cloud import control
from pipelines.cloud.control import status_of
from pipelines.cloud.request import LaunchRecord, LaunchRequest, write_launch
from pipelines.cloud.skypilot import Cluster, TaskStatus
from pipelines.show.status import print_status
from pipelines.tracking import ledger
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing, Heartbeat, Machine, ProcessId, Progress
from pipelines.tracking.runs import Run, RunRecord, read_records
from pipelines.tracking.stop_request import clear_stop_request, read_stop_request, request_stop, watch_stop_request
from trainer.store import LocalStore

RUN = "tiny-01234567"
ELSEWHERE = ProcessId("far/away", 1)


def test_a_stop_request_stands_until_it_is_withdrawn_and_the_first_one_counts(store: LocalStore) -> None:
    watch = watch_stop_request(store, RUN)
    beat = Heartbeat(RUN, "train", 1, "running", 0.0, 0.0, 0.0)
    assert (read_stop_request(store, RUN), watch(beat)) == (None, None)
    request_stop(store, RUN, "too dear")
    request = request_stop(store, RUN, "another")
    assert request.reason == "too dear"
    assert watch(beat) == f"{request.by}: too dear"
    clear_stop_request(store, RUN)
    assert (read_stop_request(store, RUN), watch(beat)) == (None, None)


def recorded(store: LocalStore) -> RunRecord:
    """A recorded run without any attempt."""
    recipe = {
        "name": "tiny",
        "tokens": {"source": "texts/*.txt", "tokenizer": "bytes"},
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "vocab_size": 257},
        "train": {"batch_tokens": 1024, "max_steps": 100, "learning_rate": 0.1, "warmup_steps": 1},
    }
    record = RunRecord(RUN, recipe, "train", {"tokenize": "tokens/t-0", "train": f"train/{RUN}"}, time.time())
    store.put(f"runs/{RUN}.json", json.dumps(record.__dict__).encode())
    return record


def test_stopping_reports_where_the_working_attempt_stopped(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HEARTBEAT_SECONDS", 0.1)
    record = recorded(store)
    assert control.stop(store, record, "enough", 10, lambda text: None) is None  # no attempt is working
    clear_stop_request(store, RUN)
    messages: list[str] = []
    watch = watch_stop_request(store, RUN)

    def leave_on_request(beat: Heartbeat) -> None:
        assert attempt
        if watch(beat) and attempt.latest.state == "running":
            attempt.update(state="stopped", progress=Progress(step=17))

    attempt = claim(store, f"train/{RUN}", RUN, "train", 1, Billing(), leave_on_request)
    assert attempt
    with attempt:
        ended = control.stop(store, record, "enough", 20, messages.append)
    assert ended and (ended.state, ended.progress.step) == ("stopped", 17)
    assert messages == ["train: attempt 1 is asked to commit and exit"]


def test_stopping_does_not_wait_for_the_dead(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SILENT_SECONDS", 1.0)
    record = recorded(store)
    elsewhere = Heartbeat(RUN, "train", 1, "running", time.time(), time.time(), 0.0, ELSEWHERE)
    store.put(f"train/{RUN}/attempts/0001/heartbeat.json", elsewhere.to_json())
    assert control.stop(store, record, "enough", 60, lambda text: None) is None
    assert read_stop_request(store, RUN)


def test_a_status_has_done_and_pending_stages_and_skypilots_jobs(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(store)
    now = time.time()
    beat = Heartbeat(
        RUN,
        "train",
        1,
        "running",
        now - 3600,
        now - 100,
        10.0,
        ELSEWHERE,
        {"setup": 500.0, "train": 3000.0},
        Progress(50, highest_step=50, resumed_from=0, metrics={"train/loss": 2.5, "perf/tokens_per_second": 1e3}),
        nodes=2,
    )
    store.put(f"train/{RUN}/attempts/0001/heartbeat.json", beat.to_json())
    request = request_stop(store, RUN, "enough")
    job = TaskStatus(3, "train", "RECOVERING", 2, "train-3", "preempted", over=False)
    status = status_of(Run(store, record), [job], now)
    assert (status.stage, status.step, status.max_steps) == ("train", 50, 100)
    assert (status.train_loss, status.tokens_per_second, status.recoveries) == (2.5, 1e3, 2)
    assert status.usd == pytest.approx(2 * 10.0 * 3500 / 3600)
    assert status.silent_seconds == pytest.approx(100)
    assert status.stop_request == request
    assert status.to_come and status.to_come.hours.middle >= 50 * 60 / 3600  # at the speed so far
    print_status([status])
    assert re.search(r"  trained about \w{3} \d\d \w{3} \d\d:\d\d, \$[\d.,]+ in all\n", capsys.readouterr().out)


def test_clusters_without_a_live_run_are_found_with_skypilots_answers_made_up(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    recorded(store)
    long_ago = now - 7200
    up: list[tuple[float, float | None]] = [(long_ago, None)]
    jobs = [
        job_record(1, RUN, "RUNNING", long_ago, "train-1"),
        job_record(2, RUN, "SUCCEEDED", long_ago, "train-2"),
        job_record(3, RUN, "PENDING", long_ago, None),
        job_record(4, "somebody-elses", "RUNNING", long_ago, "theirs-4"),
    ]
    clusters = [
        Cluster("train-1", RUN, 2, up),  # of the job, which is listed already
        Cluster("train-2", RUN, 2, up),
        Cluster("gone", RUN, 2, [(now - 7200, now - 3600)]),
        Cluster("new", RUN, 2, [(now - 60, None)]),  # it is being set up
        Cluster("by-hand", None, 1, up),
        Cluster("strange", "other-run", 1, up),
    ]
    monkeypatch.setattr(control, "managed_tasks", lambda: [TaskStatus.of(job) for job in jobs])
    monkeypatch.setattr(control, "clusters", lambda: clusters)

    def found() -> list[str]:
        return [orphan.what for orphan in control.find_orphans(store, now)]

    left_over = ["cluster train-2", "cluster by-hand", "cluster strange"]
    assert found() == [f"job 1 ({RUN}, train)", *left_over]
    beat = Heartbeat(
        RUN,
        "train",
        1,
        "running",
        now - 600,
        now,
        0.0,
        ELSEWHERE,
        machine=Machine(cluster="by-hand"),
    )
    store.put(f"train/{RUN}/attempts/0001/heartbeat.json", beat.to_json())
    assert found() == ["cluster strange"]  # the run is alive and may need it


def job_record(number: int, run: str, status: str, submitted: float, cluster: str | None) -> Any:
    names = {
        "job_id": number,
        "task_id": 0,
        "job_name": run,
        "task_name": "train",
        "recovery_count": 0,
        "submitted_at": submitted,
    }
    state = SimpleNamespace(value=status, is_terminal=lambda: status == "SUCCEEDED")
    return SimpleNamespace(**names, status=state, current_cluster_name=cluster, failure_reason=None, details=None)


def test_verbs_for_runs_that_were_not_launched_name_the_remedy(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    recorded(project.store)
    output = project.run("resume", RUN, expect=2).stderr
    assert output == f"error: resume: {RUN} was never launched; skytrain run run:{RUN} continues it here\n"
    output = project.run("logs", RUN, expect=2).stderr
    assert "was not launched" in output and "train.log" in output
    assert "no attempt runs" in project.run("stop", RUN).stdout
    assert "to be stopped" in project.run("status").stdout


def test_resuming_without_a_secret_that_the_launch_had_is_refused(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    recorded(project.store)
    request = LaunchRequest(RUN, project.store.uri, infra="slurm/here", image="none")
    write_launch(project.store, LaunchRecord(request, ["train"], [1], ["AWS_SESSION_TOKEN", "HF_TOKEN"], 0.0, []))
    output = project.run("resume", RUN, "--yes", expect=2).stderr
    assert output == "error: --secret HF_TOKEN: not set in this shell; export it first, without writing it to a file\n"


def test_a_stopped_run_commits_exits_with_76_and_stays_stopped_until_it_is_resumed(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    # So long that only the stop request ends it, and the only commits are due to the request.
    endless = ["--set", "train.max_steps=1000000", "--set", "runtime.checkpoint_minutes=1000"]
    command = ("run", "tiny.yaml", "--stage", "train", *endless)
    with project.started(*command, "--unless-stopped") as process:
        project.wait_until(project.rows_logged, process)
        (record,) = read_records(project.store)
        output = Project(project.folder).run("stop", record.run, "--reason", "lunch").stdout
        assert process.wait(30) == 76
    assert project.report()["state"] == "stopped"
    stopped_at = project.rows_committed()
    assert f"attempt 1 is stopped at step {stopped_at}" in output
    assert stopped_at > 0

    output = project.run(*command, "--unless-stopped", expect=76).stderr
    assert "lunch): nothing restarts this run automatically" in output
    assert project.claims("train") == 1
    status: dict[str, Any] = json.loads(project.run("status", record.run, "--json").stdout)[0]
    assert (status["state"], status["step"], status["wish"]["reason"]) == ("stopped", stopped_at, "lunch")

    with project.started(*command) as process:  # by hand: the user wants the run to continue
        project.wait_until(lambda: project.claims("train") == 2, process)
    assert read_stop_request(project.store, record.run) is None
