"""The ledger has every attempt at an artifact: its owner, whether it is alive, its cost and its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from pipelines.store import ledger
from pipelines.store.account import StoredHeartbeat, account
from pipelines.store.ledger import Attempt, attempts, claim, close_attempt, is_alive, is_over
from pipelines.store.process_id import process_began, process_exists, this_process
from pipelines.store.records import HEARTBEAT_SECONDS, Billing, Heartbeat, Machine
from trainer.base import process
from trainer.base.store import LocalStore
from trainer.config.errors import StoreUnavailable, UserError

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "train/tiny-1a2b3c4d"


def claimed(store: LocalStore, number: int, price: float = 0.0, earlier: Sequence[Heartbeat] = ()) -> Attempt:
    attempt = claim(store, PREFIX, "tiny-1a2b3c4d", "train", number, Billing(price), earlier=earlier)
    assert attempt is not None
    return attempt


def beat(**changes: Any) -> Heartbeat:
    now = time.time()
    return replace(Heartbeat("tiny-1a2b3c4d", "train", 1, "running", now, now, 0.0, this_process()), **changes)


# --- claiming


def test_without_a_meter_an_attempt_bills_its_process_from_its_start(tmp_path: Path) -> None:
    store, now = LocalStore(tmp_path), time.time()
    began = now - min(20.0, now - process_began())
    first = claim(store, PREFIX, "tiny-1a2b3c4d", "train", 1, Billing(3600.0), idle=0.25, began=began)
    assert first
    with first:
        pass
    (beat,) = attempts(store, PREFIX)
    assert beat.started == pytest.approx(began, abs=0.01)
    assert beat.phases["idle"] == 0.25 and sum(beat.phases.values()) == pytest.approx(beat.time - began, abs=0.5)
    second = claim(store, PREFIX, "tiny-1a2b3c4d", "train", 2, Billing(3600.0), earlier=[beat], began=began)
    assert second and second.latest.started == pytest.approx(beat.time, abs=0.01)


# --- reporting


@pytest.mark.parametrize("away", [False, True])
def test_a_watch_sees_every_heartbeat_even_while_the_store_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    monkeypatch.setattr(ledger, "HEARTBEAT_SECONDS", 0.02)
    seen: list[float] = []

    def watch(beat: Heartbeat) -> None:
        seen.append(beat.time)
        raise StoreUnavailable("a watch may ask the store too")

    store = Away(tmp_path)
    attempt = claim(store, PREFIX, "tiny-1a2b3c4d", "train", 1, Billing(), watch)
    assert attempt is not None
    with attempt:
        store.fault = StoreUnavailable("no route") if away else None
        until(lambda: len(set(seen)) >= 3, "three heartbeats were seen, each later than the one before")
        store.fault = None


class Away(LocalStore):
    """A store that raises `fault` while it is set."""

    fault: Exception | None = None
    refused = 0

    def put(self, key: str, body: bytes) -> None:
        if self.fault:
            self.refused += 1
            raise self.fault
        super().put(key, body)


@pytest.mark.parametrize("fault", [StoreUnavailable("no route"), OSError("disk full"), UserError("expired")])
def test_a_store_that_fails_for_a_while_stops_neither_heartbeat_nor_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(ledger, "HEARTBEAT_SECONDS", 0.02)
    store = Away(tmp_path)
    with claimed(store, 1) as attempt:
        store.fault = fault
        attempt.report(step=9)
        until(lambda: store.refused >= 3, "three heartbeats were refused")
        store.fault = None
        until(lambda: attempts(store, PREFIX)[0].progress.step == 9, "the heartbeat is back")
    assert attempts(store, PREFIX)[0].state == "done"


# --- dying


CHILD = """
import sys, time
from pathlib import Path
from pipelines.store import ledger
from pipelines.store.account import StoredHeartbeat, account
from trainer.base.store import LocalStore
HEARTBEAT_SECONDS = 0.05
store, billing = LocalStore(Path(sys.argv[1])), ledger.Billing(3600.0)
with ledger.claim(store, sys.argv[2], "tiny-1a2b3c4d", "train", 1, billing) as attempt:
    attempt.clock = lambda now: {"train": now - attempt.latest.started}
    attempt.report(step=5)
    time.sleep(600)
"""


def test_an_attempt_killed_in_the_middle_is_billed_up_to_its_last_heartbeat_and_known_to_be_dead_at_once(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), PREFIX], env=environment)

    def child_reported() -> bool:
        seen = attempts(store, PREFIX)
        return bool(seen) and seen[0].progress.step == 5 and seen[0].time - seen[0].started > 0.2

    try:
        until(child_reported, "the child sends heartbeats")
        assert is_alive(attempts(store, PREFIX)[0]) is True
    finally:
        os.kill(child.pid, signal.SIGKILL)
    # A zombie until its exit code is read.
    until(lambda: is_alive(attempts(store, PREFIX)[0]) is False, "a process that nobody has reaped is dead")
    child.wait()
    killed = time.time()
    time.sleep(0.3)
    (seen,) = attempts(store, PREFIX)
    assert is_alive(seen) is False
    assert seen.state == "running"  # it had no time to report its end
    assert 0.2 < seen.time - seen.started <= killed - seen.started
    assert seen.progress.step == 5
    assert seen.phases == pytest.approx({"train": seen.time - seen.started})


@pytest.mark.parametrize("skew", [-8 * 86_400.0, -7200.0, 0.0, 7200.0])
def test_a_process_of_another_machine_is_dead_only_after_a_long_silence_whatever_its_clock(
    tmp_path: Path, skew: float
) -> None:
    store, elsewhere = LocalStore(tmp_path), replace(this_process(), machine="other/boot")
    seen = beat(process=elsewhere, time=time.time() + skew)
    assert is_alive(seen) is None
    assert not is_over(seen, store.clock() - 60, store.clock)
    assert is_over(seen, store.clock() - 7200, store.clock)
    assert process_exists(elsewhere) is None


def test_a_heartbeat_carries_the_whole_billing_and_starts_when_the_machine_was_on_the_bill(tmp_path: Path) -> None:
    store, machine = LocalStore(tmp_path), Machine(cloud="aws", spot=True, on_demand_per_hour=98.3)
    since = time.time() - 90
    billing = Billing(None, "unknown: no table", 2, machine, since)
    attempt = claim(store, PREFIX, "tiny-1a2b3c4d", "train", 1, billing)
    assert attempt and attempts(store, PREFIX)[0].started > since  # a claim alone bills nothing
    with attempt:
        pass
    (seen,) = attempts(store, PREFIX)
    assert (seen.price_per_hour, seen.price_source, seen.nodes) == (None, "unknown: no table", 2)
    assert (seen.machine, seen.started) == (machine, since) and seen.billed_hours >= 90 / 3600


# --- the meter: time that is on no bill yet


@pytest.fixture
def meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "meter"
    monkeypatch.setenv("SKYTRAIN_METER", str(path))
    return path


def test_the_first_attempt_pays_for_setting_up_the_machine_and_the_next_for_the_gap(
    tmp_path: Path, meter: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    up = process_began() - 1000
    meter.write_text(f"{up:.0f}\n")  # as `date +%s` does
    with claimed(store, 1, price=3600.0) as first:
        pass
    assert first.latest.started == pytest.approx(up, abs=1)
    assert set(first.latest.phases) == {"provision", "start"}
    assert sum(first.latest.phases.values()) == pytest.approx(first.latest.time - up, abs=2)
    assert first.latest.phases["provision"] == pytest.approx(1000, abs=2)
    time.sleep(0.1)
    with claimed(store, 2) as second:
        pass
    assert second.latest.started == pytest.approx(first.latest.time)
    assert set(second.latest.phases) == {"start"}  # of the same process: no idle time
    billed = sum(b.time - b.started for b in attempts(store, PREFIX))
    assert billed == pytest.approx(second.latest.time - up, abs=1)  # every second once


def test_time_after_a_killed_attempts_last_heartbeat_is_lost_and_later_time_is_idle(
    tmp_path: Path, meter: Path
) -> None:
    store, began = LocalStore(tmp_path / "store"), process_began()
    with claimed(store, 1):
        assert meter.read_text().split()[1] == "lost"
        meter.write_text(f"{began - 60} lost\n")  # its last heartbeat, a minute before this process began
        second = claimed(store, 2)
    assert second.latest.phases["lost"] == HEARTBEAT_SECONDS
    assert second.latest.phases["idle"] == pytest.approx(60 - HEARTBEAT_SECONDS, abs=0.1)
    assert second.latest.time - second.latest.started == pytest.approx(sum(second.latest.phases.values()))


def test_a_kill_between_a_heartbeat_and_the_meter_bills_nothing_twice(tmp_path: Path, meter: Path) -> None:
    store, up = LocalStore(tmp_path / "store"), time.time() - 500
    meter.write_text(f"{up}")
    with claimed(store, 1) as first:
        pass
    meter.write_text(f"{up}")  # as if the claim had failed
    second = claim(store, PREFIX, "tiny-1a2b3c4d", "train", 2, Billing(), earlier=[first.latest])
    assert second is not None and second.latest.started == pytest.approx(first.latest.time)


@pytest.mark.parametrize("jump", [86_400.0, -3_600.0])
def test_a_clock_that_jumps_changes_no_bill_and_is_named_on_it(
    tmp_path: Path, meter: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    store, real = LocalStore(tmp_path), time.time
    monkeypatch.setenv(process.BOOTED, repr(real() - process.since_boot()))
    first = claimed(store, 1)
    with first:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
    monkeypatch.delenv(process.BOOTED)  # the next command looks at the clock anew
    seen = attempts(store, PREFIX)[0]
    with claimed(store, 2, earlier=[seen]):
        pass
    close_attempt(store, PREFIX, replace(seen, attempt=3), "interrupted", "killed")
    beats = attempts(store, PREFIX)
    assert all(0 <= 3600 * beat.billed_hours < 60 for beat in beats)
    assert [beat.progress.clock_jump for beat in beats[:2]] == [pytest.approx(jump, abs=2), None]
    bill = account([StoredHeartbeat(PREFIX, beat) for beat in beats])
    assert {a.attempt for a in bill.attempts if a.progress.clock_jump} >= {1}
