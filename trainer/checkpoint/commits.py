"""The commits of a run in the store: their state, rows and folders. No torch in this module, so that series and plans
load fast. trainer/checkpoint/checkpointer.py writes the checkpoints and loads them.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.base.metrics import merge_rows
from trainer.base.record import (
    LARGE_BYTES,
    Count,
    DamagedRecord,
    Key,
    Sha256,
    Size,
    StoredRecord,
    UnixSeconds,
    decoded,
    decoded_at,
    typed,
)
from trainer.base.store import Entry, Store, part_length
from trainer.checkpoint.health import Health
from trainer.checkpoint.layout import (
    CHECKPOINT_NAME,
    FILE_NAME,
    SEGMENT_NAME,
    attempt_of,
    checkpoints_of,
    commit_key,
    metrics_of,
    segment_key,
    step_of,
)
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES, TrainConfig
from trainer.config.errors import NotAFile, UserError

MOST_CHUNK_BYTES = 256 << 20  # of a receipt: a reader holds the first chunk of each of its files


@dataclass
class TrainState(StoredRecord):
    """The progress of a run. Together with weights and moments it is all that resuming needs."""

    step: int = 0  # updates done, including skipped ones
    tokens_seen: int = 0
    optimizer_steps: int = 0  # updates applied: the step count of AdamW
    val_step: int = -1  # of the last validation
    val_loss: float | None = None
    evaluated_step: int = -1  # of the last evaluation
    scores: dict[str, float] = field(default_factory=dict)  # of it, by metric
    # A run that resumes on as many ranks, the same devices and with the same settings that decide the memory of a
    # sequence keeps the size, to add gradients in the same order.
    micro_batch_size: int = 0
    world_size: int = 0
    devices: str = ""
    memory_settings: str = ""
    threads: int = 0  # of a rank's sums on the CPU, which add in another order with another number; 0: on GPUs
    health: Health = field(default_factory=Health)
    text_from: int = 0  # the step at which a branch began to read another text than its parent, from the start

    @property
    def data_step(self) -> int:
        """The position in the data order that the next update reads."""
        return self.step - self.text_from

    def on_another_text(self) -> "TrainState":
        """This state at the start of another text: its losses and validations say nothing about that one."""
        health = Health(skipped=self.health.skipped)
        return replace(self, text_from=self.step, health=health, val_step=-1, val_loss=None)

    def val_is_due(self, config: TrainConfig) -> bool:
        """Whether to validate now: at the start, every `val_every` steps and at the end; once each, also after a
        resume."""
        if config.val_every is None or self.val_step == self.step:
            return False
        return self.step % config.val_every == 0 or self.has_ended(config)

    def evaluation_is_due(self, every: int | None, config: TrainConfig) -> bool:
        """Whether to evaluate now: every `every` steps (None: never) and after the last one; once each, also after a
        resume."""
        if every is None or not self.step or self.evaluated_step == self.step:
            return False
        return self.step % every == 0 or self.has_ended(config)

    def passed(self, config: TrainConfig) -> str | None:
        """The target of `stop_at` that the measurements of this step pass.

        It depends on the state alone, which all ranks and the commit share: so all ranks end together, and a run that
        was killed ends at the same step."""
        if config.stop_at is None or not self.step:
            return None
        metrics = dict(self.scores) if self.evaluated_step == self.step else {}
        if self.val_step == self.step and self.val_loss is not None:
            metrics["val/loss"] = self.val_loss
        return config.stop_at.passed_by(metrics)

    def has_ended(self, config: TrainConfig) -> bool:
        """Whether no step is left: the last one is done, or a target is passed."""
        return self.step >= config.max_steps or self.passed(config) is not None

    def is_complete(self, config: TrainConfig, evaluate_every: int | None = None) -> bool:
        """Whether the run has nothing left to do."""
        return (
            self.has_ended(config)
            and not self.val_is_due(config)
            and not self.evaluation_is_due(evaluate_every, config)
        )

    @property
    def measured(self) -> tuple[int, int, int]:
        """The step, and those of the last measurements: a commit with other numbers is not this state."""
        return self.step, self.val_step, self.evaluated_step

    def advance(self, batch_tokens: int, applied: bool) -> None:
        self.step += 1
        self.tokens_seen += batch_tokens
        self.optimizer_steps += applied


@dataclass(frozen=True)
class FileReceipt(StoredRecord):
    """A file of a checkpoint, as a rank uploaded it."""

    name: Annotated[str, Field(pattern=f"^{FILE_NAME}$")]
    size: Size
    sha256: Sha256  # of the hashes of its chunks, one after the other
    # Of its chunks of equal length, so that several threads verify a file, and a range of it alone.
    chunk_bytes: Annotated[int, Field(ge=1, le=MOST_CHUNK_BYTES)]
    chunks: tuple[Sha256, ...]

    @classmethod
    def of(cls, name: str, size: int, chunks: Sequence[str]) -> "FileReceipt":
        """The receipt of a file whose chunks, the parts of its upload, have these hashes."""
        return cls(name, size, sha256("".join(chunks).encode()).hexdigest(), part_length(size), tuple(chunks))


@dataclass(frozen=True)
class Commit(StoredRecord):
    """COMMIT.json: the state of a checkpoint, and the files that it consists of."""

    step: Count
    attempt: Count
    world_size: Count
    time: UnixSeconds
    state: TrainState
    # Key of the segment with its rows, relative to the run; a later commit may have extended it.
    metrics: Key | Literal[""]
    files: tuple[FileReceipt, ...]

    def encode(self) -> bytes:
        """The commit as JSON, with the sha256 of its other fields: no other file has the sha256 of COMMIT.json."""
        values = asdict(self)
        return json.dumps({**values, "sha256": _digest(values)}, indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, body: bytes, folder: str) -> "Commit":
        """The commit that `encode` wrote into `folder`. DamagedRecord if the body is damaged or lies; NewerRecord if
        a newer version wrote it."""
        where = commit_key(folder)
        values = decoded(body, where, LARGE_BYTES)
        if not isinstance(values, dict) or values.pop("sha256", None) != _digest(values):
            raise DamagedRecord(where, "the sha256 does not match the other fields")
        commit = typed(cls, values, where)
        if (commit.step, commit.state.step, commit.attempt) != (step_of(folder), step_of(folder), attempt_of(folder)):
            raise DamagedRecord(where, "it is that of another folder")
        return commit


def _digest(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values).encode()).hexdigest()


def deletable_checkpoints(committed: list[str], keep_last: int, keep_every: int | None = None) -> list[str]:
    """The folders of `committed` (newest first) that may be deleted.

    The `keep_last` newest ones stay, and those at multiples of `keep_every` steps.
    """
    return [folder for folder in committed[keep_last:] if not (keep_every and step_of(folder) % keep_every == 0)]


def delete_checkpoint(store: Store, folder: str) -> None:
    """Remove a checkpoint, COMMIT.json first: a half-deleted checkpoint is not committed."""
    store.delete(commit_key(folder))
    for entry in store.entries(f"{folder}/"):
        store.delete(entry.key)


def checkpoint_folders(store: Store, prefix: str) -> dict[str, bool]:
    """The folders of checkpoints, newest step first, at equal steps the later attempt first; whether each is committed,
    which is whether it has a COMMIT.json."""
    keys = [entry.key for entry in named(store, checkpoints_of(prefix), CHECKPOINT_NAME)]
    folders = sorted({key.rpartition("/")[0] for key in keys}, reverse=True)
    return {folder: commit_key(folder) in keys for folder in folders}


def committed_folders(store: Store, prefix: str) -> list[str]:
    """Folders with a COMMIT.json, newest step first; at equal steps the later attempt first."""
    return [folder for folder, committed in checkpoint_folders(store, prefix).items() if committed]


def named(store: Store, prefix: str, pattern: str) -> list[Entry]:
    """The objects under `prefix` whose names match `pattern`. Others are not ours: they are reported and left alone."""
    found = store.entries(prefix)
    ours = [entry for entry in found if re.fullmatch(pattern, entry.key.removeprefix(prefix))]
    if len(ours) < len(found):
        foreign = min({entry.key for entry in found} - {entry.key for entry in ours})
        logging.getLogger(__name__).warning("%s: ignored %r, which is not ours", f"{store.uri}/{prefix}", foreign)
    return ours


def newest_commit(store: Store, prefix: str) -> Commit | None:
    """A run's newest readable commit."""
    for folder in committed_folders(store, prefix):
        with suppress(DamagedRecord, NotAFile):  # any other UserError is not damage
            return read_commit(store, folder)
    return None


def read_commit(store: Store, folder: str) -> Commit:
    """The commit of a folder that was listed. DamagedRecord if it is damaged, or no longer there; NewerRecord."""
    found = decoded_at(store, key := commit_key(folder), lambda body, _: Commit.decode(body, folder))
    if found is None:
        raise DamagedRecord(key, "it was removed meanwhile")
    return found


def committed_state(store: Store, prefix: str) -> TrainState | None:
    """The state of a run's newest commit; None without a readable commit."""
    commit = newest_commit(store, prefix)
    return commit.state if commit else None


SEGMENT_BYTES = 1 << 20  # some thousand rows
MOST_METRIC = 1e100  # a float32 has less; charts compute with differences and squares


@dataclass(frozen=True)
class Segment:
    """Committed rows in one object, `metrics/step-<last step>-a<attempt>.jsonl`. A commit extends the segment of its
    attempt until that has SEGMENT_BYTES, so that a reader needs few requests, however many commits a run has."""

    key: str
    body: bytes

    @classmethod
    def of(cls, prefix: str, step: int, attempt: int, rows: list[dict[str, Any]], before: bytes = b"") -> "Segment":
        """The segment that ends at `step`: `rows` after the body of the segment that it extends."""
        body = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        return cls(segment_key(prefix, step, attempt), before + body)

    @property
    def full(self) -> bool:
        return len(self.body) >= SEGMENT_BYTES


def series(store: Store, prefix: str) -> list[dict[str, Any]]:
    """The committed rows of a run, one a step, however often the run was interrupted."""
    return merge_rows(segments(store, prefix))


def segments(store: Store, prefix: str) -> Iterator[list[dict[str, Any]]]:
    """The committed rows as they were logged, one list a segment, oldest attempt first."""
    keys = [entry.key for entry in named(store, metrics_of(prefix), SEGMENT_NAME)]
    for key in sorted(keys, key=lambda k: (k.split("-a")[-1], k)):
        yield decoded_at(store, key, lambda body, where: list(rows_of(where, body))) or []


@dataclass(frozen=True)
class RowFields(StoredRecord):
    """The fields of a row that are not metrics."""

    step: Count
    time: UnixSeconds
    samples: tuple[str, ...] = ()


def rows_of(source: str, body: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a segment, without damaged ones. Those cause a warning only: no weight depends on a row."""
    for number, line in enumerate(body.splitlines(), 1):
        try:
            row = decoded(line, source)
            typed(RowFields, row, source)
            metrics = {name: value for name, value in row.items() if name not in RowFields.__dataclass_fields__}
            if not all(type(value) in (int, float) and abs(value) < MOST_METRIC for value in metrics.values()):
                raise DamagedRecord(source, "a metric is not a number, or too large for a chart")
        except UserError:
            logging.getLogger(__name__).warning("%s: line %d is DAMAGED; the series lacks its step", source, number)
        else:
            yield row


UPLOAD_SHARE = 0.25  # of the time, at most: the network also carries gradients, shards and the traffic of others


def checkpoint_seconds(
    save_seconds: float,
    between_failures: float = PRIOR_SECONDS_BETWEEN_FAILURES,
    upload_seconds: float = 0.0,
    traffic_seconds: float = 0.0,
) -> float:
    """The interval between checkpoints that loses least: sqrt(2 · seconds of a save · mean seconds between failures).

    The seconds of a save are those that training waits, `save_seconds`, and those for which the machines cost as much
    as its traffic, `traffic_seconds`. Source: Young 1974, "A first order approximation to the optimum checkpoint
    interval". Limited to 30 s … 30 min, or 2 h where traffic costs: below, listing the store costs more than the
    interval saves; above, the estimate of the failures is too uncertain. At least four times `upload_seconds`, which
    training does not wait.
    """
    longest = min(7200.0, max(1800.0, (2 * traffic_seconds * between_failures) ** 0.5))
    best = (2 * (save_seconds + traffic_seconds) * between_failures) ** 0.5
    return max(upload_seconds / UPLOAD_SHARE, min(longest, max(30.0, best)))
