"""Crashes: a signal (kill -9, lack of memory) ended a rank, its launcher, or `skytrain run` itself; the watchdog ended
a rank; or an attempt left because the store took no checkpoint, or because torch could not use the machine's GPUs.

A crash is an interruption, after which the same command resumes, or starts over if there is no checkpoint yet: at most
MOST_CRASHES times in a row without a new one, and once on a machine whose GPUs are unfit. The store has the count, so
it outlives the machine.
"""

from pipelines.store.ledger import attempts
from trainer.base.store import Store
from trainer.checkpoint.commits import newest_commit
from trainer.config.errors import Interrupted, RepeatedCrash

MOST_CRASHES = 3
UNFIT = "unfit machine: "  # begins the cause of an attempt that ended with UnfitMachine


def after_crash(
    store: Store, prefix: str, attempt: int, cause: str, ending: type[Interrupted] = Interrupted
) -> Interrupted | RepeatedCrash:
    """The exception that ends an attempt on the artifact `prefix` after a crash: `ending`, or RepeatedCrash."""
    commit = newest_commit(store, prefix)
    since = commit.attempt if commit else 0
    beats = [beat for beat in attempts(store, prefix) if since < beat.attempt < attempt]
    unsaved = {beat.attempt for beat in beats if beat.progress.unsaved_since and beat.state != "running"}
    crashed = [beat.attempt for beat in beats if beat.progress.killed or beat.attempt in unsaved]
    unfit = [beat.attempt for beat in beats if (beat.progress.killed or "").startswith(UNFIT)]
    if cause.startswith(UNFIT) and unfit:
        return RepeatedCrash(f"{cause}; so did attempt {unfit[-1]}: choose other machines or another image")
    if len(crashed) >= MOST_CRASHES:
        numbers = ", ".join(map(str, crashed))
        return RepeatedCrash(f"{cause}; attempts {numbers} also crashed before saving a checkpoint")
    return ending(cause)
