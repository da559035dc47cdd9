"""`skytrain doctor` on machines without and with faults."""

import json
from pathlib import Path

import pytest
from cloud_support import closed_port
from typer.testing import CliRunner

from pipelines.cli import app

pytestmark = pytest.mark.usefixtures("clean_shell")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKYTRAIN_STORE", raising=False)
    monkeypatch.setenv("SKYTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", closed_port())


def test_a_machine_without_clouds_can_run_and_learns_what_a_launch_needs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.exit_code == 0
    assert {found[name]["state"] for name in ("python", "store")} == {"ok"}
    assert found["skypilot"]["remedy"] in ("sky api start", "needed to launch: pip install '.[cloud]'")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_each_fault_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key", "AWS_REGION": "us-east-1"}
    settings |= {"SKYTRAIN_STORE": "s3://bucket", "SKYTRAIN_STORE_SECONDS": "1"}
    for name, value in (settings | dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"), closed_port())).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    remedies = {one["what"]: one["remedy"] for one in json.loads(done.stdout) if one["state"] == "broken"}
    assert done.exit_code == 2 and set(remedies) == {"store", "mlflow"}
    assert "no success within 1 s" in remedies["store"] and "MLFLOW_TRACKING_URI" in remedies["mlflow"]
