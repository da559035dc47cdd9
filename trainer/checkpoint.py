"""Checkpoints that exist once their COMMIT.json does.

A checkpoint is a folder `checkpoints/step-<step>-a<attempt>/` of safetensors files, written by
torch.distributed.checkpoint: replicated state is stored once, split over the ranks, and loads at any
world size; nothing is pickled. Every rank uploads its own files and hands in a receipt (size and
sha256); then rank 0 *creates* COMMIT.json, which lists them all. Deletion removes COMMIT.json first.
The newest commit is found by listing the store; loading verifies every file, and a damaged
checkpoint falls back to the one before it, loudly.
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from trainer.metrics import EventLog, merge_rows
from trainer.parallel import World
from trainer.process import StaleAttempt
from trainer.store import Store, sha256_of

# A single process is what we mean when we say so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")

# Mean time between preemptions that is assumed of a spot node until the run knows better.
PRIOR_SECONDS_BETWEEN_PREEMPTIONS = 4 * 3600.0


@dataclass
class TrainState:
    """Where a run is. Everything else that resuming needs is weights and moments."""

    step: int = 0  # updates done, skipped ones (fp16 overflow) included
    tokens_seen: int = 0
    optimizer_steps: int = 0  # updates applied: AdamW's own count
    val_step: int = -1  # where val loss was last measured
    val_loss: float | None = None
    loss_scale: float | None = None  # fp16 only
    loss_scale_growth: int = 0

    def advance(self, batch_tokens: int, applied: bool) -> None:
        self.step += 1
        self.tokens_seen += batch_tokens
        self.optimizer_steps += applied


@dataclass(frozen=True)
class Receipt:
    """A file of a checkpoint, as it was uploaded."""

    name: str
    size: int
    sha256: str


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
    ) -> None:
        self.store, self.prefix, self.world, self.attempt = store, prefix, world, attempt
        self.keep_last, self.superseded = keep_last, superseded
        self.work = work / f"rank-{world.rank:05d}"

    def save(self, state: TrainState, tensors: dict[str, Tensor], log: EventLog) -> None:
        """Write, upload and commit `tensors` and `state`, with the rows since the last commit."""
        started = time.time()
        folder = f"{self.prefix}/checkpoints/step-{state.step:08d}-a{self.attempt:04d}"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        dcp.save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(self.work), save_distributed=True),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=False),
            no_dist=self.world.world_size == 1,
        )
        mine = [self._upload(path, folder) for path in sorted(self.work.iterdir())]
        files = [receipt for receipts in self.world.gather(mine) for receipt in receipts]
        shutil.rmtree(self.work)
        if self.world.rank == 0:
            self._commit(folder, state, files, log)
            log.event("checkpoint", step=state.step, seconds=time.time() - started, bytes=sum(r.size for r in files))
        self.world.gather(None)  # nobody goes on as if it were committed before it is
        log.uncommitted.clear()

    def load_latest(self, tensors: dict[str, Tensor], log: EventLog) -> TrainState | None:
        """Fill `tensors` in place from the newest sound commit; None if there is none."""
        # Rank 0 lists for all: a listing may change while another attempt is still dying.
        for folder in self.world.gather(self._committed() if self.world.rank == 0 else [])[0]:
            fault = self._fetch(folder) if self.world.local_rank == 0 else None
            faults = [f for f in self.world.gather(fault) if f]
            if not faults:
                return self._load(tensors)
            log.event("damaged", checkpoint=folder, reason=faults[0])
            if self.world.rank == 0:
                print(
                    f"DAMAGED checkpoint {self.store.uri}/{folder}: {faults[0]}; using the one before it",
                    flush=True,
                )
        return None

    def committed_steps(self) -> list[int]:
        """The steps that can be resumed from, newest first."""
        return [_step_of(folder) for folder in self._committed()]

    def _upload(self, path: Path, folder: str) -> Receipt:
        self.store.upload(path, f"{folder}/{path.name}")
        return Receipt(path.name, path.stat().st_size, sha256_of(path))

    def _commit(self, folder: str, state: TrainState, files: list[Receipt], log: EventLog) -> None:
        segment = f"{self.prefix}/metrics/step-{state.step:08d}-a{self.attempt:04d}.jsonl"
        self.store.put(segment, "".join(json.dumps(row) + "\n" for row in log.uncommitted).encode())
        commit = {
            "step": state.step,
            "attempt": self.attempt,
            "world_size": self.world.world_size,
            "time": time.time(),
            "state": asdict(state),
            "metrics": segment.removeprefix(f"{self.prefix}/"),
            "files": [asdict(r) for r in files],
        }
        if self.superseded():
            raise StaleAttempt(
                f"attempt {self.attempt} of {self.prefix} was superseded: step {state.step} not committed"
            )
        if not self.store.create(f"{folder}/COMMIT.json", sealed(commit)):
            raise StaleAttempt(
                f"attempt {self.attempt} of {self.prefix} is taken: step {state.step} is committed already"
            )
        for old in self._committed()[self.keep_last :]:
            delete_checkpoint(self.store, old)

    def _committed(self) -> list[str]:
        """Folders with a COMMIT.json, newest step first, the later attempt first at equal steps."""
        keys = (entry.key for entry in self.store.entries(f"{self.prefix}/checkpoints/"))
        return sorted((k.removesuffix("/COMMIT.json") for k in keys if k.endswith("/COMMIT.json")), reverse=True)

    def _fetch(self, folder: str) -> str | None:
        """Bring a checkpoint into this node's work folder and verify it; what is wrong with it, or None."""
        local = self.work.parent / "loading"
        shutil.rmtree(local, ignore_errors=True)
        (local / "files").mkdir(parents=True)
        body = self.store.get(f"{folder}/COMMIT.json") or b""
        try:
            commit = unsealed(body)
            for receipt in (Receipt(**f) for f in commit["files"]):
                path = local / "files" / receipt.name
                self.store.download(f"{folder}/{receipt.name}", path)
                if path.stat().st_size != receipt.size or sha256_of(path) != receipt.sha256:
                    return f"{receipt.name} does not have the size and sha256 that COMMIT.json names"
        except ValueError:
            return "COMMIT.json is not what was written"
        except FileNotFoundError as error:
            return f"a file is missing: {error}"
        (local / "COMMIT.json").write_bytes(body)
        return None

    def _load(self, tensors: dict[str, Tensor]) -> TrainState:
        local = self.work.parent / "loading"
        dcp.load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(local / "files")),
            no_dist=self.world.world_size == 1,
        )
        state = TrainState(**unsealed((local / "COMMIT.json").read_bytes())["state"])
        self.world.gather(None)  # all have read
        if self.world.local_rank == 0:
            shutil.rmtree(local)
        return state


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


def delete_checkpoint(store: Store, folder: str) -> None:
    """Remove a checkpoint, the marker first: what is half deleted was never committed."""
    store.delete(f"{folder}/COMMIT.json")
    for entry in store.entries(f"{folder}/"):
        store.delete(entry.key)


def series(store: Store, prefix: str) -> list[dict[str, Any]]:
    """The committed rows of a run, one a step, whatever was interrupted in between."""
    return merge_rows(segments(store, prefix))


def segments(store: Store, prefix: str) -> Iterator[list[dict[str, Any]]]:
    """The committed rows as they were logged, one list a commit, oldest attempt first."""
    keys = [entry.key for entry in store.entries(f"{prefix}/metrics/")]
    for key in sorted(keys, key=lambda k: (k.split("-a")[-1], k)):
        yield [json.loads(line) for line in (store.get(key) or b"").decode().splitlines()]


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments under stable names, sharing memory with the live ones."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": p.detach() for p, name in names.items()}
    for p, moments in optimizer.state.items():
        tensors |= {f"{kind}.{names[p]}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return tensors


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its zero moments now rather than in the first step, so that loading can fill them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            count_device = p.device if group["fused"] else torch.device("cpu")
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=count_device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for moments in optimizer.state.values():
        moments["step"].fill_(steps)


def checkpoint_seconds(save_seconds: float, between_failures: float = PRIOR_SECONDS_BETWEEN_PREEMPTIONS) -> float:
    """The interval that loses least: sqrt(2 · cost of a save · mean time between failures).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval". Between 30 s
    and 30 min: below, listing the store costs more than it saves; above, the prior is too sure of itself.
    """
    return min(1800.0, max(30.0, (2 * save_seconds * between_failures) ** 0.5))


def _step_of(folder: str) -> int:
    return int(folder.rsplit("/step-", 1)[1].split("-")[0])
