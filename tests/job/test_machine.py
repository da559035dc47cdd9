"""The bill of a rented machine begins once, and not before the machine is rented."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.job.machine import FRESH_SECONDS, SET_UP, begin_bill, set_environment
from pipelines.store.ledger import Meter
from trainer.base.process import since_boot, steady_time


def test_the_bill_begins_once_and_not_before_the_machine_is_rented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SKYTRAIN_HOME", "SKYTRAIN_METER", "SKY_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)

    def begun(runtime: str = "") -> float:
        """When the bill begins, in a job with this folder of SkyPilot's, which Slurm's nodes have."""
        monkeypatch.setenv("SKY_RUNTIME_DIR", runtime)
        monkeypatch.setenv("SKYTRAIN_HOME", "")
        set_environment()
        assert os.environ["SKYTRAIN_HOME"] == str(Path(runtime or tmp_path) / "skytrain")
        begin_bill()
        since, phase = Meter.here().read() or (0.0, "")
        assert phase == "provision"
        return since

    def allocated(at: float) -> Any:
        """Slurm gives SkyPilot its nodes."""
        (tmp_path / ".hushlogin").touch()
        os.utime(tmp_path / ".hushlogin", (at, at))
        return pytest.approx(at, abs=0.1)

    first = allocated(time.time() - 100)
    assert begun("/run/sky") == first
    assert begun() == first  # a second job on the same machine
    assert begun("/run/sky") == first
    recovered = allocated(time.time() + 5)  # another cluster in the same home
    assert begun("/run/sky") == recovered
    (tmp_path / ".hushlogin").unlink()
    boot = steady_time() - since_boot()
    for up, since in ((FRESH_SECONDS - 1, boot), (since_boot() - 10, steady_time() - 10)):
        (tmp_path / ".skytrain-meter").unlink()
        (tmp_path / SET_UP).write_text(f"{up:.2f} 7.00")
        assert begun() == pytest.approx(since, abs=0.1)
