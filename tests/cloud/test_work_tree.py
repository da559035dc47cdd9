"""sky/environment.sh: the environment of a job without an image."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_work_trees_own_code_runs_in_an_existing_environment(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYTRAIN_VENV": sys.prefix}
    subprocess.run(["bash", ROOT / "sky" / "environment.sh"], env=environment, check=True)
    command = tmp_path / ".local" / "bin" / "skytrain"
    assert str(ROOT) in command.read_text()
    done = subprocess.run(
        [command, "recipes", "--json"], env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert "gpt2-124m" in done.stdout.decode()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A node's shell, where `uv` and `getent` are scripts that record their arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "home").mkdir()
    scripts = {
        "getent": f"echo 'somebody:x:1:1::{tmp_path}/home:/bin/sh'",
        "uv": f'echo "$@" >> {tmp_path}/uv.log; [ "$1" = pip ] || mkdir -p "${{@: -1}}"',
    }
    for name, body in scripts.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    yield {"HOME": str(tmp_path / "cluster"), "PATH": f"{programs}:{os.environ['PATH']}"}


def test_eight_recoveries_install_once_although_slurm_removes_their_home(node: dict[str, str], tmp_path: Path) -> None:
    for i in range(8):
        subprocess.run(["bash", ROOT / "sky" / "environment.sh"], env=node | {"HOME": f"{tmp_path}/{i}"}, check=True)
    calls = (tmp_path / "uv.log").read_text().splitlines()
    assert [line.split()[0] for line in calls] == ["venv", "pip"]
    (venv,) = (tmp_path / "home" / ".cache" / "skytrain").glob("venv-*/")
    assert f'exec "{venv}/bin/python"' in (tmp_path / "7" / ".local" / "bin" / "skytrain").read_text()
