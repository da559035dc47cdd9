"""The events of the ranks reach screen, heartbeat and tracking once, with the numbers that count."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipelines.nodes.address import NodeAddress
from pipelines.nodes.results import FAULT, GONE, KILLED, PEER, NodeResult
from pipelines.nodes.workers import WorkerRecord, Workers
from pipelines.pipeline import state_after
from pipelines.show.console import TerminalScreen
from pipelines.stage import Work
from pipelines.stages import follow
from pipelines.stages.follow import Follower, cause_of_crash, raise_error_of_ranks
from trainer.errors import Crashed, Interrupted, Stopped, StoreUnavailable
from trainer.events import (
    Checkpointed,
    CheckpointFailed,
    PhaseChanged,
    Row,
    event_to_json,
)


def test_a_failed_checkpoint_is_a_warning_and_a_stopped_run_names_its_last_commit(work: Callable[[str], Work]) -> None:
    train_work = work("train")
    warnings, notes = list[str](), list[str]()
    train_work.screen = cast(TerminalScreen, SimpleNamespace(warn=warnings.append, note=notes.append))
    with TerminalScreen(quiet=True).bar("train", 10) as bar:
        Follower(train_work).handle(CheckpointFailed(1200, "OSError(28)"), bar)
        Follower(train_work).handle(Checkpointed(5, 0.1), bar)
        train_work.stop.ask("SIGINT")
        Follower(train_work).handle(Checkpointed(1300, 0.1), bar)
    assert warnings == ["checkpoint of step 1,200 failed (OSError(28)); training continues"]
    assert notes == ["  step 1,300 is committed"]


def test_a_follower_reads_each_byte_of_the_events_a_few_times_however_many_there_are(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "POLL_SECONDS", 0)
    train_work, looks = work("train"), iter(range(200))
    events = train_work.folder / follow.EVENTS_FILE

    class RanksThatLogTenStepsBetweenTwoLooks:
        def poll(self) -> int | None:
            if (look := next(looks, None)) is None:
                return 0
            rows = (Row(10 * look + n, 1.0, {"tune/loss": 1.0}, {"train": 1.0}, "train") for n in range(10))
            with events.open("a") as file:
                file.writelines(event_to_json(row) + "\n" for row in rows)
            return None

        def wait(self) -> int:
            return 0

    def bytes_read() -> int:
        """By this process."""
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    assert follow.follow(train_work, cast(subprocess.Popen[bytes], RanksThatLogTenStepsBetweenTwoLooks())) == 1999
    assert bytes_read() - before < 3 * events.stat().st_size


def test_ranks_that_are_not_ready_to_train_are_killed_by_a_stop(work: Callable[[str], Work]) -> None:
    train_work = work("train")
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout and launcher.stdout.readline()  # it ignores SIGTERM now
        (train_work.folder / follow.EVENTS_FILE).write_text(event_to_json(PhaseChanged({}, "download")) + "\n")
        for name in ("train.log", "spec.json"):
            (train_work.folder / name).touch()
        train_work.stop.ask("SIGTERM")
        with pytest.raises(Interrupted):
            follow.follow(train_work, launcher)
        assert launcher.returncode == -signal.SIGKILL


def test_a_run_whose_store_takes_no_checkpoint_for_too_long_is_asked_to_stop(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, now = work("train"), 100.0
    monkeypatch.setattr(follow.time, "monotonic", lambda: now)
    monkeypatch.setenv("SKYTRAIN_UNSAVED_SECONDS", "1800")
    follower = Follower(train)
    with train.screen.bar("train", 10) as bar:
        follower.handle(CheckpointFailed(3, "refused"), bar)
        now += 1799
        follower.handle(CheckpointFailed(4, "refused"), bar)
        follower.handle(Checkpointed(5, 0.1), bar)
        assert train.attempt.latest.progress.unsaved_since is None
        now += 1799
        follower.handle(CheckpointFailed(6, "refused"), bar)
        assert not train.stop.asked and train.attempt.latest.progress.unsaved_because == "refused"
        now += 1801
        follower.handle(CheckpointFailed(7, "refused", ended=True), bar)
        assert not train.stop.asked  # it waits for the store: the machine has the only copy of the trained weights
        follower.handle(CheckpointFailed(7, "refused"), bar)
    assert train.stop.asked and train.stop.ending is Interrupted
    assert train.stop.reason == "the store has taken no checkpoint for 1,801 s"


@pytest.mark.parametrize(("ending", "raised"), [(Interrupted, StoreUnavailable), (Stopped, Stopped)])
def test_a_run_whose_store_takes_no_checkpoint_is_interrupted_or_stopped_with_the_reason_in_its_status(
    work: Callable[[str], Work], ending: type[Interrupted], raised: type[Exception]
) -> None:
    train_work, message = work("train"), "not writable"
    train_work.report(unsaved_since=1.0, unsaved_because="not writable")
    train_work.stop.ask("me: skytrain stop", ending)
    (train_work.folder / "unavailable-0.txt").write_text(message)
    with pytest.raises(raised, match=message) as ended:
        raise_error_of_ranks(train_work, 1, None, None)
    assert type(ended.value) is raised and ("me: skytrain stop; " in str(ended.value)) == (ending is Stopped)
    assert state_after(ended.value) == ("stopped" if ending is Stopped else "interrupted")
    assert train_work.attempt.latest.progress.unsaved_because == message


@pytest.mark.parametrize("ending", [Interrupted, Stopped])
def test_a_gpu_fault_interrupts_and_a_stopped_run_stays_stopped(
    work: Callable[[str], Work], ending: type[Interrupted]
) -> None:
    train_work, fault = work("train"), "CUDA error: uncorrectable ECC error encountered"
    train_work.stop.ask("me: skytrain stop", ending)
    (train_work.folder / "train.log").write_text(fault)
    (train_work.folder / "spec.json").touch()
    with pytest.raises(Interrupted, match="me: skytrain stop" if ending is Stopped else fault) as ended:
        raise_error_of_ranks(train_work, 1, None, None)
    assert ended.type is ending


STUCK_LINE = "rank 0: no progress in phase 'first exchange' for 600 s; exiting"


@pytest.mark.parametrize(
    ("file", "cause", "interruption"),
    [
        ("train.log", STUCK_LINE, Interrupted),
        ("unavailable-0.txt", "the store did not answer", StoreUnavailable),
    ],
)
def test_ranks_that_hang_or_cannot_save_are_an_interruption_that_counts_as_a_crash(
    work: Callable[[str], Work],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    cause: str,
    interruption: type[Exception],
) -> None:
    monkeypatch.setattr(follow, "SIGNALS_SECONDS", 0)
    train_work = work("train")
    for name in ("train.log", "spec.json"):
        (train_work.folder / name).touch()
    (train_work.folder / file).write_text(cause)
    if interruption is StoreUnavailable:
        train_work.report(unsaved_since=1.0)
    with pytest.raises(interruption, match=cause):
        raise_error_of_ranks(train_work, 1, None, None)
    progress = train_work.attempt.latest.progress
    assert cause in (progress.killed, progress.unsaved_because)


def test_a_killed_rank_is_the_cause_on_whichever_node_it_ran_and_lost_peers_only_without_another() -> None:
    head, killed = NodeResult(0, PEER, "connection closed"), NodeResult(1, KILLED, "rank 1 was killed by SIGKILL")
    assert cause_of_crash([head, killed]) == cause_of_crash([killed, head]) == "rank 1 was killed by SIGKILL"
    assert cause_of_crash([head, NodeResult(1, PEER, "reset by peer")]) == "connection closed"
    assert cause_of_crash([head, NodeResult(1, FAULT, "KeyError")]) is None
    assert cause_of_crash([NodeResult(0)]) is None


@pytest.mark.parametrize(("kind", "ending"), [(KILLED, Crashed), (GONE, Interrupted)])
def test_a_machine_does_not_start_again_without_the_command_of_a_worker(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch, kind: str, ending: type[Interrupted]
) -> None:
    monkeypatch.setattr(follow, "SIGNALS_SECONDS", 0)
    train_work = work("train")
    (train_work.folder / "train.log").touch()
    workers = Workers(NodeAddress(0, 2), train_work.attempt, train_work.stop)
    record = WorkerRecord(1, 1.0, result=NodeResult(1, kind, "killed by SIGKILL"))
    record.write(train_work.store, train_work.plan.prefix, train_work.attempt.number)
    workers.look()
    (train_work.folder / "peer-0.txt").write_text("connection closed")
    with pytest.raises(Interrupted, match="killed by SIGKILL") as ended:
        raise_error_of_ranks(train_work, 1, None, workers)
    assert ended.type is ending
