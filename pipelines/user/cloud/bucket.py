"""What a bucket is set up to do, which `init` and `doctor` ask. The jobs need no right for these questions."""

from typing import Any

from pipelines.store.s3_client import clients_from_environment
from pipelines.store.s3_store import S3Store

ANSWER_SECONDS = 10.0


def keeps_old_versions(store: S3Store) -> bool:
    """Whether the bucket is versioned, and no lifecycle rule ends old versions. False where nobody may ask."""
    from botocore.exceptions import BotoCoreError, ClientError

    (client,) = clients_from_environment(store.uri, ANSWER_SECONDS, 1)
    try:
        if client.get_bucket_versioning(Bucket=store.bucket).get("Status") != "Enabled":
            return False
        rules = client.get_bucket_lifecycle_configuration(Bucket=store.bucket)["Rules"]
    except (BotoCoreError, ClientError) as error:
        return "NoSuchLifecycleConfiguration" in str(error)
    return not any(ends_old_versions(rule, store.prefix) for rule in rules)


def ends_old_versions(rule: dict[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule ends old versions of all objects under a prefix."""
    limits = rule.get("Filter") or {"Prefix": rule.get("Prefix", "")}
    covers = "Prefix" in limits and prefix.startswith(limits["Prefix"])
    return covers and rule["Status"] == "Enabled" and "NoncurrentVersionExpiration" in rule
