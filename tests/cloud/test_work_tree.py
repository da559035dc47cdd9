"""sky/environment.sh: the environment of a job without an image."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def test_eight_recoveries_install_the_measured_torch_once(node: dict[str, str], tmp_path: Path) -> None:
    for i in range(8):
        subprocess.run(["bash", ROOT / "sky" / "environment.sh"], env=node | {"HOME": f"{tmp_path}/{i}"}, check=True)
    calls = (tmp_path / "uv.log").read_text().splitlines()
    assert [line.split()[0] for line in calls] == ["venv", "pip"]
    (venv,) = (tmp_path / "home" / ".cache" / "skytrain").glob("venv-*/")
    pins = (venv / "constraints.txt").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith(("torch==", "triton=="))] == ["torch==2.11.0", "triton==3.6.0"]
    assert len(pins) > 100  # and the other packages' versions
    assert f'exec "{venv}/bin/python"' in (tmp_path / "7" / ".local" / "bin" / "skytrain").read_text()
