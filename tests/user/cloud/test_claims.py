"""Of several launches of one run only one submits a job. SkyPilot's server is an imitation."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from interfering import Interfering, each
from sky_server import SkyServer, job_record
from waiting import LONG_SECONDS

from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import record
from pipelines.run.stage import STAGES
from pipelines.store.layout import launch_claims
from pipelines.store.ledger import latest_number
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.records import Heartbeat, ProcessId
from pipelines.store.store_id import read_store_id
from pipelines.user.cloud.launch import Launch, claim_launch, submit, write_store_id
from pipelines.user.cloud.request import LaunchRequest, last_launch
from pipelines.user.cloud.tasks import ManagedJob
from trainer.base.store import LocalStore
from trainer.config.errors import UserError

RUN = "tiny-01234567"
PLANS = {stage: ArtifactPlan(stage, "tiny", {"stage": stage}) for stage in STAGES}
ELSEWHERE = ProcessId("far/away", 1, "1")


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> SkyServer:
    return SkyServer(monkeypatch)


def launched(store: LocalStore) -> list[int]:
    request = LaunchRequest(RUN, store.uri)
    job: Any = ManagedJob(RUN, ())
    dag: Any = None
    return submit(Launch(request, load_recipe("smoke"), PLANS, store, {}, ["train"], job), dag).jobs


def test_of_two_launches_at_once_one_submits_and_the_other_names_it(store: LocalStore, sky: SkyServer) -> None:
    both_in = threading.Barrier(2)

    def create(key: str) -> None:
        if key.startswith(launch_claims(RUN)):
            both_in.wait(LONG_SECONDS)  # both have seen that there is no job

    outcomes = each([Interfering(store.root, create=create)] * 2, launched)
    assert [job.job_id for job in sky.jobs] == [8]
    (refusal,) = (one for one in outcomes if one != [8])
    assert isinstance(refusal, UserError) and f"skytrain status {RUN}" in str(refusal)
    found = last_launch(store, RUN)
    assert found and found.jobs == [8]


def test_a_launch_is_refused_until_the_one_before_it_is_over(store: LocalStore, sky: SkyServer) -> None:
    launched(store)
    for state in ("PENDING", "RECOVERING"):
        sky.jobs[:] = [job_record(8, RUN, state)]
        with pytest.raises(UserError, match=rf"has job 8, still running; see `skytrain status {RUN}"):
            launched(store)
    for state in ("SUCCEEDED", "CANCELLED"):
        sky.jobs[:] = [job_record(sky.last, RUN, state)]
        launched(store)
    sky.jobs.clear()  # its records are gone
    with claim_launch(store, LaunchRequest(RUN, store.uri)) as attempt:
        with pytest.raises(UserError, match=f"is being launched on {attempt.latest.process.host}"):
            launched(store)
        attempt.update(process=replace(attempt.latest.process, started="0"))  # it died, and its pid is another's
    store.put(f"{launch_claims(RUN)}/attempts/0004/heartbeat.json", replace(attempt.latest, state="running").to_json())
    assert launched(store) == [11]
    assert latest_number(store, launch_claims(RUN)) == 5


def test_a_launch_under_an_id_that_the_store_does_not_have_is_refused(store: LocalStore) -> None:
    request, job = LaunchRequest(RUN, store.uri, store_id="0123abcd"), ManagedJob(RUN, ())
    write_store_id(Launch(request, load_recipe("smoke"), PLANS, store, {}, ["train"], job))
    assert read_store_id(store) == "0123abcd"
    other = replace(request, store_id="4567abcd")  # planned before that
    with pytest.raises(UserError, match="launch again"):
        write_store_id(Launch(other, load_recipe("smoke"), PLANS, store, {}, ["train"], job))


def test_the_job_of_another_api_server_holds_the_run_until_the_store_shows_its_end(
    store: LocalStore, sky: SkyServer
) -> None:
    record(store, RUN, load_recipe("smoke"), PLANS, "train")

    def heartbeat(state: str) -> None:
        time.sleep(0.02)  # the store's clock
        beat = Heartbeat(RUN, "train", 1, state, time.time(), time.time(), 0.0, ELSEWHERE)
        store.put(f"{PLANS['train'].prefix}/attempts/0001/heartbeat.json", beat.to_json())

    heartbeat("stopped")  # before this launch
    launched(store)
    sky.name = "there/you"
    sky.jobs.clear()
    for state in (None, "running", "interrupted"):
        if state:
            heartbeat(state)
        with pytest.raises(UserError, match=r"has job 8 on SkyPilot's API server here; .* remove .*/launches/"):
            launched(store)
    heartbeat("stopped")
    assert launched(store) == [9]
