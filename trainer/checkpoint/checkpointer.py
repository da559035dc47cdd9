"""Checkpoints of a run: saved in the background, committed by one small object, verified when they are loaded.

A checkpoint is a folder `checkpoints/step-<step>-a<attempt>/` with one safetensors file per rank, see
trainer/checkpoint/pieces.py. Training waits only while `save` copies this rank's pieces to host memory. Then a thread
uploads and hashes the copy, and puts a receipt (size, sha256, hashes of chunks) into the folder. Rank 0 waits for all
receipts, and for the proof that the weights are sound: a forward pass over them gave a finite loss. Then it *creates*
COMMIT.json, which lists the files: the checkpoint exists. One save runs at a time, so host memory holds one copy. A
save that fails leaves no commit.

Deletion removes COMMIT.json first. Listing the store finds the newest commit. Loading verifies every chunk that a rank
needs (trainer/checkpoint/loading.py); if one is damaged, it reports that and uses the checkpoint before. A commit that
could not be read is not deleted for that, and displaces no other one: it may be sound, and the way to it damaged.
"""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from trainer.base.events import Checkpointed, CheckpointFailed, EventLog, Warned
from trainer.base.parallel import World
from trainer.base.process import Background, failpoint, log_line
from trainer.base.record import decoded, decoded_at, typed
from trainer.base.store import Store, part_length
from trainer.checkpoint.commits import (
    Commit,
    FileReceipt,
    Segment,
    TrainState,
    checkpoint_folders,
    committed_folders,
    deletable_checkpoints,
    delete_checkpoint,
    read_commit,
)
from trainer.checkpoint.layout import attempt_of, checkpoint_folder, commit_key, file_name, receipt_key, step_of
from trainer.checkpoint.loading import agreed, load_files
from trainer.checkpoint.pieces import HostCopy, Piece
from trainer.config.errors import Interrupted, NoSoundCommit, StaleAttempt, StoreUnavailable

# After this time, counted from the end of rank 0's own upload, a rank without a receipt is dead or lost the store. The
# files of all ranks are about equally large, but their nodes may be unequally fast: the time grows with the file.
RECEIPT_SECONDS = 300.0
SLOWEST_UPLOAD = 10e6  # bytes per second
RECEIPT_POLL_SECONDS = 0.2
INSIST_SECONDS, INSIST_POLL_SECONDS = 15.0, 0.2  # between two saves of the last state, and two looks for a stop


@dataclass
class Save:
    """A save in progress."""

    folder: str
    state: TrainState
    rows: list[dict[str, Any]]
    started: float
    proof: "Future[bool]" = field(default_factory=Future)  # whether the weights are sound, once that is known
    seconds: float = 0.0
    upload_seconds: float = 0.0  # of all ranks
    files: tuple[FileReceipt, ...] = ()  # of all ranks, once committed; only rank 0 knows them


class Checkpointer:
    """Saves and loads the checkpoints of one run under `prefix` of a store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        world: World,
        attempt: int = 0,
        keep_last: int = 2,
        superseded: Callable[[], bool] = lambda: False,
        keep_every: int | None = None,
        needed: Callable[[str], bool] = lambda folder: False,
    ) -> None:
        self.store, self.prefix, self.world, self.attempt = store, prefix, world, attempt
        self.keep_last, self.keep_every, self.superseded = keep_last, keep_every, superseded
        self.needed = needed  # whether another run needs a commit, by its folder
        self._copy: HostCopy | None = None
        self._save: Save | None = None
        self._last: Save | None = None  # the same, also after it has ended
        self._thread: Background | None = None
        self._error: BaseException | None = None  # of the last save that ended
        self._insisting = False  # the last step is done
        self.upload_seconds = 0.0  # of the last commit; only rank 0 knows it
        self._segment: Segment | None = None  # of the last commit; only rank 0 knows it
        self.damaged: list[str] = []  # folders of the damaged commits that this attempt did not load

    # --- saving

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self._prove(False)  # the thread of a save must not wait for a training that has ended

    @property
    def busy(self) -> bool:
        """Whether a save is in progress: `settle` did not report its end yet."""
        return self._save is not None

    @property
    def prepared(self) -> bool:
        """Whether host memory for copies was allocated, or is being allocated."""
        return self._copy is not None

    def prepare(self, pieces: dict[str, Piece]) -> None:
        """Allocate host memory for copies of these pieces, in the background. All saves must have the same pieces.

        On a GPU that memory is pinned, which delayed what ran beside it by up to 10 s: call it after the first step.
        """
        self._copy = HostCopy(pieces, self.world.rank, self.world.world_size)

    def before_update(self) -> None:
        """Call this before the pieces change, see HostCopy."""
        if self._copy:
            self._copy.before_update()

    def save(self, state: TrainState, pieces: dict[str, Piece], log: EventLog, proven: bool = True) -> None:
        """Copy `pieces`, then upload and commit them in the background, with `state` and the uncommitted rows.

        Unless the weights are `proven` to be sound, the commit waits for `prove`. Waits for the previous save. `settle`
        reports how a save ended.
        """
        self.settle(log, wait=True)
        started = time.monotonic()
        if self._copy is None:
            self.prepare(pieces)
        assert self._copy
        self._copy.take()
        folder = checkpoint_folder(self.prefix, state.step, self.attempt)
        self._save = self._last = Save(folder, replace(state), list(log.uncommitted), started)
        if proven:
            self.prove()
        self._thread = Background(
            "checkpoint",
            partial(self._upload_and_commit, self._save, self._copy),
            crashed=partial(self._failed, self._save),
            daemon=False,  # a save that has begun is completed
        )
        self._thread.start()

    def amend(self, state: TrainState, pieces: dict[str, Piece], log: EventLog) -> None:
        """Commit the step of the last save once more, with `state` and the rows since: its weights are in the store.

        Saves all of it if that save failed. A collective call.
        """
        self.settle(log, wait=True)
        if any(self.world.gather(self._error is not None)):
            return self.save(state, pieces, log)
        if self.world.rank == 0:
            assert self._last and self._last.state.step == state.step and self._segment
            rows = list(log.uncommitted)
            self._check_current(state.step)
            self._segment = Segment.of(self.prefix, state.step, self.attempt, rows, self._segment.body)
            self.store.put(self._segment.key, self._segment.body)
            commit = self._commit_of(state, self._segment, self._last.files)
            self.store.put(commit_key(self._last.folder), commit.encode())
        log.uncommitted.clear()

    def prove(self) -> None:
        """Record that a forward pass over the weights of the last save gave a finite loss."""
        self._prove(True)

    def _prove(self, sound: bool) -> None:
        if self._save and not self._save.proof.done():
            self._save.proof.set_result(sound)

    def settle(self, log: EventLog, wait: bool = False) -> None:
        """Log the result of the last save if it has ended; with `wait`, once it has. Then it makes no commit without
        a proof up to now.

        After a failed save its rows stay uncommitted, and the next save stores them. Only StaleAttempt is raised:
        nothing that this attempt does will count.
        """
        if self._save is None or self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._prove(False)
        self._thread.join()
        save, self._save = self._save, None
        self._error = error = self._thread.error
        if isinstance(error, StaleAttempt):
            raise error
        if error is None:
            self.upload_seconds = save.upload_seconds
            del log.uncommitted[: len(save.rows)]
            log.write(Checkpointed(save.state.step, save.seconds))
            return
        log.write(CheckpointFailed(save.state.step, repr(error), self._insisting))
        log_line(f"checkpoint of step {save.state.step} FAILED ({error!r}); training continues")

    def finish(self, log: EventLog) -> None:
        """Wait for the last saves of all ranks. Raises the error of this rank's. A collective call."""
        self.settle(log, wait=True)
        self.world.gather(None)  # a rank that left would take along one that still commits
        if self._error:
            raise self._error

    def insist(self, pieces: dict[str, Piece], log: EventLog, check_stop: Callable[[], None]) -> None:
        """After the last step: repeat the last save until the store takes it, or `check_stop` raises Interrupted.

        Any other error than one of the store ends it at once. A collective call.
        """
        self._insisting = True
        self.settle(log, wait=True)
        with suppress(Interrupted):
            while any(self.world.gather(isinstance(self._error, OSError))):
                assert self._last
                log_line(f"step {self._last.state.step} is the last, and not in the store; trying again")
                for _ in range(round(INSIST_SECONDS / INSIST_POLL_SECONDS)):  # as often on every rank
                    check_stop()
                    time.sleep(INSIST_POLL_SECONDS)
                self.save(self._last.state, pieces, log)
                self.settle(log, wait=True)

    def _upload_and_commit(self, save: Save, copy: HostCopy) -> None:
        """In the thread: upload this rank's file and its receipt. Rank 0 commits."""
        parts, name = copy.safetensors(), self._file_name()
        size = sum(len(part) for part in parts)
        receipt = FileReceipt.of(name, size, self.store.write(parts, f"{save.folder}/{name}", part_length(size)))
        self.store.put(self._receipt_key(save), json.dumps(asdict(receipt)).encode())
        if self.world.rank == 0:
            receipts = self._receipts(save, receipt.size)
            save.upload_seconds = time.monotonic() - save.started
            self._commit(save, receipts)
        save.seconds = time.monotonic() - save.started

    def _failed(self, save: Save, thread: Background) -> None:
        """In the thread, after any error: remove the files of the save, so that a nearly full disk has space for the
        next one. `settle` reports the error in the training thread."""
        if isinstance(thread.error, StaleAttempt | StoreUnavailable):
            return  # it may not delete, or cannot
        if self.world.rank == 0:
            with suppress(Exception):  # the next save removes them
                self._delete_uncommitted(save.state.step)
            return
        with suppress(Exception):
            self.store.delete(f"{save.folder}/{self._file_name()}")
        with suppress(Exception):  # so that rank 0 does not wait for a receipt
            self.store.put(self._receipt_key(save), json.dumps({"fault": repr(thread.error)}).encode())

    def _file_name(self) -> str:
        return file_name(self.world.rank, self.world.world_size)

    def _receipt_key(self, save: Save) -> str:
        return receipt_key(save.folder, self.world.rank)

    def _receipts(self, save: Save, size: int) -> list[FileReceipt]:
        """Wait for the receipts of all ranks, after the upload of this rank's file of `size` bytes. OSError if a rank
        failed, TimeoutError if a receipt is late."""
        limit = RECEIPT_SECONDS + size / SLOWEST_UPLOAD
        begun = time.monotonic()
        receipts: list[FileReceipt] = []
        while len(receipts) < self.world.world_size:
            rank = len(receipts)
            key = receipt_key(save.folder, rank)
            receipt = decoded_at(self.store, key, decoded, polled=True)
            if receipt is not None:
                if isinstance(receipt, dict) and "fault" in receipt:
                    raise OSError(f"rank {rank}: {receipt['fault']}")
                receipts.append(typed(FileReceipt, receipt, key))
            elif time.monotonic() > begun + limit:
                raise TimeoutError(f"rank {rank} sent no receipt within {limit:.0f} s")
            else:
                time.sleep(RECEIPT_POLL_SECONDS)
        return receipts

    def _commit(self, save: Save, files: list[FileReceipt]) -> None:
        step = save.state.step
        if not save.proof.result():
            raise FloatingPointError(f"no loss after step {step} was finite, so its weights may be ruined")
        self._check_current(step)
        extended = None if self._segment is None or self._segment.full else self._segment
        segment = Segment.of(self.prefix, step, self.attempt, save.rows, extended.body if extended else b"")
        self.store.put(segment.key, segment.body)
        commit = self._commit_of(save.state, segment, tuple(files))
        self._check_current(step)
        stored = {entry.key: entry.size for entry in self.store.entries(f"{save.folder}/")}
        for file in files:
            if stored.get(key := f"{save.folder}/{file.name}") != file.size:
                raise StoreUnavailable(f"{self.store.uri}/{key}: removed before its commit")
        if not self.store.create(commit_key(save.folder), commit.encode()):
            raise StaleAttempt(f"attempt {self.attempt} of {self.prefix} runs twice: step {step} is already committed")
        # Frozen before the commit, it may have been superseded meanwhile, and the files removed.
        if self.superseded():
            self.store.delete(commit_key(save.folder))
            self._check_current(step)
        self._segment, save.files = segment, tuple(files)
        failpoint("committed")
        with suppress(Exception):  # the next commit, or gc, deletes the rest
            if extended and extended.key != segment.key:
                self.store.delete(extended.key)
            self._delete_old(save.state)
            self._delete_uncommitted(step)

    def _commit_of(self, state: TrainState, segment: Segment, files: tuple[FileReceipt, ...]) -> Commit:
        return Commit(
            step=state.step,
            attempt=self.attempt,
            world_size=self.world.world_size,
            time=time.time(),
            state=state,
            metrics=segment.key.removeprefix(f"{self.prefix}/"),
            files=files,
        )

    def _check_current(self, step: int) -> None:
        if self.superseded():
            raise StaleAttempt(f"attempt {self.attempt} of {self.prefix} was superseded: step {step} not committed")

    def _delete_old(self, state: TrainState) -> None:
        # The commit of `state` is sound. One of a later step is of a superseded attempt, and displaces nothing.
        committed = [f for f in committed_folders(self.store, self.prefix) if step_of(f) <= state.step]
        readable = [folder for folder in committed if folder not in self.damaged]
        for folder in self._not_newer(deletable_checkpoints(readable, self.keep_last, self.keep_every)):
            if not self.needed(folder):
                delete_checkpoint(self.store, folder)

    def _delete_uncommitted(self, step: int) -> None:
        """Remove the files of failed and interrupted saves, up to the one of `step`: a later one may be in progress."""
        folders = checkpoint_folders(self.store, self.prefix)
        for folder in self._not_newer(folder for folder, committed in folders.items() if not committed):
            over = attempt_of(folder) < self.attempt or step_of(folder) <= step
            if over and self.store.get(commit_key(folder)) is None:  # a listing alone may be wrong
                delete_checkpoint(self.store, folder)

    def _not_newer(self, keys: Iterable[str]) -> list[str]:
        """Keys of this attempt and earlier ones. This attempt must never delete the keys of a later one, which may
        exist before this one knows of it."""
        return [key for key in keys if attempt_of(key) <= self.attempt]

    # --- loading

    def load_latest(self, pieces: dict[str, Piece], log: EventLog) -> TrainState | None:
        """Fill `pieces` in place from the newest sound commit. None if the run has no commit, NoSoundCommit if none can
        be read."""
        while folders := [f for f in self._committed() if f not in self.damaged]:
            state, damage = self.load(folders[0], pieces)
            if state:
                return state
            self.damaged.append(folders[0])
            consequence = "using the one before it" if folders[1:] else "no earlier one exists"
            log.write(Warned(f"DAMAGED checkpoint {self.store.uri}/{folders[0]}: {damage}; {consequence}"))
        if self.damaged:
            where = f"{self.store.uri}/{self.prefix}/checkpoints"
            raise NoSoundCommit(
                f"{where}: none of its commits can be read (the last one: {damage}); starting over would lose them: if "
                "the storage itself is damaged, remove that folder to begin anew"
            )
        return None

    def load(self, folder: str, pieces: dict[str, Piece]) -> tuple[TrainState | None, str]:
        """Fill `pieces` in place from one commit, of this run or of another. Its state; None and a description if it
        is damaged; then the pieces are zero. A collective call."""

        def read() -> Commit | None:
            # Rank 0 alone, so all ranks load the same: a dying attempt may amend or delete it.
            return read_commit(self.store, folder) if self.world.rank == 0 else None

        (commit, *_), damage = agreed(self.world, read)
        if commit is not None:
            damage = load_files(self.store, folder, commit.files, pieces, self.world)
        return (commit.state, "") if commit and not damage else (None, damage or "")

    def _committed(self) -> list[str]:
        """Folders of the commits, newest first, equal on all ranks: rank 0 lists, because a dying attempt may still
        commit one and delete another."""
        folders = committed_folders(self.store, self.prefix) if self.world.rank == 0 else []
        return list(self.world.gather(folders)[0])
