"""infra/mlflow: a team's server takes what runs write, keeps strangers out, and survives the loss of its disk."""

import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from servers import S3Account
from team_mlflow import FILES, TeamMlflow

ROOT = FILES.parents[1]


@pytest.fixture
def team(s3_server: S3Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TeamMlflow]:
    if missing := TeamMlflow.missing_programs():
        pytest.skip(f"needs {', '.join(missing)}")
    pytest.importorskip("flask_wtf", reason="needs mlflow[auth] (pip)")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    bucket = f"team-{uuid.uuid4().hex[:8]}"
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
    server = TeamMlflow(tmp_path, s3_server, f"s3://{bucket}/mlflow")
    server.start()
    try:
        for name, value in server.client_environment().items():
            monkeypatch.setenv(name, value)
        yield server
    finally:
        server.stop()


def status(url: str, certificate: Path | None = None, method: str = "GET", **headers: str) -> int:
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | headers, method=method)
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    try:
        return urllib.request.urlopen(request, timeout=30, context=context).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_what_runs_wrote_before_a_backup_survives_the_loss_of_the_servers_disk(team: TeamMlflow) -> None:
    from mlflow import MlflowClient

    search = "/api/2.0/mlflow/experiments/search?max_results=1"
    assert status(team.uri + search, team.certificate) == 401  # without an account
    direct = f"http://{team.address}"
    assert status(direct + search, Host="evil.example.org") == 403  # another name that leads here
    create = direct + "/api/2.0/mlflow/runs/search"
    assert status(create, method="POST", Origin="https://evil.example.org") == 403  # a page of another site
    assert status(create, method="POST", Origin=team.uri) == 401

    client = MlflowClient()
    experiment = client.create_experiment("skytrain")
    for _ in range(2):
        write_run(client, experiment)
    before = points_of(client, experiment)
    assert [len(points) for points in before.values()] == [20, 20]
    made = team.backup("now")
    assert made.returncode == 0, made.stderr
    client.create_experiment("after the backup")
    team.aws("cp", "-", f"{team.store}/backups/2999-01-01T000000Z/mlflow.dump", text="half")  # incomplete

    team.stop_mlflow()
    team.lose_database()
    restored = team.backup("restore")
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout == f"restored: {made.stdout.split()[-1]}\n"
    assert "the database's" not in made.stderr + restored.stderr
    team.start_mlflow()
    assert points_of(client, experiment) == before
    assert client.get_experiment_by_name("after the backup") is None
    (run,) = client.search_runs([experiment], max_results=1)
    folder = client.download_artifacts(run.info.run_id, "")  # by the server, from the bucket
    assert (Path(folder) / "sample.txt").read_text().startswith("a text of a run\n")
    assert team.backup("restore", "1999-01-01T000000Z").returncode == 2


def write_run(client: Any, experiment: str) -> None:
    from mlflow.entities import Metric

    run = client.create_run(experiment).info.run_id
    client.log_batch(
        run, metrics=[Metric("train/loss", 1 / step, 1_700_000_000_000 + step, step) for step in range(1, 21)]
    )
    client.log_text(run, "a text of a run\n" * 100, "sample.txt")


def points_of(client: Any, experiment: str) -> dict[str, list[tuple[int, float]]]:
    return {
        run.info.run_id: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
        for run in client.search_runs([experiment])
    }


def test_no_file_of_the_server_holds_a_secret_and_only_the_proxy_is_reachable() -> None:
    compose: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text())
    services = compose["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    secret = [name for name in ("SKYTRAIN_DB_PASSWORD", "SKYTRAIN_MLFLOW_PASSWORD", "SKYTRAIN_MLFLOW_KEY")]
    for service in services.values():
        words = " ".join(map(str, [*service.get("command", []), *service.get("entrypoint", [])]))
        assert not any(name in words for name in secret), "a command line is public on its machine"
    task = yaml.safe_load((FILES / "sky.yaml").read_text())
    assert {name: task["secrets"][name] for name in secret} == dict.fromkeys(secret)
    settings = (FILES / "example.env").read_text().splitlines()
    assert all(f"{name}=" in settings for name in secret)


@pytest.mark.parametrize("name", ["infra/mlflow/compose.yaml", "docker/compose.yaml"])
def test_the_compose_files_keep_the_schema(name: str) -> None:
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema (pip)")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
