"""What a bucket is set up to do, which `init` and `doctor` ask. The jobs need no right for these questions."""

import math
from typing import Any

from pipelines.artifacts.s3_answers import code_of
from pipelines.artifacts.s3_client import clients_from_environment
from pipelines.artifacts.s3_store import S3Store

ANSWER_SECONDS = 10.0


def days_of_old_versions(store: S3Store) -> float:
    """For how long the bucket keeps an object that was removed: 0 without versioning, or where nobody may ask; inf
    without a lifecycle rule that ends old versions."""
    from botocore.exceptions import BotoCoreError, ClientError

    (client,) = clients_from_environment(store.uri, ANSWER_SECONDS, 1)
    try:
        if client.get_bucket_versioning(Bucket=store.bucket).get("Status") != "Enabled":
            return 0
        rules = client.get_bucket_lifecycle_configuration(Bucket=store.bucket)["Rules"]
    except ClientError as error:
        return math.inf if code_of(error) == "NoSuchLifecycleConfiguration" else 0
    except BotoCoreError:
        return 0
    return min((days_by_rule(rule, store.prefix) for rule in rules), default=math.inf)


def days_by_rule(rule: dict[str, Any], prefix: str) -> float:
    """The days after which a rule ends old versions of all objects under a prefix; inf if it does not."""
    limits = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    covers = set(limits) <= {"Prefix"} and prefix.startswith(limits.get("Prefix", ""))
    ends = rule.get("NoncurrentVersionExpiration", {}) if covers and rule["Status"] == "Enabled" else {}
    return float(ends.get("NoncurrentDays", math.inf))
