"""Text in S3, by the requests of the store (pipelines/store/s3_store.py): its credentials, retries and errors.

A file is read in ranges of the object that was opened: an object that is replaced meanwhile is an error.
"""

import functools
import io
import os
import re
from typing import Any

from pipelines.store.s3_store import S3Store
from trainer.base.store import Entry
from trainer.config.config import seconds_from_environment
from trainer.config.errors import UserError

BLOCK_BYTES = 4 << 20  # read at once, also behind the end of a piece


def matching_objects(source: str) -> dict[str, Entry]:
    """The objects that s3://BUCKET/KEY or a pattern of keys names, by their URL in order. UserError without any."""
    from fsspec.utils import glob_translate

    bucket, _, pattern = source.removeprefix("s3://").partition("/")
    matches = re.compile(glob_translate(pattern)).match
    prefix = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    found = store_of(bucket).objects(prefix) if pattern else []
    objects = {f"s3://{bucket}/{one.key}": one for one in found if one.key == pattern or matches(one.key)}
    if not objects:
        raise UserError(f"tokens.source: no object matches '{source}'")
    return dict(sorted(objects.items()))


def opened_object(url: str) -> io.BufferedReader:
    """An object for reading. FileNotFoundError if it is gone."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    found = next((one for one in store_of(bucket).objects(key) if one.key == key), None)
    if found is None:
        raise FileNotFoundError(2, "no such object", url)
    return io.BufferedReader(_Object(store_of(bucket), found), BLOCK_BYTES)


class _Object(io.RawIOBase):
    def __init__(self, store: S3Store, found: Entry) -> None:
        self.store, self.found, self.at = store, found, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.found.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        if wanted := max(0, min(len(buffer), self.found.size - self.at)):
            wanted = self.store.read_listed(self.found, self.at, memoryview(buffer)[:wanted])
        self.at += wanted
        return wanted


@functools.cache  # a client of boto3 takes 0.1 s of processor time
def store_of(bucket: str) -> S3Store:
    """The whole of a bucket, by the environment of the first call."""
    return S3Store(bucket, time_limit_s=seconds_from_environment("SKYTRAIN_STORE_SECONDS", 120))
