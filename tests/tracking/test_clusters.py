"""The bill's total is what the cloud charges: hours of SkyPilot's clusters outside all attempts belong to it."""

from pathlib import Path
from typing import Any

import pytest
from run_records import RUN, attempted, done_run, recorded

from pipelines.cloud import control
from pipelines.cloud.budget import spent_by_others
from pipelines.cloud.skypilot import Cluster
from pipelines.cloud.tasks import run_label
from pipelines.show.bill import print_bill
from pipelines.tracking.account import Cost, total_cost
from pipelines.tracking.clusters import Interval, clusters_key, read_intervals, record_intervals
from pipelines.tracking.records import Machine
from pipelines.tracking.runs import read_run
from trainer.store import LocalStore

SPOT = Machine(cloud="aws", cluster="train-7")


def trained(store: LocalStore, started: float = 1000.0, ended: float = 4600.0, **changes: Any) -> None:
    """A run with one attempt of an hour, on two nodes at 10 dollars."""
    values: dict[str, Any] = {"nodes": 2, "price_per_hour": 10.0, "machine": SPOT} | changes
    attempted(store, "train", started=started, time=ended, **values)
    recorded(store)


def test_the_time_between_a_death_and_the_release_of_its_machine_is_in_the_total(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(store)
    record_intervals(store, RUN, [Interval("train-7", 2, 940.0, 4660.0)])
    bill = read_run(store, RUN).account
    assert (bill.outside.hours, bill.outside.usd) == (pytest.approx(240 / 3600), pytest.approx(10 * 240 / 3600))
    assert bill.total.usd == pytest.approx(20 + 10 * 240 / 3600) and bill.by_stage["train"].usd == 20.0
    assert total_cost(bill.by_phase.values()).hours == pytest.approx(bill.total.hours)
    assert spent_by_others(store, RUN, None, 3600.0) == pytest.approx(bill.total.usd)  # a budget counts it too
    print_bill(bill)
    assert "0.67 of 20.67 dollars are not by our own clock" in " ".join(capsys.readouterr().out.split())


def test_a_second_node_that_never_began_an_attempt_is_in_the_total_at_skypilots_price(store: LocalStore) -> None:
    trained(store)
    waiting = Interval("train-8", 1, 1000.0, 2800.0, price_per_hour=12.0)
    record_intervals(store, RUN, [Interval("train-7", 2, 1000.0, 4600.0), waiting])
    assert read_run(store, RUN).account.outside == Cost(0.5, 6.0)
    record_intervals(store, RUN, [Interval("train-8", 1, 1000.0, 2800.0)])
    bill = read_run(store, RUN).account
    assert bill.outside == Cost(0.5, 0.0, 0.5) and bill.total.unpriced_hours == 0.5


def test_an_interval_without_an_end_costs_nothing_after_the_last_sign_of_its_cluster(store: LocalStore) -> None:
    trained(store)
    record_intervals(store, RUN, [Interval("train-7", 2, 1000.0, None), Interval("train-9", 1, 0.0, None)])
    assert read_run(store, RUN).account.outside == Cost()
    record_intervals(store, RUN, [Interval("train-7", 2, 1000.0, None, seen=4960.0)])
    assert read_run(store, RUN).account.outside.usd == pytest.approx(2.0)  # two nodes for six minutes


def test_hours_that_only_the_ledger_has_do_not_lower_the_total(store: LocalStore) -> None:
    trained(store)
    record_intervals(store, RUN, [Interval("train-7", 2, 1060.0, 4000.0)])
    assert read_run(store, RUN).account.outside == Cost()


def test_status_records_which_clusters_skypilot_still_has(store: LocalStore) -> None:
    trained(store)
    mine = run_label(RUN)
    control.record_cluster_hours(
        store,
        [RUN],
        [
            Cluster("train-7", mine, 2, [(0.0, 60.0), (100.0, None)], price_per_hour=3.0),
            Cluster("train-6", mine, 2, [(0.0, None)], exists=False),
        ],
    )
    first, second, gone = read_intervals(store, RUN)
    assert (first.ended, second.ended, second.price_per_hour) == (60.0, None, 3.0)
    assert second.seen and gone.seen is None


def test_damaged_hours_of_clusters_are_named_and_the_rest_is_billed(store: LocalStore, tmp_path: Path) -> None:
    done_run(store)
    store.put(clusters_key(RUN), b"{")
    bill = read_run(store, RUN).account
    assert bill.total.usd == 20.0 and f"{clusters_key(RUN)}: damaged" in bill.faults[0]
