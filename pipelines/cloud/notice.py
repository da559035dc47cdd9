"""Preemption notices: a cloud that takes a machine back announces it in the machine's metadata service.

A daemon thread polls the service every two seconds. On a notice it does the same as SIGTERM: the run finishes its step,
saves, commits and exits with code 75. The thread detects the cloud by itself, in under a second, and ends if no service
answers. A faulty service can only hide a notice; it does no other harm.

SKYTRAIN_NOTICE: ec2, gce, azure, or off. Without it the thread detects the cloud.
SKYTRAIN_NOTICE_ENDPOINT: another http://host:port to poll.
SKYTRAIN_GRACE_SECONDS: the time that the training processes have to save, once asked to stop.
"""

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipelines.screen import Screen
from pipelines.tracking.records import Machine
from trainer.errors import UserError
from trainer.process import Background, StopSignal

ENDPOINT = "http://169.254.169.254"  # link-local, the same at EC2, GCE and Azure
POLL_SECONDS = 2.0  # of at least 30 s of notice
DETECT_SECONDS = 0.3  # for each of three clouds: under a second in all; a metadata service answers in milliseconds
ANSWER_SECONDS = 5.0
GCE_API = "https://compute.googleapis.com"
MOST_GCE_SECONDS, EXIT_SECONDS = 120, 10  # of GCE's notice; of it, for the exit after the save
MOST_BYTES = 65_536  # of an answer: real ones have a few hundred


@dataclass(frozen=True)
class Notice:
    """A cloud's announcement, in our own text and with checked parts of its answer only."""

    why: str
    final: bool = True  # False: a warning that a notice may come


@dataclass(frozen=True)
class MetadataAnswer:
    """An answer of a metadata service, with at most MOST_BYTES of its body."""

    status: int
    body: str
    headers: http.client.HTTPMessage


class Metadata:
    """A metadata service. Requests go to it directly, so neither a proxy nor a redirect ever sees a token."""

    def __init__(self, endpoint: str) -> None:
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host = None
        if not host or parts.scheme != "http" or parts.path.strip("/"):
            raise UserError(f"SKYTRAIN_NOTICE_ENDPOINT: {endpoint!r} is not of the form http://host:port")
        self._host, self._port = host, port

    def ask(self, path: str, headers: dict[str, str], timeout_s: float, method: str = "GET") -> MetadataAnswer:
        """One request; `timeout_s` limits each read. OSError or HTTPException without an answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return MetadataAnswer(response.status, response.read(MOST_BYTES).decode(errors="replace"), response.headers)
        finally:
            connection.close()


class NoticeSource(Protocol):
    """A cloud's way to announce the end of a machine."""

    name: str
    grace_seconds: int  # the time to save after a notice, less some seconds for the exit

    def probe(self) -> None:
        """Raise any exception unless this machine belongs to that cloud."""

    def notices(self) -> Iterator[Notice]:
        """The present announcements, the most urgent first. Raises any exception without a valid answer."""

    def machine(self) -> Machine:
        """This machine. Raises as `notices`."""


class Ec2:
    """EC2 spot: IMDSv2, a token first. Two minutes of notice; no notice is a 404."""

    name, grace_seconds = "EC2 spot", 110
    ACTIONS = ("terminate", "stop", "hibernate")
    TOKEN_SECONDS = 21_600  # the maximum; the answer to an expired one is 401

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    def probe(self) -> None:
        self._renew_token(DETECT_SECONDS)

    def notices(self) -> Iterator[Notice]:
        if body := self._read("spot/instance-action"):
            event = json_object(body)
            if event.get("action") not in self.ACTIONS:
                raise ValueError("not an action of EC2")
            yield Notice(f"{self.name}: {event['action']} at {utc_time(event.get('time'))}")
        if self._read("events/recommendations/rebalance"):
            # Only a higher risk of an interruption; many machines run on for hours.
            yield Notice(f"{self.name}: higher risk of an interruption (rebalance recommendation)", final=False)

    def machine(self) -> Machine:
        names = ("placement/region", "placement/availability-zone", "instance-type", "instance-life-cycle")
        items = [self._read(name) for name in names]
        region, zone, instance, life_cycle = (item or "" for item in items)
        if not (region and instance and life_cycle):
            raise ValueError("not a machine of EC2")
        return described(region, zone, instance, spot=life_cycle == "spot")

    def _read(self, item: str) -> str | None:
        """An item's value, None if there is no such item (404)."""
        if not self._token:
            self._renew_token(ANSWER_SECONDS)
        answer = self._get(item)
        if answer.status == 401:
            self._renew_token(ANSWER_SECONDS)
            answer = self._get(item)
        return None if answer.status == 404 else ok(answer).body

    def _get(self, item: str) -> MetadataAnswer:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return self._metadata.ask(f"/latest/meta-data/{item}", headers, ANSWER_SECONDS)

    def _renew_token(self, timeout_s: float) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
        token = ok(self._metadata.ask("/latest/api/token", headers, timeout_s, method="PUT")).body
        if not (token.isascii() and token.isprintable() and 0 < len(token) < 1000) or set("<> ") & set(token):
            raise ValueError("not a token")  # but a gateway's page
        self._token = token


class Gce:
    """GCE: two items that always have a value. 30 s of notice for spot, an hour for a GPU's host maintenance.

    A spot machine with `preemptionNoticeDuration` gets up to 120 s before those 30. The metadata service does not tell
    that, but the Compute Engine API does, to an account of the machine that may read the machine.
    """

    name, grace_seconds = "GCE", 25
    HEADERS = {"Metadata-Flavor": "Google"}  # required in a request, and present in every real answer

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def probe(self) -> None:
        if self._read("preempted", DETECT_SECONDS) not in ("TRUE", "FALSE"):
            raise ValueError("preempted is neither TRUE nor FALSE")

    def notices(self) -> Iterator[Notice]:
        if self._read("preempted") == "TRUE":
            yield Notice(f"{self.name}: preempted")
        # A request enables this notice. The machine survives a live migration (MIGRATE_…).
        if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            yield Notice(f"{self.name}: host maintenance will stop this machine")

    def machine(self) -> Machine:
        # projects/<number>/zones/us-central1-a and projects/<number>/machineTypes/a3-highgpu-8g
        zone, instance = (self._read(item).rpartition("/")[2] for item in ("zone", "machine-type"))
        region = zone.rpartition("-")[0]
        if not (region and instance):
            raise ValueError("not a machine of GCE")
        return described(region, zone, instance, spot=self._read("scheduling/preemptible") == "TRUE")

    def given_seconds(self) -> int:
        """The time to save after a notice, as this machine was made. Raises any exception without a valid answer."""
        if self._read("scheduling/preemptible") != "TRUE":
            return self.grace_seconds
        token = json_object(self._read("service-accounts/default/token"))["access_token"]
        path = f"/compute/v1/{self._read('zone')}/instances/{self._read('name')}?fields=scheduling"
        api = urlsplit(GCE_API)
        kind = http.client.HTTPSConnection if api.scheme == "https" else http.client.HTTPConnection
        connection = kind(api.hostname or "", api.port, timeout=ANSWER_SECONDS)  # no proxy: it has a token
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            scheduling = json_object(connection.getresponse().read(MOST_BYTES).decode())["scheduling"]
        finally:
            connection.close()
        given = int(scheduling.get("preemptionNoticeDuration", {}).get("seconds", 0))
        return max(self.grace_seconds, min(MOST_GCE_SECONDS, given) - EXIT_SECONDS)

    def _read(self, item: str, timeout_s: float = ANSWER_SECONDS) -> str:
        answer = ok(self._metadata.ask(f"/computeMetadata/v1/instance/{item}", self.HEADERS, timeout_s))
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise ValueError("not Google's metadata service")
        return answer.body.strip()


COMPUTE = "instance/compute?api-version=2021-02-01"


class Azure:
    """Azure: scheduled events, of this machine and of its neighbours. 30 s of notice for spot."""

    name, grace_seconds = "Azure", 25
    HEADERS = {"Metadata": "true"}
    # After Freeze, Reboot and Redeploy the machine is still ours.
    ENDS = {"Preempt": "preempted", "Terminate": "deleted"}
    # The first request enables scheduled events, which takes up to two minutes; later ones are fast.
    FIRST_ANSWER_SECONDS = 125.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._machine = ""
        self._patience_s = self.FIRST_ANSWER_SECONDS

    def probe(self) -> None:
        self._read_name(DETECT_SECONDS)

    def notices(self) -> Iterator[Notice]:
        if not self._machine:
            self._read_name(ANSWER_SECONDS)
        answer = self._read("scheduledevents?api-version=2020-07-01", self._patience_s)
        self._patience_s = ANSWER_SECONDS
        events = answer.get("Events")
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and self._ends_this_machine(event):
                yield Notice(f"{self.name}: {self.ENDS[event['EventType']]} at {utc_time(event.get('NotBefore'))}")

    def machine(self) -> Machine:
        compute = self._read(COMPUTE, ANSWER_SECONDS)
        region, zone, instance = (str(compute.get(name) or "") for name in ("location", "zone", "vmSize"))
        if not (region and instance):
            raise ValueError("not a machine of Azure")
        return described(region, zone, instance, spot=compute.get("priority") == "Spot")

    def _ends_this_machine(self, event: dict[str, Any]) -> bool:
        machines = event.get("Resources")
        if not isinstance(machines, list) or event.get("EventType") not in list(self.ENDS):
            return False
        return self._machine.lower() in [str(machine).lower() for machine in machines]

    def _read_name(self, timeout_s: float) -> None:
        name = self._read(COMPUTE, timeout_s).get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("not a machine of Azure")
        self._machine = name

    def _read(self, path: str, timeout_s: float) -> dict[str, Any]:
        return json_object(ok(self._metadata.ask(f"/metadata/{path}", self.HEADERS, timeout_s)).body)


SOURCES: dict[str, Callable[[Metadata], NoticeSource]] = {"ec2": Ec2, "gce": Gce, "azure": Azure}


def described(region: str, zone: str, instance: str, spot: bool) -> Machine:
    """A machine by the answers of its metadata service; an empty answer is unknown."""
    return Machine(region=region or None, zone=zone or None, instance=instance or None, spot=spot)


def ok(answer: MetadataAnswer) -> MetadataAnswer:
    """The answer itself. ValueError for a status other than 200."""
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    return answer


def json_object(body: str) -> dict[str, Any]:
    """The JSON object in a body. ValueError for anything else."""
    values = json.loads(body)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def utc_time(text: object) -> str:
    """A cloud's time (ISO 8601, or as in mail) in one form; 'once' if it is not a time: the notice still counts."""
    if not isinstance(text, str):
        return "once"
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError):
            continue
    return "once"


@contextmanager
def watching(stop: StopSignal, screen: Screen) -> Iterator[None]:
    """Ask the run to stop if the cloud announces the end of this machine while the block runs.

    Also sets `stop.grace_seconds` to the time after this cloud's notice, or to SKYTRAIN_GRACE_SECONDS. UserError for an
    environment variable with an invalid value.
    """
    named = os.environ.get("SKYTRAIN_NOTICE") or None
    if named not in (None, "off", *SOURCES):
        raise UserError(f"SKYTRAIN_NOTICE: {named!r} is unknown; it is one of {', '.join(SOURCES)}, off")
    metadata = Metadata(os.environ.get("SKYTRAIN_NOTICE_ENDPOINT") or ENDPOINT)
    chosen_grace = grace_from_environment()
    if chosen_grace:
        stop.grace_seconds = chosen_grace

    def choose(source: NoticeSource) -> NoticeSource:
        stop.grace_seconds = chosen_grace or source.grace_seconds
        return source

    source = choose(SOURCES[named](metadata)) if named in SOURCES else None
    ending = threading.Event()

    def watch() -> None:
        if here := source or detect_source(metadata):
            if isinstance(here, Gce) and not chosen_grace:
                with suppress(Exception):  # an account without rights: what every spot machine gets
                    here.grace_seconds = here.given_seconds()
            poll(choose(here), stop, screen, ending, expected=source is not None)

    def died(thread: Background) -> None:
        screen.warn(f"this machine's preemption notices are not heard any more: {thread.error!r}")

    if named != "off":
        Background("notice", watch, died).start()
    try:
        yield
    finally:
        ending.set()  # without a join: a service that hangs delays nothing


def grace_from_environment() -> int | None:
    """SKYTRAIN_GRACE_SECONDS; None if it is not set. UserError for an invalid value."""
    text = os.environ.get("SKYTRAIN_GRACE_SECONDS") or None
    if text is None:
        return None
    if not (text.isdecimal() and len(text) <= 5 and int(text) > 0):
        raise UserError(f"SKYTRAIN_GRACE_SECONDS: {text!r} is not a whole number of seconds, from 1 to 99999")
    return int(text)


def detect_source(metadata: Metadata) -> NoticeSource | None:
    """The cloud whose metadata service answers."""
    for kind in SOURCES.values():
        source = kind(metadata)
        try:
            source.probe()
        except Exception:  # a service may answer anything
            continue
        return source
    return None


def poll(source: NoticeSource, stop: StopSignal, screen: Screen, ending: threading.Event, expected: bool) -> None:
    """Poll until there is a notice, or until `ending`. If the user named the source (`expected`), warn if it fails."""
    reported: set[Notice] = set()
    warn = expected
    while not (ending.is_set() or stop.asked):
        try:
            for notice in source.notices():
                if notice.final:
                    stop.ask(notice.why)
                    screen.warn(f"{notice.why}; the run saves, then exits")
                    return
                if notice not in reported:
                    reported.add(notice)
                    screen.note(f"  {notice.why}")
            warn = False
        except Exception as error:  # a service may answer anything, and the next answer may be a notice
            if warn and not ending.is_set():
                reason = f"{source.name}: the metadata service gives no valid answer ({type(error).__name__})"
                screen.warn(f"{reason}; polling continues")
            warn = False
        ending.wait(POLL_SECONDS)
