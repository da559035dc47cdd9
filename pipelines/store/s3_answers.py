"""What an answer of an S3 server means: transient, refused, or a mistake with its remedy.

A refusal (wrong or expired credentials, no rights, no such bucket) is not transient; the store decides when it
takes it for one.
"""

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pipelines.store.secrets import redacted
from trainer.base.record import MOST_FILE_BYTES
from trainer.config.errors import StoreUnavailable, UserError, cut

T = TypeVar("T")

# Transient server errors, besides every 5xx but 501: load, a conflicting write in progress
# (create's 409), and bodies that were damaged or cut in transfer.
TRANSIENT_CODES = {
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
    "RequestTimeout", "RequestTimeoutException", "ConditionalRequestConflict", "OperationAborted",
    "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
    "NoSuchUpload",  # the server dropped the unfinished upload, or completed it and its answer was lost
}  # fmt: skip
TRANSIENT_STATUS = {408, 409, 429}

# The remedies of permanent errors, see `with_names_in_use`.
REMEDIES = {
    "NoSuchBucket": "the bucket does not exist; create it, or correct the store's URI",
    "InvalidBucketName": "the bucket's name is not valid; correct the store's URI",
    "AccessDenied": "the credentials may not do that; they need s3:GetObject, PutObject, DeleteObject and "
    "AbortMultipartUpload on the objects and s3:ListBucket on the bucket",
    "InvalidAccessKeyId": "the server does not know the access key; set AWS_ACCESS_KEY_ID "
    "or AWS_PROFILE to a key of this server, or AWS_ENDPOINT_URL to the key's server",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; correct "
    "AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the credentials have expired; log in again",
    "ExpiredTokenException": "the credentials have expired; log in again",
    "InvalidToken": "the session token is not valid; correct AWS_SESSION_TOKEN or log in again",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
    "IllegalLocationConstraintException": "the bucket is in another region; set AWS_REGION to it",
    "NotImplemented": "this server lacks an operation that commits need; use one with If-None-Match: *",
    "QuotaExceeded": "the quota of the bucket or its owner is used up",
}  # fmt: skip
OWN = "SKYTRAIN_S3_"  # before the names of settings for the store alone
KEYS = {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"}  # all are the store's own, or all are those of AWS
# An answer without a body (HEAD) has no error code, only a status.
CODE_OF_STATUS = {
    "301": "PermanentRedirect",
    "403": "AccessDenied",
    "412": "PreconditionFailed",
    "501": "NotImplemented",
}

SENT_BY_EVERY_SERVER = {
    **dict.fromkeys(("GetObject", "PutObject", "UploadPart", "CompleteMultipartUpload"), "ETag"),
    "CreateMultipartUpload": "UploadId",
    "ListObjectsV2": "IsTruncated",  # without it: an empty listing
}


class OddAnswer(Exception):
    """A successful answer that no S3 server gives: something else has answered."""


def understood(request: Callable[[], T]) -> T:
    """The result of a request. OddAnswer if a field of its answer is missing, or not of its kind."""
    from botocore.exceptions import BotoCoreError

    try:
        return request()
    except (UserError, BotoCoreError):  # some are ValueErrors, too
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise OddAnswer(f"{type(error).__name__}: {error}") from error


def is_transient(error: BaseException) -> bool:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, exceptions.ClientError):
        status, code = status_of(error), code_of(error)
        odd = not code or code.isdigit()  # the body is not the XML of an error
        return odd or code in TRANSIENT_CODES or status in TRANSIENT_STATUS or (status >= 500 and status != 501)
    if isinstance(error, exceptions.SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    connection_errors = (
        exceptions.ConnectionError,  # refused, no such host (yet)
        exceptions.HTTPClientError,  # reset, timed out, closed half-way
        exceptions.IncompleteReadError,
        HTTPError,  # botocore passes on a reset in the middle of an error's body
        OddAnswer,
        ResponseParserError,
        exceptions.CredentialRetrievalError,  # a short failure of the instance's metadata service
        exceptions.MetadataRetrievalError,
    )
    return isinstance(error, connection_errors)


def is_outdated(error: BaseException) -> bool:
    """Whether the source of our credentials has expired ones, for which botocore has no exception type."""
    return isinstance(error, RuntimeError) and "credentials are still expired" in str(error)


def is_refusal(error: BaseException) -> bool:
    """Whether the server, or the source of our credentials, refuses a request that may be accepted later."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        return status_of(error) in (401, 403) or code_of(error) in REMEDIES
    return is_outdated(error) or isinstance(error, _credential_errors())


def _credential_errors() -> tuple[type[Exception], ...]:
    """The errors of botocore without usable credentials."""
    from botocore import exceptions

    return (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.ProfileNotFound,
        exceptions.TokenRetrievalError,
        exceptions.UnauthorizedSSOTokenError,
        exceptions.SSOError,
    )


def explained(error: Exception, what: str, endpoint: str, time_limit_s: float) -> Exception:
    """The error for the caller: StoreUnavailable, UserError, or `error` itself if it is a bug."""
    from botocore import exceptions

    server = redacted(endpoint)
    where = f"{what} at {server}"
    if is_transient(error):
        last = f"no success within {time_limit_s:g} s; last: {brief(error)}"
        return StoreUnavailable(f"{server} does not answer: {last} (to {what}); check the network")
    if isinstance(error, exceptions.ClientError):
        code = code_of(error)
        if code in REMEDIES:
            return UserError(f"{where}: {with_names_in_use(REMEDIES[code])} ({code})")
        said = cut(" ".join(str(error.response.get("Error", {}).get("Message", "")).split()))
        return UserError(f"{where}: the server refused the request: {said or 'no reason given'} ({brief(error)})")
    if is_outdated(error):
        return UserError(f"{where}: {REMEDIES['ExpiredToken']}")
    if isinstance(error, _credential_errors()):
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of ~/.aws"
        return UserError(f"{where}: no usable credentials ({type(error).__name__}); {with_names_in_use(remedy)}")
    if isinstance(error, exceptions.SSLError):
        return UserError(f"{where}: its certificate is not trusted; set AWS_CA_BUNDLE to its authority")
    if isinstance(error, exceptions.ParamValidationError):
        return UserError(f"{where}: {' '.join(str(error).split())}")
    return error


def with_names_in_use(remedy: str) -> str:
    """The remedy with SKYTRAIN_S3_… for AWS_…, where the store has settings of that name."""
    own = {name[len(OWN) :] for name, value in os.environ.items() if value and name.startswith(OWN)}
    own |= KEYS if own & KEYS else set()
    return re.sub(r"AWS_(\w+)", lambda found: f"{OWN}{found[1]}" if found[1] in own else found[0], remedy)


def refuse_odd_answer(event_name: str, http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    """OddAnswer for a success without the field that every S3 server sends, or with a size that no object has; boto3
    calls this after every request."""
    field = SENT_BY_EVERY_SERVER.get(event_name.rpartition(".")[2])
    if http_response.status_code < 300 and field and field not in parsed:
        raise OddAnswer(f"no {field} in the answer")
    size = max(parsed.get("ContentLength", 0), int(parsed.get("ContentRange", "/0").rpartition("/")[2]))
    if size > MOST_FILE_BYTES:
        raise OddAnswer(f"an object of {size:,} bytes")


def code_of(error: Any) -> str:
    """The code of an error: a word; digits or nothing if the server sent no such body."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return CODE_OF_STATUS.get(code, code)


def status_of(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def brief(error: BaseException | None) -> str:
    """A short name of an error. Not botocore's message: it repeats URLs, and one line is enough."""
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        return f"{code_of(error)} (HTTP {status_of(error)})"
    return re.sub(r"(Error|Exception)$", "", type(error).__name__)
