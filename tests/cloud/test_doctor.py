"""`skytrain doctor` on machines without and with faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import free_ports

from pipelines.cloud.doctor import disk

ROOT = Path(__file__).resolve().parents[2]


def doctor(folder: Path, expect: int, **more: str) -> dict[str, Any]:
    """Its findings by subject; the exit code is as expected."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "MLFLOW_", "AWS_"))}
    ours = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "SKY_RUNTIME_DIR": str(folder),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}",
    }
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "doctor", "--json"]
    done = subprocess.run(command, cwd=folder, env=kept | ours | more, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stdout + done.stderr
    return {finding["what"]: finding for finding in json.loads(done.stdout)}


def test_a_machine_without_clouds_can_run_and_learns_the_needs_of_a_launch(tmp_path: Path) -> None:
    found = doctor(tmp_path, 0)
    assert {found[name]["state"] for name in ("python", "torch", "mlflow", "boto3", "store")} == {"ok"}
    assert found["skypilot"]["state"] == "note"
    assert found["skypilot"]["remedy"] in ("sky api start", "needed to launch: pip install '.[cloud]'")
    assert not any(path.is_file() for path in tmp_path.rglob(".skytrain/**/*"))


@pytest.mark.slow
def test_each_fault_is_named_with_its_remedy(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    keys = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key", "AWS_REGION": "us-east-1"}
    found = doctor(
        tmp_path,
        2,
        SKYTRAIN_STORE="s3://bucket",
        SKYTRAIN_STORE_SECONDS="1",
        AWS_ENDPOINT_URL=nobody,
        MLFLOW_TRACKING_URI=nobody,
        **keys,
    )
    broken = {name: finding["remedy"] for name, finding in found.items() if finding["state"] == "broken"}
    assert set(broken) == {"store", "mlflow"}
    assert "no success within 1 s" in broken["store"] and "MLFLOW_TRACKING_URI" in broken["mlflow"]


def test_free_space_is_measured_in_the_folder_for_scratch(tmp_path: Path) -> None:
    finding = disk(tmp_path / "not" / "yet" / "there")
    assert finding.seen.endswith(f"at {tmp_path}")
    assert (finding.state == "note") is (int(finding.seen.split()[0].replace(",", "")) < 30)


def test_a_folder_for_scratch_that_is_a_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = disk(tmp_path / "file" / "below")
    assert found.state == "broken" and found.remedy == "name one in SKYTRAIN_HOME"
