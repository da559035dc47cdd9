"""sky/environment.sh: the environment of a job without an image."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A node's shell, where `uv` and `getent` are scripts that record their arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "home").mkdir()
    scripts = {
        "getent": f"echo 'somebody:x:1:1::{tmp_path}/home:/bin/sh'",
        "sleep": "",
        "uv": f"""
if [ "$1" = pip ] && [ -n "$FAILURES" ] && [ $(cat {tmp_path}/uv.log | wc -l) -le "$FAILURES" ]; then
  echo failed >> {tmp_path}/uv.log; echo "$SAID" >&2; exit 2
fi
echo "$@" >> {tmp_path}/uv.log; [ "$1" = pip ] || mkdir -p "${{@: -1}}"
""",
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


@pytest.mark.parametrize(
    ("failures", "said", "setup", "run"),
    [
        (2, "error: Request failed after 3 retries\n  cause: Failed to fetch: http://index/simple/six/", 0, None),
        (99, "error: Request failed after 3 retries\n  cause: Failed to fetch: http://index/simple/six/", 0, 75),
        (99, "error: No solution found when resolving dependencies", 1, None),
    ],
    ids=["index away for a while", "index away", "no such version"],
)
def test_an_index_that_does_not_answer_ends_no_job(
    node: dict[str, str], tmp_path: Path, failures: int, said: str, setup: int, run: int | None
) -> None:
    (tmp_path / "uv.log").touch()
    script = ["bash", str(ROOT / "sky" / "environment.sh")]
    assert subprocess.run(script, env=node | {"FAILURES": str(failures), "SAID": said}).returncode == setup
    program = tmp_path / "cluster" / ".local" / "bin" / "skytrain"
    if run is not None:
        assert subprocess.run([program]).returncode == run
        subprocess.run(script, env=node, check=True)  # the next attempt of the job on this node
    assert not program.exists() if setup else "pipelines.cli" in program.read_text()
