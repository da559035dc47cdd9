"""The notice before the end: a cloud that takes a machine back says so first, to whoever asks.

A daemon thread asks the machine's metadata service every two seconds. On a notice it does what SIGTERM
does, so the run finishes its step, saves, commits and leaves with exit code 75. Which cloud this is it
finds out by itself, in under a second and in the thread; where nobody answers, the thread ends. Whatever
the service does, the worst that happens is that no notice is seen.

SKYTRAIN_NOTICE: ec2, gce, azure, or off. Without it the thread finds out.
SKYTRAIN_NOTICE_ENDPOINT: another http://host:port to ask.
SKYTRAIN_GRACE_SECONDS: how long the training processes may take to save once asked to stop.
"""

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipelines.screen import Screen
from pipelines.tracking.records import Machine
from trainer.errors import UserError
from trainer.process import StopSignal

ENDPOINT = "http://169.254.169.254"  # link-local, the same at EC2, GCE and Azure
POLL_SECONDS = 2.0  # of at least 30 s of notice
FIND_SECONDS = 0.3  # for each of three clouds: under a second in all; a metadata service answers in milliseconds
ANSWER_SECONDS = 5.0
MOST_BYTES = 65_536  # of an answer: real ones have a few hundred
FAULTS = (OSError, http.client.HTTPException, ValueError, RecursionError)  # the last: of JSON nested without end


@dataclass(frozen=True)
class Notice:
    """What a cloud announces, in our words and with nothing of the answer in it that was not checked."""

    why: str
    final: bool = True  # False: only a warning of what may come


@dataclass(frozen=True)
class Answer:
    status: int
    body: str
    headers: http.client.HTTPMessage


class Metadata:
    """A metadata service. Asked directly: neither a proxy nor a redirect may ever see a token."""

    def __init__(self, endpoint: str) -> None:
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host = None
        if not host or parts.scheme != "http" or parts.path.strip("/"):
            raise UserError(f"SKYTRAIN_NOTICE_ENDPOINT: {endpoint!r} is not of the form http://host:port")
        self._host, self._port = host, port

    def ask(self, path: str, headers: dict[str, str], timeout_s: float, method: str = "GET") -> Answer:
        """One request. OSError or HTTPException if there is no answer, `timeout_s` is for each read."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(MOST_BYTES).decode(errors="replace"), response.headers)
        finally:
            connection.close()


class Source(Protocol):
    """A cloud's way to announce the end."""

    name: str
    grace_seconds: int  # what a notice leaves to save, some seconds kept for what comes after

    def greet(self) -> None:
        """Raise one of FAULTS unless this machine is one of that cloud's."""

    def notices(self) -> Iterator[Notice]:
        """What is announced now, the most urgent first. Raises one of FAULTS for no answer or a senseless one."""

    def machine(self) -> Machine:
        """What this machine is. Raises as `notices`."""


class Ec2:
    """EC2 spot: IMDSv2, a token first. Two minutes of notice; no notice is a 404."""

    name, grace_seconds = "EC2 spot", 110
    ACTIONS = ("terminate", "stop", "hibernate")
    TOKEN_SECONDS = 21_600  # the longest there is; one that has expired is answered with 401

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    def greet(self) -> None:
        self._renew_token(FIND_SECONDS)

    def notices(self) -> Iterator[Notice]:
        if body := self._read("spot/instance-action"):
            told = an_object(body)
            if told.get("action") not in self.ACTIONS:
                raise ValueError("no action that EC2 has")
            yield Notice(f"{self.name}: {told['action']} at {utc_time(told.get('time'))}")
        if self._read("events/recommendations/rebalance"):
            # Says that an interruption is likelier than usual; many machines live on for hours.
            yield Notice(f"{self.name}: an interruption is likelier than usual (rebalance recommendation)", final=False)

    def machine(self) -> Machine:
        place = "placement/region", "placement/availability-zone"
        items = [self._read(item) for item in (*place, "instance-type", "instance-life-cycle")]
        region, zone, instance, life_cycle = (item or "" for item in items)
        if not (region and instance and life_cycle):
            raise ValueError("no machine of EC2's")
        return located(region, zone, instance, spot=life_cycle == "spot")

    def _read(self, item: str) -> str | None:
        """An item's value, None if there is no such item (404)."""
        if not self._token:
            self._renew_token(ANSWER_SECONDS)
        answer = self._get(item)
        if answer.status == 401:
            self._renew_token(ANSWER_SECONDS)
            answer = self._get(item)
        return None if answer.status == 404 else ok(answer).body

    def _get(self, item: str) -> Answer:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return self._metadata.ask(f"/latest/meta-data/{item}", headers, ANSWER_SECONDS)

    def _renew_token(self, timeout_s: float) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
        token = ok(self._metadata.ask("/latest/api/token", headers, timeout_s, method="PUT")).body
        if not (token.isascii() and token.isprintable() and 0 < len(token) < 1000) or set("<> ") & set(token):
            raise ValueError("no token")  # but some gateway's page
        self._token = token


class Gce:
    """GCE: two items that always have a value. 30 s of notice for spot, an hour for a GPU's host maintenance."""

    name, grace_seconds = "GCE", 25
    HEADERS = {"Metadata-Flavor": "Google"}  # has to be in the request, and is in every true answer

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def greet(self) -> None:
        if self._read("preempted", FIND_SECONDS) not in ("TRUE", "FALSE"):
            raise ValueError("neither preempted nor not")

    def notices(self) -> Iterator[Notice]:
        if self._read("preempted") == "TRUE":
            yield Notice(f"{self.name}: preempted")
        # Asking is what turns its notice on. A live migration (MIGRATE_…) is survived.
        if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            yield Notice(f"{self.name}: the host is about to be maintained, this machine to be stopped")

    def machine(self) -> Machine:
        # projects/<number>/zones/us-central1-a and projects/<number>/machineTypes/a3-highgpu-8g
        zone, instance = (self._read(item).rpartition("/")[2] for item in ("zone", "machine-type"))
        region = zone.rpartition("-")[0]
        if not (region and instance):
            raise ValueError("no machine of GCE's")
        return Machine(
            region=region or None,
            zone=zone or None,
            instance=instance or None,
            spot=self._read("scheduling/preemptible") == "TRUE",
        )

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
    ENDS = {"Preempt": "preempted", "Terminate": "deleted"}  # Freeze, Reboot and Redeploy leave us the machine
    # The first question turns scheduled events on, which takes up to two minutes; from then on it is quick.
    FIRST_ANSWER_SECONDS = 125.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._machine = ""
        self._patience_s = self.FIRST_ANSWER_SECONDS

    def greet(self) -> None:
        self._learn_name(FIND_SECONDS)

    def notices(self) -> Iterator[Notice]:
        if not self._machine:
            self._learn_name(ANSWER_SECONDS)
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
            raise ValueError("no machine of Azure's")
        return Machine(
            region=region or None, zone=zone or None, instance=instance or None, spot=compute.get("priority") == "Spot"
        )

    def _ends_this_machine(self, event: dict[str, Any]) -> bool:
        machines = event.get("Resources")
        if not isinstance(machines, list) or event.get("EventType") not in list(self.ENDS):
            return False
        return self._machine.lower() in [str(machine).lower() for machine in machines]

    def _learn_name(self, timeout_s: float) -> None:
        name = self._read(COMPUTE, timeout_s).get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("no machine of Azure's")
        self._machine = name

    def _read(self, what: str, timeout_s: float) -> dict[str, Any]:
        return an_object(ok(self._metadata.ask(f"/metadata/{what}", self.HEADERS, timeout_s)).body)


SOURCES: dict[str, Callable[[Metadata], Source]] = {"ec2": Ec2, "gce": Gce, "azure": Azure}


def located(region: str, zone: str, instance: str, spot: bool) -> Machine:
    """A machine by the answers of its metadata service; an empty one says nothing."""
    return Machine(region=region or None, zone=zone or None, instance=instance or None, spot=spot)


def ok(answer: Answer) -> Answer:
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    return answer


def an_object(body: str) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def utc_time(said: object) -> str:
    """A cloud's time (ISO 8601, or as in mail) in one form; 'once' if it is none, for the notice still counts."""
    if not isinstance(said, str):
        return "once"
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(said).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError):
            continue
    return "once"


@contextmanager
def watching(stop: StopSignal, screen: Screen) -> Iterator[None]:
    """Ask `stop` to stop if, while the block runs, the end of this machine is announced.

    Also sets `stop.grace_seconds` to what this cloud's notice leaves, or to SKYTRAIN_GRACE_SECONDS. Raises
    UserError for an environment variable that can't be meant.
    """
    named = os.environ.get("SKYTRAIN_NOTICE") or None
    if named not in (None, "off", *SOURCES):
        raise UserError(f"SKYTRAIN_NOTICE: {named!r} is unknown; it is one of {', '.join(SOURCES)}, off")
    metadata = Metadata(os.environ.get("SKYTRAIN_NOTICE_ENDPOINT") or ENDPOINT)
    wished_grace = grace_from_environment()
    if wished_grace:
        stop.grace_seconds = wished_grace

    def settle_on(source: Source) -> Source:
        stop.grace_seconds = wished_grace or source.grace_seconds
        return source

    source = settle_on(SOURCES[named](metadata)) if named in SOURCES else None
    ending = threading.Event()

    def watch() -> None:
        if here := source or find(metadata):
            poll(settle_on(here), stop, screen, ending, expected=source is not None)

    if named != "off":
        threading.Thread(target=watch, daemon=True, name="notice").start()
    try:
        yield
    finally:
        ending.set()  # and no join: a service that hangs is not waited for


def grace_from_environment() -> int | None:
    said = os.environ.get("SKYTRAIN_GRACE_SECONDS") or None
    if said is None:
        return None
    if not (said.isdecimal() and len(said) <= 5 and int(said) > 0):
        raise UserError(f"SKYTRAIN_GRACE_SECONDS: {said!r} is not a whole number of seconds, from 1 to 99999")
    return int(said)


def find(metadata: Metadata) -> Source | None:
    """The cloud whose metadata service answers."""
    for kind in SOURCES.values():
        source = kind(metadata)
        try:
            source.greet()
        except FAULTS:
            continue
        return source
    return None


def poll(source: Source, stop: StopSignal, screen: Screen, ending: threading.Event, expected: bool) -> None:
    """Look for a notice until there is one, or until `ending`. Who named the source (`expected`) learns if it fails."""
    told: set[Notice] = set()
    unheard = expected
    while not (ending.is_set() or stop.asked):
        try:
            for notice in source.notices():
                if notice.final:
                    stop.ask(notice.why)
                    screen.warn(f"{notice.why}; saving, then leaving")
                    return
                if notice not in told:
                    told.add(notice)
                    screen.note(f"  {notice.why}")
            unheard = False
        except FAULTS:
            if unheard and not ending.is_set():
                screen.warn(f"{source.name}: the metadata service doesn't answer as it should; asking on for notices")
            unheard = False
        ending.wait(POLL_SECONDS)
