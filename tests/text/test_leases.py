"""Leases of parts: whoever works, dies, freezes or comes back, the shards are the same."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from texts import FourFiles

from pipelines.text import leases, parts
from pipelines.text.leases import Lease, PartTaken, take
from pipelines.text.parts import finished_part, make_parts, parts_in_order
from trainer.store import LocalStore, Store

PARTS = 6


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a second. Processes that the test forks have them, too."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(leases, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(parts, "WAIT_SECONDS", 0.1)


@pytest.fixture
def text(tmp_path: Path) -> FourFiles:
    """Twelve files in six parts of five or six shards."""
    for number in range(2 * PARTS):
        (tmp_path / f"{number:02d}.jsonl").write_text(
            "".join(json.dumps({"text": f"{number} {line} " * 9}) + "\n" for line in range(150 + 10 * number))
        )
    return FourFiles(tmp_path, "*.jsonl", tokenizer="bytes", shard_tokens=5000, parts=PARTS)


def work(text: FourFiles, store: Path, rank: int, waits: bool = True) -> None:
    """One node, at a speed at which a signal finds it at work."""
    job = text.job(parts_in_order(rank, 4, PARTS), store)

    def slow(*file: Any) -> Any:
        time.sleep(0.1)
        return job.upload(*file)

    list(make_parts(replace(job, upload=slow, waits=waits)))


def shards_made(text: FourFiles, store: Path) -> list[list[tuple[str, int, str, int, int]]]:
    """Every finished part's shards as their receipts have them: without the attempt's folder."""
    lists = [finished_part(LocalStore(store), text.plan, part) for part in range(PARTS)]
    assert all(lists), lists
    return [[(r.file.name, r.tokens, r.file.sha256, r.document, r.offset) for r in one or []] for one in lists]


def started(text: FourFiles, store: Path, rank: int) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work, args=(text, store, rank))
    process.start()
    return process


@pytest.mark.parametrize(
    ("nodes", "kills"),
    [(3, 3), *(pytest.param(nodes, 5, marks=pytest.mark.slow) for nodes in (1, 2, 4, 7))],
)
def test_any_number_of_nodes_with_kills_and_a_frozen_one_makes_the_shards_of_one_node(
    nodes: int, kills: int, text: FourFiles, tmp_path: Path, quick: None
) -> None:
    list(make_parts(text.job(range(PARTS), tmp_path / "alone")))
    draw, store = random.Random(nodes), tmp_path / "several"
    running = [started(text, store, rank) for rank in range(nodes)]
    try:
        frozen = running[0]
        time.sleep(0.15)
        os.kill(frozen.pid, signal.SIGSTOP)  # longer than its lease is good
        for _ in range(kills):
            time.sleep(draw.uniform(0.02, 0.2))
            victim = draw.randrange(nodes)
            if running[victim] is not frozen or nodes == 1:
                running[victim].kill()
                running[victim].join()
                running[victim] = started(text, store, victim)
        time.sleep(1.3)
        if running[0] is frozen:
            os.kill(frozen.pid, signal.SIGCONT)
        for process in running:
            process.join(60)
        assert [process.exitcode for process in running] == [0] * nodes
    finally:
        for process in running:
            process.kill()
            process.join()
    assert shards_made(text, store) == shards_made(text, tmp_path / "alone")


def test_a_node_leaves_once_no_part_is_left_to_take_and_the_others_keep_theirs(
    text: FourFiles, tmp_path: Path, quick: None
) -> None:
    job = text.job(range(PARTS), tmp_path / "store")
    with leased(job.store, text, 0), leased(job.store, text, 3):
        *_, last = make_parts(replace(job, waits=False))
    made = [finished_part(job.store, job.plan, part) is not None for part in range(PARTS)]
    assert made == [False, True, True, False, True, True] and last.new > 0
    list(make_parts(replace(job, folder=job.folder)))  # given back: the node that waits takes them at once
    list(make_parts(text.job(range(PARTS), tmp_path / "alone")))
    assert shards_made(text, tmp_path / "store") == shards_made(text, tmp_path / "alone")


def leased(store: Store, text: FourFiles, part: int, attempt: int = 1) -> Lease:
    lease = take(store, text.plan.prefix, part, attempt, "another node")
    assert lease
    return lease


def test_a_lease_is_good_until_its_node_gives_it_back_falls_silent_or_belongs_to_an_older_attempt(
    text: FourFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    store = LocalStore(tmp_path / "store")

    def taken(attempt: int = 1) -> Lease | None:
        return take(store, text.plan.prefix, 0, attempt, "me")

    with leased(store, text, 0):
        (first,) = store.entries(f"{text.plan.prefix}/leases/00/")
        wait_until(lambda: next(iter(store.entries(first.key))).modified > first.modified)  # it is renewed
        assert taken() is None
    given_back = taken()
    assert given_back and taken() is None  # not entered, so nobody renews it
    newer = taken(attempt=2)
    assert newer and taken(attempt=1) is None
    with newer:
        newer.check()
    monkeypatch.setattr(leases, "SILENT_SECONDS", 0.3)
    silent = leased(store, text, 0)
    wait_until(lambda: taken() is not None)
    with silent:  # it thaws
        wait_until(lambda: silent.lost)
        with pytest.raises(PartTaken):
            silent.check()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
