"""The newest state of a training on the disk of its machine, for a store that takes no checkpoint for long.

The ranks keep it as they leave (trainer/checkpoint.py). The next attempt on the same machine commits it, unless a later
attempt has made a commit meanwhile.
"""

from pathlib import Path

from pipelines.artifacts.manifest import scratch
from pipelines.stage import Work
from trainer.commits import Commit, committed_folders, newest_commit
from trainer.store import LocalStore, Store


def kept_store(home: Path, store: Store) -> LocalStore:
    """The folder for the states of `store` on this machine; keys are the same as there."""
    return LocalStore(home / "kept" / scratch(home, store, "").name)


def commit_kept_state(work: Work) -> None:
    """Commit the state that an earlier attempt kept on this machine, if it is newer than every commit."""
    kept, prefix = kept_store(work.home, work.store), work.plan.prefix
    for folder in committed_folders(kept, prefix):
        try:
            commit = Commit.decode(kept.get(f"{folder}/COMMIT.json") or b"", folder)
        except ValueError:
            commit = None
        if commit and is_newer(commit, newest_commit(work.store, prefix)):
            for file in commit.files:
                work.store.upload(kept.path_of(f"{folder}/{file.name}"), f"{folder}/{file.name}")
            work.store.put(f"{prefix}/{commit.metrics}", kept.get(f"{prefix}/{commit.metrics}") or b"")
            work.attempt.check()
            work.store.create(f"{folder}/COMMIT.json", commit.encode())
            work.screen.note(f"  step {commit.step:,} was kept on this machine's disk, and is now in the store")
    for entry in kept.entries(f"{prefix}/"):
        kept.delete(entry.key)


def is_newer(kept: Commit, newest: Commit | None) -> bool:
    """Whether no later attempt has made a commit, and the newest one is older."""
    return newest is None or (newest.attempt <= kept.attempt and newest.step < kept.step)
