"""`skytrain stop` and `status` work from every machine that reaches the store."""

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, Project

from pipelines.cloud import control, skypilot
from pipelines.cloud.control import Orphan, RunsOfStores, status_of
from pipelines.cloud.request import LaunchRecord, LaunchRequest, write_launch
from pipelines.cloud.skypilot import Cluster, TaskStatus
from pipelines.show.status import print_orphans, print_status
from pipelines.tracking import ledger
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing, Heartbeat, Machine, ProcessId, Progress
from pipelines.tracking.runs import Run, RunRecord, read_records
from pipelines.tracking.stop_request import clear_stop_request, read_stop_request, request_stop, watch_stop_request
from pipelines.verbs import status as status_verb
from pipelines.verbs.down import down
from trainer.errors import StoreUnavailable, UserError
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
        Progress(
            50, now - 400, highest_step=50, resumed_from=0, metrics={"train/loss": 2.5, "perf/tokens_per_second": 1e3}
        ),
        nodes=2,
        machine=Machine(cloud="slurm", region="north", zone="gpu"),
    )
    store.put(f"train/{RUN}/attempts/0001/heartbeat.json", beat.to_json())
    request = request_stop(store, RUN, "enough")
    job = TaskStatus(3, "train", "RECOVERING", 2, "train-3", "preempted", over=False)
    os.utime(store.path_of(f"train/{RUN}/attempts/0001/heartbeat.json"), (now - 100, now - 100))
    status = status_of(Run(store, record), [job], now)
    assert (status.stage, status.step, status.max_steps) == ("train", 50, 100)
    assert (status.train_loss, status.tokens_per_second, status.recoveries) == (2.5, 1e3, 2)
    assert status.usd == pytest.approx(2 * 10.0 * 3500 / 3600)
    assert status.silent_seconds == pytest.approx(100, abs=60)
    assert status.stop_request == request
    assert status.to_come and status.to_come.hours.middle >= 50 * 60 / 3600  # at the speed so far
    print_status([status, replace(status, places=["slurm/north", "aws/us-east-1a"])])
    text = capsys.readouterr().out
    assert re.search(r"  trained about \w{3} \d\d \w{3} \d\d:\d\d, \$[\d.,]+ in all\n", text)
    assert "in 1 attempt on slurm/north, 2 recovered by SkyPilot\n" in text
    assert text.count("  no new step for 5 min 00 s\n") == 2
    print_status([replace(status, state="lost")])  # nobody trains: no time of its end
    assert "to go" in (lost := capsys.readouterr().out) and "trained about" not in lost
    assert "in 1 attempt on slurm/north, then aws/us-east-1a, 2 recovered" in text


def test_a_status_shouts_that_no_checkpoint_is_saved_and_names_resume_after_the_job(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record, now = recorded(store), time.time()
    unsaved = Progress(50, unsaved_since=now - 700, unsaved_because="the key is refused", killed="rank 1 was killed")
    beat = Heartbeat(RUN, "train", 1, "failed", now - 3600, now - 100, 10.0, ELSEWHERE, progress=unsaved)
    store.put(f"train/{RUN}/attempts/0001/heartbeat.json", beat.to_json())
    job = TaskStatus(3, "train", "FAILED", 2, "train-3", None, over=True)
    print_status([status_of(Run(store, record), [job], now)])
    text = capsys.readouterr().out
    assert "NO CHECKPOINT IS SAVED for 10 min 00 s: the key is refused\n  rank 1 was killed\n" in text
    assert f"resume {RUN} continues it" in text


def test_silence_is_measured_by_the_clock_of_the_store(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record, now = recorded(store), time.time()
    for skew in (-7200.0, 7200.0):  # of the clock here, from the store's and the node's
        beat = Heartbeat(RUN, "train", 1, "running", now - 9000, now - 4000 + skew, 10.0, ELSEWHERE)
        store.put(f"train/{RUN}/attempts/0001/heartbeat.json", beat.to_json())
        run = Run(store, record)
        ((one,),) = [run.heartbeats]
        monkeypatch.setattr(store, "clock", lambda stored=one.stored: stored + 4000.0)
        assert status_of(run, [], now + skew).silent_seconds == 4000.0
        assert control.idle_reason(run, now + skew - 9000, now + skew) == "no heartbeat of the run for 67 min"
        assert control.idle_reason(run, now + skew - 60, now + skew) is None  # it has the machine for a minute
    beat = Heartbeat(RUN, "train", 2, "done", now - 3000, now - 1000, 10.0, ELSEWHERE)
    store.put(f"train/{RUN}/attempts/0002/heartbeat.json", beat.to_json())
    assert status_of(Run(store, record), [], now).silent_seconds is None  # the first one was killed


def orphans_of(store: LocalStore, now: float) -> list[Orphan]:
    return list(control.find_orphans(RunsOfStores(store.uri), now))


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
        job_record(5, RUN, "RECOVERING", long_ago, None),
    ]
    clusters = [
        Cluster("train-1", RUN, 2, up),  # of the job, which is listed already
        Cluster("train-2", RUN, 2, up),
        Cluster("gone", RUN, 2, [(now - 7200, now - 3600)]),
        Cluster("new", RUN, 2, [(now - 60, None)]),  # it is being set up
        Cluster("by-hand", None, 1, up),
        Cluster("strange", "other-run", 1, up),
        Cluster("train-5", RUN, 2, up),  # its job, whose record does not name it now, would bring it back
        Cluster("sky-jobs-controller-1", None, 1, up, is_controller=True),  # it has work
    ]
    with_skypilot(monkeypatch, jobs, clusters)

    def found() -> list[str]:
        return [orphan.what for orphan in orphans_of(store, now)]

    left_over = ["cluster train-2", "cluster by-hand", "cluster strange"]
    assert found() == [f"job 1 ({RUN}, train)", f"job 5 ({RUN}, train)", *left_over]
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


def with_skypilot(patch: pytest.MonkeyPatch, jobs: list[Any], clusters: list[Cluster]) -> list[str]:
    """SkyPilot's answers; the list gets what it was asked to remove. A cancelled job takes its clusters with it."""
    removed: list[str] = []

    def tasks(run: str | None = None, unfinished: bool = False) -> list[TaskStatus]:
        found = [TaskStatus.of(job) for job in jobs]
        return [one for one in found if run in (None, one.run) and not (unfinished and one.over)]

    def cancel(ids: list[int]) -> None:
        removed.extend(f"job {number}" for number in ids)
        jobs[:] = [job for job in jobs if job.job_id not in ids]
        clusters[:] = [one for one in clusters if not one.name.endswith(tuple(f"-{number}" for number in ids))]

    def take_down(name: str) -> None:
        removed.append(f"cluster {name}")
        clusters[:] = [one for one in clusters if one.name != name]

    patch.setattr(control, "managed_tasks", tasks)
    patch.setattr(control, "clusters", lambda: list(clusters))
    patch.setattr(control, "cancel_jobs", cancel)
    patch.setattr(control, "take_down", take_down)
    patch.setattr(control, "reach_api_server", lambda note: None)
    return removed


JOB_YAML = """name: {run}
---
name: train
resources:
  labels: {{project: skytrain, run: {run}}}
envs: {{SKYTRAIN_STORE: "{store}"}}
"""


def test_without_a_store_orphans_are_the_jobs_of_skypilots_own_record(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    up: list[tuple[float, float | None]] = [(now - 7200, None)]
    ours, elsewhere = job_record(8, RUN, "STARTING", now - 7200, "train-8"), store.uri + "/elsewhere"
    ours.user_yaml = JOB_YAML.format(run=RUN, store="no-such-scheme:x")
    lost = job_record(9, "gone-01234567", "RUNNING", now - 60, "train-9")
    lost.user_yaml = JOB_YAML.format(run="gone-01234567", store=elsewhere)
    theirs = job_record(10, "theirs", "RUNNING", now - 7200, "theirs-10")
    theirs.user_yaml = "name: theirs\n---\n- : ["
    clusters = [Cluster("train-8", RUN, 1, up), Cluster("train-9", RUN, 1, up), Cluster("left", RUN, 1, up)]
    with_skypilot(monkeypatch, [ours, lost, theirs], clusters)

    def gone(uri: str) -> LocalStore:
        if uri == elsewhere:
            return LocalStore(tmp_path / "elsewhere")
        raise StoreUnavailable("no such bucket")

    monkeypatch.setattr(control, "open_store", gone)
    found = orphans_of(store, now)
    assert [one.what for one in found] == [f"job 8 ({RUN}, train)", "job 9 (gone-01234567, train)", "cluster left"]
    assert "its store can't be read" in found[0].why and "not in its store" in found[1].why
    assert "sky jobs cancel 8" in found[0].remedy and "sky down left" in found[2].remedy
    print_orphans([])
    assert capsys.readouterr().out == "none\n"


def test_a_store_that_fails_half_way_leaves_no_orphan_out(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(store)
    job = job_record(8, RUN, "RUNNING", time.time() - 7200, "train-8")
    with_skypilot(monkeypatch, [job], [Cluster("left", RUN, 1, [(time.time() - 7200, None)])])

    def without_manifests(key: str) -> bytes | None:
        if key.endswith("MANIFEST.json"):
            raise StoreUnavailable("no route")
        return LocalStore.get(store, key)

    monkeypatch.setattr(store, "get", without_manifests)
    monkeypatch.setattr(control, "open_store", lambda uri: store)
    found = {one.what: one.why for one in orphans_of(store, time.time())}
    doubt = "nothing shows whether its run works (no route)"
    assert found == {f"job 8 ({RUN}, train)": doubt, "cluster left": doubt}


@pytest.mark.parametrize("kind", ["runs/{run}.json", "{train}/attempts/0001/heartbeat.json"])
def test_orphans_call_no_machine_of_an_unreadable_run_unused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = recorded(store)
    key = kind.format(run=RUN, train=made.prefixes["train"])
    store.put(key, b'{"format": 2}')
    job = job_record(8, RUN, "RUNNING", time.time() - 7200, "train-8")
    with_skypilot(monkeypatch, [job], [Cluster("left", RUN, 1, [(time.time() - 7200, None)])])
    monkeypatch.setattr(control, "open_store", lambda uri: store)
    found = {one.what: one.why for one in orphans_of(store, time.time())}
    assert set(found) == {f"job 8 ({RUN}, train)", "cluster left"}
    for why in found.values():
        assert why.startswith("nothing shows whether its run works (") and f"{key}: written by a newer skytrain" in why


def test_a_run_is_taken_down_by_skypilots_own_record_and_never_below_its_controller(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    up: list[tuple[float, float | None]] = [(now - 7200, None)]
    job = job_record(8, RUN, "RECOVERING", now - 7200, None)
    job.user_yaml = JOB_YAML.format(run=RUN, store="s3://gone/x")
    theirs = job_record(10, "tiny-theirs", "RUNNING", now - 7200, "theirs-10")
    clusters = [Cluster("train-8", RUN, 1, up), Cluster("by-hand", RUN, 1, up), Cluster("train-9", "other", 1, up)]
    removed = with_skypilot(monkeypatch, [job, theirs], clusters)
    monkeypatch.setattr(control, "JOB_CLUSTER_SECONDS", 0.0)
    monkeypatch.setattr(skypilot, "reach_api_server", lambda note: None)
    down("tiny", store=str(tmp_path / "never-written"))
    assert removed == ["job 8", "cluster by-hand"]
    out, notes = capsys.readouterr()
    assert out.endswith(f"{RUN}: no job and no cluster of it is left\n")
    assert f"by SkyPilot's record, the run is {RUN}" in notes
    with pytest.raises(UserError, match="no such run in .* SkyPilot's own record has no single run tiny-theirs either"):
        down("tiny-theirs", store=str(tmp_path / "never-written"))


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
    rest = {"failure_reason": None, "details": None, "end_at": None, "user_yaml": None}
    return SimpleNamespace(**names, **rest, status=state, current_cluster_name=cluster)


def test_a_status_has_every_job_that_is_not_over_and_the_last_one() -> None:
    def task(job: int, number: int, status: str, run: str = RUN) -> TaskStatus:
        over = status != "RUNNING"
        return TaskStatus(job, "train", status, 0, None, None, over, run, number)

    tasks = [task(4, 0, "FAILED"), task(3, 0, "RUNNING"), task(1, 0, "FAILED"), task(9, 0, "RUNNING", "other")]
    tasks += [task(2, 1, "RUNNING"), task(2, 0, "SUCCEEDED")]
    assert [(one.job, one.task) for one in control.tasks_of(RUN, tasks)] == [(2, 0), (2, 1), (3, 0), (4, 0)]
    assert control.tasks_of("new", tasks) == []


def test_the_status_of_many_runs_is_one_request_and_the_store_does_not_wait_for_its_answer(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        run = f"tiny-{number:08d}"
        store.put(f"runs/{run}.json", json.dumps(recorded(store).__dict__ | {"run": run}).encode())
        write_launch(store, LaunchRecord(LaunchRequest(run, store.uri), ["train"], [number], [], 0.0, []))
    asked: list[str | None] = []
    answer = threading.Event()

    def tasks(run: str | None = None) -> list[TaskStatus]:
        asked.append(run)
        answer.wait(10)
        return [TaskStatus(2, "train", "RUNNING", 0, None, None, False, "tiny-00000002")]

    monkeypatch.setattr(control, "reach_api_server", lambda note: None)
    monkeypatch.setattr(control, "managed_tasks", tasks)

    def no_clusters() -> list[Cluster]:
        asked.append("clusters")
        return []

    monkeypatch.setattr(control, "clusters", no_clusters)
    monkeypatch.setattr(status_verb, "FIRST_ANSWER_SECONDS", 0.1)
    threading.Timer(1.0, answer.set).start()
    status_verb.status(store=store.uri)
    first, _, jobs = capsys.readouterr().out.partition("SkyPilot has not answered yet; its jobs follow")
    assert first.count("step 0 of 100") == 4 and "job 2" not in first
    assert jobs.split() == ["tiny-00000002", "waiting", "job", "2", "train", "RUNNING"]
    status_verb.status(["tiny-00000002"], store=store.uri, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["tasks"][0]["job"] == 2
    status_verb.status([RUN], store=store.uri)  # it was never launched
    assert asked == [None, "clusters", None, "clusters"]


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


def test_the_store_takes_no_other_secret_of_the_shell_and_no_image_without_a_word(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    recorded(project.store)
    request = LaunchRequest(RUN, project.store.uri, infra="slurm/here", image="evil/x@sha256:" + "ab" * 32)
    record = LaunchRecord(replace(request, variables={"A": "1"}), ["train"], [1], ["HOME"], 0.0, [])
    write_launch(project.store, record)
    refused = project.run("resume", RUN, "--yes", expect=2)
    assert refused.stderr.startswith("error: resume: the record of its launch in ") and refused.stdout == ""
    assert refused.stderr.endswith("names the secret HOME; if you named it then, add --secret HOME\n")
    agreed = project.run("resume", RUN, "--yes", "--secret", "HOME", expect=2)
    assert f"image {request.image}; variables: A=1; secrets: HOME" in agreed.stdout
    for other in (replace(request, run="other-12345678"), replace(request, store="s3://elsewhere/x")):
        project.store.put(f"launches/{RUN}.json", replace(record, request=other).to_json())
        assert "damaged (it launches " in project.run("resume", RUN, "--yes", expect=2).stderr


def test_a_stopped_run_commits_exits_with_76_and_stays_stopped_until_it_is_resumed(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    # So long that only the stop request ends it, and the only commits are due to the request.
    endless = ["--set", "train.max_steps=50000", "--set", "runtime.checkpoint_minutes=1000"]
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
