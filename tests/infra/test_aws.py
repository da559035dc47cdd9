"""infra/aws gives jobs, viewers, the tracking server and CI the rights for their work, and no others."""

import ast
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError
from servers import Radosgw, S3Account

from pipelines.store.s3_store import S3Store

pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse:UserWarning")  # what moto's CloudFormation lacks
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "infra" / "aws" / "stack.yaml"
BUCKET, OTHER_BUCKET, PREFIX = f"runs-{uuid.uuid4().hex[:8]}", f"others-{uuid.uuid4().hex[:8]}", "sky/train"
# The right that each request of ours needs.
RIGHTS = {
    "get_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "head_bucket": "s3:ListBucket",
}


class Stack:
    """The template, deployed to an imitation of AWS: its outputs, and its resources as the services have them."""

    def __init__(self, name: str, **parameters: str) -> None:
        self.formation, self.iam, self.s3 = (
            boto3.client(service, region_name="us-east-1") for service in ("cloudformation", "iam", "s3")
        )
        self.formation.create_stack(
            StackName=name,
            TemplateBody=TEMPLATE.read_text(),
            Capabilities=["CAPABILITY_IAM"],
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        )
        (made,) = self.formation.describe_stacks(StackName=name)["Stacks"]
        assert made["StackStatus"] == "CREATE_COMPLETE"
        self.outputs = {output["OutputKey"]: output["OutputValue"] for output in made["Outputs"]}
        resources = self.formation.list_stack_resources(StackName=name)["StackResourceSummaries"]
        self.ids = {one["LogicalResourceId"]: one["PhysicalResourceId"] for one in resources}

    def policy(self, name: str) -> dict[str, Any]:
        version = self.iam.get_policy(PolicyArn=self.ids[name])["Policy"]["DefaultVersionId"]
        return self.iam.get_policy_version(PolicyArn=self.ids[name], VersionId=version)["PolicyVersion"]["Document"]

    def role(self, name: str) -> dict[str, Any]:
        return self.iam.get_role(RoleName=self.ids[name])["Role"]

    def policies_of(self, role: str) -> list[str]:
        attached = self.iam.list_attached_role_policies(RoleName=self.ids[role])["AttachedPolicies"]
        return [policy["PolicyArn"] for policy in attached]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    moto = pytest.importorskip("moto", reason="needs moto (pip)")
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with moto.mock_aws():
        yield


@pytest.fixture(scope="module")
def policies() -> dict[str, Any]:
    """The policies of a deployed stack."""
    moto = pytest.importorskip("moto", reason="needs moto (pip)")
    with moto.mock_aws():
        stack = Stack("skytrain", BucketName=BUCKET, Prefix=PREFIX)
        return {name: stack.policy(name) for name in ("JobPolicy", "ViewerPolicy", "MlflowPolicy")}


def rights_on_objects(policy: dict[str, Any], prefix: str) -> set[str]:
    """The actions that a policy allows on the objects of a prefix; it has to allow only those and s3:ListBucket."""
    allowed: dict[str, set[str]] = {}
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        actions = statement["Action"]
        allowed[statement["Resource"]] = {actions} if isinstance(actions, str) else set(actions)
    assert allowed.pop(f"arn:aws:s3:::{BUCKET}") == {"s3:ListBucket"}
    rights = allowed.pop(f"arn:aws:s3:::{BUCKET}/{prefix}/*")
    assert all("*" not in action for action in rights)
    return rights


def test_a_job_may_do_exactly_what_the_store_does(policies: dict[str, Any]) -> None:
    methods = set(boto3.client("s3", region_name="us-east-1").meta.method_to_api_mapping)
    rooms = ROOT / "pipelines"
    files = [path for path in rooms.rglob("*.py") if not path.is_relative_to(rooms / "user")]  # which no job runs
    used = {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in methods
    }
    assert used == set(RIGHTS)
    needed = {RIGHTS[method] for method in used} - {"s3:ListBucket"}
    assert rights_on_objects(policies["JobPolicy"], PREFIX) == needed
    assert rights_on_objects(policies["ViewerPolicy"], PREFIX) == {"s3:GetObject"}


class Template(yaml.SafeLoader):
    """CloudFormation's YAML; the value of a function such as !Sub is its text."""


Template.add_multi_constructor("!", lambda loader, _, node: getattr(node, "value", None))


def test_the_bucket_is_private_and_encrypted_and_drops_uploads_of_lost_nodes(aws: None) -> None:
    stack = Stack("skytrain", BucketName=BUCKET)
    assert stack.outputs["Store"] == f"s3://{BUCKET}/skytrain"
    assert "AES256" in json.dumps(stack.s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"])
    # moto's CloudFormation passes over the rest.
    resources = yaml.load(TEMPLATE.read_text(), Loader=Template)["Resources"]  # noqa: S506 - a SafeLoader
    bucket = resources["Bucket"]["Properties"]
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4 and all(bucket["PublicAccessBlockConfiguration"].values())
    aborts, backups = bucket["LifecycleConfiguration"]["Rules"]
    assert aborts["Status"] == "Enabled" and aborts["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert "ExpirationInDays" not in aborts, "a lifecycle rule must never delete commits of a run"
    assert backups["Prefix"] == "${MlflowPrefix}/backups/" and backups["ExpirationInDays"] == 35
    (denied,) = resources["EncryptedConnectionsOnly"]["Properties"]["PolicyDocument"]["Statement"]
    assert denied["Effect"] == "Deny" and denied["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_each_role_has_one_policy_and_the_workflow_of_one_environment_gets_a_role_only_if_asked(aws: None) -> None:
    plain = Stack("plain", BucketName=BUCKET)
    assert "CiRole" not in plain.ids and "CiRoleArn" not in plain.outputs
    assert plain.policies_of("JobRole") == [plain.outputs["JobPolicyArn"]]
    assert plain.policies_of("ViewerRole") == [plain.ids["ViewerPolicy"]]
    (statement,) = plain.role("JobRole")["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}

    # moto's CloudFormation does not make providers, so the account has one already.
    arn = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    stack = Stack("ci", BucketName=f"{BUCKET}-ci", GitHubRepository="ann/gpt", GitHubProviderArn=arn)
    (statement,) = stack.role("CiRole")["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Federated": arn}
    assert statement["Condition"] == {
        "StringEquals": {  # no wildcard
            "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
            "token.actions.githubusercontent.com:sub": "repo:ann/gpt:environment:skytrain",
        }
    }
    assert stack.policies_of("CiRole") == [stack.outputs["JobPolicyArn"]] == stack.policies_of("JobRole")


# --- the policies on a real S3 server that enforces them


@pytest.fixture
def user_with(radosgw: Radosgw, policies: dict[str, Any]) -> Callable[[str], S3Account]:
    """Makes a user of a real S3 server with one of the policies."""
    owner = client("s3", radosgw.account)
    owner.create_bucket(Bucket=BUCKET)
    owner.put_object(Bucket=BUCKET, Key="others/secret", Body=b"not for jobs")
    owner.create_bucket(Bucket=OTHER_BUCKET)

    def make(policy: str) -> S3Account:
        account = radosgw.add_user(uuid.uuid4().hex[:8])
        iam = client("iam", radosgw.account)
        document = json.dumps(policies[policy])
        iam.put_user_policy(UserName=account.access_key, PolicyName=policy, PolicyDocument=document)
        return account

    return make


def client(service: str, account: S3Account) -> Any:
    keys = {"aws_access_key_id": account.access_key, "aws_secret_access_key": account.secret_key}
    return boto3.client(service, endpoint_url=account.endpoint, region_name="us-east-1", **keys)


def is_denied(call: Callable[..., Any], **arguments: Any) -> bool:
    with pytest.raises(ClientError) as error:
        call(**arguments)
    return error.value.response["Error"]["Code"] == "AccessDenied"


@pytest.mark.slow
def test_a_job_has_all_rights_of_a_store_and_none_elsewhere(
    user_with: Callable[[str], S3Account], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def user(policy: str) -> tuple[Any, S3Store]:
        account = user_with(policy)
        for name, value in account.environment.items():
            monkeypatch.setenv(name, value)
        return client("s3", account), S3Store(BUCKET, PREFIX)

    job, store = user("JobPolicy")
    big = tmp_path / "big"
    big.write_bytes(bytes(20 * 2**20))  # in parts
    assert store.create("commit", b"1") and not store.create("commit", b"2")
    store.put("plain", b"2")
    store.upload(big, "big")
    store.download("big", tmp_path / "back")
    assert (tmp_path / "back").stat().st_size == 20 * 2**20
    assert store.get("absent") is None and store.get("plain") == b"2"
    assert [entry.key for entry in store.entries("")] == ["big", "commit", "plain"]
    store.delete("big")

    assert is_denied(job.get_object, Bucket=BUCKET, Key="others/secret")
    assert is_denied(job.put_object, Bucket=BUCKET, Key="others/mine", Body=b"")
    assert is_denied(job.delete_object, Bucket=BUCKET, Key="others/secret")
    assert is_denied(job.list_objects_v2, Bucket=OTHER_BUCKET)
    assert is_denied(job.delete_bucket, Bucket=BUCKET)
    assert is_denied(job.put_bucket_policy, Bucket=BUCKET, Policy="{}")

    viewer, store = user("ViewerPolicy")
    assert store.get("plain") == b"2" and store.get("absent") is None and len(store.entries("")) == 2
    assert is_denied(viewer.put_object, Bucket=BUCKET, Key=f"{PREFIX}/plain", Body=b"3")
    assert is_denied(viewer.delete_object, Bucket=BUCKET, Key=f"{PREFIX}/plain")

    mlflow = client("s3", user_with("MlflowPolicy"))
    for key in ("mlflow/artifacts/a", "mlflow/backups/b"):
        mlflow.put_object(Bucket=BUCKET, Key=key, Body=b"1")
    mlflow.delete_object(Bucket=BUCKET, Key="mlflow/artifacts/a")
    assert is_denied(mlflow.delete_object, Bucket=BUCKET, Key="mlflow/backups/b")
    assert is_denied(mlflow.get_object, Bucket=BUCKET, Key=f"{PREFIX}/plain")
    assert is_denied(job.get_object, Bucket=BUCKET, Key="mlflow/backups/b")
