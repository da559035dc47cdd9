"""The run that a verb names."""

from typing import TYPE_CHECKING

from pipelines.verbs.options import store_uri

if TYPE_CHECKING:
    from pipelines.tracking.runs import RunRecord
    from trainer.store import Store


def named_run(run: str, store: str | None) -> "tuple[RunRecord, Store]":
    """The run, and its store. UserError if there is no such run, or more than one."""
    from pipelines.artifacts.store import open_store
    from pipelines.tracking.runs import read_records

    opened = open_store(store_uri(store))
    (record,) = read_records(opened, [run])
    return record, opened
