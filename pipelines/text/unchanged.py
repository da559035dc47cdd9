"""A text that must stay what it was when its artifact was planned, until its last shard is stored.

The fingerprint of an artifact holds the contents of the text. So before it is read, it is identified once more; and
before each shard is stored, its files are compared with their state at that time.
"""

from collections.abc import Mapping
from typing import Any

from pipelines.text.sources import Source
from trainer.errors import UserError


class UnchangedText:
    """A source with its identity and the state of its files. UserError if it is not the text of that identity."""

    def __init__(self, source: Source, where: str, identity: Mapping[str, Any]) -> None:
        self.source, self.where = source, where
        self.state = source.state()  # before the contents: a change between the two is found later
        found = source.identity()
        if found != identity:
            contents = (each.get("sha256") or each.get("etag") for each in (found, identity))
            raise self._changed(*(dict(zip(self.state, each or (), strict=False)) for each in contents))

    def check(self) -> None:
        """UserError if a file has changed since."""
        if (now := self.source.state()) != self.state:
            raise self._changed(now, self.state)

    def _changed(self, now: Mapping[str, Any], before: Mapping[str, Any]) -> UserError:
        names = [name for name in self.state if now.get(name) != before.get(name)]
        which = f"'{names[0]}' of '{self.where}'" if names else f"'{self.where}'"
        return UserError(
            f"tokens.source: {which} changed after its artifact was planned; run again, and do not change a text "
            "while it is read"
        )
