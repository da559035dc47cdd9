"""Deaths by a signal (kill -9, lack of memory, a crash) of a rank, of torchrun, or of `skytrain run` itself; ranks that
the watchdog ended; and attempts that left because the store took no checkpoint.

A death is an interruption, after which the same command resumes: if training has a commit to resume from, and at most
MOST_DEATHS times in a row without a new commit. The attempts in the store hold the count, so it outlives the machine.
"""

from pipelines.tracking.ledger import attempts
from trainer.commits import newest_commit
from trainer.errors import Died, Interrupted
from trainer.store import Store

MOST_DEATHS = 3


def after_death(
    store: Store, prefix: str, attempt: int, cause: str, may_start_over: bool = False
) -> Interrupted | Died:
    """The exception that ends an attempt on the artifact `prefix` after a death of this cause.

    After a fault of the hardware, a hang or failed saves, the same command also `may_start_over` without a commit.
    """
    commit = newest_commit(store, prefix)
    if prefix.startswith("train/") and commit is None and not may_start_over:
        return Died(f"{cause}; there is no commit to resume from")
    since = commit.attempt if commit else 0
    beats = [beat for beat in attempts(store, prefix) if since < beat.attempt < attempt]
    unsaved = {beat.attempt for beat in beats if beat.progress.unsaved_since and beat.state != "running"}
    died = [beat.attempt for beat in beats if beat.progress.killed or beat.attempt in unsaved]
    if len(died) >= MOST_DEATHS:
        numbers = ", ".join(map(str, died))
        return Died(f"{cause}; so did attempts {numbers} end, and none of them made a commit")
    return Interrupted(cause)
