"""Checkpoints that cost a step nothing but a copy, and exist once their COMMIT.json does.

A checkpoint is a folder `checkpoints/step-<step>-a<attempt>/` of safetensors files, one a rank, of flattened
tensors or contiguous pieces of them: a rank stores the pieces that it alone holds, and the ranks share out what
all of them hold, so nothing is gathered and nothing stored twice. Where a piece begins stands in the header, as
torch.distributed.checkpoint wants it, which loads such a folder, too. However a tensor was cut up when it was
saved, a rank reads the ranges it needs: any world size goes on from any other's checkpoint. Nothing is pickled.
`save` has this rank's pieces copied to host memory (the only stall) and returns. Behind it a thread hashes and
uploads that copy and puts a receipt (size, sha256) into the folder; rank 0 waits for all receipts and *creates*
COMMIT.json, which lists them. One save is in flight at a time, so the memory is one copy. Whatever fails on the
way ends in no commit. Deletion removes COMMIT.json first. The newest commit is found by listing the store;
loading verifies every file, and a damaged checkpoint falls back to the one before it, loudly.
"""

import json
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.commits import TrainState, delete_checkpoint, sealed, step_of, superfluous, unsealed
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES
from trainer.errors import StaleAttempt, UserError
from trainer.health import is_landmark
from trainer.metrics import EventLog
from trainer.optim import AdamW
from trainer.parallel import World
from trainer.process import failpoint, log_line
from trainer.store import Store, sha256_of

# A rank whose receipt is not there so long after rank 0's own upload has died or lost the store: no commit.
RECEIPT_SECONDS = 300.0
RECEIPT_POLL_SECONDS = 0.2
FILES_AT_ONCE = 4  # that a node downloads and verifies


@dataclass(frozen=True)
class FileReceipt:
    """A file of a checkpoint, as it was uploaded."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a flattened tensor, as this rank holds it."""

    live: Tensor  # (n,), a view of what training changes
    start: int  # its first element's place in the flattened tensor
    shape: tuple[int, ...]  # of the whole tensor
    replicated: bool  # every rank holds the very same piece

    @classmethod
    def whole(cls, tensor: Tensor) -> "Piece":
        """A contiguous tensor that every rank has."""
        return cls(tensor.detach().view(-1), 0, tuple(tensor.shape), replicated=True)

    @property
    def end(self) -> int:
        return self.start + self.live.numel()


class HostCopy:
    """The pieces that this rank stores, copied to host memory that is allocated once.

    Pinning that memory took 10 s for 19 GB, so a thread begins with it at once. On a GPU the copy has a stream
    of its own, beside the next step's forward and backward; only its update has to wait, see `before_update`.
    Pieces that lie side by side, as all do in flat buffers, travel together: 1,740 copies are more than the driver
    takes at once, and asking for them took as long as they did.
    """

    def __init__(self, pieces: dict[str, Piece], rank: int, world_size: int) -> None:
        self.pieces = {name: pieces[name] for name in share_of(pieces, rank, world_size)}
        on_gpu = any(piece.live.device.type == "cuda" for piece in self.pieces.values())
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._taken: torch.cuda.Event | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="pin")
        self._host = pool.submit(self._allocate)
        pool.shutdown(wait=False)

    def _allocate(self) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Where each piece is copied to, and what is copied in one go: to where, and from where."""
        if self._stream:
            torch.cuda.set_device(self._stream.device)  # a thread begins on the first
        places: dict[str, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for names in side_by_side({name: piece.live for name, piece in self.pieces.items()}):
            lives = [self.pieces[name].live for name in names]
            start, end = lives[0].storage_offset(), lives[-1].storage_offset() + lives[-1].numel()
            live = lives[0].as_strided((end - start,), (1,))
            host = torch.empty(end - start, dtype=live.dtype, pin_memory=self._stream is not None)
            copies.append((host, live))
            for name, t in zip(names, lives, strict=True):
                at = t.storage_offset() - start
                places[name] = host[at : at + t.numel()]
        return {name: places[name] for name in self.pieces}, copies

    def take(self) -> None:
        """Copy the live pieces as they are now, or on a GPU begin to."""
        if self._stream is None:
            self._copy(non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(non_blocking=True)
            self._taken = self._stream.record_event()

    def _copy(self, non_blocking: bool) -> None:
        for host, live in self._host.result()[1]:
            host.copy_(live, non_blocking=non_blocking)
            failpoint("copy")

    def before_update(self) -> None:
        """Let the GPU change the live pieces only once the copy of them is taken. Waits for nothing itself."""
        if self._taken:
            torch.cuda.current_stream().wait_event(self._taken)

    def safetensors(self) -> list[memoryview]:
        """The copy as the parts of a safetensors file (format: 8 bytes of length, JSON header, raw data)."""
        if self._taken:
            self._taken.synchronize()
        host, end = self._host.result()[0], 0
        places = {n: {"saved_offsets": [p.start], "shape": list(p.shape)} for n, p in self.pieces.items()}
        header: dict[str, Any] = {"__metadata__": {SHARDING: json.dumps(places)}}
        for name, t in host.items():
            start, end = end, end + t.nbytes
            header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = [t.view(torch.uint8).numpy().data for t in host.values()]
        return [memoryview(struct.pack("<Q", len(text)) + text), *data]


GAP = 4096  # elements between two tensors of one buffer, at most, that are copied along with them
# Bytes of one copy of several tensors: torch rounds what it pins up to a power of two, which of gigabytes is much.
MOST_BYTES = 1 << 29


def side_by_side(tensors: dict[str, Tensor]) -> list[list[str]]:
    """The names of contiguous tensors in runs of those that follow each other in one buffer, up to MOST_BYTES."""

    def place(name: str) -> tuple[int, str, int]:
        t = tensors[name]
        return t.untyped_storage().data_ptr(), str(t.dtype), int(t.storage_offset())

    runs: list[list[str]] = []
    end, start = (0, "", 0), 0
    for name in sorted(tensors, key=place):
        t, at = tensors[name], place(name)
        beside = at[:2] == end[:2] and 0 <= at[2] - end[2] <= GAP
        if not beside or (at[2] + t.numel() - start) * t.itemsize > MOST_BYTES:
            runs.append([])
            start = at[2]
        runs[-1].append(name)
        end = (*at[:2], at[2] + t.numel())
    return runs


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Where torch.distributed.checkpoint.hf_storage looks for each tensor's "saved_offsets"; "shape" is for us.
SHARDING = "DCP_SHARDING_INFO"


def share_of(pieces: dict[str, Piece], rank: int, world_size: int) -> list[str]:
    """The names that `rank` stores: what only it holds, and of what all hold a share of about equally many bytes."""
    load = [0] * world_size
    shares: list[list[str]] = [[] for _ in range(world_size)]
    shared = {name: piece.live.nbytes for name, piece in pieces.items() if piece.replicated}
    for name in sorted(shared, key=lambda n: (-shared[n], n)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += shared[name]
    return shares[rank] + [name for name in pieces if name not in shared]


def load_pieces(pieces: dict[str, Piece], files: Iterable[Path]) -> None:
    """Read what the pieces cover from all files of a checkpoint.

    UserError if these are the files of another model, or not all of them.
    """
    from safetensors import safe_open

    missing = {name: piece.live.numel() for name, piece in pieces.items()}
    for path in files:
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()[SHARDING])
            for name in places.keys() & pieces.keys():
                piece, stored, start = pieces[name], file.get_slice(name), places[name]["saved_offsets"][0]
                if tuple(places[name]["shape"]) != piece.shape:
                    raise UserError(f"{path.name}: {name} is {places[name]['shape']}; this model's is {piece.shape}")
                first, last = max(piece.start, start), min(piece.end, start + stored.get_shape()[0])
                if first < last:
                    piece.live[first - piece.start : last - piece.start].copy_(stored[first - start : last - start])
                    missing[name] -= last - first
    if lacking := [name for name, count in missing.items() if count]:
        raise UserError(f"checkpoint: {lacking[0]} is not, or not all there; it was made by another model")


@dataclass
class Save:
    """A save in flight."""

    folder: str
    state: TrainState
    rows: list[dict[str, Any]]
    started: float
    fault: Exception | None = None
    seconds: float = 0.0
    bytes: int = 0  # of all ranks, as rank 0 learns from their receipts


class Checkpointer:
    """Saves and finds the checkpoints of one run under `prefix` of a store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        world: World,
        work: Path,
        attempt: int = 0,
        keep_last: int = 2,
        superseded: Callable[[], bool] = lambda: False,
        keep_every: int | None = None,
        between_failures: float = PRIOR_SECONDS_BETWEEN_FAILURES,
    ) -> None:
        self.store, self.prefix, self.world, self.attempt = store, prefix, world, attempt
        self.keep_last, self.keep_every, self.superseded = keep_last, keep_every, superseded
        self.work, self.between_failures = work, between_failures
        self._copy: HostCopy | None = None
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None  # of the last save that ended
        self._damaged: list[str] = []  # commits that this attempt has fallen back past

    @property
    def busy(self) -> bool:
        """Whether a save is still on its way."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, pieces: dict[str, Piece]) -> None:
        """Make room for the copies, which are always of these pieces, in the background."""
        self._copy = HostCopy(pieces, self.world.rank, self.world.world_size)

    def before_update(self) -> None:
        """To be called before the pieces change: see HostCopy."""
        if self._copy:
            self._copy.before_update()

    def save(self, state: TrainState, pieces: dict[str, Piece], log: EventLog) -> None:
        """Copy `pieces`, and begin to upload and commit them with `state` and the uncommitted rows.

        Waits for the save before it, if that is still on its way; see `settle` for how it ended.
        """
        self.settle(log, wait=True)
        started = time.monotonic()
        if self._copy is None:
            self.prepare(pieces)
        assert self._copy
        self._copy.take()
        folder = f"{self.prefix}/checkpoints/step-{state.step:08d}-a{self.attempt:04d}"
        self._save = Save(folder, replace(state), list(log.uncommitted), started)
        self._thread = threading.Thread(target=self._carry_out, args=(self._save, self._copy), name="checkpoint")
        self._thread.start()

    def settle(self, log: EventLog, wait: bool = False) -> None:
        """Take note of how the last save ended, if it has (or once it has, with `wait`).

        A save that failed is reported and made up for by the next one: its rows stay uncommitted. Only
        StaleAttempt is raised: then nothing that this attempt does will ever count.
        """
        if self._save is None or self._thread is None or (self.busy and not wait):
            return
        self._thread.join()
        save, self._save = self._save, None
        self._fault = save.fault
        if isinstance(save.fault, StaleAttempt):
            raise save.fault
        if save.fault is None:
            del log.uncommitted[: len(save.rows)]
            log.event("checkpoint", step=save.state.step, seconds=save.seconds, bytes=save.bytes)
            return
        log.event("checkpoint_failed", step=save.state.step, reason=repr(save.fault))
        log_line(f"checkpoint of step {save.state.step} FAILED ({save.fault!r}); training goes on")

    def finish(self, log: EventLog) -> None:
        """Wait for the last save; raise what it failed with."""
        self.settle(log, wait=True)
        if self._fault:
            raise self._fault

    def _carry_out(self, save: Save, copy: HostCopy) -> None:
        """In the thread: upload this rank's file, hand in its receipt, and as rank 0 commit."""
        receipt = f"{save.folder}/receipt-{self.world.rank:05d}.json"
        try:
            failpoint("upload")
            mine = self._upload(save.folder, copy)
            failpoint("uploaded")
            self.store.put(receipt, json.dumps(asdict(mine)).encode())
            if self.world.rank == 0:
                receipts = self._receipts(save.folder)
                failpoint("receipts")
                self._commit(save, receipts)
                save.bytes = sum(r.size for r in receipts)
        except Exception as error:  # it is raised or reported by `settle`, in the thread that trains
            save.fault = error
            if self.world.rank != 0:  # rank 0 need not wait for what won't come
                with suppress(OSError, UserError):
                    self.store.put(receipt, json.dumps({"fault": repr(error)}).encode())
        save.seconds = time.monotonic() - save.started

    def _upload(self, folder: str, copy: HostCopy) -> FileReceipt:
        parts = copy.safetensors()
        name = f"rank-{self.world.rank:05d}-of-{self.world.world_size:05d}.safetensors"
        digest = sha256()
        for part in parts:
            digest.update(part)
        self.store.write(parts, f"{folder}/{name}")
        return FileReceipt(name, sum(len(part) for part in parts), digest.hexdigest())

    def _receipts(self, folder: str) -> list[FileReceipt]:
        """All ranks' receipts, once they are there. OSError if a rank has failed, TimeoutError if one is late."""
        deadline = time.monotonic() + RECEIPT_SECONDS
        receipts: list[FileReceipt] = []
        while len(receipts) < self.world.world_size:
            body = self.store.get(f"{folder}/receipt-{len(receipts):05d}.json")
            if body:
                told = json.loads(body)
                if "fault" in told:
                    raise OSError(f"rank {len(receipts)}: {told['fault']}")
                receipts.append(FileReceipt(**told))
            elif time.monotonic() > deadline:
                raise TimeoutError(f"rank {len(receipts)} handed in no receipt within {RECEIPT_SECONDS:.0f} s")
            else:
                time.sleep(RECEIPT_POLL_SECONDS)
        return receipts

    def load_latest(self, pieces: dict[str, Piece], log: EventLog, before: int | None = None) -> TrainState | None:
        """Fill `pieces` in place from the newest sound commit; None if there is none.

        With `before`, from the newest landmark up to that step.
        """
        while folders := [f for f in self._listed(before) if f not in self._damaged]:
            fault = self._fetch(folders[0]) if self.world.local_rank == 0 else None
            faults = [f for f in self.world.gather(fault) if f]
            if not faults:
                return self._load(pieces)
            self._damaged.append(folders[0])
            log.event("damaged", checkpoint=folders[0], reason=faults[0])
            if self.world.rank == 0:
                instead = "using the one before it" if folders[1:] else "no other is left"
                log_line(f"DAMAGED checkpoint {self.store.uri}/{folders[0]}: {faults[0]}; {instead}")
        return None

    def _listed(self, before: int | None) -> list[str]:
        """The commits there are now, newest first. Rank 0 lists for all: an attempt that is dying may still
        commit one and delete another."""
        folders = self.world.gather(self._committed() if self.world.rank == 0 else [])[0]
        if before is None:
            return folders
        return [f for f in folders if step_of(f) <= before and is_landmark(step_of(f))]

    def forget_after(self, step: int) -> None:
        """Remove what was committed after `step`, rows included: the run went back there to go another way.

        StaleAttempt, on every rank, if a newer attempt has taken over.
        """
        stale = self.world.gather(self.world.rank == 0 and self.superseded())[0]
        if stale:
            raise StaleAttempt(f"attempt {self.attempt} of {self.prefix} was superseded: nothing is rolled back")
        if self.world.rank == 0:
            # What was never committed goes too: its receipts would vouch for files of the way not taken.
            folders = {e.key.rpartition("/")[0] for e in self.store.entries(f"{self.prefix}/checkpoints/")}
            for folder in self._ours(folders):
                if step_of(folder) > step:
                    delete_checkpoint(self.store, folder)
            for key in self._ours(e.key for e in self.store.entries(f"{self.prefix}/metrics/")):
                if step_of(key) > step:
                    self.store.delete(key)
        self.world.gather(None)  # nobody commits before that is done

    def committed_steps(self) -> list[int]:
        """The steps that can be resumed from, newest first."""
        return [step_of(folder) for folder in self._committed()]

    def _commit(self, save: Save, files: list[FileReceipt]) -> None:
        step = save.state.step
        self._check_current(step)
        segment = f"{self.prefix}/metrics/step-{step:08d}-a{self.attempt:04d}.jsonl"
        self.store.put(segment, "".join(json.dumps(row) + "\n" for row in save.rows).encode())
        commit = {
            "step": step,
            "attempt": self.attempt,
            "world_size": self.world.world_size,
            "time": time.time(),
            "state": asdict(save.state),
            "metrics": segment.removeprefix(f"{self.prefix}/"),
            "files": [asdict(r) for r in files],
        }
        self._check_current(step)
        if not self.store.create(f"{save.folder}/COMMIT.json", sealed(commit)):
            raise StaleAttempt(f"attempt {self.attempt} of {self.prefix} is taken: step {step} is committed already")
        failpoint("committed")
        with suppress(OSError, UserError):  # what stays is deleted after the next commit, or by gc
            # Or they would pass for the newest again, and push out the sound ones.
            while self._damaged:
                delete_checkpoint(self.store, self._damaged.pop())
            old_ones = superfluous(self._committed(), self.keep_last, save.state.health.calm_step, self.keep_every)
            for old in self._ours(old_ones):
                delete_checkpoint(self.store, old)

    def _check_current(self, step: int) -> None:
        if self.superseded():
            raise StaleAttempt(f"attempt {self.attempt} of {self.prefix} was superseded: step {step} not committed")

    def _ours(self, keys: Iterable[str]) -> list[str]:
        """Without what a later attempt has made: that is not for this one to delete, however late it learns of it."""
        return [key for key in keys if int(key.rpartition("-a")[2].partition(".")[0]) <= self.attempt]

    def _committed(self) -> list[str]:
        """Folders with a COMMIT.json, newest step first, the later attempt first at equal steps."""
        keys = (entry.key for entry in self.store.entries(f"{self.prefix}/checkpoints/"))
        return sorted((k.removesuffix("/COMMIT.json") for k in keys if k.endswith("/COMMIT.json")), reverse=True)

    def _fetch(self, folder: str) -> str | None:
        """Bring a checkpoint into this node's work folder and verify it; what is wrong with it, or None.

        A store that is away, refuses us, or doesn't fit on the disk raises: that is no damage.
        """
        local = self.work / "loading"
        shutil.rmtree(local, ignore_errors=True)
        (local / "files").mkdir(parents=True)
        body = self.store.get(f"{folder}/COMMIT.json") or b""
        try:
            commit = unsealed(body)
        except ValueError:
            return "COMMIT.json is not what was written"

        def fetched(receipt: FileReceipt) -> str | None:
            path = local / "files" / receipt.name
            try:
                self.store.download(f"{folder}/{receipt.name}", path)
            except FileNotFoundError as error:
                return f"a file is missing: {error}"
            failpoint("download")
            if path.stat().st_size != receipt.size or sha256_of(path) != receipt.sha256:
                return f"{receipt.name} does not have the size and sha256 that COMMIT.json names"
            return None

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:  # a hash keeps a core busy, and a file comes meanwhile
            faults = list(pool.map(fetched, (FileReceipt(**f) for f in commit["files"])))
        if found := [fault for fault in faults if fault]:
            return found[0]
        (local / "COMMIT.json").write_bytes(body)
        return None

    def _load(self, pieces: dict[str, Piece]) -> TrainState:
        local = self.work / "loading"
        load_pieces(pieces, sorted((local / "files").iterdir()))
        state = TrainState.of(unsealed((local / "COMMIT.json").read_bytes())["state"])
        self.world.gather(None)  # all have read
        if self.world.local_rank == 0:
            shutil.rmtree(local)
        return state


def training_tensors(model: torch.nn.Module, optimizer: AdamW) -> dict[str, Piece]:
    """Weights and moments under stable names, sharing memory with the live ones."""
    kinds: dict[str, Mapping[Tensor, Tensor]] = {
        "model": {p: p for p in model.parameters()},
        "exp_avg": optimizer.exp_avg,
        "exp_avg_sq": optimizer.exp_avg_sq,
    }
    return {
        f"{kind}.{name}": Piece.whole(tensors[p])
        for kind, tensors in kinds.items()
        for name, p in model.named_parameters()
    }
