"""A state that nodes kept on their disks is committed by the next attempt there, if it is whole and the newest."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from servers import LOOPBACK, free_ports

from pipelines.nodes.address import NodeAddress
from pipelines.nodes.head import Head
from pipelines.nodes.kept import commit_kept_state, kept_store
from pipelines.nodes.worker import run_worker
from pipelines.recipe import load_recipe
from pipelines.show.console import TerminalScreen
from pipelines.stage import plans_of
from trainer.commits import Commit, FileReceipt, TrainState, committed_folders, newest_commit
from trainer.process import StopSignal
from trainer.store import LocalStore, Store

PREFIX, RUN = "train/tiny-0123", "tiny-0123"


def commit(store: Store, step: int, attempt: int, ranks: int = 1, here: tuple[int, ...] = (0,)) -> None:
    """A commit of so many ranks, with the files of those that are here."""
    folder = f"{PREFIX}/checkpoints/step-{step:08d}-a{attempt:04d}"
    rows = f"metrics/step-{step:08d}-a{attempt:04d}.jsonl"
    bodies = [f"weights of {step}, {rank}".encode() for rank in range(ranks)]
    files = tuple(
        FileReceipt(f"rank-{rank:05d}-of-{ranks:05d}.safetensors", len(body), sha256(body).hexdigest())
        for rank, body in enumerate(bodies)
    )
    for rank in here:
        store.put(f"{folder}/{files[rank].name}", bodies[rank])
    store.put(f"{PREFIX}/{rows}", b"")
    store.create(f"{folder}/COMMIT.json", Commit(step, attempt, ranks, 0.0, TrainState(step), rows, files).encode())


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("others", "newest"),
    [
        ([], (9, 1)),
        ([(5, 1)], (9, 1)),
        ([(5, 2)], (5, 2)),  # a later attempt went on elsewhere
        ([(12, 1)], (12, 1)),
    ],
)
def test_a_kept_state_is_committed_unless_others_went_on(
    tmp_path: Path, others: list[tuple[int, int]], newest: tuple[int, int]
) -> None:
    store, kept = LocalStore(tmp_path / "store"), kept_store(tmp_path, LocalStore(tmp_path / "store"))
    commit(kept, 9, 1)
    for step, attempt in others:
        commit(store, step, attempt)
    for _ in range(2):
        commit_kept_state(tmp_path, store, PREFIX, None, nothing, print)
        found = newest_commit(store, PREFIX)
        assert found and (found.step, found.attempt) == newest
        (folder, *_) = committed_folders(store, PREFIX)
        assert store.get(f"{folder}/{found.files[0].name}") == f"weights of {found.step}, 0".encode()
        assert kept.entries("") == []


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """A head with one worker, each with a home of its own."""
    recipe = load_recipe("smoke")
    store, port = LocalStore(tmp_path / "store"), free_ports(1)[0]
    stop = StopSignal.__new__(StopSignal)  # pytest keeps its signals
    with ThreadPoolExecutor(1) as threads:
        with Head(NodeAddress(0, 2, LOOPBACK, port), RUN, stop, lambda error: 75) as head:
            worker = NodeAddress(1, 2, LOOPBACK, port)
            screen, plans, home = TerminalScreen(quiet=True), plans_of(recipe), tmp_path / "home-1"
            ended = threads.submit(run_worker, worker, RUN, "train", recipe, plans, store, home, stop, screen, False)
            head.wait_for_workers(2)
            yield head
        assert ended.result(60) == 0


@pytest.mark.parametrize("damage", [None, "missing", "changed"])
def test_a_state_of_several_nodes_is_committed_only_if_each_file_is_on_one_of_them_as_all_agreed(
    tmp_path: Path, head: Head, damage: str | None
) -> None:
    store = LocalStore(tmp_path / "store")
    homes = [tmp_path / f"home-{node}" for node in range(2)]
    commit(store, 5, 1, ranks=4, here=(0, 1, 2, 3))
    for node, home in enumerate(homes):
        commit(kept_store(home, store), 9, 1, ranks=4, here=(2 * node, 2 * node + 1))
    (other,) = kept_store(homes[1], store).root.rglob("rank-00003-*")
    if damage == "missing":
        other.unlink()
    elif damage:
        other.write_bytes(other.read_bytes()[::-1])
    notes: list[str] = []
    commit_kept_state(homes[0], store, PREFIX, head, nothing, notes.append)
    found = newest_commit(store, PREFIX)
    assert found and found.step == (5 if damage else 9)
    assert len(notes) == 1 and ("rank-00003-of-00004" in notes[0]) == bool(damage)
    (folder, *_) = committed_folders(store, PREFIX)
    for rank, file in enumerate(found.files):
        assert store.get(f"{folder}/{file.name}") == f"weights of {found.step}, {rank}".encode()
    assert kept_store(homes[0], store).entries("") == []
