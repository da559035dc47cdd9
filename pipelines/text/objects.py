"""Text in S3: objects as files that can be read from any position, by fsspec.

The requests are those of the store (pipelines/artifacts/store.py): the same credentials, endpoint, retries and errors.
A file is read in ranges of the object that was opened: an object that is replaced meanwhile is an error.
"""

import functools
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from pipelines.artifacts.store import S3Store
from trainer.config import seconds_from_environment
from trainer.errors import UserError
from trainer.store import Entry

BLOCK_BYTES = 4 << 20  # read at once, also behind the end of a piece


def matching_objects(source: str) -> dict[str, Entry]:
    """The objects that s3://BUCKET/KEY or a pattern of keys names, by their URL in order. UserError without any."""
    files = S3Files()
    path = files._strip_protocol(source)
    found = files.glob(path, detail=True) if fsspec.core.has_magic(path) else {path: files.info_or_none(path)}
    objects = {f"s3://{name}": info["object"] for name, info in sorted(found.items()) if info}
    if not objects:
        raise UserError(f"tokens.source: no object matches '{source}'")
    return objects


class S3Files(AbstractFileSystem):
    """Read-only files of all buckets that the credentials reach. A path is BUCKET/KEY."""

    protocol = "s3"

    def info_or_none(self, path: str) -> dict[str, Any] | None:
        """The file of exactly this path, if there is one."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        same = (one for one in store_of(bucket).objects(key) if one.key == key) if key else iter(())
        return next((_info(bucket, one) for one in same), None)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if info := self.info_or_none(path):
            return info
        raise FileNotFoundError(2, "no such object", f"s3://{self._strip_protocol(path)}")

    def find(self, path: str, *_: Any, detail: bool = False, **options: Any) -> Any:
        """All files below a folder, which `glob` filters."""
        bucket, _slash, key = self._strip_protocol(path).partition("/")
        prefix = f"{key}/" if key else ""
        found = {info["name"]: info for one in store_of(bucket).objects(prefix) for info in [_info(bucket, one)]}
        return found if detail else sorted(found)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> "S3File":
        assert mode == "rb", mode
        bucket = self._strip_protocol(path).partition("/")[0]
        return S3File(self, path, store_of(bucket), self.info(path)["object"])


class S3File(AbstractBufferedFile):
    """One object, opened for reading."""

    def __init__(self, files: S3Files, path: str, store: S3Store, opened: Entry) -> None:
        self.store, self.opened = store, opened
        super().__init__(files, path, block_size=BLOCK_BYTES, size=opened.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.store.read(self.opened, start, end - start)


@functools.cache  # fsspec makes a file system for each thread; a client of boto3 takes 0.1 s of processor time
def store_of(bucket: str) -> S3Store:
    """The whole of a bucket, by the environment of the first call."""
    return S3Store(bucket, time_limit_s=seconds_from_environment("SKYTRAIN_STORE_SECONDS", 120))


def _info(bucket: str, one: Entry) -> dict[str, Any]:
    return {"name": f"{bucket}/{one.key}", "type": "file", "size": one.size, "ETag": one.etag, "object": one}
