"""The store in a bucket, and `open_store`, which opens the store of a URI.

Large files go in parts and in parallel. Python's lock is what limits them, so a part has one buffer, which system calls
fill and send without a copy. Around each request, and around each whole upload, tenacity repeats transient errors until
the time limit; then StoreUnavailable is raised. So do answers that no S3 server gives: a proxy's page, an error or a
success without its body. Permanent errors raise UserError at once, with the request and the remedy.

A refusal (wrong or expired credentials, no rights, no such bucket) is permanent at the first request of its kind. Once
the server has accepted such a request, a refusal is transient: credentials are renewed, policies corrected, buckets
restored. So a wrong key ends a command at its start, and a long run survives a refusal as it survives an outage.
"""

import base64
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pipelines.store.s3_answers import OddAnswer, brief, code_of, explained, is_refusal, is_transient, understood
from pipelines.store.s3_client import CONNECTIONS_OF_NODE, SENT, clients_from_environment
from pipelines.store.secrets import redacted
from trainer.base.store import (
    PART_BYTES,
    WAITING,
    Check,
    Entry,
    LocalStore,
    Store,
    Take,
    checked_key,
    checked_prefix,
    part_length,
    pause,
    read_through,
    refuse_huge,
    replacing,
    share_of_node,
    slices,
)
from trainer.config.config import seconds_from_environment
from trainer.config.errors import StoreUnavailable, UserError

log = logging.getLogger(__name__)
T = TypeVar("T")

# Of a download: their answer tells the size of the object, for which the other parts wait. And of a thread's buffer.
FIRST_BYTES = 1 << 20
READ_AGAIN_SECONDS = (0.3, 0.7, 1.5, 3.0)  # before each new read of an object that arrived damaged
LINE_SECONDS = 30.0  # between two lines about an outage
PART_ATTEMPTS = 5  # then the whole transfer begins again, until the time limit
CONTENT_TYPES = {".json": "application/json", ".jsonl": "application/x-ndjson", ".md": "text/markdown; charset=utf-8"}


class S3Store:
    """A store under a prefix of an S3 bucket, or of a server with the S3 protocol and conditional writes."""

    def __init__(self, bucket: str, prefix: str = "", time_limit_s: float = 120) -> None:
        """`time_limit_s` bounds the repetitions of a request or a transfer, from its first failure on."""
        if "@" in bucket or (":" in bucket and "@" in prefix):
            where = redacted(f"s3://{bucket}/{prefix}")
            raise UserError(f"{where}: has a user or password in it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self.bucket = bucket
        self.prefix = checked_key(prefix) + "/" if prefix else ""
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self.connections = share_of_node(CONNECTIONS_OF_NODE)
        self._time_limit_s = time_limit_s
        self._accepted: set[str] = set()  # kinds of requests that the server has accepted from this process
        self._line_at = -math.inf  # by time.monotonic
        self._etags_are_md5 = False  # as far as this process has seen
        self._unverified: dict[str, str] = {}  # the MD5 of a body that differed from its ETag before that was known
        self._connect()

    def _connect(self) -> None:
        """Make the clients, with the credentials of now."""
        self._client, self._transfer_client = clients_from_environment(self.uri, self._time_limit_s, 1, PART_ATTEMPTS)

    def create(self, key: str, body: bytes) -> bool:
        def attempt() -> bool:
            try:
                self._put_object(key, body, IfNoneMatch="*")
                return True
            except self._client.exceptions.ClientError as error:
                if code_of(error) != "PreconditionFailed":
                    raise
            # The server may have stored the body that it refuses now: an earlier attempt whose answer was lost, or
            # this one, delivered twice. Then we have created the object.
            if (stored := self._get_object(key)) is None:
                raise OddAnswer("a refusal to replace an object that does not exist")
            return stored == body

        return self._until_answered(f"create {self._uri_of(key)}", attempt)

    def put(self, key: str, body: bytes) -> None:
        self._until_answered(f"put {self._uri_of(key)}", lambda: self._put_object(key, body))

    def get(self, key: str) -> bytes | None:
        return self._until_answered(f"get {self._uri_of(key)}", lambda: self._get_object(key))

    def read_into(
        self, key: str, start: int, buffer: memoryview, size: int | None = None, take: Take | None = None
    ) -> int:
        return self._read(self._where(key), start, buffer, size, take)[0]

    def read_listed(self, found: Entry, start: int, buffer: memoryview) -> int:
        """Like `read_into`. UserError if the object was removed or has other contents than when `objects` listed it."""
        where = {"Bucket": self.bucket, "Key": self.prefix + found.key, "IfMatch": found.etag}
        try:
            return self._read(where, start, buffer)[0]
        except FileNotFoundError:
            raise UserError(f"{self.uri}/{found.key}: changed while it was read; run again") from None

    def _read(
        self, where: dict[str, str], start: int, buffer: memoryview, size: int | None = None, take: Take | None = None
    ) -> tuple[int, int]:
        """Like `read_into`, and the size of the object, which is 0 at its end."""
        uri = f"s3://{where['Bucket']}/{where['Key']}"

        def attempt() -> tuple[int, int]:
            try:
                answer = self._client.get_object(**where, Range=f"bytes={start}-{start + (size or len(buffer)) - 1}")
            except self._client.exceptions.ClientError as error:
                if code_of(error) == "InvalidRange":  # the object ends before it
                    return 0, 0
                absent = code_of(error) in ("NoSuchKey", "PreconditionFailed")
                raise FileNotFoundError(2, "no such object", uri) if absent else error from None
            whole = int(answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2])
            return filled(buffer, answer, size, take), whole

        return self._until_answered(f"get {uri} from byte {start:,}", attempt)

    def upload(self, path: Path, key: str, check: Check | None = None) -> None:
        with open(path, "rb") as file:

            def read(start: int, buffer: memoryview) -> None:
                if check:
                    check()
                while buffer and (count := os.preadv(file.fileno(), [buffer], start)):
                    start, buffer = start + count, buffer[count:]

            size = os.fstat(file.fileno()).st_size
            self._upload_from(read, size, key, part_length(size))

    def write(self, parts: Sequence[memoryview], key: str, length: int) -> list[str]:
        def read(start: int, buffer: memoryview) -> None:
            for piece in slices(parts, start, len(buffer)):
                buffer[: len(piece)] = piece
                buffer = buffer[len(piece) :]

        return self._upload_from(read, sum(len(part) for part in parts), key, length)

    def _upload_from(self, read: Callable[[int, memoryview], None], size: int, key: str, length: int) -> list[str]:
        """Store `size` bytes, of which `read(start, buffer)` fills a buffer, in parts of `length` and in parallel.
        Returns the sha256 of each part."""
        own = threading.local()  # the buffer of a thread: new memory for each part would cost as much as sending it

        def filled_part(start: int) -> bytearray:
            count = min(length, size - start)
            if count < length:
                body = bytearray(count)
            else:
                body = own.body = getattr(own, "body", None) or bytearray(length)
            read(start, memoryview(body))
            return body

        if size <= length:
            self.put(key, body := bytes(filled_part(0)))
            return [hashlib.sha256(body).hexdigest()] if body else []

        def attempt() -> list[str]:
            client, where = self._transfer_client, self._where(key)
            where["UploadId"] = client.create_multipart_upload(**where, **_content_type(key))["UploadId"]

            def send(start: int) -> tuple[dict[str, Any], str]:
                number, body = start // length + 1, filled_part(start)
                answer = client.upload_part(**where, PartNumber=number, Body=body)
                return {"PartNumber": number, "ETag": answer["ETag"]}, SENT.sha256

            try:
                with ThreadPoolExecutor(self.connections) as pool:
                    sent = list(pool.map(send, range(0, size, length)))
                client.complete_multipart_upload(**where, MultipartUpload={"Parts": [part for part, _ in sent]})
                return [digest for _, digest in sent]
            except BaseException:
                with suppress(Exception):  # the bucket's rule for uploads of lost nodes removes it
                    client.abort_multipart_upload(**where)
                raise

        return self._until_answered(f"put {self._uri_of(key)}", attempt)

    def download(self, key: str, path: Path) -> str:
        buffer = memoryview(bytearray(FIRST_BYTES))
        count, size = self._read(self._where(key), 0, buffer)
        digest, own = hashlib.sha256(buffer[:count]), threading.local()
        with replacing(Path(path)) as file, ThreadPoolExecutor(self.connections) as pool:

            def part(start: int) -> int:
                """Fetch a part into the file, through the buffer of its thread. Returns its end."""
                own.buffer = getattr(own, "buffer", None) or bytearray(FIRST_BYTES)
                length = min(PART_BYTES, size - start)

                def write(at: int, arrived: memoryview) -> None:
                    write_at(file.fileno(), arrived, start + at)

                if self.read_into(key, start, memoryview(own.buffer), length, write) != length:
                    raise StoreUnavailable(f"{self._uri_of(key)}: changed while it was read; run again")
                return start + length

            write_at(file.fileno(), buffer[:count], 0)
            for end in pool.map(part, range(count, size, PART_BYTES)):
                # Hashed from the cache of the file system, beside the parts that arrive.
                while count < end and (read := os.preadv(file.fileno(), [buffer[: end - count]], count)):
                    digest.update(buffer[:read])
                    count += read
        return digest.hexdigest()

    def entries(self, prefix: str) -> list[Entry]:
        return self.objects(checked_prefix(prefix))

    def objects(self, prefix: str) -> list[Entry]:
        """The objects whose keys begin with `prefix`, in order of their keys; they need not be ours."""
        request = {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        found, known = list[Entry](), set[str | None]()

        def attempt() -> tuple[list[Entry], str | None]:
            page = self._client.list_objects_v2(**request)
            more = page["NextContinuationToken"] if page["IsTruncated"] else None
            if more in known:
                raise OddAnswer("the same continuation token again")
            entries = [
                Entry(item["Key"][len(self.prefix) :], item["Size"], item["LastModified"].timestamp(), item["ETag"])
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")  # folder markers of web consoles
            ]
            return entries, more

        while True:
            entries, more = self._until_answered(f"list {self.uri}/{prefix}", attempt)
            found += entries
            if more is None:
                return sorted(found, key=lambda one: one.key)
            known.add(more)
            request["ContinuationToken"] = more

    def delete(self, key: str) -> None:
        self._until_answered(f"delete {self._uri_of(key)}", lambda: self._client.delete_object(**self._where(key)))

    def clock(self) -> float:
        request = {"Bucket": self.bucket, "Prefix": self.prefix, "MaxKeys": 1}

        def attempt() -> float:
            date = self._client.list_objects_v2(**request)["ResponseMetadata"]["HTTPHeaders"].get("date")
            return parsedate_to_datetime(date).timestamp() if date else time.time()

        return self._until_answered(f"list {self.uri}/", attempt)

    def other_connections(self) -> Iterator[None]:
        for seconds in READ_AGAIN_SECONDS:
            pause(seconds)
            for client in (self._client, self._transfer_client):
                client.close()  # of its connections; the next request opens one
            yield

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return str(self._client.meta.endpoint_url)

    def region(self) -> str | None:
        """The region of the bucket; None if the server does not tell it."""
        what = f"locate {self.uri}"
        answer = self._until_answered(what, lambda: self._client.head_bucket(Bucket=self.bucket))
        return answer.get("BucketRegion")

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + checked_key(key)}

    def _uri_of(self, key: str) -> str:
        return f"{self.uri}/{checked_key(key)}"

    def _put_object(self, key: str, body: bytes, **conditions: str) -> None:
        # The server compares the MD5 before it stores: a damaged body never becomes an object.
        md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        self._client.put_object(**self._where(key), Body=body, ContentMD5=md5, **_content_type(key), **conditions)

    def _get_object(self, key: str) -> bytes | None:
        try:
            answer = self._client.get_object(**self._where(key))
            refuse_huge(self._uri_of(key), answer.get("ContentLength", 0))
            body = bytes(answer["Body"].read())
            self._check_md5(key, body, answer)
            return body
        except self._client.exceptions.ClientError as error:
            if code_of(error) == "NoSuchKey":
                return None
            raise

    def _check_md5(self, key: str, body: bytes, answer: Mapping[str, Any]) -> None:
        """OddAnswer for a body that is not the one that was stored. The ETag of an object that was sent in one part is
        its MD5, unless a key of KMS encrypts it or the server has ETags of its own: then a second read gives the same
        body."""
        tag, digest = answer["ETag"].strip('"'), hashlib.md5(body, usedforsecurity=False).hexdigest()
        self._etags_are_md5 |= tag == digest
        encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256"
        if tag == digest or encrypted or not re.fullmatch("[0-9a-f]{32}", tag):
            return
        before, self._unverified[key] = self._unverified.get(key), digest
        if self._etags_are_md5 or before != digest:
            raise OddAnswer("the body does not have the MD5 of its ETag")

    def _until_answered(self, what: str, request: Callable[[], T]) -> T:
        """Call `request` until it answers, fails for good, or reaches the time limit, which begins with its first
        failure. Logs few lines: the times come first, because a narrow terminal cuts the end."""
        import tenacity

        began: float | None = None  # of the outage, by time.monotonic
        kind = what.partition(" ")[0].replace("create", "put")

        def may_pass(error: BaseException) -> bool:
            return is_transient(error) or (kind in self._accepted and is_refusal(error))

        def is_too_late(state: tenacity.RetryCallState) -> bool:
            since = time.monotonic() if began is None else began
            return time.monotonic() + state.upcoming_sleep - since > self._time_limit_s

        def log_retry(state: tenacity.RetryCallState) -> None:
            nonlocal began
            WAITING.check()
            assert state.outcome is not None
            error, now = state.outcome.exception(), time.monotonic()
            began = now if began is None else began
            if now - self._line_at >= LINE_SECONDS:
                self._line_at, left = now, max(0.0, began + self._time_limit_s - now)
                times = f"{now - began:.0f} s without an answer, {left:.0f} s left"
                log.warning("%s: %s: %s; trying again", times, what, brief(error))
            if error and is_refusal(error):
                with suppress(UserError):
                    self._connect()

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            sleep=pause,
            stop=is_too_late,
            before_sleep=log_retry,
            reraise=True,
        )
        try:
            answer = attempts(understood, request)
            self._accepted.add(kind)
            return answer
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:
            reported = explained(error, what, self._client.meta.endpoint_url, self._time_limit_s)
            if reported is error:
                raise
            if may_pass(error) and not is_transient(error):
                raise StoreUnavailable(f"{reported}; refused for {self._time_limit_s:g} s") from error
            raise reported from error


def filled(buffer: memoryview, answer: Mapping[str, Any], size: int | None = None, take: Take | None = None) -> int:
    """Fill a buffer with the body of an answer, like `read_into`. Returns the number of bytes. IncompleteReadError for
    a body that ends too early.

    botocore and urllib3 would copy each byte three times. The system call below them takes the buffer itself.
    """
    from botocore.exceptions import IncompleteReadError

    body = answer["Body"]._raw_stream
    wanted = min(size or len(buffer), answer["ContentLength"])  # a server may ignore the range

    def read(part: memoryview) -> int:
        with body._error_catcher():  # not around `take`, whose errors, such as a full disk, are not the server's
            return int(body._fp.readinto(part))

    try:
        done = read_through(read, wanted, buffer, take)
    except BaseException:
        body.close()
        raise
    if done < wanted:
        raise IncompleteReadError(actual_bytes=done, expected_bytes=wanted)
    if answer["ContentLength"] > wanted:
        body.close()
    return done


def write_at(file: int, body: memoryview, start: int) -> None:
    """Write a body into a file, from byte `start` on."""
    while body:
        count = os.pwrite(file, body, start)
        start, body = start + count, body[count:]


def open_store(uri: str) -> Store:
    """The store of a URI: "s3://bucket/prefix", "file://path" (relative or absolute), or a plain path.
    Reads and writes nothing yet. UserError for any other URI."""
    shown = redacted(uri)
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
            raise UserError(f"store {shown!r}: {prefix!r} is not a valid prefix; use one such as 'team/runs'") from None
    if kind == "file" and rest:
        return _local(shown, Path(rest))
    if re.fullmatch(r"[\w.-]*\w", uri) and not os.path.isdir(uri):
        raise UserError(f"store {shown!r}: neither a bucket nor a folder that exists; write s3://{shown} or ./{shown}")
    if uri and not scheme:
        return _local(shown, Path(uri))
    raise UserError(f"store {shown!r}: not a store; give s3://BUCKET/PREFIX, file://PATH or a path (./NAME)")


def _local(uri: str, root: Path) -> LocalStore:
    store = LocalStore(root)
    try:
        nearest = next(folder for folder in (store.root, *store.root.parents) if folder.exists())
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(f"store {uri[:80]!r}: not a usable path ({error.strerror}); name a folder") from error
    if not nearest.is_dir():
        raise UserError(f"store {uri!r}: {nearest} is a file; a store is a folder")
    return store


def _content_type(key: str) -> dict[str, str]:
    """The argument of a request that stores an object, by its name."""
    kind = CONTENT_TYPES.get(PurePosixPath(key).suffix)
    return {"ContentType": kind} if kind else {}
