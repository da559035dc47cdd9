"""The deployment in infra/ gives jobs the rights for their work, and no others."""

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError
from servers import Radosgw, S3Account

from pipelines.artifacts.store import S3Store

TEMPLATE = Path(__file__).resolve().parents[2] / "infra" / "aws-bucket.yaml"
BUCKET, OTHER_BUCKET, PREFIX = f"runs-{uuid.uuid4().hex[:8]}", f"others-{uuid.uuid4().hex[:8]}", "sky/train"


class Template(yaml.SafeLoader):
    """CloudFormation's YAML, with values for its parameters."""


VALUES = {"AWS::Partition": "aws", "BucketName": BUCKET, "Prefix": PREFIX, "Bucket.Arn": f"arn:aws:s3:::{BUCKET}"}
Template.add_constructor(
    "!Sub", lambda loader, node: re.sub(r"\$\{(.+?)\}", lambda m: VALUES.get(m[1], m[1]), node.value)
)
Template.add_constructor("!Ref", lambda loader, node: VALUES.get(node.value, node.value))
Template.add_constructor("!GetAtt", lambda loader, node: VALUES[node.value])


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    return yaml.load(TEMPLATE.read_text(), Loader=Template)["Resources"]  # noqa: S506 - a SafeLoader


@pytest.fixture
def user_with(radosgw: Radosgw, resources: dict[str, Any]) -> Callable[[str], S3Account]:
    """Makes a user of a real S3 server with one of the template's policies."""
    owner = client("s3", radosgw.account)
    owner.create_bucket(Bucket=BUCKET)
    owner.put_object(Bucket=BUCKET, Key="others/secret", Body=b"not for jobs")
    owner.create_bucket(Bucket=OTHER_BUCKET)

    def make(policy: str) -> S3Account:
        account = radosgw.add_user(uuid.uuid4().hex[:8])
        document = json.dumps(resources[policy]["Properties"]["PolicyDocument"])
        iam = client("iam", radosgw.account)
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
    user_with: Callable[[str], S3Account], tmp_path: Path
) -> None:
    job = client("s3", user_with("JobPolicy"))
    store = S3Store(BUCKET, PREFIX, client=job)
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

    reader = client("s3", user_with("ReaderPolicy"))
    store = S3Store(BUCKET, PREFIX, client=reader)
    assert store.get("plain") == b"2" and store.get("absent") is None and len(store.entries("")) == 2
    assert is_denied(reader.put_object, Bucket=BUCKET, Key=f"{PREFIX}/plain", Body=b"3")
    assert is_denied(reader.delete_object, Bucket=BUCKET, Key=f"{PREFIX}/plain")


def test_the_bucket_is_private_and_encrypted_and_drops_uploads_of_lost_nodes(resources: dict[str, Any]) -> None:
    bucket = resources["Bucket"]["Properties"]
    assert all(bucket["PublicAccessBlockConfiguration"].values())
    assert bucket["BucketEncryption"]
    (rule,) = bucket["LifecycleConfiguration"]["Rules"]
    assert rule["Status"] == "Enabled" and rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert "ExpirationInDays" not in rule, "a lifecycle rule must never delete commits of a run"
    (denied,) = resources["EncryptedConnectionsOnly"]["Properties"]["PolicyDocument"]["Statement"]
    assert denied["Effect"] == "Deny" and denied["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
