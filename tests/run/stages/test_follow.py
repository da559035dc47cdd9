"""The events of the ranks reach screen, heartbeat and tracking once, with the numbers that count."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipelines.run.nodes.address import NodeAddress
from pipelines.run.nodes.ranks import Ranks, TrainTask
from pipelines.run.nodes.results import FAULT, GONE, KILLED, PEER, NodeResult, cause_of
from pipelines.run.nodes.workers import WorkerRecord, Workers
from pipelines.run.pipeline import state_after
from pipelines.run.stage import Work
from pipelines.run.stages import follow
from pipelines.run.stages.follow import Follower, raise_error_of_ranks
from pipelines.run.stages.train import saving_task
from pipelines.user.show.console import TerminalScreen
from trainer.base.events import Checkpointed, CheckpointFailed, PhaseChanged, Row, event_to_json, events_after
from trainer.config.errors import Crashed, Interrupted, Stopped, StoreUnavailable


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


def test_events_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / follow.EVENTS_FILE
    rows = [event_to_json(Row(step, 1.0, {"tune/loss": 1.0}, {"train": 1.0}, "train")) + "\n" for step in (1, 2)]
    path.write_text(rows[0])
    (first,), offset = events_after(path, 0)
    path.write_text("x" * offset + rows[1] + rows[1][:9])  # the last line is not complete yet
    (second,), _ = events_after(path, offset)
    assert isinstance(first, Row) and isinstance(second, Row) and (first.step, second.step) == (1, 2)


def test_ranks_that_are_not_ready_to_train_are_killed_by_a_stop(work: Callable[[str], Work]) -> None:
    train_work = work("train")
    task = TrainTask(**saving_task(train_work, 1))
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout and launcher.stdout.readline()  # it ignores SIGTERM now
        (train_work.folder / follow.EVENTS_FILE).write_text(event_to_json(PhaseChanged({}, "download")) + "\n")
        for name in ("train.log", "task.json"):
            (train_work.folder / name).touch()
        train_work.stop.ask("SIGTERM")
        with pytest.raises(Interrupted):
            follow.follow(train_work, Ranks(launcher, task, train_work.folder, 30.0))
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


STUCK_LINE = "rank 0: no progress in phase 'first exchange' for 600 s; exiting"
ECC = "CUDA error: uncorrectable ECC error encountered"
AWAY = "the store did not answer"


@pytest.mark.parametrize(
    ("file", "message", "asked", "raised"),
    [
        ("train.log", STUCK_LINE, None, Interrupted),
        ("train.log", ECC, Interrupted, Interrupted),
        ("train.log", ECC, Stopped, Stopped),
        ("unavailable-0.txt", AWAY, None, StoreUnavailable),
        ("unavailable-0.txt", AWAY, Interrupted, StoreUnavailable),
        ("unavailable-0.txt", AWAY, Stopped, Stopped),
    ],
)
def test_a_hang_a_fault_and_an_outage_interrupt_with_their_reason_in_the_status_and_a_stopped_run_stays_stopped(
    work: Callable[[str], Work],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    message: str,
    asked: type[Interrupted] | None,
    raised: type[Exception],
) -> None:
    monkeypatch.setattr(follow, "SIGNALS_SECONDS", 0)
    train_work = work("train")
    for name in ("train.log", "task.json"):
        (train_work.folder / name).touch()
    (train_work.folder / file).write_text(message)
    if message == AWAY:
        train_work.report(unsaved_since=1.0, unsaved_because="not writable")
    if asked:
        train_work.stop.ask("me: skytrain stop", asked)
    with pytest.raises(raised) as ended:
        raise_error_of_ranks(train_work, 1, None, None)
    assert type(ended.value) is raised and ("me: skytrain stop" in str(ended.value)) == (raised is Stopped)
    assert state_after(ended.value) == ("stopped" if raised is Stopped else "interrupted")
    progress = train_work.attempt.latest.progress
    counted = not (message == ECC and raised is Stopped)
    assert not counted or message in f"{progress.killed} {progress.unsaved_because}"


def test_a_killed_rank_is_the_cause_on_whichever_node_it_ran_and_lost_peers_only_without_another() -> None:
    head, killed = NodeResult(0, PEER, "connection closed"), NodeResult(1, KILLED, "rank 1 was killed by SIGKILL")
    fault = NodeResult(1, FAULT, "KeyError")
    assert cause_of([head, killed]) == cause_of([killed, head]) == killed
    assert cause_of([head, NodeResult(1, PEER, "reset by peer")]) == head
    assert cause_of([head, fault]) == fault and cause_of([NodeResult(0)]) is None


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
