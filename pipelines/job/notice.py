"""Preemption notices: a cloud that takes a machine back announces it in the machine's metadata service.

A daemon thread polls the service every two seconds. On a notice it does the same as SIGTERM: the run finishes its step,
saves, commits and exits with code 75. The thread detects the cloud by itself, in under a second, and ends if no service
answers. A faulty service can only hide a notice; it does no other harm.

SKYTRAIN_NOTICE: ec2, gce, or off. Without it the thread detects the cloud.
SKYTRAIN_NOTICE_ENDPOINT: another http://host:port to poll.
SKYTRAIN_GRACE_SECONDS: the time that the training processes have to save, once asked to stop.
"""

import http.client
import json
import os
import re
import socket
import threading
from contextlib import suppress
from functools import partial

from pipelines.run.screen import Screen
from pipelines.run.watch import Watch
from pipelines.store.records import Machine
from trainer.base.answers import answered_within
from trainer.base.process import Background, StopSignal
from trainer.config.config import seconds_from_environment
from trainer.config.errors import UserError

ENDPOINT = "http://169.254.169.254"  # link-local, the same at EC2 and GCE
POLL_SECONDS = 2.0  # of at least 30 s of notice
DETECT_SECONDS = 0.3  # for each cloud: under a second in all; a metadata service answers in milliseconds
ANSWER_SECONDS = 5.0
MOST_BYTES = 65_536  # of an answer: real ones have a few hundred


class Metadata:
    """A metadata service. Requests go to it directly, so neither a proxy nor a redirect ever sees a token."""

    def __init__(self, endpoint: str | None = None) -> None:
        """`endpoint`: by default the environment's, or every cloud's."""
        endpoint = endpoint or os.environ.get("SKYTRAIN_NOTICE_ENDPOINT") or ENDPOINT
        form = re.fullmatch(r"http://((?:[\w.-]+|\[[\da-fA-F:.]+\])(?::\d{1,5})?)/?", endpoint)
        if not form:
            raise UserError(f"SKYTRAIN_NOTICE_ENDPOINT: {endpoint!r} is not of the form http://host:port")
        self._address = form[1]

    def ask(
        self, path: str, headers: dict[str, str], timeout_s: float, method: str = "GET"
    ) -> tuple[str | None, http.client.HTTPMessage]:
        """At most MOST_BYTES of an item (None: there is none) and the answer's headers; `timeout_s` limits the time to
        connect, and then the whole answer. OSError or HTTPException without an answer, ValueError for an error."""
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)

        def exchange() -> tuple[str | None, http.client.HTTPMessage]:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            if response.status not in (200, 404):
                raise ValueError(f"status {response.status}")
            body = response.read(MOST_BYTES).decode(errors="replace")
            return body if response.status == 200 else None, response.headers

        connection.connect()
        with connection.sock as to_service:
            try:
                return answered_within(timeout_s, exchange)
            finally:
                with suppress(OSError):
                    to_service.shutdown(socket.SHUT_RDWR)  # also ends the thread of an exchange that takes too long


class Ec2:
    """EC2 spot: IMDSv2, a token first. Two minutes of notice; no notice is a 404."""

    cloud, name, grace_seconds = "aws", "EC2 spot", 110
    ACTIONS = ("terminate", "stop", "hibernate")
    TOKEN_SECONDS = 60  # each item is read with a token of its own

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def probe(self) -> None:
        """Raise any exception unless this machine belongs to this cloud."""
        self._token(DETECT_SECONDS)

    def notice(self) -> str | None:
        """The cloud's announcement in our own text; None without one. Raises any exception without a valid answer."""
        body = self._read("spot/instance-action")
        if not body:
            return None
        event = json.loads(body)
        if event["action"] not in self.ACTIONS:
            raise ValueError("not an action of EC2")
        return f"{self.name}: {event['action']} at {str(event.get('time'))[:40]}"

    def machine(self) -> Machine:
        """This machine. Its zone is the id, for letters differ by account. Raises as `notice`."""
        names = ("placement/region", "placement/availability-zone-id", "instance-type", "instance-life-cycle")
        region, zone, instance, life_cycle = (self._read(name) or "" for name in names)
        if not (region and instance and life_cycle):
            raise ValueError("not a machine of EC2")
        return Machine(region=region, zone=zone or None, instance=instance, spot=life_cycle == "spot")

    def _read(self, item: str) -> str | None:
        """An item's value, None if there is no such item (404)."""
        headers = {"X-aws-ec2-metadata-token": self._token(ANSWER_SECONDS)}
        return self._metadata.ask(f"/latest/meta-data/{item}", headers, ANSWER_SECONDS)[0]

    def _token(self, timeout_s: float) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
        token = self._metadata.ask("/latest/api/token", headers, timeout_s, method="PUT")[0] or ""
        if not (token.isascii() and token.isprintable() and 0 < len(token) < 1000) or set("<> ") & set(token):
            raise ValueError("not a token")  # but a gateway's page
        return token


class Gce:
    """GCE: two items that always have a value. 30 s of notice for spot, an hour for a GPU's host maintenance."""

    cloud, name, grace_seconds = "gcp", "GCE", 25
    HEADERS = {"Metadata-Flavor": "Google"}  # required in a request, and present in every real answer

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def probe(self) -> None:
        if self._read("preempted", DETECT_SECONDS) not in ("TRUE", "FALSE"):
            raise ValueError("preempted is neither TRUE nor FALSE")

    def notice(self) -> str | None:
        if self._read("preempted") == "TRUE":
            return f"{self.name}: preempted"
        # A request enables this notice. The machine survives a live migration (MIGRATE_…).
        if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return f"{self.name}: host maintenance will stop this machine"
        return None

    def machine(self) -> Machine:
        # projects/<number>/zones/us-central1-a and projects/<number>/machineTypes/a3-highgpu-8g
        zone, instance = (self._read(item).rpartition("/")[2] for item in ("zone", "machine-type"))
        region = zone.rpartition("-")[0]
        if not (region and instance):
            raise ValueError("not a machine of GCE")
        spot = self._read("scheduling/preemptible") == "TRUE"
        return Machine(region=region, zone=zone, instance=instance, spot=spot)

    def _read(self, item: str, timeout_s: float = ANSWER_SECONDS) -> str:
        body, headers = self._metadata.ask(f"/computeMetadata/v1/instance/{item}", self.HEADERS, timeout_s)
        if body is None or headers.get("Metadata-Flavor") != "Google":
            raise ValueError("not Google's metadata service")
        return body.strip()


NoticeSource = Ec2 | Gce  # a cloud's way to announce the end of a machine; seconds of notice, less some for the exit
SOURCES: dict[str, type[NoticeSource]] = {"ec2": Ec2, "gce": Gce}


class Notices(Watch):
    """Asks the run to stop when the cloud announces the end of this machine. Sets `stop.grace_seconds` to the time
    after this cloud's notice, or to SKYTRAIN_GRACE_SECONDS."""

    def __init__(self, stop: StopSignal, screen: Screen) -> None:
        self.stop, self.screen = stop, screen
        self._ending = threading.Event()

    def start(self) -> None:
        """Start the thread. UserError for an environment variable with an invalid value."""
        named = os.environ.get("SKYTRAIN_NOTICE") or None
        if named not in (None, "off", *SOURCES):
            raise UserError(f"SKYTRAIN_NOTICE: {named!r} is unknown; choose one of {', '.join(SOURCES)}, off")
        metadata = Metadata()
        source = SOURCES[named](metadata) if named in SOURCES else None
        self._set_grace(source, least=1)
        if named != "off":
            Background("notice", partial(self._watch, source, metadata), self._report_crash).start()

    def end(self, error: BaseException | None) -> None:
        self._ending.set()  # without a join: a service that hangs delays nothing

    def _set_grace(self, source: NoticeSource | None, least: float = 0) -> None:
        default = (source or self.stop).grace_seconds
        self.stop.grace_seconds = seconds_from_environment("SKYTRAIN_GRACE_SECONDS", default, least=least)

    def _watch(self, source: NoticeSource | None, metadata: Metadata) -> None:
        if not (found := source or detect_source(metadata)):
            return
        self._set_grace(found)
        while not (self._ending.is_set() or self.stop.asked):
            with suppress(Exception):  # a service may answer anything, and the next answer may be a notice
                if why := found.notice():
                    self.stop.ask(why)
                    self.screen.warn(f"{why}; the run saves, then exits")
                    return
            self._ending.wait(POLL_SECONDS)

    def _report_crash(self, thread: Background) -> None:
        self.screen.warn(f"this process stopped watching for preemption notices: {thread.error!r}")


def detect_source(metadata: Metadata) -> NoticeSource | None:
    """The cloud whose metadata service answers."""
    for kind in SOURCES.values():
        with suppress(Exception):  # a service may answer anything
            (source := kind(metadata)).probe()
            return source
    return None
