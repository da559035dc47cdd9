"""A state that a machine kept on its disk is committed by the next attempt there, unless others went on."""

from collections.abc import Callable

import pytest

from pipelines.stage import Work
from pipelines.stages import follow
from pipelines.stages.follow import Follower
from pipelines.stages.kept import commit_kept_state, kept_store
from trainer.commits import Commit, FileReceipt, TrainState, committed_folders, newest_commit
from trainer.errors import Interrupted
from trainer.events import Checkpointed, CheckpointFailed
from trainer.store import Store

FILE = "rank-00000-of-00001.safetensors"


def commit(store: Store, prefix: str, step: int, attempt: int) -> None:
    folder = f"{prefix}/checkpoints/step-{step:08d}-a{attempt:04d}"
    rows = f"metrics/step-{step:08d}-a{attempt:04d}.jsonl"
    store.put(f"{folder}/{FILE}", f"weights of {step}".encode())
    store.put(f"{prefix}/{rows}", b"")
    receipt = FileReceipt(FILE, 12, "0" * 64)
    store.create(f"{folder}/COMMIT.json", Commit(step, attempt, 1, 0.0, TrainState(step), rows, (receipt,)).encode())


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
    work: Callable[[str], Work], others: list[tuple[int, int]], newest: tuple[int, int]
) -> None:
    train = work("train")
    prefix, kept = train.plan.prefix, kept_store(train.home, train.store)
    commit(kept, prefix, 9, 1)
    for step, attempt in others:
        commit(train.store, prefix, step, attempt)
    commit_kept_state(train)
    found = newest_commit(train.store, prefix)
    assert found and (found.step, found.attempt) == newest
    (folder, *_) = committed_folders(train.store, prefix)
    assert train.store.get(f"{folder}/{FILE}") == f"weights of {found.step}".encode()
    assert kept.entries("") == []
    commit_kept_state(train)


def test_a_run_whose_store_takes_no_checkpoint_for_too_long_is_asked_to_stop(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, now = work("train"), 100.0
    monkeypatch.setattr(follow.time, "monotonic", lambda: now)
    monkeypatch.setattr(follow, "track_committed", lambda *_: {})
    monkeypatch.setenv("SKYTRAIN_UNSAVED_SECONDS", "1800")
    follower = Follower(train, None)  # type: ignore[arg-type]
    with train.screen.bar("train", 10) as bar:
        follower.handle(CheckpointFailed(3, "refused"), bar)
        now += 1799
        follower.handle(CheckpointFailed(4, "refused"), bar)
        follower.handle(Checkpointed(5, 0.1, 7), bar)
        assert train.attempt.latest.progress.unsaved_since is None
        now += 1799
        follower.handle(CheckpointFailed(6, "refused"), bar)
        assert not train.stop.asked and train.attempt.latest.progress.unsaved_because == "refused"
        now += 1801
        follower.handle(CheckpointFailed(7, "refused"), bar)
    assert train.stop.asked and train.stop.ending is Interrupted
    assert train.stop.reason == "the store has taken no checkpoint for 1,801 s"
