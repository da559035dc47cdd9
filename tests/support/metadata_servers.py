"""Servers with the metadata protocol of each cloud."""

import json
import secrets

from answers import Request, answering

END = "2026-11-20T10:02:00Z"


class Cloud:
    """A metadata service on loopback."""

    name = "none"
    grace_seconds = 30

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.server = answering(self.receive)
        self.endpoint = self.server.__enter__()

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def receive(self, request: Request) -> None:
        self.requests.append((request.command, request.path))
        self.answer(request)

    def answer(self, request: Request) -> None:
        request.respond(404)

    def threaten(self) -> None:
        """Announce an event that must not stop a run."""

    def preempt(self) -> None:
        """Announce the preemption."""


class Ec2Cloud(Cloud):
    """IMDSv2: 401 without a valid token, 404 for an item that is not announced."""

    name, grace_seconds = "ec2", 110
    why = f"EC2 spot: terminate at {END}"

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[str] = []
        self.items: dict[str, str] = {}

    def answer(self, request: Request) -> None:
        if request.path == "/latest/api/token":
            seconds = int(request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0))
            if request.command != "PUT" or not 1 <= seconds <= 21600:
                return request.respond(400)
            self.tokens.append(secrets.token_urlsafe(40) + "==")
            return request.respond(200, self.tokens[-1])
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return request.respond(401)
        item = self.items.get(request.path.removeprefix("/latest/meta-data/"))
        return request.respond(404) if item is None else request.respond(200, item)

    def threaten(self) -> None:
        self.items["events/recommendations/rebalance"] = json.dumps({"noticeTime": END})

    def preempt(self) -> None:
        self.items["spot/instance-action"] = json.dumps({"action": "terminate", "time": END})


class GceCloud(Cloud):
    """403 without the header, which every genuine response has too."""

    name, grace_seconds = "gce", 25
    why = "GCE: preempted"

    def __init__(self) -> None:
        super().__init__()
        self.items = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answer(self, request: Request) -> None:
        if request.headers.get("Metadata-Flavor") != "Google":
            return request.respond(403)
        item = self.items.get(request.path.removeprefix("/computeMetadata/v1/instance/"))
        return request.respond(404) if item is None else request.respond(200, item, Metadata_Flavor="Google")

    def threaten(self) -> None:
        self.items["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"

    def preempt(self) -> None:
        self.items["preempted"] = "TRUE"
