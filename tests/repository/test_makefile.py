"""`make` in a clone, and in a work tree of it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, target: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["make", target, f"PYTHON={sys.executable}"], cwd=folder, capture_output=True, text=True)


def test_make_in_a_work_tree_that_borrows_an_environment_uses_it_and_never_empties_it(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "clone" / ".venv", tmp_path / "work tree"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "pyvenv.cfg").touch()
    (theirs / "bin" / "python").write_text('#!/bin/sh\necho "ran $*"\n')
    (theirs / "bin" / "python").chmod(0o755)
    mine.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, mine)
    (mine / ".venv").symlink_to(theirs)
    done = make(mine, "docs")
    assert done.returncode == 0 and "ran -m benchmarks.documents" in done.stdout, done.stderr
    refused = make(mine, "install")
    assert refused.returncode == 2 and f"links to that of another clone, {theirs}; remove the link" in refused.stderr
    assert sorted(path.name for path in theirs.rglob("*")) == ["bin", "python", "pyvenv.cfg"]
