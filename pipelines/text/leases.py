"""Leases of the parts of a text: of several nodes, one works on a part, and another takes over after its silence.

A node takes lease number n of a part by a create-only put, and renews it by a put every few seconds. A lease is over
once its node says so, once its attempt is, or after SILENT_SECONDS by the store's clock; then lease n + 1 can be taken.
A lease decides which node works, never what counts: a shard has the same bytes whoever makes it, and its receipt is
created once. So a node that was frozen, and goes on beside its successor, harms nothing.
"""

import json
import re
import threading
from contextlib import suppress

from trainer.errors import UserError
from trainer.process import Background
from trainer.store import Entry, Store

RENEW_SECONDS = 5.0
SILENT_SECONDS = 20.0
NAME = re.compile(r"\d{4,9}\.json")
OVER = b"{}"  # the body of a lease that its node has given back


class PartTaken(Exception):
    """Another node has taken over the part."""


class Lease:
    """A lease of a part. Use as a context manager: it is renewed inside, and given back behind."""

    def __init__(self, store: Store, folder: str, number: int, body: bytes) -> None:
        self.lost = False
        self._store, self._folder, self._number, self._body = store, folder, number, body
        self._ending = threading.Event()
        self._thread = Background("lease", self._renew)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(RENEW_SECONDS)
        with suppress(OSError, UserError):  # then it is over by its silence
            self._store.put(_key(self._folder, self._number), OVER)

    def check(self) -> None:
        """PartTaken if another node has taken over."""
        if self.lost:
            raise PartTaken(self._folder)

    def _renew(self) -> None:
        while not self._ending.wait(RENEW_SECONDS):
            with suppress(OSError, UserError):  # a store that does not answer: another node may take over
                self._store.put(_key(self._folder, self._number), self._body)
                self.lost = _newest(self._store, self._folder)[0] > self._number


def take(store: Store, prefix: str, part: int, attempt: int, holder: str) -> Lease | None:
    """The next lease of a part for a node of this attempt; None while another node's is good.

    `holder` is unique: two nodes that take the same number must not write the same bytes.
    """
    folder = f"{prefix}/leases/{part:02d}/"
    number, entry = _newest(store, folder)
    if entry and store.clock() - entry.modified < SILENT_SECONDS and _is_good(store.get(entry.key), attempt):
        return None
    body = json.dumps({"attempt": attempt, "holder": holder}).encode()
    return Lease(store, folder, number + 1, body) if store.create(_key(folder, number + 1), body) else None


def _is_good(body: bytes | None, attempt: int) -> bool:
    """Whether a lease belongs to a node that may still work: one of this attempt, or of a newer one."""
    with suppress(ValueError, TypeError, AttributeError):
        return int(json.loads(body or OVER).get("attempt", 0)) >= attempt
    return False  # a damaged record


def _newest(store: Store, folder: str) -> tuple[int, Entry | None]:
    """The highest number of a lease, 0 without one, and its entry."""
    names = ((entry.key.removeprefix(folder), entry) for entry in store.entries(folder))
    found = [(int(name.removesuffix(".json")), entry) for name, entry in names if NAME.fullmatch(name)]
    return max(found, default=(0, None), key=lambda one: one[0])


def _key(folder: str, number: int) -> str:
    return f"{folder}{number:04d}.json"
