"""A plan where the store can't be read: without credentials, a bucket or a network, it covers the whole run."""

import os
from pathlib import Path

from pipelines.store.layout import STORE_ID
from trainer.base.answers import answered_within
from trainer.base.store import LocalStore, Store
from trainer.config.errors import UserError
from trainer.config.source import RUN

ANSWER_SECONDS = 10.0


class UnreadStore(LocalStore):
    """An empty store with the address of one that can't be read, and the reason. Nothing can be written to it."""

    def __init__(self, uri: str, why: str) -> None:
        super().__init__(Path(os.devnull))
        self._uri, self.why = uri, why

    @property
    def uri(self) -> str:
        return self._uri


def readable(store: Store, recipe: str) -> Store:
    """The store if it can be read within ANSWER_SECONDS, else an empty one. UserError or OSError for a recipe that only
    the store has."""
    try:
        answered_within(ANSWER_SECONDS, lambda: (store.get(STORE_ID), store.entries(STORE_ID)))
    except (UserError, OSError) as error:
        if recipe.startswith(RUN):
            raise
        return UnreadStore(store.uri, str(error).replace(f"/{STORE_ID}", ""))
    return store
