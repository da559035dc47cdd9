"""The bucket of a store: created with its protections, or checked. Only `skytrain init` changes a bucket.

A new bucket is private, encrypted where the server can, removes unfinished uploads after a day, and on AWS answers over
TLS alone. An existing bucket stays as it is: each missing protection is a note. infra/aws/ has the same as a template.
"""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pipelines.artifacts.s3_answers import brief, code_of, explained, status_of
from pipelines.cloud.checks import ANSWER_SECONDS, Finding
from trainer.errors import UserError

WITHOUT_PLACE = ("us-east-1", "aws-global", "auto")  # regions that create_bucket takes no location for
PRIVATE = dict.fromkeys(("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True)
ENCRYPTION = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
LIFECYCLE = {
    "Rules": [
        {
            "ID": "abort-uploads-of-dead-nodes",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
    ]
}
NOT_THERE = (
    *("NoSuchPublicAccessBlockConfiguration", "ServerSideEncryptionConfigurationNotFoundError"),
    *("NoSuchLifecycleConfiguration", "NoSuchBucketPolicy"),
)


@dataclass(frozen=True)
class Protection:
    """A property of a bucket. `add` sets it, `has` reads it, `undo` removes it; all raise botocore's ClientError."""

    what: str
    add: Callable[[Any, str], None]
    has: Callable[[Any, str], bool]
    undo: Callable[[Any, str], None]


def prepare_bucket(bucket: str, prefix: str, client: Any) -> list[Finding]:
    """Create a bucket with its protections, or check an existing one. `client` is boto3's, for S3.

    UserError if the name is another account's or the server refuses; StoreUnavailable if it does not answer.
    """
    where = f"s3://{bucket}"
    with as_ours(f"create {where}", client):
        created = not exists(client, bucket) and create(client, bucket)
    place = f" in {client.meta.region_name}" if is_of_aws(client) else ""
    findings = [Finding("bucket", f"{where} created{place}" if created else f"{where} exists; left as it is")]
    for protection in protections(client):
        findings.append(added(protection, client, bucket, prefix) if created else checked(protection, client, bucket))
    if not created and (note := versions(client, bucket)):
        findings.append(note)
    return findings


@contextmanager
def as_ours(what: str, client: Any) -> Iterator[None]:
    """Errors of botocore as UserError or StoreUnavailable."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise explained(error, what, client.meta.endpoint_url, ANSWER_SECONDS) from error


def exists(client: Any, bucket: str) -> bool:
    try:
        client.head_bucket(Bucket=bucket)
    except client.exceptions.ClientError as error:
        if status_of(error) == 404:
            return False
        if status_of(error) == 403:
            raise UserError(
                f"s3://{bucket}: of another account, or these credentials may not list it; choose another name, or "
                "correct the AWS_* environment"
            ) from error
        raise
    return True


def create(client: Any, bucket: str) -> bool:
    """Create a bucket in the client's region. False if another process of this account has just done so."""
    region = client.meta.region_name
    place = {} if region in (None, *WITHOUT_PLACE) else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        client.create_bucket(Bucket=bucket, **place)
    except client.exceptions.ClientError as error:
        if code_of(error) == "BucketAlreadyOwnedByYou":
            return False
        if code_of(error) == "BucketAlreadyExists":
            raise UserError(f"s3://{bucket}: another account has this name; choose another one") from error
        raise
    return True


def added(protection: Protection, client: Any, bucket: str, prefix: str) -> Finding:
    """Add a protection to a new bucket. Some servers take a setting, and refuse every object from then on: radosgw 16
    with BlockPublicAcls, others with an encryption that they have no keys for. There it is removed again."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        protection.add(client, bucket)
    except (BotoCoreError, ClientError) as error:
        return Finding("bucket", f"not {protection.what}: {brief(error)}", "note", "this server or account can't")
    tried = {"Bucket": bucket, "Key": f"{prefix}control/tried/{uuid.uuid4().hex}"}
    try:
        client.put_object(**tried, Body=b"tried")
        client.delete_object(**tried)
    except (BotoCoreError, ClientError) as error:
        with as_ours(f"undo {protection.what} of s3://{bucket}", client):
            protection.undo(client, bucket)
        seen = f"not {protection.what}: this server then refuses every object ({brief(error)})"
        return Finding("bucket", seen, "note", "without it, only accounts with keys that you give out have access")
    return Finding("bucket", protection.what)


def checked(protection: Protection, client: Any, bucket: str) -> Finding:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        if protection.has(client, bucket):
            return Finding("bucket", protection.what)
    except (BotoCoreError, ClientError) as error:
        if not (isinstance(error, ClientError) and code_of(error) in NOT_THERE):
            return Finding("bucket", f"unknown whether {protection.what}: {brief(error)}", "note")
    return Finding("bucket", f"not {protection.what}", "note", "infra/aws/stack.yaml has the settings")


def versions(client: Any, bucket: str) -> Finding | None:
    """A note if the bucket keeps what is deleted."""
    from botocore.exceptions import BotoCoreError, ClientError

    with suppress(BotoCoreError, ClientError):
        if client.get_bucket_versioning(Bucket=bucket).get("Status") == "Enabled":
            remedy = "suspend versioning, or expire old versions: you pay for removed checkpoints while they stay"
            return Finding("bucket", "keeps old versions of removed files", "note", remedy)
    return None


def protections(client: Any) -> list[Protection]:
    """The protections that a bucket of this server can have."""
    common = [
        Protection(
            "private", make_private, is_private, lambda client, bucket: client.delete_public_access_block(Bucket=bucket)
        ),
        Protection(
            "encrypted", encrypt, is_encrypted, lambda client, bucket: client.delete_bucket_encryption(Bucket=bucket)
        ),
        Protection(
            "without uploads of dead nodes after a day",
            *(remove_unfinished, removes_unfinished),
            lambda client, bucket: client.delete_bucket_lifecycle(Bucket=bucket),
        ),
    ]
    # Elsewhere a proxy may end the TLS in front of the server, and the policy would lock everybody out.
    if is_of_aws(client):
        common.append(
            Protection(
                "open over TLS alone",
                *(require_tls, requires_tls),
                lambda client, bucket: client.delete_bucket_policy(Bucket=bucket),
            )
        )
    return common


def is_of_aws(client: Any) -> bool:
    return (urlsplit(client.meta.endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def make_private(client: Any, bucket: str) -> None:
    client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=PRIVATE)


def is_private(client: Any, bucket: str) -> bool:
    blocked = client.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    return all(blocked.get(name) for name in PRIVATE)


def encrypt(client: Any, bucket: str) -> None:
    client.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration=ENCRYPTION)


def is_encrypted(client: Any, bucket: str) -> bool:
    return bool(client.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"].get("Rules"))


def remove_unfinished(client: Any, bucket: str) -> None:
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=LIFECYCLE)


def removes_unfinished(client: Any, bucket: str) -> bool:
    rules = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    return any(rule["Status"] == "Enabled" and "AbortIncompleteMultipartUpload" in rule for rule in rules)


def require_tls(client: Any, bucket: str) -> None:
    arn = f"arn:{client.meta.partition}:s3:::{bucket}"
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [arn, f"{arn}/*"],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))


def requires_tls(client: Any, bucket: str) -> bool:
    return "aws:SecureTransport" in client.get_bucket_policy(Bucket=bucket)["Policy"]
