"""The store in a bucket, and `open_store`, which opens the store of a URI.

boto3 makes one attempt a request; tenacity, only in this module, decides about another one. Transient errors are
retried until the time limit and then raise StoreUnavailable. So do answers that no S3 server gives: a proxy's page, an
error or a success without its body. Permanent errors raise UserError at once, with the request and the remedy.

A refusal (wrong or expired credentials, no rights, no such bucket) is permanent at the first request of its kind. Once
the server has accepted such a request, a refusal is transient: credentials are renewed, policies corrected, buckets
restored. So a wrong key ends a command at its start, and a long run survives a refusal as it survives an outage.

Endpoint, region and credentials are those of every AWS tool: AWS_ENDPOINT_URL(_S3), AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_PROFILE, ~/.aws, the instance's role.
"""

import base64
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from pipelines.artifacts.outage import LOGGER, Outage
from pipelines.artifacts.s3_answers import (
    brief,
    code_of,
    explained,
    is_outdated,
    is_refusal,
    is_transient,
    sound,
    status_of,
)
from pipelines.artifacts.traffic import count, count_request
from trainer.config import seconds_from_environment
from trainer.errors import StoreUnavailable, UserError
from trainer.store import (
    Arrived,
    Check,
    Entry,
    LocalStore,
    Store,
    checked_key,
    checked_prefix,
    refuse_huge,
    replacing,
    slices,
)

log = logging.getLogger(LOGGER)
T = TypeVar("T")

# 16 MiB x 10,000 parts (S3's most) = 160 GB, eight times the largest file we write.
# The repetition of a lost part costs 0.2 s.
PART_BYTES = 16 << 20
MAX_PARTS = 10_000
CHUNK_BYTES = 1 << 20
# One S3 connection gives ~100 MB/s, so four fill a 3 Gbit/s link; uploading holds 4 x 16 MiB in memory.
PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class S3Object:
    """An object of a bucket, below the prefix of its store. The ETag changes with the contents."""

    key: str
    size: int
    etag: str
    modified: float  # unix seconds


class S3Store:
    """A store under a prefix of an S3 bucket, or of a server with the S3 protocol and conditional writes."""

    def __init__(self, bucket: str, prefix: str = "", client: Any = None, time_limit_s: float = 120) -> None:
        """`time_limit_s` bounds the retries of one request; a file is many requests.
        `client` is a boto3 S3 client with one attempt a request; by default one from the environment."""
        self.bucket = bucket
        self.prefix = checked_key(prefix) + "/" if prefix else ""
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self._time_limit_s = time_limit_s
        self._new_client = lambda: client if client is not None else client_from_environment(self.uri, time_limit_s)
        self._client = self._new_client()
        self._accepted: set[str] = set()  # kinds of requests that the server has accepted from this process

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r})"

    def create(self, key: str, body: bytes) -> bool:
        def attempt(_: int) -> bool:
            try:
                self._put_object(key, body, IfNoneMatch="*")
                return True
            except self._client.exceptions.ClientError as error:
                if code_of(error) != "PreconditionFailed":
                    raise
            # The server may have stored the body that it refuses now: an earlier attempt whose answer was lost, or
            # this one, delivered twice. Then we have created the object.
            return self._get_object(key) == body

        return self._until_answered(f"create {self._uri_of(key)}", attempt)

    def put(self, key: str, body: bytes) -> None:
        self._until_answered(f"put {self._uri_of(key)}", lambda _: self._put_object(key, body))

    def get(self, key: str) -> bytes | None:
        return self._until_answered(f"get {self._uri_of(key)}", lambda _: self._get_object(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        def attempt(_: int) -> int:
            done, answer = 0, self._get_range(key, start, len(buffer))
            for chunk in answer["Body"].iter_chunks(CHUNK_BYTES) if answer else ():
                count(received=len(chunk))
                taken = chunk[: len(buffer) - done]  # a server may ignore the range
                buffer[done : done + len(taken)] = taken
                done += len(taken)
            return done

        return self._until_answered(f"get {self._uri_of(key)} from byte {start:,}", attempt)

    def upload(self, path: Path, key: str, check: Check | None = None) -> None:
        def read(start: int, size: int) -> bytes:
            if check:
                check()
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(size)

        self._upload_from(read, os.path.getsize(path), key)

    def write(self, parts: Sequence[memoryview], key: str) -> None:
        def read(start: int, size: int) -> bytes:
            return b"".join(slices(parts, start, size))

        self._upload_from(read, sum(len(part) for part in parts), key)

    def download(self, key: str, path: Path, arrived: Arrived | None = None) -> None:
        where = self._where(key)
        with replacing(Path(path)) as file:
            size, etag = self._until_answered(f"get {self._uri_of(key)}", lambda _: self._first_range(file, key))
            begun = os.fstat(file.fileno()).st_size  # the first part; all of it from a server that ignores the range
            there = _InOrder(file, size or begun, arrived).there if arrived else lambda start: None
            for start in range(0, begun, PART_BYTES):
                there(start)

            def fetch(start: int) -> None:
                def attempt(_: int) -> None:
                    answer = sound(self._client.get_object(**where, Range=_range(start), IfMatch=etag), "ETag")
                    _copy_range(answer, file, start)

                self._until_answered(f"get {self._uri_of(key)} from byte {start:,}", attempt)
                there(start)

            _in_parallel(fetch, range(PART_BYTES, size, PART_BYTES))

    def entries(self, prefix: str) -> list[Entry]:
        return [Entry(one.key, one.size, one.modified) for one in self.objects(checked_prefix(prefix))]

    def objects(self, prefix: str) -> list[S3Object]:
        """The objects whose keys begin with `prefix`, in order of their keys; they need not be ours."""
        request = {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        found: list[S3Object] = []
        while True:
            page = self._until_answered(
                f"list {self.uri}/{prefix}",
                lambda _: sound(self._client.list_objects_v2(**request), "IsTruncated"),  # else: an empty listing
            )
            found += [
                S3Object(item["Key"][len(self.prefix) :], item["Size"], item["ETag"], item["LastModified"].timestamp())
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")  # folder markers of web consoles
            ]
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda one: one.key)
            request["ContinuationToken"] = page["NextContinuationToken"]

    def read(self, found: S3Object, start: int, size: int) -> bytes:
        """A range of an object's bytes. UserError if the object was removed or has other contents by now."""
        where = {"Bucket": self.bucket, "Key": self.prefix + found.key}
        what = f"get {self._uri_of(found.key)} from byte {start:,}"

        def attempt(_: int) -> bytes:
            try:
                answer = self._client.get_object(**where, Range=_range(start, size), IfMatch=found.etag)
                return _body(sound(answer, "ETag"))
            except self._client.exceptions.ClientError as error:
                if code_of(error) in ("PreconditionFailed", "NoSuchKey"):
                    raise UserError(f"{self._uri_of(found.key)}: changed while it was read; run again") from None
                raise

        return self._until_answered(what, attempt)

    def delete(self, key: str) -> None:
        self._until_answered(f"delete {self._uri_of(key)}", lambda _: self._client.delete_object(**self._where(key)))

    def clock(self) -> float:
        request = {"Bucket": self.bucket, "Prefix": self.prefix, "MaxKeys": 1}
        answer = self._until_answered(f"list {self.uri}/", lambda _: self._client.list_objects_v2(**request))
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(date).timestamp() if date else time.time()

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return str(self._client.meta.endpoint_url)

    def region(self) -> str | None:
        """The region of the bucket; None if the server does not tell it."""
        what = f"locate {self.uri}"
        answer = self._until_answered(what, lambda _: self._client.head_bucket(Bucket=self.bucket))
        return answer.get("BucketRegion")

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + checked_key(key)}

    def _uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def _put_object(self, key: str, body: bytes, **conditions: str) -> None:
        # The server compares the MD5 before it stores: a damaged body never becomes an object.
        count(sent=len(body))
        sound(self._client.put_object(**self._where(key), Body=body, ContentMD5=_md5(body), **conditions), "ETag")

    def _get_object(self, key: str) -> bytes | None:
        try:
            answer = self._client.get_object(**self._where(key))
            refuse_huge(self._uri_of(key), answer.get("ContentLength", 0))
            return _body(sound(answer, "ETag"))
        except self._client.exceptions.ClientError as error:
            if code_of(error) == "NoSuchKey":
                return None
            raise

    def _get_range(self, key: str, start: int, size: int) -> Any:
        """The answer for a range; None if the object ends before it. FileNotFoundError without the object."""
        try:
            return sound(self._client.get_object(**self._where(key), Range=_range(start, size)), "ETag")
        except self._client.exceptions.ClientError as error:
            if code_of(error) == "NoSuchKey":
                raise FileNotFoundError(2, "no such object", self._uri_of(key)) from None
            if code_of(error) == "InvalidRange":
                return None
            raise

    def _first_range(self, file: Any, key: str) -> tuple[int, str]:
        """Fetch the start of the object; returns its whole size and the ETag that later ranges must match."""
        answer = self._get_range(key, 0, PART_BYTES)
        if answer is None:  # the object is empty
            return 0, ""
        _copy_range(answer, file, 0)
        return int(answer.get("ContentRange", "/0").rpartition("/")[2]), answer["ETag"]

    def _upload_from(self, read: Callable[[int, int], bytes], size: int, key: str) -> None:
        """Store `size` bytes from `read(start, size)`, in parts if there are many."""
        if size <= PART_BYTES:
            self.put(key, read(0, size))
        else:
            self._upload_parts(read, size, key)

    def _upload_parts(self, read: Callable[[int, int], bytes], size: int, key: str) -> None:
        where = self._where(key)
        # Marks the object as the result of this upload, in case the answer to the last request is lost.
        token = uuid.uuid4().hex
        what = f"put {self._uri_of(key)}"
        begun = self._until_answered(
            what,
            lambda _: sound(self._client.create_multipart_upload(**where, Metadata={"upload": token}), "UploadId"),
        )
        upload = where | {"UploadId": begun["UploadId"]}
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))

        def send(number: int) -> dict[str, Any]:
            body = read((number - 1) * part_bytes, part_bytes)
            # No MD5, which would be half of the work: the signature covers the body's sha256, and the server checks it.
            request = upload | {"PartNumber": number, "Body": body}

            def attempt(_: int) -> dict[str, Any]:
                count(sent=len(body))
                return sound(self._client.upload_part(**request), "ETag")

            sent = self._until_answered(f"{what} part {number}", attempt)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        def complete(_: int) -> None:
            try:
                sound(self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}), "ETag")
            except self._client.exceptions.ClientError as error:
                ours = code_of(error) == "NoSuchUpload" and self._upload_of(where) == token
                if not ours:
                    raise

        try:
            parts = _in_parallel(send, range(1, -(-size // part_bytes) + 1))
            self._until_answered(what, complete)
        except BaseException:
            # Parts of an unfinished upload are invisible but billed. Raise the first error, even if the abort fails.
            try:
                self._client.abort_multipart_upload(**upload)
            except Exception as error:
                log.warning("%s: unfinished upload left behind (%s)", self._uri_of(key), type(error).__name__)
            raise

    def _upload_of(self, where: dict[str, str]) -> str | None:
        """The token of the upload that made the object, or None."""
        try:
            return self._client.head_object(**where)["Metadata"].get("upload")
        except self._client.exceptions.ClientError as error:
            if status_of(error) == 404:
                return None
            raise

    def _with_current_credentials(self, request: Callable[[int], T], number: int) -> T:
        """`request(number)`; if our credentials are out of date, read them again and repeat it once."""
        try:
            return request(number)
        except Exception as error:
            if not is_outdated(error):
                raise
        self._client = self._new_client()
        return request(number)

    def _until_answered(self, what: str, request: Callable[[int], T]) -> T:
        """Call `request(attempt number, from 1)` until it answers, fails for good, or reaches the time limit."""
        import tenacity

        began = time.monotonic()
        outage: Outage | None = None

        def log_retry(state: tenacity.RetryCallState) -> None:
            nonlocal outage
            assert state.outcome is not None
            error = state.outcome.exception()
            outage = Outage(what, brief(error), began, self._time_limit_s)
            log.warning("%s", outage.text(time.monotonic()), extra={"outage": outage})
            if error and is_refusal(error):
                with suppress(UserError):
                    self._client = self._new_client()  # with the credentials of now

        def log_end(answered: bool) -> None:
            if outage:
                now = time.monotonic()
                end = replace(outage, ended=now, answered=answered)
                log.info("%s", end.text(now), extra={"outage": end})

        kind = what.partition(" ")[0].replace("create", "put")

        def may_pass(error: BaseException) -> bool:
            return is_transient(error) or (kind in self._accepted and is_refusal(error))

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_before_delay(self._time_limit_s),
            before_sleep=log_retry,
            reraise=True,
        )
        answered = False
        try:
            for attempt in attempts:
                with attempt:
                    answer = self._with_current_credentials(request, attempt.retry_state.attempt_number)
                    self._accepted.add(kind)
                    answered = True
                    return answer
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:
            told = explained(error, what, self._client.meta.endpoint_url, self._time_limit_s)
            if may_pass(error) and not is_transient(error):
                raise StoreUnavailable(f"{told}; refused for {self._time_limit_s:g} s") from error
            raise told from error
        finally:
            log_end(answered)
        raise AssertionError("tenacity always returns or raises")


def open_store(uri: str) -> Store:
    """The store of a URI: "s3://bucket/prefix", "file://path" (relative or absolute), or a plain path.
    Reads and writes nothing yet. UserError for any other URI."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", uri)
    kind, _, rest = uri.partition("://")
    if kind == "s3" and rest:
        bucket, _, prefix = rest.partition("/")
        time_limit_s = seconds_from_environment("SKYTRAIN_STORE_SECONDS", 120)
        try:
            return S3Store(bucket, prefix.strip("/"), time_limit_s=time_limit_s)
        except UserError:
            raise
        except ValueError:
            raise UserError(f"store {uri!r}: {prefix!r} is no prefix; give one such as 'team/runs'") from None
    if kind == "file" and rest:
        return _local(uri, Path(rest))
    if uri and not scheme:
        return _local(uri, Path(uri))
    raise UserError(f"store {uri!r}: not a store; give s3://BUCKET/PREFIX, file://PATH or a path (./NAME)")


def _local(uri: str, root: Path) -> LocalStore:
    store = LocalStore(root)
    try:
        nearest = next(folder for folder in (store.root, *store.root.parents) if folder.exists())
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(f"store {uri[:80]!r}: no usable path ({error.strerror}); write that of a folder") from error
    if not nearest.is_dir():
        raise UserError(f"store {uri!r}: {nearest} is a file; a store is a folder")
    return store


def client_from_environment(uri: str, time_limit_s: float) -> Any:
    """A boto3 client for S3 with one attempt a request. UserError for a wrong environment."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(10, time_limit_s),
        read_timeout=min(60, time_limit_s),  # of silence, not of the whole answer
        max_pool_connections=4 * PARTS_AT_ONCE,
        # S3's newer checksums may use a chunked encoding that older servers (Ceph 16) store as data. We send
        # Content-MD5 instead, which all servers check.
        s3={"payload_signing_enabled": True},  # over TLS it is not the default
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        # A session of our own: two threads must not build boto3's default session at once.
        client = boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise UserError(f"{uri}: {error}; correct the AWS_* environment or ~/.aws/config") from error
    client.meta.events.register("before-send.s3", count_request)
    return client


def _body(answer: Any) -> bytes:
    """The whole body of an answer."""
    body: bytes = answer["Body"].read()
    count(received=len(body))
    return body


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _range(start: int, size: int = PART_BYTES) -> str:
    return f"bytes={start}-{start + size - 1}"


def _copy_range(answer: Any, file: Any, start: int) -> None:
    """Write the body of a ranged answer to `file` at `start`. Other threads write other ranges: pwrite."""
    for chunk in answer["Body"].iter_chunks(CHUNK_BYTES):
        count(received=len(chunk))
        while chunk:
            written = os.pwrite(file.fileno(), chunk, start)
            chunk, start = chunk[written:], start + written


class _InOrder:
    """Passes the parts of a file on in their order: each one once all before it are there. Threads fetch the parts;
    one of them passes on, the others go on fetching."""

    def __init__(self, file: Any, size: int, arrived: Arrived) -> None:
        self.file, self.size, self.arrived = file, size, arrived
        self._there: set[int] = set()  # starts of parts that are not passed on yet
        self._next, self._passing, self._changing = 0, False, Lock()

    def there(self, start: int) -> None:
        """The part from byte `start` on is in the file."""
        with self._changing:
            self._there.add(start)
            if self._passing:
                return
            self._passing = True
        while True:
            with self._changing:
                self._passing = self._next in self._there
                if not self._passing:
                    return
                self._there.remove(self._next)
                begin, self._next = self._next, self._next + PART_BYTES
            for at in range(begin, end := min(self._next, self.size), CHUNK_BYTES):
                self.arrived(os.pread(self.file.fileno(), min(CHUNK_BYTES, end - at), at))


def _in_parallel(work: Callable[[int], T], numbers: range) -> list[T]:
    """`[work(n) for n in numbers]`, a few at a time. A failure cancels the calls that have not begun, and is raised."""
    with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="store") as pool:
        futures = [pool.submit(work, number) for number in numbers]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
