"""`skytrain init`, and `skytrain.yaml`, which every command reads."""

import json
import os
import pty
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError
from servers import S3Account

from pipelines.artifacts.store import client_from_environment, open_store
from pipelines.cloud.bucket import prepare_bucket, require_tls
from pipelines.project import Project
from pipelines.verbs.plan import clouds_of
from trainer.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
SKYTRAIN = [sys.executable, "-c", "from pipelines.cli import main; main()"]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "AWS_", "MLFLOW_"))}
    return kept | {"PYTHONPATH": str(REPOSITORY), "HOME": str(folder), "SKYTRAIN_NOTICE": "off"} | more


def skytrain(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*SKYTRAIN, *arguments],
        cwd=folder,
        env=environment(folder, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "skytrain.yaml"
    path.write_text(text)
    return path


# --- the file


def test_an_option_wins_over_the_environment_and_both_over_the_file(tmp_path: Path) -> None:
    written(tmp_path, "store: from-file\ntracking: 'https://mlflow.example.org'\n")
    for arguments, more, store in (
        (["--store", "from-option"], {"SKYTRAIN_STORE": "from-variable"}, "from-option"),
        ([], {"SKYTRAIN_STORE": "from-variable"}, "from-variable"),
        ([], {}, "from-file"),
    ):
        done = skytrain(tmp_path, "status", "nobody", *arguments, **more)
        assert done.returncode == 2 and f"no such run in file://{tmp_path}/{store}" in done.stderr

    project = Project.read(tmp_path / "skytrain.yaml")
    for shell, then in (
        ({}, "https://mlflow.example.org"),
        ({"MLFLOW_TRACKING_URI": "http://mine"}, "http://mine"),
        ({"SKYTRAIN_TRACKING": "off"}, None),
    ):
        project.set_in(shell)
        assert shell.get("MLFLOW_TRACKING_URI") == then
    off, shell = Project(tracking="off"), {"MLFLOW_TRACKING_URI": "http://mine"}
    off.set_in(shell)
    assert "SKYTRAIN_TRACKING" not in shell
    off.set_in(shell := {})
    assert shell == {"SKYTRAIN_TRACKING": "off"}


@pytest.mark.slow
def test_a_launch_takes_place_budget_and_image_of_the_file_unless_an_option_gives_them(tmp_path: Path) -> None:
    written(tmp_path, "store: runs\ninfra: lambda\nbudget: 7\nimage: example.org/me/skytrain:1\n")
    more = {"SKYPILOT_API_SERVER_ENDPOINT": "http://127.0.0.1:9"}
    job = skytrain(tmp_path, "launch", "smoke", "--dry-run", "--budget", "9", **more).stdout
    assert "SKYTRAIN_BUDGET: '9'" in job and "SKYTRAIN_IMAGE: example.org/me/skytrain:1" in job
    assert "infra: lambda" in job and "infra: aws" not in job and f"SKYTRAIN_STORE: file://{tmp_path}/runs" in job


def test_a_plan_compares_the_clouds_of_the_places() -> None:
    assert clouds_of("aws/us-east-1, aws/eu-west-1,gcp") == "aws,gcp" and clouds_of(None) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stroe: a", "stroe: unknown field; did you mean 'store'?"),
        ("budget: much", "budget: input should be a valid number (got 'much')"),
        ("budget: 0", "budget: input should be greater than 0 (got 0)"),
        ("budget: .nan", "budget: input should be a finite number"),
        ("store: ''", "store: empty, or blanks around it"),
        ("tracking: mlflow.example.org", "tracking: not an http(s) URL of an MLflow server, and not off"),
        ("tracking: https://me:secret@mlflow.example.org", "tracking: has a user or password in it"),
        ("- store", "not of the form NAME: VALUE; its names are store, tracking, infra, budget, image"),
        ("a: b: c", "not a YAML file: "),
    ],
)
def test_a_wrong_key_or_value_of_the_file_is_one_line_without_the_secret(tmp_path: Path, text: str, line: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        Project.read(path)
    assert str(error.value).startswith(f"{path}: {line}")
    assert "\n" not in str(error.value) and "secret@" not in str(error.value)


def test_every_command_but_help_and_init_ends_with_2_on_a_wrong_file(tmp_path: Path) -> None:
    written(tmp_path, "stroe: a\n")
    for verb in (["plan", "smoke"], ["report"], ["doctor"]):
        done = skytrain(tmp_path, *verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: skytrain.yaml: stroe: unknown field; did you mean 'store'?\n"
    assert skytrain(tmp_path, "plan", "--help").returncode == 0


def test_what_init_writes_is_what_every_command_reads(tmp_path: Path) -> None:
    for project in (Project(), Project(store="s3://b/p", tracking="off", infra="aws/us-east-1", budget=2.5)):
        assert Project.read(written(tmp_path, project.to_yaml())) == project
    assert set(yaml.safe_load(Project(store="runs").to_yaml())) == {"store"}


# --- the command


def test_init_without_a_terminal_asks_nothing_and_replaces_no_file_without_a_word(tmp_path: Path) -> None:
    done = skytrain(tmp_path, "init")
    assert done.returncode == 2 and done.stderr.startswith("error: init: no terminal to ask on; give --store s3://")
    assert not (tmp_path / "skytrain.yaml").exists()
    path = written(tmp_path, "stroe: my own\n")
    done = skytrain(tmp_path, "init", "--store", "runs")
    assert done.returncode == 2 and done.stderr.startswith("error: init: skytrain.yaml exists; edit it, or add --repl")
    assert path.read_text() == "stroe: my own\n"
    done = skytrain(tmp_path, "init", "--store", "ftp://host", "--replace")
    assert done.returncode == 2 and "not a store" in done.stderr and path.read_text() == "stroe: my own\n"


@pytest.mark.slow
def test_init_on_a_terminal_asks_for_what_no_option_gives_and_ends_with_doctors_screen(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [*SKYTRAIN, "init", "--tracking", "off"]
    more = environment(tmp_path, SKYPILOT_API_SERVER_ENDPOINT="http://127.0.0.1:9")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=more, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(leader, b"runs\n\nmuch\n12.5\n\n")
    out, _ = process.communicate(timeout=300)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0
    assert yaml.safe_load((tmp_path / "skytrain.yaml").read_text()) == {
        "store": "runs", "tracking": "off", "budget": 12.5,
    }  # fmt: skip
    assert f"store: file://{tmp_path}/runs is writable" in out.decode() and b"next: " in out


# --- the bucket


def test_init_makes_a_private_bucket_on_a_real_server_and_leaves_an_existing_one_as_it_is(
    tmp_path: Path, s3_server: S3Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"init-{uuid.uuid4().hex[:12]}"
    options = ("init", "--store", f"s3://{bucket}/team/runs", "--tracking", "off", "--budget", "25")
    more = s3_server.environment | {"SKYPILOT_API_SERVER_ENDPOINT": "http://127.0.0.1:9"}
    done = skytrain(tmp_path, *options, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"s3://{bucket} created" in done.stdout
    assert f"s3://{bucket}/team/runs is writable, and refuses a second create" in done.stdout
    assert s3_server.secret_key not in done.stdout + (tmp_path / "skytrain.yaml").read_text()

    for name, value in more.items():
        monkeypatch.setenv(name, value)
    client = client_from_environment(f"s3://{bucket}", 10)
    assert "not private: this server then refuses every object (AccessDenied" in done.stdout  # radosgw 16
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1} and "Expiration" not in rule
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0, "the checks leave nothing behind"

    client.delete_bucket_lifecycle(Bucket=bucket)
    seen = [finding.seen for finding in prepare_bucket(bucket, "team/runs/", client)]
    assert seen[0].endswith("exists; left as it is") and "not without uploads of dead nodes after a day" in seen
    assert skytrain(tmp_path, "report", **more).returncode == 0  # the store of the file


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Any:
    """moto's S3 at the addresses of AWS, in this process."""
    moto = pytest.importorskip("moto", reason="needs moto (pip)")
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with moto.mock_aws():
        yield client_from_environment("s3://runs", 10)


def test_a_new_bucket_on_aws_has_all_protections_in_its_region_and_an_open_one_is_named(aws: Any) -> None:
    found = [finding.seen for finding in prepare_bucket("my-runs", "sky/", aws)]
    has = ["private", "encrypted", "without uploads of dead nodes after a day"]
    assert found[:4] == ["s3://my-runs created in eu-west-1", *has]
    assert aws.get_bucket_location(Bucket="my-runs")["LocationConstraint"] == "eu-west-1"
    require_tls(aws, "my-runs")
    assert [finding.seen for finding in prepare_bucket("my-runs", "sky/", aws)][1:] == [*has, "open over TLS alone"]
    (denied,) = json.loads(aws.get_bucket_policy(Bucket="my-runs")["Policy"])["Statement"]
    assert denied["Effect"] == "Deny" and denied["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}

    aws.create_bucket(Bucket="open", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    aws.put_bucket_versioning(Bucket="open", VersioningConfiguration={"Status": "Enabled"})
    notes = prepare_bucket("open", "", aws)
    assert {finding.state for finding in notes[1:] if finding.seen.startswith(("not ", "keeps "))} == {"note"}
    assert {"not private", "not open over TLS alone", "keeps old versions of removed files"} <= {n.seen for n in notes}


def test_a_protection_after_which_the_server_refuses_objects_is_removed_again(aws: Any) -> None:
    last = prepare_bucket("my-runs", "sky/", aws)[-1]  # moto reads no conditions: the policy denies everything there
    assert last.seen.startswith("not open over TLS alone: this server then refuses every object (AccessDenied")
    with pytest.raises(aws.exceptions.ClientError, match="NoSuchBucketPolicy"):
        aws.get_bucket_policy(Bucket="my-runs")
    store = open_store("s3://my-runs/sky")
    assert store.create("a", b"1") and not store.create("a", b"2")
    assert [entry.key for entry in store.entries("")] == ["a"], "the checks leave nothing behind"


def test_a_name_that_another_account_has_is_one_line(aws: Any) -> None:
    aws.meta.events.register("before-call.s3.HeadBucket", refuse_head)
    with pytest.raises(UserError, match="^s3://my-runs: of another account, or these credentials may not list it"):
        prepare_bucket("my-runs", "", aws)


def refuse_head(**_: Any) -> None:
    answer: Any = {"Error": {"Code": "403"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    raise ClientError(answer, "HeadBucket")
