"""Promises of `skytrain pull`: exactly the export's files, verified, and nothing else touched."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_runs import Project
from run_records import PLANS, RUN, finished, recorded

from pipelines.store.manifest import DamagedArtifact, File, upload
from pipelines.user.pull import pull_run
from trainer.base.store import LocalStore
from trainer.config.errors import StoreUnavailable, UserError

CONTENTS = {"config.json": b"{}", "model.safetensors": b"weights", "gguf/a-f16.gguf": b"half", "gguf/a-q8_0.gguf": b"8"}


def exported(store: LocalStore, tmp_path: Path, *more: File) -> str:
    """A run with an export of CONTENTS, and of `more` in its manifest."""
    files = []
    for name, content in CONTENTS.items():
        path = tmp_path / "made"
        path.write_bytes(content)
        files.append(upload(store, PLANS["export"].prefix, 1, path, name))
    finished(store, "export", (*files, *more))
    recorded(store)
    return RUN


@pytest.fixture
def run(store: LocalStore, tmp_path: Path) -> str:
    """A run in the store with an export in two formats."""
    return exported(store, tmp_path)


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


def test_what_is_in_the_way_is_found_before_anything_is_copied(store: LocalStore, run: str, tmp_path: Path) -> None:
    for name, make in {
        "file": lambda path: path.write_bytes(b"mine"),
        "link": lambda path: path.symlink_to(tmp_path / "elsewhere"),
        "link to a folder": lambda path: path.symlink_to(tmp_path / "elsewhere", target_is_directory=True),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        make(tmp_path / name / "gguf")
        with pytest.raises(UserError, match=r"/gguf: not a folder, but a file or a link; choose an empty folder"):
            pull_run(store, run, tmp_path / name, None)
        assert not [*(tmp_path / "elsewhere").iterdir()] and [one.name for one in (tmp_path / name).iterdir()] == [
            "gguf"
        ]
    (tmp_path / "out").mkdir()
    (tmp_path / "same").write_bytes(CONTENTS["config.json"])
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "same")
    with pytest.raises(UserError, match=r"config.json: another file is there"):
        pull_run(store, run, tmp_path / "out", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "names 'config.json' twice"), ("gguf", "names 'gguf' twice"), ("new", r"a0001/new: .* missing")],
)
def test_a_manifest_that_cannot_be_pulled_whole_is_refused_before_anything_is_copied(
    store: LocalStore, tmp_path: Path, name: str, message: str
) -> None:
    run = exported(store, tmp_path, File(name, f"a0001/{name}", 1, "0" * 64))
    with pytest.raises(DamagedArtifact, match=message):
        pull_run(store, run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_an_object_of_another_size_than_in_the_manifest_is_refused_before_it_is_copied(
    store: LocalStore, run: str, tmp_path: Path
) -> None:
    with store.path_of(f"{PLANS['export'].prefix}/a0001/model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DamagedArtifact, match=r"it is 1,099,511,627,776 bytes long, but 7 bytes in its manifest"):
        pull_run(store, run, tmp_path / "out", None)


def test_the_next_pull_removes_what_a_killed_one_left_and_refuses_to_work_beside_another(
    store: LocalStore, run: str, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from trainer.base.store import LocalStore\n"
        "from pipelines.user.pull import pull_run\n"
        "class Killed(LocalStore):\n"
        "    def download(self, key, path):\n"
        "        Path(path).write_bytes(b'some'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "list(pull_run(Killed(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]), None))"
    )
    out, here = tmp_path / "out", Path(__file__).parents[3]
    command = [sys.executable, "-c", code, str(store.root), run, str(out)]
    assert subprocess.run(command, cwd=here, check=False).returncode == -signal.SIGKILL
    assert list(files_in(out).values()) == [b"some"]
    pulling = pull_run(store, run, out, None)
    next(pulling)
    with pytest.raises(UserError, match=r"out: another pull is at work there; wait for its end"):
        next(pull_run(store, run, out, None))
    assert len(list(pulling)) == 3 and files_in(out) == CONTENTS
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "gguf", "model.safetensors"]


def test_an_outage_during_a_pull_is_an_outage(store: LocalStore, run: str, tmp_path: Path) -> None:
    class Silent(LocalStore):
        def download(self, key: str, path: Path) -> str:
            raise StoreUnavailable("no answer")

    with pytest.raises(StoreUnavailable):
        list(pull_run(Silent(store.root), run, tmp_path / "out", None))


def test_the_command_pulls_a_real_run_and_refuses_a_format_that_it_lacks(
    undisturbed: Callable[[int], Project], tmp_path: Path
) -> None:
    project = undisturbed(1)
    nowhere = project.run("pull", "tiny", "", expect=2)
    assert nowhere.stderr == "error: DIR: an empty name; name a folder, or . for this one\n"
    refused = project.run("pull", "tiny", str(tmp_path / "out"), "--format", "gguf", expect=2)
    assert "error: --format gguf: the export of tiny-" in refused.stderr and "has hf; `skytrain run" in refused.stderr
    done = project.run("pull", "tiny", str(tmp_path / "out"))
    assert f"bytes in {tmp_path / 'out'}, verified by sha256" in done.stdout
    exported = project.path("export", "model.safetensors")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == exported.read_bytes()
