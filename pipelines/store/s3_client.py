"""The clients of boto3 for a bucket: endpoint, region, credentials, retries and checksums.

Endpoint, region and credentials are found as by every AWS tool (AWS_ENDPOINT_URL(_S3), AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_PROFILE, ~/.aws, the instance's role), unless SKYTRAIN_S3_* names others; AWS's then stay for AWS.
"""

import os
import threading
from typing import Any

from pipelines.store.s3_answers import refuse_odd_answer
from pipelines.store.traffic import count_answer, count_request
from trainer.config.errors import UserError

# One connection to S3 gives about 100 MB/s, so a node's connections fill a link of 50 Gbit/s. An upload holds a part in
# memory for each.
CONNECTIONS_OF_NODE = 64
# The settings of a bucket that is not on AWS, as variables SKYTRAIN_S3_<name> and as boto3 calls them.
OWN_SETTINGS = {
    "ENDPOINT_URL": "endpoint_url",
    "REGION": "region_name",
    "ACCESS_KEY_ID": "aws_access_key_id",
    "SECRET_ACCESS_KEY": "aws_secret_access_key",
    "SESSION_TOKEN": "aws_session_token",
}
SENT = threading.local()  # the sha256 of the last part that a thread sent
SILENCE_SECONDS = 60.0  # of a server, in the middle of an answer too


def keep_sha256(request: Any, **_: Any) -> None:
    """Keep the sha256 of the body that this thread sends: botocore has computed it for the signature, and calls this
    before each request."""
    SENT.sha256 = request.headers["X-Amz-Content-SHA256"].decode()


def clients_from_environment(uri: str, time_limit_s: float, *attempts: int) -> list[Any]:
    """Boto3 clients for S3 that make this many attempts at a request. UserError for a wrong environment."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    from pipelines.store.s3_connection import POOLS

    own = {option: os.environ.get(f"SKYTRAIN_S3_{name}") or None for name, option in OWN_SETTINGS.items()}
    configs = [
        Config(
            retries={"total_max_attempts": total, "mode": "standard"},
            connect_timeout=min(10, time_limit_s),
            read_timeout=min(SILENCE_SECONDS / total, time_limit_s),  # of silence, and of LEAST_BYTES
            max_pool_connections=2 * CONNECTIONS_OF_NODE,
            # S3's newer checksums may use a chunked encoding that older servers (Ceph 16) store as data. We send
            # Content-MD5 or sign the body instead, which all servers check.
            s3={"payload_signing_enabled": True},  # over TLS it is not the default
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        for total in attempts
    ]
    try:
        # A session of our own: two threads must not build boto3's default session at once. Its first client takes
        # 0.1 s of processor time, the next ones nothing.
        session = boto3.session.Session()
        clients = [session.client("s3", config=config, **own) for config in configs]
    except (BotoCoreError, ValueError) as error:
        raise UserError(f"{uri}: {error}; correct SKYTRAIN_S3_*, AWS_* or ~/.aws/config") from error
    for client in clients:
        client._endpoint.http_session._pool_classes_by_scheme.update(POOLS)
        client.meta.events.register("before-send.s3", count_request)
        client.meta.events.register("before-send.s3.UploadPart", keep_sha256)
        client.meta.events.register("after-call.s3", refuse_odd_answer)
        client.meta.events.register("after-call.s3", count_answer)
    return clients
