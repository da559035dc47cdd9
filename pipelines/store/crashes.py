"""Crashes: a signal (kill -9, lack of memory) ended a rank, its launcher, or `skytrain run` itself; the watchdog ended
a rank; or an attempt left because the store took no checkpoint, or because torch could not use the machine's GPUs.

A crash is an interruption, after which the same command resumes, or starts over if there is no checkpoint yet: at most
MOST_CRASHES times in a row without a new one, and once on a machine whose GPUs are unfit. The store has the count, so
it outlives the machine.
"""

from collections.abc import Iterable

from pipelines.store.ledger import attempts
from pipelines.store.records import Heartbeat, Machine
from trainer.base.store import Store
from trainer.checkpoint.commits import newest_commit
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES
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


# --- their rate

# Own and on-demand machines: Llama 3's 16,384 GPUs had 419 unplanned interruptions in 54 days (Dubey et al. 2024),
# so eight GPUs fail once in about 260 days. A new rented machine is less reliable than that.
STEADY_SECONDS_BETWEEN_FAILURES = 30 * 86_400.0


def prior_seconds_between_failures(machine: Machine, nodes: int = 1) -> float:
    """The expected time until the first of so many nodes is lost, before a run has attempts of its own.

    Own and on-demand machines are steady; a machine of unknown market may be spot.
    """
    steady = not machine.cloud or machine.spot is False
    return (STEADY_SECONDS_BETWEEN_FAILURES if steady else PRIOR_SECONDS_BETWEEN_FAILURES) / nodes


def seconds_between_failures(heartbeats: Iterable[Heartbeat], prior_seconds: float) -> float:
    """Mean time between crashes, by a signal or without a last heartbeat. The prior counts as one.

    The posterior mean of a Poisson rate with a Gamma(1, prior) prior. An attempt that committed before it left lost
    nothing, and does not count.
    """
    beats = list(heartbeats)
    seconds = sum(3600 * beat.billed_hours for beat in beats)
    crashes = sum(beat.state == "running" or beat.progress.killed is not None for beat in beats)
    return (prior_seconds + seconds) / (1 + crashes)
