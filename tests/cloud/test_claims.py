"""Of several launches of one run only one submits a job. SkyPilot's answers are made up."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud import claims, launch
from pipelines.cloud.claims import LaunchClaim, claim_launch, newest_entry, read_claim, refuse_second_launch
from pipelines.cloud.launch import Launch, submit
from pipelines.cloud.request import LaunchRequest, last_launch
from pipelines.cloud.skypilot import TaskStatus
from pipelines.cloud.tasks import ManagedJob
from pipelines.recipe import load_recipe
from pipelines.stage import STAGES
from pipelines.tracking.records import Heartbeat, ProcessId
from pipelines.tracking.runs import record
from trainer.errors import UserError
from trainer.store import LocalStore

RUN = "tiny-01234567"
PLANS = {stage: ArtifactPlan(stage, "tiny", {"stage": stage}) for stage in STAGES}
ELSEWHERE = ProcessId("far/away", 1, "1")


class Sky:
    """SkyPilot's API server: the state of each job by its id."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.jobs: dict[int, str] = {}
        self.name = "here/me"
        self.last = 7
        self.on_submit = lambda: None
        patch.setattr(claims, "managed_tasks", self.tasks)
        patch.setattr(claims, "server_name", lambda: self.name)
        patch.setattr(launch, "submit_job", self.submit)

    def tasks(self, run: str) -> list[TaskStatus]:
        over = ("SUCCEEDED", "FAILED", "CANCELLED")
        return [TaskStatus(job, "train", state, 0, None, None, state in over, run) for job, state in self.jobs.items()]

    def submit(self, dag: Any, run: str) -> list[int]:
        self.on_submit()
        self.last += 1
        self.jobs[self.last] = "PENDING"
        return [self.last]


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Sky:
    return Sky(monkeypatch)


def launched(store: LocalStore) -> list[int]:
    request = LaunchRequest(RUN, store.uri)
    job: Any = ManagedJob(RUN, ())
    dag: Any = None
    return submit(Launch(request, load_recipe("smoke"), PLANS, store, {}, ["train"], job), [dag]).jobs


def newest(store: LocalStore) -> LaunchClaim:
    entry = newest_entry(store, RUN)
    assert entry
    claim = read_claim(store, entry)
    assert claim
    return claim


def test_of_two_launches_at_once_one_submits_and_the_other_names_it(store: LocalStore, sky: Sky) -> None:
    both_in = threading.Barrier(2)
    refusals: list[str] = []
    claimed = store.create

    def create_together(key: str, body: bytes) -> bool:
        both_in.wait(60)  # both have seen that there is no job
        return claimed(key, body)

    store.create = create_together  # type: ignore[method-assign]

    def one() -> None:
        try:
            launched(store)
        except UserError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(sky.jobs) == [8]
    (refusal,) = refusals
    assert f"skytrain status {RUN}" in refusal and newest(store).by in refusal
    found = last_launch(store, RUN)
    assert found and found.jobs == newest(store).jobs == [8]


def test_a_launch_is_refused_until_the_job_before_it_is_over(store: LocalStore, sky: Sky) -> None:
    launched(store)
    with pytest.raises(UserError, match=rf"has job 8, launched by .*@.*, still running; see `skytrain status {RUN}"):
        launched(store)
    sky.jobs[8] = "RECOVERING"
    with pytest.raises(UserError, match="job 8"):
        refuse_second_launch(store, RUN)
    claim = newest(store)
    store.put(claim.key, replace(claim, jobs=[]).to_json())  # its launch has not named the job yet
    with pytest.raises(UserError, match=r"has job 8, launched by "):
        launched(store)
    store.put(claim.key, claim.to_json())
    for state in ("SUCCEEDED", "CANCELLED"):
        sky.jobs[sky.last] = state
        launched(store)
    sky.jobs.clear()  # its records are gone
    launched(store)
    assert (newest(store).number, newest(store).jobs) == (4, [11])


def test_a_launch_that_died_before_its_job_had_an_id_does_not_hold_the_run(store: LocalStore, sky: Sky) -> None:
    claim = claim_launch(store, RUN)
    with pytest.raises(UserError, match="being submitted"):
        launched(store)
    store.put(claim.key, replace(claim, process=replace(claim.process, started="0")).to_json())  # the pid is another's
    assert launched(store) == [8]
    claim = newest(store)
    sky.jobs.clear()
    store.put(claim.key, replace(claim, process=ELSEWHERE, jobs=[]).to_json())  # nobody here can know
    with pytest.raises(UserError, match=rf"if that launch is over, remove {store.uri}/{claim.key}"):
        launched(store)
    store.delete(claim.key)
    assert launched(store) == [9]


def test_the_job_of_another_api_server_holds_the_run_until_the_store_shows_its_end(store: LocalStore, sky: Sky) -> None:
    record(store, RUN, load_recipe("smoke"), PLANS, "train")

    def heartbeat(state: str) -> None:
        time.sleep(0.02)  # the store's clock
        beat = Heartbeat(RUN, "train", 1, state, time.time(), time.time(), 0.0, ELSEWHERE)
        store.put(f"{PLANS['train'].prefix}/attempts/0001/heartbeat.json", beat.to_json())

    heartbeat("stopped")  # before this launch
    launched(store)
    sky.name, sky.jobs = "there/you", {}
    for state in (None, "running", "interrupted"):
        if state:
            heartbeat(state)
        with pytest.raises(UserError, match=r"by .*@.* already \(job 8 on SkyPilot's server here/me\)"):
            launched(store)
    heartbeat("stopped")
    assert launched(store) == [9]
