"""examples/minimal.py, run as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_minimal_example_goes_on_after_a_kill_with_the_same_losses(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(ROOT / "examples" / "minimal.py"), str(tmp_path / "out"), __file__]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lost: dict[str, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout
        for line in first.stdout:
            lost |= losses(line)
            if "70" in lost:
                first.kill()
    resumed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    assert "begins at step 40" in resumed and "\ndef " in resumed
    found = losses(resumed)
    assert [found[step] for step in ("50", "60", "70")] == [lost[step] for step in ("50", "60", "70")]
    assert float(found["120"]) < 2.5 < float(lost["10"])  # nats a byte


def losses(output: str) -> dict[str, str]:
    """The losses that the example has printed, by step."""
    return dict(re.findall(r"step +([0-9]+): loss ([0-9.]+)", output))
