"""A password of MLflow is in no file and in no message of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow_runs import remove_tracking_settings, until
from servers import free_ports

from pipelines.cloud.checks import mlflow_answers
from pipelines.tracking.mlflow import shipper as shipping
from pipelines.tracking.mlflow.secrets import redacted, without_credentials
from pipelines.tracking.mlflow.settings import tracking_uri
from pipelines.tracking.mlflow.shipper import rebuild
from pipelines.tracking.mlflow.tracker import Tracker
from trainer.errors import UserError
from trainer.store import LocalStore

CANARY = "hunter2/canary"
QUOTED = "hunter2%2Fcanary"


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # `tracking_uri` sets them; monkeypatch removes them again


@pytest.mark.parametrize("scheme", ["postgresql", pytest.param("http", marks=pytest.mark.slow)])
def test_no_file_of_a_tracked_run_holds_the_servers_password(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = f"{scheme}://ann:{QUOTED}@127.0.0.1:{free_ports(1)[0]}/db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0.1")
    tracker = Tracker(tmp_path / "work", "run-1", default_uri="sqlite:///d")
    tracker.start()
    tracker.stage_started("train", {"a": 1}, {})
    until(lambda: "will try again" in tracker.shipper_log.read_text(), 60, "the shipper found no server")
    print(tracker.close(), tracker.uri if scheme == "http" else "")
    tracker.keep_journal(store := LocalStore(tmp_path / "store"))
    with pytest.raises(UserError, match="has taken nothing for") as error:
        rebuild(store, "run-1", tracker.uri)
    print(error.value, *mlflow_answers(uri, os.environ).__dict__.values())

    texts = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()}
    texts[Path("output")] = "".join(capfd.readouterr())
    assert [str(path) for path, text in texts.items() if CANARY in text or QUOTED in text] == []
    for path in (tracker.log, tracker.shipper_log):
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_password_of_a_url_moves_to_mlflows_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_credentials("http://a.b/c") == ("http://a.b/c", {})
    assert tracking_uri(f"https://ann:{QUOTED}@a.b:5000/c", "") == "https://a.b:5000/c"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("ann", CANARY)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "own")
    tracking_uri(f"https://ann:{QUOTED}@a.b:5000/c", "")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "own"
    assert redacted("refused: own") == "refused: ***"


def test_a_traceback_of_the_shipper_hides_the_password(tmp_path: Path) -> None:
    code = (
        "import sys; from pipelines.tracking.mlflow.shipper import main\n"
        "sys.argv[1:] = [sys.argv[1] + '/no/such.log']\n"
        "import pipelines.tracking.mlflow.shipper as s\n"
        "def fail(name): raise RuntimeError('cannot reach ' + __import__('os').environ['MLFLOW_TRACKING_URI'])\n"
        "s.Path = fail\n"
        "main()"
    )
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"postgresql://ann:{QUOTED}@h/db",
        "PYTHONPATH": str(Path(shipping.__file__).parents[3]),
    }
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert "cannot reach postgresql://ann:***@h/db" in done.stderr and QUOTED not in done.stderr
