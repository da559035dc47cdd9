"""The record of a crash of a job's work: a signal (kill -9, lack of memory) ended the child of the supervisor.

The next child writes it. So a job that always crashes ends after MOST_CRASHES (`pipelines/store/crashes.py`).
"""

import time
from dataclasses import replace

from pipelines.job.prices import billing_here
from pipelines.run.nodes.address import NodeAddress
from pipelines.run.nodes.results import GONE, NodeResult, signal_name
from pipelines.run.nodes.workers import WorkerRecord
from pipelines.run.pipeline import state_after
from pipelines.run.stage import missing, run_name
from pipelines.store.crashes import after_crash
from pipelines.store.ledger import attempts, claim, close_attempt, is_alive, newest_attempt
from pipelines.store.manifest import ArtifactPlan
from trainer.base.store import Store
from trainer.config.errors import EXIT_DONE, Crashed, Interrupted

ORPHAN_SECONDS = 150.0  # for the ranks of a killed command to commit: more than any cloud's grace


def record_crash(
    number: int, node: NodeAddress, store: Store, plans: dict[str, ArtifactPlan], until: str
) -> BaseException:
    """Record that a signal ended this node's part of a run. Returns the exception that ends it; Crashed if this machine
    may go on."""
    if node.rank:
        cause = f"the command of node {node.rank} was killed by {signal_name(number)}"
        recorded = record_for_node_0(store, plans["train"].prefix, node.rank, cause)
        return SystemExit(EXIT_DONE) if recorded else Interrupted(cause)  # the exit code of node 0 counts
    return record_on_node_0(store, plans, until, f"the run's command was killed by {signal_name(number)}")


def record_for_node_0(store: Store, train: str, rank: int, cause: str) -> bool:
    """Write into a worker's own record that it is gone: node 0 counts it. Returns whether node 0's attempt still runs,
    and this worker had started ranks for it."""
    newest = newest_attempt(store, train)
    own = WorkerRecord.read(store, train, newest.attempt, rank) if newest and newest.state == "running" else None
    if newest is None or own is None:
        return False
    replace(own, time=time.time(), result=NodeResult(rank, GONE, cause)).write(store, train, newest.attempt)
    return True


def record_on_node_0(store: Store, plans: dict[str, ArtifactPlan], until: str, cause: str) -> Exception:
    """Close the attempt of the process that was killed, once its ranks have left: the kernel asks them to commit. A
    process that crashed before it claimed an attempt gets one now, so that it counts too."""
    stage = next(iter(missing(store, plans, until)), None)
    if stage is None:
        return Crashed(cause)  # the work that is left is a report
    prefix = plans[stage].prefix
    beats = attempts(store, prefix)
    deadline = time.monotonic() + ORPHAN_SECONDS
    while beats and is_alive(beats[-1]) and time.monotonic() < deadline:
        time.sleep(0.5)
        beats = attempts(store, prefix)
    newest = beats[-1] if beats else None
    if newest and is_alive(newest) is not False:
        return Interrupted(cause)  # it waited for an attempt of another machine
    if newest and newest.state == "running":
        ending = after_crash(store, prefix, newest.attempt, cause, Crashed)
        close_attempt(store, prefix, newest, state_after(ending), cause)
        return ending
    number = newest.attempt + 1 if newest else 1
    ending = after_crash(store, prefix, number, cause, Crashed)
    if attempt := claim(store, prefix, run_name(plans), stage, number, billing_here(None), earlier=beats):
        with attempt:
            attempt.update(state=state_after(ending))
            attempt.report(killed=cause)
    return ending
