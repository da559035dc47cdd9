"""The messages between the head and the workers, one JSON object each.

A worker sends Hello first, then WorkDone and StopNotice. The head sends StartRanks, Trained
and End. Both send KeepAlive. The shell of a worker whose command a signal has ended sends CommandDied.
"""

import json
import platform
from dataclasses import asdict, dataclass, field

from pipelines.artifacts.traffic import Traffic
from pipelines.nodes.ranks import RankSpec
from pipelines.nodes.results import NodeResult


@dataclass(frozen=True)
class KeepAlive:
    """The sender is alive, and has exchanged so much with buckets."""

    traffic: Traffic = Traffic()


@dataclass(frozen=True)
class Hello:
    """A worker introduces itself: its node, its run, and the number of ranks that it can start."""

    node: int
    run: str
    processes: int
    host: str = field(default_factory=platform.node)


@dataclass(frozen=True)
class CommandDied:
    """A signal ended the command of a worker."""

    node: int
    run: str
    cause: str


@dataclass(frozen=True)
class WorkDone:
    """A worker's ranks ended, of this round."""

    round: int
    result: NodeResult


@dataclass(frozen=True)
class StopNotice:
    """A worker was asked to stop."""

    reason: str


@dataclass(frozen=True)
class StartRanks:
    """Start your ranks; torchrun's processes meet on this port of the head."""

    round: int
    spec: RankSpec
    port: int


@dataclass(frozen=True)
class Trained:
    """Training is complete: the workers may leave."""


@dataclass(frozen=True)
class End:
    """The head leaves with this exit code."""

    exit_code: int
    reason: str


Message = KeepAlive | Hello | CommandDied | WorkDone | StopNotice | StartRanks | Trained | End


def message_to_json(message: Message) -> bytes:
    """The JSON of a message; `message_from_json` is its reader."""
    match message:
        case KeepAlive(traffic):
            values: dict[str, object] = asdict(traffic)
        case Hello():
            values = asdict(message)
        case CommandDied(node, run, cause):
            values = {"died": node, "run": run, "cause": cause}
        case WorkDone(round_, result):
            values = {"ended": round_, **asdict(result)}
            values["words"] = values.pop("message")
        case StopNotice(reason):
            values = {"stop": reason}
        case StartRanks(round_, spec, port):
            values = {"train": round_, "spec": spec.to_json(), "port": port}
        case Trained():
            values = {"trained": True}
        case End(exit_code, reason):
            values = {"end": exit_code, "why": reason}
    return json.dumps(values).encode()


def message_from_json(body: bytes) -> Message:
    """ValueError or TypeError for anything that `message_to_json` does not write."""
    match json.loads(body):
        case {"sent": int(sent), "received": int(received), "writes": int(writes), "reads": int(reads)}:
            return KeepAlive(Traffic(sent, received, writes, reads))
        case {"node": int(node), "run": str(run), "processes": int(processes), "host": str(host)}:
            return Hello(node, run, processes, host)
        case {"died": int(node), "run": str(run), "cause": str(cause)}:
            return CommandDied(node, run, cause)
        case {
            "ended": int(round_),
            "node": int(node),
            "kind": str() | None as kind,
            "words": str(message),
            "host": str(host),
        }:
            return WorkDone(round_, NodeResult(node, kind, message, host))
        case {"stop": str(reason)}:
            return StopNotice(reason)
        case {"train": int(round_), "spec": dict(spec), "port": int(port)}:
            return StartRanks(round_, RankSpec.from_json(spec), port)
        case {"trained": True}:
            return Trained()
        case {"end": int(exit_code), "why": str(reason)}:
            return End(exit_code, reason)
    raise ValueError(f"not a message between nodes: {body[:200]!r}")
