"""What a run has committed, as it lies in the store: states, rows, folders. No torch in it, so that series and plans
are there at once. How a checkpoint comes there and is read again: trainer/checkpoint.py.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.health import Health, data_step, is_landmark
from trainer.metrics import merge_rows
from trainer.store import Store


@dataclass
class TrainState:
    """Where a run is. Everything else that resuming needs is weights and moments."""

    step: int = 0  # updates done, skipped ones included
    tokens_seen: int = 0
    optimizer_steps: int = 0  # updates applied: AdamW's own count
    val_step: int = -1  # where val loss was last measured
    val_loss: float | None = None
    loss_scale: float | None = None  # fp16 only
    loss_scale_growth: int = 0
    micro_batch_size: int = 0  # on so many ranks and such devices: a resumed run adds up in the same order
    world_size: int = 0
    devices: str = ""
    health: Health = field(default_factory=Health)
    rollbacks: tuple[tuple[int, int], ...] = ()  # step returned to, steps of data left out there

    @classmethod
    def of(cls, values: dict[str, Any]) -> "TrainState":
        """From what `asdict` and JSON made of it."""
        rollbacks = tuple((returned_to, left_out) for returned_to, left_out in values["rollbacks"])
        return cls(**{**values, "health": Health.of(values["health"]), "rollbacks": rollbacks})

    @property
    def data_step(self) -> int:
        """The place in the data order that the next update reads."""
        return data_step(self.step, self.rollbacks)

    def advance(self, batch_tokens: int, applied: bool) -> None:
        self.step += 1
        self.tokens_seen += batch_tokens
        self.optimizer_steps += applied


def sealed(commit: dict[str, Any]) -> bytes:
    """A commit as JSON that carries the sha256 of its other fields: nothing else vouches for it."""
    return json.dumps({**commit, "sha256": sha256(json.dumps(commit).encode()).hexdigest()}, indent=1).encode()


def unsealed(body: bytes) -> dict[str, Any]:
    """The commit in `body`. ValueError if it is not what `sealed` made."""
    commit = json.loads(body)
    if not isinstance(commit, dict):
        raise ValueError("no JSON object")
    seal = commit.pop("sha256", None)
    if seal != sha256(json.dumps(commit).encode()).hexdigest():
        raise ValueError("its sha256 is not that of its other fields")
    return commit


def superfluous(
    committed: list[str], keep_last: int, calm_step: int | None, keep_every: int | None = None
) -> list[str]:
    """Of the committed folders, newest first, those that need not stay: the last ones do, and every M steps one.

    Where a rollback may be wanted, two landmarks more do: the newest from before any rise of the loss, to
    return to, and the one after it, which will take its place.
    """
    spared = [folder for folder in committed if keep_every and step_of(folder) % keep_every == 0]
    if calm_step is not None:
        landmarks = [folder for folder in committed if is_landmark(step_of(folder))]
        newer = sum(step_of(folder) > calm_step for folder in landmarks)
        spared += landmarks[max(0, newer - 1) : newer + 1]
    return [folder for folder in committed[keep_last:] if folder not in spared]


def delete_checkpoint(store: Store, folder: str) -> None:
    """Remove a checkpoint, the marker first: what is half deleted was never committed."""
    store.delete(f"{folder}/COMMIT.json")
    for entry in store.entries(f"{folder}/"):
        store.delete(entry.key)


def committed_state(store: Store, prefix: str) -> TrainState | None:
    """Where the newest commit of a run stands; None if there is none that can be read."""
    keys = [e.key for e in store.entries(f"{prefix}/checkpoints/") if e.key.endswith("/COMMIT.json")]
    for key in sorted(keys, reverse=True):
        body = store.get(key) or b""  # a store that refuses raises a ValueError, too: that is no damage
        with suppress(ValueError):
            return TrainState.of(unsealed(body)["state"])
    return None


def series(store: Store, prefix: str) -> list[dict[str, Any]]:
    """The committed rows of a run, one a step, whatever was interrupted in between."""
    return merge_rows(segments(store, prefix))


def segments(store: Store, prefix: str) -> Iterator[list[dict[str, Any]]]:
    """The committed rows as they were logged, one list a commit, oldest attempt first."""
    keys = [entry.key for entry in store.entries(f"{prefix}/metrics/")]
    for key in sorted(keys, key=lambda k: (k.split("-a")[-1], k)):
        yield list(_rows(f"{store.uri}/{key}", store.get(key) or b""))


def _rows(where: str, body: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a segment. One that is damaged is left out, loudly: weights do not depend on it."""
    for number, line in enumerate(body.splitlines(), 1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError):
            logging.getLogger(__name__).warning("%s: line %d is DAMAGED; the series lacks its step", where, number)
        else:
            yield row


def checkpoint_seconds(save_seconds: float, between_failures: float = PRIOR_SECONDS_BETWEEN_FAILURES) -> float:
    """The interval that loses least: sqrt(2 · cost of a save · mean time between failures).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval". Between 30 s
    and 30 min: below, listing the store costs more than it saves; above, the prior is too sure of itself.
    """
    return min(1800.0, max(30.0, (2 * save_seconds * between_failures) ** 0.5))


def step_of(folder: str) -> int:
    """The step of a checkpoint's folder, or of what lies in it."""
    return int(folder.rsplit("/step-", 1)[1].split("-")[0])
