"""Preemption notices: servers with the protocols of EC2 and GCE, and servers with none of them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from answers import Request
from metadata_servers import Cloud, Ec2Cloud, GceCloud
from pipeline_runs import FOLDER_NAME, SHIPPED_CLI, TINY, Project
from waiting import until

from pipelines.job import notice
from pipelines.job.notice import Notices
from pipelines.run.watch import watching
from pipelines.user.show.console import TerminalScreen
from trainer.base.process import StopSignal
from trainer.config.errors import UserError

CLOUDS = [Ec2Cloud, GceCloud]


@pytest.fixture
def start() -> Iterator[Callable[[Any], Any]]:
    """Starts clouds and closes them at the end."""
    clouds: list[Cloud] = []

    def started(cloud: Cloud) -> Cloud:
        clouds.append(cloud)
        return cloud

    yield started
    for cloud in clouds:
        cloud.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notice, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(notice, "DETECT_SECONDS", 20.0)  # this machine may be busy
    monkeypatch.delenv("SKYTRAIN_NOTICE", raising=False)
    monkeypatch.setenv("SKYTRAIN_NOTICE_ENDPOINT", "http://127.0.0.1:1")  # never a real one
    monkeypatch.delenv("SKYTRAIN_GRACE_SECONDS", raising=False)
    yield
    until(lambda: not threads(), "no thread watches")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`with watched(cloud): ...` yields the stop signal that the watcher may set."""

    @contextmanager
    def watch(cloud: Cloud | None, named: str | None = None) -> Iterator[StopSignal]:
        if cloud:
            monkeypatch.setenv("SKYTRAIN_NOTICE_ENDPOINT", cloud.endpoint)
        if named:
            monkeypatch.setenv("SKYTRAIN_NOTICE", named)
        stop = StopSignal.__new__(StopSignal)  # pytest keeps its signals
        with watching([Notices(stop, screen := TerminalScreen())], screen):
            yield stop

    return watch


def polled(cloud: Cloud, times: int) -> None:
    """Wait for so many more requests of the watcher."""
    before = len(cloud.requests)
    until(lambda: len(cloud.requests) >= before + times, "the watcher has asked")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "notice"]


@pytest.mark.parametrize("kind", CLOUDS)
@pytest.mark.parametrize("named", [True, False])
def test_a_notice_stops_the_run_with_its_reason(start, watched, kind, named: bool) -> None:
    cloud = start(kind())
    cloud.threaten()  # an event that ends no machine
    with watched(cloud, kind.name if named else None) as stop:
        polled(cloud, 6)
        assert not stop.asked and stop.grace_seconds == kind.grace_seconds
        cloud.preempt()
        until(lambda: stop.asked, "the run is asked to stop")
    assert stop.reason == kind.why


def test_off_polls_no_service_and_a_chosen_grace_wins(start, watched, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = start(Ec2Cloud())
    cloud.preempt()
    with watched(cloud, "off") as stop:
        assert threads() == []
    assert (cloud.requests, stop.asked, stop.grace_seconds) == ([], False, 30)
    monkeypatch.setenv("SKYTRAIN_GRACE_SECONDS", "77")
    with watched(cloud, "ec2") as stop:
        assert stop.grace_seconds == 77


@pytest.mark.parametrize("seconds", ["0", "0.5", "-1", "inf", "nan", "soon"])
def test_a_grace_that_saves_nothing_is_refused(watched, monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("SKYTRAIN_GRACE_SECONDS", seconds)
    with pytest.raises(UserError, match="_SECONDS=.*: must be a number of seconds >= 1; for example"), watched(None):
        pytest.fail("the run started")


@pytest.mark.parametrize(
    "endpoint", ["http://host:abc", "http://a host", "http://me:secret@host", "https://host", "host"]
)
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="SKYTRAIN_NOTICE_ENDPOINT: .* is not of the form http://host:port"):
        notice.Metadata(endpoint)


def test_an_endpoint_may_be_a_name_or_an_address_of_ipv6() -> None:
    for endpoint in ("http://metadata.google.internal/", "http://[fd00:ec2::254]:80"):
        notice.Metadata(endpoint)


def test_a_service_that_hangs_delays_nothing(start, watched) -> None:
    released = threading.Event()

    class Hangs(Cloud):
        def answer(self, request: Request) -> None:
            released.wait()

    cloud = start(Hangs())
    try:
        with watched(cloud, "ec2") as stop:
            polled(cloud, 1)
        assert not released.is_set() and not stop.asked  # in and out of the block while it hangs
    finally:
        released.set()


def test_a_token_goes_through_no_proxy_and_follows_no_redirect(start, watched, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = start(Cloud())

    class Redirects(Ec2Cloud):
        def answer(self, request: Request) -> None:
            if request.path == "/latest/api/token":
                return super().answer(request)
            return request.respond(307, Location=f"{elsewhere.endpoint}{request.path}")

    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, elsewhere.endpoint)
    cloud = start(Redirects())
    with watched(cloud) as stop:
        polled(cloud, 6)
    assert cloud.tokens and elsewhere.requests == [] and not stop.asked


def test_a_run_that_gets_notice_commits_its_last_step_and_the_next_run_resumes_after_it(tmp_path: Path, start) -> None:
    recipe = TINY | {
        "tokens": TINY["tokens"] | {"max_tokens": 16_384, "val_shards": 1},
        "train": TINY["train"] | {"val_every": None},
        "runtime": TINY["runtime"] | {"processes": 1, "checkpoint_minutes": 1000},  # it commits when asked to stop only
    }
    project, command = Project(tmp_path / FOLDER_NAME, recipe), ["run", "tiny.yaml", "--stage", "train"]
    cloud = start(Ec2Cloud())
    project.environment |= {"SKYTRAIN_NOTICE": "ec2", "SKYTRAIN_NOTICE_ENDPOINT": cloud.endpoint}
    code = f"from pipelines.job import notice; notice.POLL_SECONDS = 0.05; {SHIPPED_CLI}"
    with project.started(*command, code=code) as process:
        project.wait_until(lambda: project.rows_logged() >= 3, process)
        cloud.preempt()
        err = process.communicate()[1]
    assert process.returncode == 75 and Ec2Cloud.why in err and "Traceback" not in err, err
    (commit,) = project.found("train/*/checkpoints/*/COMMIT.json")
    assert json.loads(commit.read_text())["step"] == project.rows_logged() < recipe["train"]["max_steps"]
    (beat,) = (beat for beat in project.heartbeats() if beat["stage"] == "train")
    assert (beat["state"], beat["progress"]["notice"]) == ("interrupted", Ec2Cloud.why)
    assert not project.alive()

    project.environment["SKYTRAIN_NOTICE"] = "off"
    project.run(*command)
    assert project.rows_committed() == recipe["train"]["max_steps"] and project.report()["attempts"] == 2
