"""Promises of `skytrain pull`: exactly the export's files, verified, and nothing else touched."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_runs import Project
from run_records import PLANS, RUN, finished, recorded

from pipelines.artifacts.manifest import upload
from pipelines.pull import pull_run
from trainer.errors import UserError
from trainer.store import LocalStore

CONTENTS = {"config.json": b"{}", "model.safetensors": b"weights", "gguf/a-f16.gguf": b"half", "gguf/a-q8_0.gguf": b"8"}


@pytest.fixture
def run(store: LocalStore, tmp_path: Path) -> str:
    """A run in the store with an export in two formats."""
    files = []
    for name, content in CONTENTS.items():
        path = tmp_path / "made"
        path.write_bytes(content)
        files.append(upload(store, PLANS["export"].prefix, 1, path, name))
    finished(store, "export", tuple(files))
    recorded(store)
    return RUN


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_pull_brings_all_files_or_those_of_a_format(store: LocalStore, run: str, tmp_path: Path) -> None:
    assert [file.was_there for file in pull_run(store, run, tmp_path / "all", None)] == [False] * 4
    assert files_in(tmp_path / "all") == CONTENTS
    list(pull_run(store, run, tmp_path / "one", "gguf"))
    assert files_in(tmp_path / "one") == {name: CONTENTS[name] for name in CONTENTS if name.startswith("gguf/")}
    list(pull_run(store, "smoke", tmp_path / "one", "hf"))
    assert files_in(tmp_path / "one") == CONTENTS


def test_a_second_pull_continues_the_first(store: LocalStore, run: str, tmp_path: Path) -> None:
    pulling = pull_run(store, run, tmp_path / "out", None)
    first = next(pulling).path
    del pulling
    inode = first.stat().st_ino
    assert [file.was_there for file in pull_run(store, run, tmp_path / "out", None)] == [True, False, False, False]
    assert files_in(tmp_path / "out") == CONTENTS and first.stat().st_ino == inode


def test_a_file_of_the_user_is_never_overwritten(store: LocalStore, run: str, tmp_path: Path) -> None:
    (tmp_path / "out" / "gguf").mkdir(parents=True)
    mine = tmp_path / "out" / "gguf" / "a-q8_0.gguf"
    mine.write_bytes(b"9")
    with pytest.raises(UserError, match=r"a-q8_0.gguf: another file is there; choose an empty folder, or remove it"):
        pull_run(store, run, tmp_path / "out", None)
    assert files_in(tmp_path / "out") == {"gguf/a-q8_0.gguf": b"9"}
    with pytest.raises(UserError, match=r"out/.*: cannot be written \(File exists\); choose another folder"):
        list(pull_run(store, run, mine, "hf"))
    with pytest.raises(UserError, match=r"/proc/.*: cannot be written \(No such file.*; choose another folder"):
        list(pull_run(store, run, Path("/proc/out"), "hf"))


def test_the_command_pulls_a_real_run_and_refuses_a_format_that_it_lacks(
    undisturbed: Callable[[int], Project], tmp_path: Path
) -> None:
    project = undisturbed(1)
    refused = project.run("pull", "tiny", str(tmp_path / "out"), "--format", "gguf", expect=2)
    assert "error: --format gguf: the export of tiny-" in refused.stderr and "has hf; `skytrain run" in refused.stderr
    done = project.run("pull", "tiny", str(tmp_path / "out"))
    assert f"bytes in {tmp_path / 'out'}, verified by sha256" in done.stdout
    exported = project.path("export", "model.safetensors")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == exported.read_bytes()
