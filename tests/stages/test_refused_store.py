"""A store that refuses a run in mid-training stops no step; the newest commit survives."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from pipeline_runs import FOLDER_NAME, Project, sums
from servers import Radosgw, S3Account

from pipelines.artifacts.manifest import read_manifest
from pipelines.artifacts.store import S3Store
from pipelines.tracking.runs import Run, read_records
from trainer.commits import newest_commit

STEPS = 600
TRAIN = ("--stage", "train", "--set", f"train.max_steps={STEPS}", "--set", "runtime.checkpoint_minutes=0.01")


class Renewable:
    """A user of the server with a bucket, whose secret key changes."""

    def __init__(self, server: Radosgw, folder: Path) -> None:
        self.server, self.file = server, folder / "credentials"
        self.account = server.add_user(f"user-{uuid.uuid4().hex[:8]}")
        self.bucket = f"b-{uuid.uuid4().hex[:8]}"
        self.log_in(self.account.secret_key)
        self.client.create_bucket(Bucket=self.bucket)

    @property
    def client(self) -> Any:
        keys = {"aws_access_key_id": self.account.access_key, "aws_secret_access_key": self.account.secret_key}
        return boto3.client("s3", endpoint_url=self.account.endpoint, region_name="us-east-1", **keys)

    def log_in(self, secret: str) -> None:
        """Write the credentials file of the user's shell."""
        lines = ["[default]", f"aws_access_key_id={self.account.access_key}", f"aws_secret_access_key={secret}"]
        self.file.write_text("\n".join(lines))

    def change_key(self) -> str:
        """The server's new secret key of this user; the old one is refused from now on."""
        secret = uuid.uuid4().hex
        user = ("--uid", self.account.access_key, "--access-key", self.account.access_key, "--secret-key", secret)
        self.server._run("radosgw-admin", "-c", self.server._conf, "key", "create", "--key-type=s3", *user)
        self.account = S3Account(self.account.endpoint, self.account.access_key, secret)
        return secret


@pytest.fixture
def user(radosgw: Radosgw, tmp_path: Path, fresh_s3_store: Callable[[S3Account], S3Store]) -> Renewable:
    fresh_s3_store(radosgw.account)
    return Renewable(radosgw, tmp_path)


@pytest.fixture
def project(user: Renewable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(user.file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    project = Project(tmp_path / FOLDER_NAME)
    project.environment |= {
        "SKYTRAIN_STORE": f"s3://{user.bucket}/runs",
        "SKYTRAIN_STORE_SECONDS": "5",
        "SKYTRAIN_UNSAVED_SECONDS": "3",
    }
    return project


def store_of(user: Renewable) -> S3Store:
    return S3Store(user.bucket, "runs")


def committed_step(user: Renewable) -> int:
    records = read_records(store_of(user))
    commit = newest_commit(store_of(user), records[0].prefixes["train"]) if records else None
    return commit.step if commit else 0


def undisturbed(project: Project, user: Renewable) -> tuple[list[Any], dict[str, str]]:
    """Losses and sums of the same run in another store."""
    project.run("run", "tiny.yaml", *TRAIN, "--store", f"s3://{user.bucket}/undisturbed")
    return results(S3Store(user.bucket, "undisturbed"))


def results(store: S3Store) -> tuple[list[Any], dict[str, str]]:
    (record,) = read_records(store)
    made = read_manifest(store, record.prefixes["train"])
    assert made
    return [(row["step"], row["train/loss"]) for row in Run(store, record).series if "train/loss" in row], sums(made)


def test_a_run_whose_secret_key_is_refused_trains_on_and_saves_with_the_renewed_key(
    radosgw: Radosgw, user: Renewable, project: Project
) -> None:
    project.environment["SKYTRAIN_UNSAVED_SECONDS"] = "600"
    with project.started("run", "tiny.yaml", *TRAIN) as process:
        project.wait_until(lambda: committed_step(user) > 150, process)
        secret = user.change_key()
        refused_at = project.rows_logged()
        project.wait_until(lambda: project.rows_logged() > refused_at + 100, process, 120)
        user.log_in(secret)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "checkpoint of step" in err and "SignatureDoesNotMatch" in err
    (record,) = read_records(store_of(user))
    assert Run(store_of(user), record).summary.attempts == 1
    assert results(store_of(user)) == undisturbed(project, user)


def test_a_run_whose_key_stays_refused_leaves_and_resumes_from_its_newest_commit(
    radosgw: Radosgw, user: Renewable, project: Project
) -> None:
    slow = ("--set", "train.max_steps=4000")
    with project.started("run", "tiny.yaml", *TRAIN, *slow) as process:
        project.wait_until(lambda: committed_step(user) > 150, process)
        secret = user.change_key()
        _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert "the store has taken no checkpoint for" in err and "Traceback" not in err
    last = project.rows_logged()
    assert project.run("run", "tiny.yaml", *TRAIN, *slow, expect=2).stderr.count("\n") == 1  # at the start: a mistake
    user.log_in(secret)
    with project.started("run", "tiny.yaml", *TRAIN, *slow) as process:
        project.wait_until(lambda: committed_step(user) > last, process)
        process.terminate()
        process.communicate(timeout=100)
    (record,) = read_records(store_of(user))
    assert [row["step"] for row in Run(store_of(user), record).series if "train/loss" in row][:last] == list(
        range(1, last + 1)
    )


def test_wrong_credentials_at_the_start_are_a_mistake(radosgw: Radosgw, user: Renewable, project: Project) -> None:
    user.log_in("wrong")
    err = project.run("run", "tiny.yaml", expect=2).stderr
    assert json.dumps(err).count("\\n") == 1 and "the secret key does not belong to the access key" in err
