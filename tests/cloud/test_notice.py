"""Notices of preemption: servers with each cloud's protocol, and servers with none of them."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metadata_servers import END, AzureCloud, Cloud, Ec2Cloud, Everything, GceCloud, Handler
from pipeline_runs import FOLDER_NAME, SHIPPED_CLI, TINY, Project

from pipelines.cloud import notice
from pipelines.cloud.notice import Notice, utc_time, watching
from pipelines.show.console import TerminalScreen
from trainer.errors import UserError
from trainer.process import StopSignal

LIMIT_S = 20.0  # of waits that take milliseconds


CLOUDS: list[type[Ec2Cloud] | type[GceCloud] | type[AzureCloud]] = [Ec2Cloud, GceCloud, AzureCloud]


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
    monkeypatch.setattr(notice, "DETECT_SECONDS", 2.0)  # this machine may be busy
    monkeypatch.delenv("SKYTRAIN_NOTICE", raising=False)
    monkeypatch.setenv("SKYTRAIN_NOTICE_ENDPOINT", "http://127.0.0.1:1")  # never a real one
    monkeypatch.delenv("SKYTRAIN_GRACE_SECONDS", raising=False)
    yield
    until(lambda: not threads(), "the watcher ended")  # the next test would count it


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
        with watching(stop, TerminalScreen()):
            yield stop

    return watch


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


def polled(cloud: Cloud, times: int) -> None:
    """Wait for so many more requests of the watcher."""
    before = len(cloud.requests)
    until(lambda: len(cloud.requests) >= before + times, f"{cloud.name} was asked {times} times")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "notice"]


class Odd:
    """A service whose answers raise what nobody thought of."""

    name, grace_seconds = "odd", 7

    def __init__(self, metadata: Any) -> None:
        self.answers: list[Exception | Notice] = [KeyError("x"), TypeError(), AttributeError(), Notice("odd: gone")]

    def probe(self) -> None:
        pass

    def notices(self) -> Iterator[Notice]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield answer


def test_no_answer_ends_the_watch_for_the_notice_after_it(watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(notice.SOURCES, "odd", Odd)
    with watched(None, "odd") as stop:
        until(lambda: stop.asked, "the notice was seen")
    assert stop.reason == "odd: gone"


def test_the_death_of_the_watch_is_reported(
    watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(notice, "poll", die)
    with watched(None, "ec2"):
        until(lambda: not threads(), "the thread died")
    assert "preemption notices are not heard any more: SystemExit(3)" in " ".join(capsys.readouterr().err.split())


# --- each cloud


@pytest.mark.parametrize("kind", CLOUDS)
@pytest.mark.parametrize("named", [True, False])
def test_a_notice_stops_the_run_with_its_reason(start, watched, kind, named: bool) -> None:
    cloud = start(kind())
    with watched(cloud, kind.name if named else None) as stop:
        polled(cloud, 8)
        assert not stop.asked
        cloud.preempt()
        until(lambda: stop.asked, "the notice was seen")
    assert stop.reason == kind.why


@pytest.mark.parametrize("kind", CLOUDS)
def test_events_that_are_no_notice_for_this_machine_stop_nothing(start, watched, kind) -> None:
    cloud = start(kind())
    cloud.threaten()
    with watched(cloud, kind.name) as stop:
        polled(cloud, 10)
        assert not stop.asked
        cloud.preempt()
        until(lambda: stop.asked, "the notice was seen")


def test_a_rebalance_recommendation_is_reported_once(start, watched, capsys: pytest.CaptureFixture[str]) -> None:
    cloud = start(Ec2Cloud())
    cloud.threaten()
    with watched(cloud, "ec2") as stop:
        polled(cloud, 12)
    assert not stop.asked
    assert capsys.readouterr().err.count("rebalance recommendation") == 1


@pytest.mark.parametrize("action", ["stop", "hibernate"])
def test_a_notice_to_stop_a_spot_machine_stops_the_run_too(start, watched, action: str) -> None:
    cloud = start(Ec2Cloud())
    cloud.items["spot/instance-action"] = json.dumps({"action": action})  # no time: the notice still counts
    with watched(cloud, "ec2") as stop:
        until(lambda: stop.asked, "the notice was seen")
    assert stop.reason == f"EC2 spot: {action} at once"


def test_an_expired_token_is_renewed_and_none_is_requested_needlessly(start, watched) -> None:
    cloud = start(Ec2Cloud())
    with watched(cloud) as stop:
        polled(cloud, 10)
        assert len(cloud.tokens) == 1
        cloud.expired = True
        until(lambda: len(cloud.tokens) == 2, "a new token was asked for")
        polled(cloud, 10)
        assert len(cloud.tokens) == 2
        cloud.preempt()
        until(lambda: stop.asked, "the notice was seen")


def test_a_host_maintenance_of_a_gpu_machine_stops_the_run(start, watched) -> None:
    cloud = start(GceCloud())
    cloud.items["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    with watched(cloud, "gce") as stop:
        until(lambda: stop.asked, "the notice was seen")
    assert stop.reason and "host maintenance" in stop.reason


# --- which cloud


def test_clouds_are_probed_in_order_and_only_the_first_that_answers_is_polled(start, watched) -> None:
    class Two(AzureCloud):
        """Looks like GCE and like Azure."""

        items = {"preempted": "FALSE", "maintenance-event": "NONE"}

        def answer(self, request: Handler) -> None:
            if request.path.startswith("/computeMetadata"):
                GceCloud.answer(self, request)  # type: ignore[arg-type]
            else:
                super().answer(request)

    cloud = start(Two())
    with watched(cloud):
        polled(cloud, 8)
    assert cloud.requests[:2] == [("PUT", "/latest/api/token"), ("GET", "/computeMetadata/v1/instance/preempted")]
    assert {path.split("/")[1] for _, path in cloud.requests[1:]} == {"computeMetadata"}


@pytest.mark.parametrize("kind", CLOUDS)
def test_training_may_use_the_clouds_notice_time_to_save(start, watched, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = start(kind())
    with watched(cloud) as stop:
        until(lambda: stop.grace_seconds == kind.grace_seconds, "the cloud was found")
    with watched(cloud, kind.name) as stop:
        assert stop.grace_seconds == kind.grace_seconds  # at once: no probe is needed
    monkeypatch.setenv("SKYTRAIN_GRACE_SECONDS", "77")
    with watched(cloud, kind.name) as stop:
        polled(cloud, 4)
        assert stop.grace_seconds == 77


class GceWithApi(GceCloud):
    """A spot machine, and the API that describes it to who has the machine's token."""

    def __init__(self, scheduling: str) -> None:
        super().__init__()
        self.scheduling = scheduling
        self.items |= {"zone": "projects/7/zones/us-central1-a", "name": "node-1", "scheduling/preemptible": "TRUE"}
        self.items["service-accounts/default/token"] = '{"access_token": "ya29.secret", "token_type": "Bearer"}'

    def answer(self, request: Handler) -> None:
        path = "/compute/v1/projects/7/zones/us-central1-a/instances/node-1?fields=scheduling"
        if request.path == path and request.headers.get("Authorization") == "Bearer ya29.secret":
            return request.respond(200, f'{{"scheduling": {self.scheduling}}}')
        return super().answer(request)


@pytest.mark.parametrize(
    ("scheduling", "seconds"),
    [('{"preemptionNoticeDuration": {"seconds": "120"}}', 110), ('{"preemptible": true}', 25), ('"odd"', 25)],
)
def test_a_spot_machine_of_gce_uses_the_notice_that_it_was_made_with(
    start, watched, scheduling: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = start(GceWithApi(scheduling))
    monkeypatch.setattr(notice, "GCE_API", cloud.endpoint)
    with watched(cloud) as stop:
        polled(cloud, 8)
        assert stop.grace_seconds == seconds


def test_off_polls_no_service_and_keeps_torchruns_own_grace(start, watched) -> None:
    cloud = start(Ec2Cloud())
    cloud.preempt()
    with watched(cloud, "off") as stop:
        assert threads() == []
    assert (cloud.requests, stop.asked, stop.grace_seconds) == ([], False, 30)


def test_on_no_cloud_the_watcher_ends(watched, capsys: pytest.CaptureFixture[str]) -> None:
    with watched(None) as stop:  # refused
        until(lambda: not threads(), "the watcher gave up")
    assert (stop.asked, stop.grace_seconds) == (False, 30)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SKYTRAIN_NOTICE", "aws"),
        ("SKYTRAIN_NOTICE_ENDPOINT", "169.254.169.254"),
        ("SKYTRAIN_NOTICE_ENDPOINT", "https://127.0.0.1"),
        ("SKYTRAIN_NOTICE_ENDPOINT", "http://127.0.0.1:99999"),
        ("SKYTRAIN_NOTICE_ENDPOINT", "http://127.0.0.1/latest"),
        ("SKYTRAIN_GRACE_SECONDS", "0"),
        ("SKYTRAIN_GRACE_SECONDS", "2m"),
        ("SKYTRAIN_GRACE_SECONDS", "9" * 5000),
    ],
)
def test_an_invalid_setting_is_a_user_error(watched, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{name}: "), watched(None):
        pass
    assert threads() == []


# --- services that misbehave

DEEP = "[" * 60_000
GARBAGE = [
    Everything,
    lambda: Everything(200, "<html>Please log in</html>"),
    lambda: Everything(200, "<html>Please log in</html>", Metadata_Flavor="Google"),
    lambda: Everything(200, "null"),
    lambda: Everything(200, DEEP),
    lambda: Everything(200, '{"action": ["terminate"], "name": 7, "Events": 1}'),
    lambda: Everything(200, '{"action": "[bold]now", "name": "x", "Events": [7, {"EventType": [], "Resources": []}]}'),
    lambda: Everything(200, "TRUE"),
    lambda: Everything(500, "{}"),
    lambda: Everything(204),
]


@pytest.mark.parametrize("kind", CLOUDS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_senseless_answer_is_no_notice_and_the_watcher_continues(start, watched, kind, garbage) -> None:
    cloud = start(garbage())
    with watched(cloud, kind.name) as stop:
        polled(cloud, 6)
        assert not stop.asked
        assert threads() != []


@pytest.mark.parametrize("garbage", [*GARBAGE[:3], *GARBAGE[8:]])  # the others may be tokens
def test_a_service_with_an_unknown_protocol_is_no_cloud(start, watched, garbage) -> None:
    cloud = start(garbage())
    with watched(cloud) as stop:
        until(lambda: not threads(), "the watcher gave up")
    assert not stop.asked and len(cloud.requests) == 3


@pytest.mark.parametrize(
    "bytes_", [b"", b"\x00\xff" * 2000, b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, b"SSH-2.0\r\n"]
)
def test_a_response_that_is_not_http_does_no_harm(watched, bytes_: bytes, start) -> None:
    class NoHttp(Cloud):
        def answer(self, request: Handler) -> None:
            request.wfile.write(bytes_)
            request.close_connection = True

    cloud = start(NoHttp())
    with watched(cloud, "ec2") as stop:
        polled(cloud, 5)
        assert not stop.asked and threads() != []


def test_a_named_service_that_fails_is_reported_once_and_its_later_notice_still_counts(
    start, watched, capsys: pytest.CaptureFixture[str]
) -> None:
    class Down(Ec2Cloud):
        down = True

        def answer(self, request: Handler) -> None:
            return request.respond(503) if self.down else super().answer(request)

    cloud = start(Down())
    with watched(cloud, "ec2") as stop:
        polled(cloud, 5)
        cloud.down = False
        polled(cloud, 5)
        cloud.down = True
        polled(cloud, 5)
        cloud.down = False
        cloud.preempt()
        until(lambda: stop.asked, "the notice was seen")
        until(lambda: not threads(), "the watcher ended")
    message = capsys.readouterr().err
    assert message.count("gives no valid answer") == 1
    assert message.count(Ec2Cloud.why) == 1
    assert not any(token in message for token in cloud.tokens)


@pytest.mark.parametrize("named", ["ec2", "gce", "azure", None])
def test_a_service_that_hangs_delays_nothing(start, watched, named: str | None) -> None:
    released = threading.Event()

    class Hangs(Cloud):
        def answer(self, request: Handler) -> None:
            released.wait(LIMIT_S)

    cloud = start(Hangs())
    try:
        with watched(cloud, named) as stop:
            polled(cloud, 1)
        assert not released.is_set() and not stop.asked  # in and out of the block while it hangs
    finally:
        released.set()
    until(lambda: not threads(), "the watcher ended")


def test_a_hanging_answer_times_out_and_the_next_one_counts(start, watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "ANSWER_SECONDS", 0.2)
    released = threading.Event()

    class Slow(Ec2Cloud):
        hanging = False

        def answer(self, request: Handler) -> None:
            if self.hanging:
                released.wait(LIMIT_S)
            super().answer(request)

    cloud = start(Slow())
    with watched(cloud) as stop:
        polled(cloud, 3)
        cloud.hanging = True
        polled(cloud, 2)
        cloud.hanging = False
        cloud.preempt()
        until(lambda: stop.asked, "the notice was seen")
    released.set()


def test_a_token_goes_through_no_proxy_and_follows_no_redirect(start, watched, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = start(Everything(200, "{}"))

    class Redirects(Ec2Cloud):
        def answer(self, request: Handler) -> None:
            if request.path == "/latest/api/token":
                return super().answer(request)
            return request.respond(307, Location=f"{elsewhere.endpoint}{request.path}")

    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, elsewhere.endpoint)
    cloud = start(Redirects())
    with watched(cloud) as stop:
        polled(cloud, 6)
    assert cloud.tokens and elsewhere.requests == [] and not stop.asked


@given(
    st.one_of(st.none(), st.integers(), st.text(), st.from_regex(r"\w\w\w, \d+ \w\w\w \d+ [\d:]+ \S+", fullmatch=True))
)
def test_any_deadline_text_of_a_cloud_is_accepted(message: object) -> None:
    shown = utc_time(message)
    assert shown == "once" or shown.endswith(" UTC")


def test_times_are_shown_in_one_form() -> None:
    assert utc_time(END) == utc_time("Fri, 20 Nov 2026 10:02:00 GMT") == utc_time("2026-11-20T12:02:00+02:00")
    assert utc_time(END) == "2026-11-20 10:02:00 UTC"


# --- the whole command

SHORT = TINY | {
    "tokens": TINY["tokens"] | {"max_tokens": 16_384, "val_shards": 1},
    "train": TINY["train"] | {"val_every": None},
    "runtime": TINY["runtime"] | {"processes": 2, "checkpoint_minutes": 1000},  # it commits when asked to stop only
}
STEPS = SHORT["train"]["max_steps"]
QUICK_CLI = f"from pipelines.cloud import notice; notice.POLL_SECONDS = 0.05; {SHIPPED_CLI}"
COMMAND = ["run", "tiny.yaml", "--stage", "train"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / FOLDER_NAME, SHORT)


def train_heartbeats(project: Project) -> list[dict[str, Any]]:
    return sorted((b for b in project.heartbeats() if b["stage"] == "train"), key=lambda b: b["attempt"])


def assert_stopped_behind_a_commit(project: Project, why: str) -> None:
    (commit,) = project.found("train/*/checkpoints/*/COMMIT.json")
    assert json.loads(commit.read_text())["step"] == project.rows_logged() < STEPS
    (beat,) = train_heartbeats(project)
    assert (beat["state"], beat["progress"]["notice"]) == ("interrupted", why)
    assert not project.alive()


def assert_the_next_run_redoes_nothing(project: Project) -> None:
    project.environment["SKYTRAIN_NOTICE"] = "off"
    project.run(*COMMAND)
    assert project.rows_committed() == STEPS
    assert "notice" not in train_heartbeats(project)[1]["progress"]
    assert project.report()["attempts"] == 2


def test_a_run_that_gets_notice_commits_its_last_step_and_the_next_run_resumes_after_it(
    project: Project, start
) -> None:
    cloud = start(Ec2Cloud())
    project.environment |= {"SKYTRAIN_NOTICE": "ec2", "SKYTRAIN_NOTICE_ENDPOINT": cloud.endpoint}
    with project.started(*COMMAND, code=QUICK_CLI) as process:
        project.wait_until(lambda: project.rows_logged() >= 3, process)
        (torchrun,) = psutil.Process(process.pid).children()
        environment = torchrun.environ()
        assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "110"
        assert environment["GOMP_SPINCOUNT"] == "1000"  # its threads sleep while they wait
        cloud.preempt()
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 75, err
    assert Ec2Cloud.why in err and "Traceback" not in err
    assert_stopped_behind_a_commit(project, Ec2Cloud.why)
    assert_the_next_run_redoes_nothing(project)


@pytest.mark.slow
def test_sigusr1_to_every_process_of_a_run_acts_like_a_notice(project: Project) -> None:
    with project.started(*COMMAND) as process:
        project.wait_until(lambda: project.rows_logged() >= 3, process)
        for one in project.alive():
            one.send_signal(signal.SIGUSR1)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 75, err
    assert_stopped_behind_a_commit(project, "SIGUSR1")
    assert_the_next_run_redoes_nothing(project)


@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, version("torch").split(".")[:2])) < (2, 12), reason="needs torch 2.12's torchrun")
def test_a_run_that_cannot_save_in_time_is_ended_after_its_grace_and_loses_only_its_steps(project: Project) -> None:
    project.environment["SKYTRAIN_GRACE_SECONDS"] = "2"
    with project.started(*COMMAND) as process:
        project.wait_until(lambda: project.rows_logged() >= 3, process)
        (torchrun,) = psutil.Process(process.pid).children()
        ranks = torchrun.children()
        assert len(ranks) == 2
        ranks[1].suspend()  # SIGTERM does not reach it any more, and its peer waits for it
        process.terminate()
        err = process.communicate(timeout=25)[1]  # torchrun's own grace is 30
    assert process.returncode == 75, err
    assert not project.alive() and not project.found("train/*/checkpoints/*/COMMIT.json")
    assert_the_next_run_redoes_nothing(project)
