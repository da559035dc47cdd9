"""The bill of a rented machine ends with its release, by SkyPilot's record, which the store has for every reader."""

from typing import Any

import pytest
from run_records import RUN, attempted, recorded

from pipelines.run.runs import read_run
from pipelines.store.account import StoredHeartbeat, account
from pipelines.store.records import Heartbeat, Machine, Progress
from pipelines.store.releases import Release, until_release, write_releases
from pipelines.user.show.bill import print_bill
from trainer.base.store import LocalStore

T = 1_800_000_000.0
FRESH = {"provision": 10.0}  # the first attempt on a machine


def beat(number: int, began: float, ended: float, state: str = "stopped", **more: Any) -> StoredHeartbeat:
    rest: dict[str, Any] = {"machine": Machine(cluster="train-3"), "phases": FRESH} | more
    return StoredHeartbeat(
        "train/a", Heartbeat("a", "train", number, state, T + began, T + ended, 3600.0, nodes=2, **rest)
    )


def release(since: float, until: float) -> Release:
    return Release("train-3", T + since, T + until)


STOP = Progress(notice="skytrain stop")
TAKEN: dict[str, Any] = {"state": "interrupted", "progress": Progress(notice="spot")}


@pytest.mark.parametrize(
    ("beats", "releases", "seconds", "unknown"),
    [
        ([beat(1, 0, 100)], [release(-50, 187)], [187], 0),
        ([beat(1, 0, 100)], [], [100], 1),
        ([beat(1, 0, 100, machine=Machine())], [], [100], 0),  # an own machine
        ([beat(1, 0, 100), beat(2, 100, 150, phases={})], [release(-50, 200)], [100, 100], 0),  # on one machine
        # A recovery gives the next machine the same name.
        ([beat(1, 0, 100, **TAKEN), beat(2, 200, 300)], [release(-50, 130), release(140, 320)], [100, 120], 0),
        ([beat(1, 0, 100, "interrupted"), beat(2, 200, 300)], [release(-50, 130)], [130, 100], 1),  # after a crash
        # Stopped, and launched again by a server that has not numbered a job before.
        ([beat(1, 0, 100, progress=STOP), beat(2, 200, 300)], [release(-50, 187), release(190, 320)], [187, 120], 0),
        ([beat(1, 0, 100, "running"), beat(2, 200, 300, "running")], [release(-50, 130)], [100, 100], 0),
        ([beat(1, 0, 100, **TAKEN)], [release(-50, 120)], [120], 0),  # by `skytrain down`
        ([beat(1, 0, 100)], [release(-50, 99.5)], [100], 0),  # clocks differ
    ],
)
def test_a_machine_is_billed_from_its_start_until_its_release(
    beats: list[StoredHeartbeat], releases: list[Release], seconds: list[float], unknown: int
) -> None:
    billed, missing = until_release(beats, releases)
    bill = account(billed)
    assert [a.time - a.started for a in bill.attempts] == seconds and len(missing) == unknown
    assert bill.total.usd == pytest.approx(2 * sum(seconds))
    extra = sum(seconds) - sum(one.beat.time - one.beat.started for one in beats)
    assert sum(a.phases.get("release", 0.0) for a in bill.attempts) == pytest.approx(extra)


def test_a_bill_says_first_what_it_exceeds_and_what_it_lacks(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(cluster="train-3")
    attempted(store, "train", 1, state="stopped", machine=machine, price_per_hour=10.0)
    recorded(store, "train")
    print_bill(read_run(store, RUN), budget=0.01)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("OVER ITS BUDGET: $") and second.startswith("without the last minutes of 1 machine(s)")
    (found,) = read_run(store, RUN).heartbeats
    known = Release("train-3", found.beat.started, found.beat.time + 100)
    write_releases(store, RUN, [known, Release("evaluate-3", T, T + 93)])
    bill = read_run(store, RUN)
    print_bill(bill)
    assert capsys.readouterr().out.startswith("without 1 cluster(s) on which nothing ran, in SkyPilot's record for at")
    assert bill.account.by_phase["release"].hours == pytest.approx(100 / 3600)
