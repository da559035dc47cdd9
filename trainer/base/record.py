"""The reader of every record that comes from the store. Any writer of the store may have written the record.

A record is JSON of a dataclass that derives from `StoredRecord`. The reader bounds its size and its numbers,
takes each field in its own type only, and ignores unknown fields: an earlier skytrain wrote those that were removed
since. A change that an older reader must not ignore raises FORMAT. A name that becomes a path has the type `Key`. So
code behind the reader handles sound values alone.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trainer.base.store import Store, checked_key, read_again
from trainer.config.errors import NotAFile, UserError, cut, shown

FORMAT = 1  # of a record without the field `format`
SMALL_BYTES = 1 << 20  # of a record
LARGE_BYTES = 64 << 20  # of one that names files; the manifest of a text with 100,000 shards has 25 MB
MOST_VALUES = 4_000_000  # in a record: 64 MB of `0,0,0` would take gigabytes of memory
MOST_FILE_BYTES = 5 << 40  # the most that an object in S3 holds
FIRST_SECOND, LAST_SECOND = -62_135_596_800.0, 253_402_300_799.0  # of the years 1 to 9999, which can be shown
MOST_COUNT = 1 << 53  # integers that a float holds exactly
MOST_CHARACTERS, MOST_CHARACTERS_OF_A_PART = 1024, 255  # of a name: what S3 and file systems take

T = TypeVar("T")


class DamagedRecord(UserError):
    """A record that no version of ours wrote. `where`: its place, which a name of the store begins."""

    def __init__(self, where: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{where}: damaged ({cut(reason)})" + (f"; {remedy}" if remedy else ""))
        self.where, self.reason = where, cut(reason)


class NewerRecord(UserError):
    """A record of a newer skytrain."""


class StoredRecord:
    """Base of the dataclasses of records: a field takes no value of another type."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)


def checked_name(name: str) -> str:
    """A plain relative path that every store and file system can hold; ValueError for any other name."""
    if len(name) > MOST_CHARACTERS or any(len(part.encode()) > MOST_CHARACTERS_OF_A_PART for part in name.split("/")):
        raise ValueError(f"not a name: {shown(name)} is too long")
    return checked_key(name)


Key = Annotated[str, AfterValidator(checked_name)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=MOST_FILE_BYTES)]  # bytes of a file
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
UnixSeconds = Annotated[float, Field(ge=FIRST_SECOND, le=LAST_SECOND)]
Number = int | float


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Any error of the block is damage of the record at `where`: nobody can list what a stranger's values raise. A
    UserError and an error of the store stay as they are."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise DamagedRecord(where, f"{kind}{error}") from error


def record_in(kind: type[T], body: bytes, where: str, version: int = FORMAT, most_bytes: int = SMALL_BYTES) -> T:
    """The record in an object of the store. DamagedRecord or NewerRecord with the object's name, `where`."""
    return typed(kind, decoded(body, where, most_bytes), where, version)


def record_at(kind: type[T], store: Store, key: str, polled: bool = False) -> T | None:
    """The record in an object of the store, as `decoded_at` reads it."""
    return decoded_at(store, key, lambda body, where: record_in(kind, body, where), polled)


def decoded_at(
    store: Store, key: str, decode: Callable[[bytes, str], T], polled: bool = False, remedy: str = ""
) -> T | None:
    """The record in an object of the store, by `decode(body, where)`; None if there is none. DamagedRecord with the
    remedy, or NewerRecord.

    A record that looks damaged is read again on other connections, and so is one that is absent although the store
    lists it. `polled`: its absence is usual and harmless, so it costs no listing.
    """
    where = f"{store.uri}/{key}"

    def read() -> T | None:
        body = store.get(key)
        if body is None and not polled and any(entry.key == key for entry in store.entries(key)):
            body = store.get(key)  # it may have been created before the listing
            if body is None:
                raise DamagedRecord(where, "the store lists it, and finds no such object")
        return None if body is None else decode(body, where)

    try:
        return read_again(store, read, DamagedRecord, NewerRecord, NotAFile)
    except DamagedRecord as error:
        raise DamagedRecord(error.where, error.reason, remedy) from error


def decoded(body: bytes, where: str, most_bytes: int = SMALL_BYTES) -> Any:
    """The JSON of a record. DamagedRecord for anything else, for NaN, infinity and integers beyond 64 bits."""
    with reading(where):
        if len(body) > most_bytes:
            raise ValueError(f"more than {most_bytes:,} bytes")
        if body.count(b",") > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        return json.loads(body, parse_int=_integer, parse_float=_finite, parse_constant=_finite)


def _integer(text: str) -> int:
    if len(text) > 19 or (value := int(text)).bit_length() > 63:
        raise ValueError("an integer has more than 64 bits")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a number")
    return value


def typed(kind: type[T], values: Any, where: str, version: int = FORMAT) -> T:
    """Decoded JSON as a dataclass, or a list of them. DamagedRecord or NewerRecord."""
    if isinstance(values, dict) and "format" in values:
        written = values["format"]
        if type(written) is int and written > version:
            raise NewerRecord(
                f"{where}: written by a newer skytrain (format {written}, this one reads {version}); upgrade skytrain"
            )
        if type(written) is not int or written != version:
            raise DamagedRecord(where, f"format {shown(written)}")
        if "format" not in getattr(kind, "__dataclass_fields__", {}):
            values = {name: value for name, value in values.items() if name != "format"}
    with reading(where):
        try:
            return _adapter(cast(Any, kind)).validate_json(json.dumps(values))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{place}: {problem['msg']}" if place else problem["msg"]) from error


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
