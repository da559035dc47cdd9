"""Checks of real buckets and servers before a machine is rented."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import answering
from cloud_support import KEYS, closed_port
from core_bundle import make_bundle
from servers import S3Account
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.recipe.loader import load_recipe
from pipelines.run.stage import STAGES
from pipelines.store.s3_store import S3Store
from pipelines.user.cloud.checks import Finding, mlflow_answers, old_versions, store_commits
from pipelines.user.cloud.preflight import credentials, preflight
from pipelines.user.cloud.request import LaunchRequest, secrets_from_shell, variables_from_shell
from pipelines.user.cloud.tasks import managed_job
from trainer.base.install import how_to_install
from trainer.base.store import LocalStore, Store
from trainer.config.errors import UserError

pytestmark = pytest.mark.usefixtures("clean_shell")


def test_a_bucket_that_refuses_a_second_create_is_accepted_and_nothing_is_left_in_it(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store]
) -> None:
    store = fresh_s3_store(moto_server)
    assert store_commits(store).state == "ok"
    assert store.entries("") == []


def test_a_versioned_bucket_is_named_with_its_cost_unless_a_rule_ends_old_versions(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store]
) -> None:
    store = fresh_s3_store(moto_server)
    assert list(old_versions(store)) == list(old_versions(LocalStore(Path("store")))) == []
    store._client.put_bucket_versioning(Bucket=store.bucket, VersioningConfiguration={"Status": "Enabled"})

    (found,) = old_versions(store)
    assert found.state == "note" and "$0.023 a GB and month" in found.seen and "lifecycle rule" in found.remedy

    def named(rule: dict[str, Any]) -> bool:
        ends = {"ID": "a", "Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
        store._client.put_bucket_lifecycle_configuration(
            Bucket=store.bucket, LifecycleConfiguration={"Rules": [ends | rule]}
        )
        return bool(list(old_versions(store)))

    assert named({"Filter": {"Prefix": "other/"}}) and named({"Filter": {"Prefix": ""}, "Status": "Disabled"})
    assert named({"Filter": {"Tag": {"Key": "a", "Value": "b"}}})
    assert not named({"Filter": {"Prefix": "some/"}}) and not named({"Prefix": ""})
    store._client.put_bucket_versioning(Bucket=store.bucket, VersioningConfiguration={"Status": "Suspended"})
    assert list(old_versions(store)) == []


def test_a_tracking_server_that_is_gone_or_refuses_us_is_named() -> None:
    assert "start it" in mlflow_answers(closed_port(), {}).remedy

    good, account = base64.b64encode(b"somebody:a password").decode(), {"MLFLOW_TRACKING_USERNAME": "somebody"}
    with answering(lambda one: one.respond(200 if one.headers.get("Authorization") == f"Basic {good}" else 401)) as uri:
        assert mlflow_answers(uri, account | {"MLFLOW_TRACKING_PASSWORD": "a password"}).state == "ok"
        refused = mlflow_answers(uri, account | {"MLFLOW_TRACKING_PASSWORD": "another"})
    assert refused.state == "broken" and "MLFLOW_TRACKING_PASSWORD" in refused.remedy
    assert "another" not in f"{refused.seen} {refused.remedy}"


# A job


def problems(
    store: Store,
    source: str = f"hf://datasets/a/b@{'a' * 40}",
    changes: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Finding]:
    """The findings that are not fine, by subject."""
    asked = LaunchRequest("tiny-12345678", store.uri, **options)
    recipe = load_recipe("smoke", [f"tokens.source={source}", *changes])
    findings = preflight(managed_job(asked, STAGES), asked, recipe, store, KEYS)
    return {finding.what: finding for finding in findings if finding.state != "ok"}


def test_what_only_this_machine_has_is_refused_for_rented_machines(tmp_path: Path) -> None:
    store, bundle = LocalStore(tmp_path), make_bundle(tmp_path / "bundle")
    weights = f"train.init_from={tmp_path}/model@sha256:{'0' * 64}"
    changes = (weights, f"evaluate.core={bundle}")
    rented = problems(store, "mine/*.txt", changes, infra="aws")
    assert rented["store"].remedy == "--store s3://BUCKET/PREFIX"
    assert "skytrain run RECIPE --stage tokenize" in rented["text"].remedy
    assert "run:NAME" in rented["weights for train"].remedy
    assert "is on this machine" in rented["core"].seen
    cluster = problems(store, f"{tmp_path}/*.txt", changes, infra="slurm/here")
    assert {name: cluster[name].state for name in ("text", "weights for train", "core")} == dict.fromkeys(
        ("text", "weights for train", "core"), "note"
    )
    assert "store" not in cluster


def test_mlflow_without_an_answer_here_is_a_note_and_a_malformed_uri_is_refused(tmp_path: Path) -> None:
    def found(uri: str) -> Finding:
        return problems(LocalStore(tmp_path), infra="slurm/here", variables={"MLFLOW_TRACKING_URI": uri})["mlflow"]

    with answering(lambda one: one.respond(401)) as refusing:
        for one in found(closed_port()), found(refusing):
            assert one.state == "note" and "; a job runs without it; later, `skytrain report tiny-1" in one.remedy
    for wrong in ("ftp://host", "http://ann:secret@host", "http://[host"):
        with pytest.raises(UserError, match="^MLFLOW_TRACKING_URI: "):
            found(wrong)


@pytest.mark.parametrize(("infra", "consolidated"), [("slurm/here", True), ("aws,slurm/here", False), ("aws", False)])
def test_slurm_is_refused_to_a_controller_that_could_not_reach_it(
    infra: str, consolidated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sky.skypilot_config.get_nested", lambda keys, default: consolidated)
    found = problems(LocalStore(tmp_path), infra=infra).get("controller")
    refused = infra == "aws,slurm/here"
    assert found and "consolidation_mode: true" in found.remedy if refused else found is None


@pytest.mark.parametrize("gpus", ["V100-32GB:8", "P100:1", "MI300X:8", "tpu-v5litepod-8:1"])
def test_gpus_for_which_the_wheels_have_no_kernels_are_refused_unless_the_environment_is_the_users(
    tmp_path: Path, gpus: str
) -> None:
    def found(**more: Any) -> Finding | None:
        return problems(LocalStore(tmp_path), infra="slurm/here", gpus=gpus, **more).get("GPUs")

    refused = found()
    assert refused and refused.state == "broken" and "have no kernels for it" in refused.seen
    assert found(variables={"SKYTRAIN_VENV": "/opt/own"}) is None


@pytest.mark.parametrize(
    ("secrets", "clouds", "state"),
    [
        (KEYS, ["lambda"], "ok"),
        ({}, ["aws"], "note"),  # the nodes' role
        ({}, ["slurm"], "note"),  # a file of theirs
        ({}, ["aws", "lambda"], "broken"),
        ({"AWS_ACCESS_KEY_ID": "an id"}, ["aws"], "broken"),
        ({"SKYTRAIN_S3_ACCESS_KEY_ID": "an id", "SKYTRAIN_S3_SECRET_ACCESS_KEY": "a key"}, ["aws", "lambda"], "ok"),
        ({"SKYTRAIN_S3_SECRET_ACCESS_KEY": "a key"}, ["aws"], "broken"),
    ],
)
def test_a_job_that_could_not_open_the_bucket_is_not_launched(
    secrets: dict[str, str], clouds: list[str], state: str
) -> None:
    assert credentials(S3Store("bucket"), clouds, secrets).state == state


# The shell that launches


def test_a_job_takes_over_the_settings_of_the_store_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items() | {("AWS_REGION", "eu-west-1"), ("WANDB", "another thing")}:
        monkeypatch.setenv(name, value)
    file = {"AWS_SHARED_CREDENTIALS_FILE": "/shared/ann/aws-credentials"}
    assert variables_from_shell(f"{name}={path}" for name, path in file.items()) == {"AWS_REGION": "eu-west-1"} | file
    assert variables_from_shell(["A=b=c"]) == {"AWS_REGION": "eu-west-1", "A": "b=c"}
    assert secrets_from_shell() == KEYS
    assert secrets_from_shell(["WANDB"]) == KEYS | {"WANDB": "another thing"}
    own = {name.replace("AWS_", "SKYTRAIN_S3_"): "of R2" for name in KEYS}
    for name, value in own.items() | {("SKYTRAIN_S3_ENDPOINT_URL", "https://r2")}:
        monkeypatch.setenv(name, value)
    assert secrets_from_shell() == own  # those of AWS are SkyPilot's, to rent machines
    assert variables_from_shell() == {"SKYTRAIN_S3_ENDPOINT_URL": "https://r2"}


def test_keys_of_another_service_under_the_names_of_aws_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://r2")
    noted = credentials(S3Store("bucket"), ["aws"], KEYS)
    assert noted.state == "note" and "SKYTRAIN_S3_" in noted.remedy


@pytest.mark.parametrize("text", ["AWS_SECRET_ACCESS_KEY=x", "MY_API_TOKEN=x", "DB_PASSWORD=x"])
def test_a_secret_is_not_taken_as_a_plain_variable(text: str) -> None:
    with pytest.raises(UserError, match="export it and use --secret") as refused:
        variables_from_shell([text])
    assert "=x" not in str(refused.value)


# This machine: `skytrain doctor`


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder and a shell without a server of SkyPilot, which else remembers the address that it has used before: that
    of another server on this machine, for instance."""
    from sky.server import common

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKYTRAIN_STORE", raising=False)
    monkeypatch.setenv("SKYTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", closed_port())
    common.get_server_url.cache_clear()
    yield
    common.get_server_url.cache_clear()


@pytest.mark.usefixtures("alone")
def test_a_machine_without_clouds_can_run_and_learns_what_a_launch_needs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.exit_code == 0
    assert {found[name]["state"] for name in ("python", "store")} == {"ok"}
    assert found["skypilot"]["remedy"] in ("sky api start", f"needed to launch: {how_to_install('cloud')}")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.usefixtures("alone")
def test_each_fault_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key", "AWS_REGION": "us-east-1"}
    settings |= {"SKYTRAIN_STORE": "s3://bucket", "SKYTRAIN_STORE_SECONDS": "1"}
    for name, value in (settings | dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"), closed_port())).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    remedies = {one["what"]: one["remedy"] for one in json.loads(done.stdout) if one["state"] == "broken"}
    assert done.exit_code == 2 and set(remedies) == {"store", "mlflow"}
    assert "no success within 1 s" in remedies["store"] and "MLFLOW_TRACKING_URI" in remedies["mlflow"]
