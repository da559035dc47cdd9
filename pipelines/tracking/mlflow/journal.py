"""The log between a run and its shipper: one JSON record a line. A copy in the store is the run's journal.

A position is an offset in bytes up to which the log is shipped or copied. Its writer updates it last, so a kill
repeats records and loses none. Each tracking URI has its own position: a new server gets the whole history.
"""

import gzip
import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.commits import named
from trainer.store import Store
from trainer.stored import Count, DamagedRecord, Key, NewerRecord, Number, Sha256, Stored, UnixSeconds, decoded, typed

log = logging.getLogger(__name__)
PIECE_NAME = r"[0-9a-f]{12}/\d{12,18}-\d{12,18}\.jsonl\.gz"
MOST_PIECE_BYTES = 1 << 30  # unpacked; an hour of training writes some 10 MB
RECORDS_AT_ONCE = 5_000  # read into memory together: ~200 bytes each, so 1 MB


@dataclass(frozen=True)
class Record(Stored):
    """A line of the log."""

    kind: ClassVar[str]
    time: UnixSeconds

    def to_json(self) -> bytes:
        return json.dumps({"kind": self.kind} | vars(self)).encode()


@dataclass(frozen=True)
class Session(Record):
    """A process of the run has opened the log."""

    kind = "session"
    run: str
    experiment: str


@dataclass(frozen=True)
class Close(Record):
    """The session has ended."""

    kind = "close"


@dataclass(frozen=True)
class StageRecord(Record):
    """A record of one MLflow run. A stage of None means the run of skytrain itself, the parent."""

    stage: str | None


@dataclass(frozen=True)
class StageStarted(StageRecord):
    """A stage has started or resumed."""

    kind = "stage_started"
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True)
class StageEnded(StageRecord):
    """A stage has ended."""

    kind = "stage_ended"
    status: str  # FINISHED, FAILED or KILLED


@dataclass(frozen=True)
class Sample(StageRecord):
    """Metrics of the machine. A reader gets them as Metrics."""

    kind = "metrics"
    step: Count
    values: dict[str, Number]  # NaN and infinity, too: MLflow takes them


@dataclass(frozen=True)
class Metrics(Sample):
    """The values of metrics at a step."""

    again: bool = False  # ship the points even if MLflow has points of a training series at that step


@dataclass(frozen=True)
class DatasetInput(StageRecord):
    """An input of a stage."""

    kind = "dataset"
    name: str
    digest: str
    source: str  # URI


@dataclass(frozen=True)
class Tags(StageRecord):
    """Tags of an MLflow run."""

    kind = "tags"
    tags: dict[str, str]


@dataclass(frozen=True)
class Table(StageRecord):
    """A table, as an artifact of an MLflow run."""

    kind = "table"
    name: Key
    columns: Mapping[str, list[Any]]


@dataclass(frozen=True)
class TextFile(StageRecord):
    """A text file, as an artifact of an MLflow run."""

    kind = "text_file"
    name: Key
    text: str


@dataclass(frozen=True)
class Model(StageRecord):
    """The export of a finished run, for MLflow's logged models and its registry. The weights stay in the store."""

    kind = "model"
    name: str  # in the registry
    run: str
    fingerprint: Sha256  # of the export
    uri: str  # of the export
    created: UnixSeconds
    step: Count
    good: bool  # whether the run has passed a target
    params: dict[str, str]
    tags: dict[str, str]


KINDS: dict[str, type[Record]] = {
    one.kind: one
    for one in (Session, Close, StageStarted, StageEnded, Metrics, DatasetInput, Tags, Table, TextFile, Model)
}


def record_from_json(line: bytes) -> Record | None:
    """The record of a line; None for an empty line, or one that a crash or a full disk cut in two.

    A damaged line is no error, nor is one of a newer skytrain: tracking must not fail a run.
    """
    try:
        values = decoded(line, "a record", finite=False)
        return typed(KINDS[values.pop("kind")], values, "a record")
    except (DamagedRecord, NewerRecord, KeyError, TypeError, AttributeError):
        return None


class LogReader:
    """Reads the complete lines of a log while another process appends to it: each line once, from `offset` on."""

    def __init__(self, log: Path, offset: int = 0) -> None:
        self.log, self.offset = log, offset

    def read(self) -> list[tuple[Record, int]]:
        """Up to 5,000 new records, each with the offset of its end; none at the end of the log."""
        records: list[tuple[Record, int]] = []
        with open(self.log, "rb") as lines:
            lines.seek(self.offset)
            while len(records) < RECORDS_AT_ONCE:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    break  # an unfinished line, or the end
                self.offset += len(line)
                if record := record_from_json(line):
                    records.append((record, self.offset))
        return records


def open_log(log: Path) -> int:
    """A file descriptor for `append`."""
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def append(fd: int, record: Record, torn: bool = False) -> None:
    """Write a whole line at once: with O_APPEND, lines of two processes do not mix. `torn`: end a cut line first."""
    line = (b"\n" if torn else b"") + record.to_json() + b"\n"
    if os.write(fd, line) < len(line):
        raise OSError("the disk is full")


def ends_with_close(log: Path) -> bool:
    """Whether the last session of a log has ended: a killed process leaves none."""
    with open(log, "rb") as lines:
        lines.seek(max(0, os.fstat(lines.fileno()).st_size - 1000))  # the last record has some 50 bytes
        last = lines.read().rstrip().rpartition(b"\n")[2]
    return isinstance(record_from_json(last), Close)


def position_file(log: Path, uri: str) -> Path:
    """The file with the position of the shipper of `log` to `uri`."""
    return log.with_suffix(f".{hashlib.sha256(uri.encode()).hexdigest()[:8]}.position")


def read_position(path: Path) -> int:
    """Bytes of the log that are shipped; 0 if unknown, since repeated shipping does no harm."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def write_position(path: Path, offset: int) -> None:
    fresh = path.with_suffix(".position-new")
    fresh.write_text(str(offset))
    fresh.replace(path)


def keep_journal(store: Store, run: str, log: Path) -> None:
    """Copy the new lines of a run's log to `tracking/<run>/<log>/<from>-<to>.jsonl.gz` of the store.

    After an interruption it copies the same lines again, which does no harm: shipping may repeat records.
    """
    position = log.with_suffix(".journal.position")
    start = read_position(position)
    with open(log, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
        name = hashlib.sha256(first).hexdigest()[:12]  # the first line has a time: no two logs share it
        lines.seek(start)
        body = lines.read()
    body = body[: body.rfind(b"\n") + 1]  # without an unfinished line
    if body:
        end = start + len(body)
        store.put(f"tracking/{run}/{name}/{start:012d}-{end:012d}.jsonl.gz", gzip.compress(body))
        write_position(position, end)


def sessions_in_journal(store: Store, run: str) -> list[list[bytes]]:
    """The lines of a run's logs on all machines, one list a session, oldest first. Damage costs a warning."""
    sessions: list[tuple[float, list[bytes]]] = []
    for entry in named(store, f"tracking/{run}/", PIECE_NAME):  # the pieces of one log follow each other
        where, lost = f"{store.uri}/{entry.key}", 0
        for line in unpacked(store.get(entry.key) or b"", where):
            record = record_from_json(line)
            if isinstance(record, Session):
                sessions.append((record.time, []))
            if record and sessions:
                sessions[-1][1].append(line)
            lost += bool(line.strip()) and not (record and sessions)
        if lost:
            log.warning("%s: left out %d lines that are damaged or of a newer skytrain", where, lost)
    return [lines for _, lines in sorted(sessions, key=lambda session: session[0])]


def unpacked(piece: bytes, where: str) -> list[bytes]:
    """The lines of a piece of a journal; none, and a warning, if it is damaged or too large."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(piece)) as lines:
            body = lines.read(MOST_PIECE_BYTES + 1)
        if len(body) > MOST_PIECE_BYTES:
            raise ValueError(f"more than {MOST_PIECE_BYTES:,} bytes")
        return body.splitlines(keepends=True)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        log.warning("%s: damaged (%s); its lines are left out", where, error)
        return []
