"""The newest state of a training on the disks of its nodes, for a store that takes no checkpoint for long.

The ranks keep it as they leave (trainer/checkpoint.py): each node has the files of its ranks, and a copy of the
COMMIT.json that names the files of all. The next attempt on these nodes commits the state, unless a later attempt has
made a commit meanwhile: each node stores the files that it has exactly as COMMIT.json says, and the head creates the
commit only if no file is missing then. Otherwise the attempt resumes from the newest commit.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pipelines.artifacts.manifest import scratch
from pipelines.nodes.head import Head
from trainer.commits import Commit, FileReceipt, committed_folders, newest_commit
from trainer.store import LocalStore, Store, sha256_of


def kept_store(home: Path, store: Store) -> LocalStore:
    """The folder for the states of `store` on this machine; keys are the same as there."""
    return LocalStore(home / "kept" / scratch(home, store, "").name)


def commit_kept_state(
    home: Path, store: Store, prefix: str, head: Head | None, check: Callable[[], None], note: Callable[[str], None]
) -> None:
    """Commit the state that an earlier attempt kept on these nodes, if it is whole and newer than every commit.

    `check` raises if this attempt must end.
    """
    kept = kept_store(home, store)
    for folder, commit in usable_states(kept, store, prefix):
        store_held_files(kept, store, folder, commit.files)
        if head and (missing := missing_files(store, folder, commit.files)):
            head.store_kept(folder, missing, check)
        if missing := missing_files(store, folder, commit.files):
            note(f"  step {commit.step:,} was kept without {missing[0].name}, which no node has: it is not used")
            continue
        store.put(f"{prefix}/{commit.metrics}", kept.get(f"{prefix}/{commit.metrics}") or b"")
        check()
        store.create(f"{folder}/COMMIT.json", commit.encode())
        disks = "these machines' disks" if head else "this machine's disk"
        note(f"  step {commit.step:,} was kept on {disks}, and is now in the store")
    forget_kept(kept, prefix)


def usable_states(kept: LocalStore, store: Store, prefix: str) -> Iterator[tuple[str, Commit]]:
    """The states of a run that this node kept and that are newer than every commit in the store, with their folders."""
    for folder in committed_folders(kept, prefix):
        try:
            commit = Commit.decode(kept.get(f"{folder}/COMMIT.json") or b"", folder)
        except ValueError:
            continue
        if is_newer(commit, newest_commit(store, prefix)):
            yield folder, commit


def is_newer(kept: Commit, newest: Commit | None) -> bool:
    """Whether no later attempt has made a commit, and the newest one is older."""
    return newest is None or (newest.attempt <= kept.attempt and newest.step < kept.step)


def store_held_files(kept: LocalStore, store: Store, folder: str, files: Iterable[FileReceipt]) -> None:
    """Upload the files of a kept checkpoint that this node has, with their exact contents."""
    for file in files:
        key = f"{folder}/{file.name}"
        path = kept.path_of(key)
        if path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256:
            store.upload(path, key)


def missing_files(store: Store, folder: str, files: Iterable[FileReceipt]) -> tuple[FileReceipt, ...]:
    """The files of a checkpoint that are not in the store."""
    sizes = {entry.key: entry.size for entry in store.entries(f"{folder}/")}
    return tuple(file for file in files if sizes.get(f"{folder}/{file.name}") != file.size)


def forget_kept(kept: LocalStore, prefix: str) -> None:
    """Remove the states of a run that this node kept."""
    for entry in kept.entries(f"{prefix}/"):
        kept.delete(entry.key)
