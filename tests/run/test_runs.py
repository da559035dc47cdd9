"""A run is read from the store alone, and once: its state, sums, names and faults."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from interfering import Interfering
from run_records import (
    ELSEWHERE,
    GONE,
    PLANS,
    RECIPE,
    RUN,
    TRAIN,
    attempted,
    done_run,
    recorded,
)
from servers import S3Account
from waiting import LONG_SECONDS

from pipelines.run.run_record import full_names
from pipelines.run.runs import Run, Summary, read_run, store_summary, usable_runs, without_failed_trials
from pipelines.run.stage import STAGES, missing, planned
from pipelines.store.ledger import attempts
from pipelines.store.process_id import this_process
from pipelines.store.records import Machine, Progress
from pipelines.store.releases import Release, write_releases
from pipelines.store.s3_store import S3Store
from pipelines.store.traffic import counted_together, traffic_here
from pipelines.user.verbs.report import report
from pipelines.user.verbs.status import status
from trainer.base.store import LocalStore
from trainer.config.errors import UserError


def test_a_run_with_all_its_artifacts_is_done_and_carries_their_facts(store: LocalStore) -> None:
    summary = Run(store, done_run(store)).summary
    assert (summary.run, summary.state, summary.attempts) == (RUN, "done", 1)
    assert (summary.steps, summary.tokens) == (200, 200 * 8192)
    assert (summary.train_loss, summary.val_loss, summary.hellaswag_acc_norm) == (2.4, 2.45678, 0.2945)
    assert (summary.billed_hours, summary.usd) == (pytest.approx(2.0), pytest.approx(20.0))
    assert summary.phases == {"setup": 240.0} | dict.fromkeys(STAGES, 1740.0)


@pytest.mark.parametrize(
    ("beat", "state"),
    [
        ({"state": "running", "process": this_process()}, "running"),
        ({"state": "running", "process": GONE}, "lost"),
        ({"state": "running", "process": ELSEWHERE}, "running"),
        ({"state": "running", "process": ELSEWHERE, "time": 0.0}, "running"),  # its clock is wrong
        ({"state": "interrupted", "process": this_process()}, "interrupted"),
        ({"state": "interrupted", "process": GONE}, "interrupted"),
        ({"state": "failed", "process": GONE}, "failed"),
        # Done with this stage: about to start the next one, if it lives.
        ({"state": "done", "process": this_process()}, "running"),
        ({"state": "done", "process": GONE}, "interrupted"),
    ],
)
def test_the_state_of_an_unfinished_run_is_that_of_its_newest_attempt(
    store: LocalStore, beat: dict[str, Any], state: str
) -> None:
    attempted(store, "train", 1, hours=9, state="failed")
    attempted(store, "train", 2, hours=0.1, **beat)
    summary = Run(store, recorded(store)).summary
    assert (summary.state, summary.attempts) == (state, 2)


def test_attempts_and_artifacts_are_read_side_by_side(store: LocalStore) -> None:
    together = threading.Barrier(3)

    def wait_for_the_others(key: str) -> None:
        if key.endswith(("heartbeat.json", "MANIFEST.json")):
            together.wait(LONG_SECONDS)

    for number in (1, 2, 3):
        attempted(store, "train", number, hours=1, state="failed")
    slow = Interfering(store.root, get=wait_for_the_others)
    assert [beat.attempt for beat in attempts(slow, TRAIN)] == [1, 2, 3]
    assert [one.beat.attempt for one in Run(slow, recorded(store)).heartbeats] == [1, 2, 3]
    assert missing(slow, PLANS, "evaluate") == ["tokenize", "train", "evaluate"]


def test_an_attempt_elsewhere_is_lost_once_the_store_has_no_new_heartbeat(store: LocalStore) -> None:
    ahead = time.time() + 7200
    attempted(store, "train", 1, state="running", process=ELSEWHERE, time=ahead)
    assert Run(store, recorded(store)).state == "running"
    (path,) = store.root.glob("train/*/attempts/*/heartbeat.json")
    os.utime(path, (time.time() - 300, time.time() - 300))
    assert Run(store, recorded(store)).state == "lost"


def test_the_progress_of_an_unfinished_run_is_in_its_heartbeats(store: LocalStore) -> None:
    attempted(
        store,
        "train",
        1,
        state="interrupted",
        progress=Progress(step=120, metrics={"train/loss": 3.0, "val/loss": 3.1}),
    )
    attempted(store, "train", 2, state="interrupted", progress=Progress(step=150, metrics={"train/loss": 2.9}))
    summary = Run(store, recorded(store)).summary
    assert (summary.steps, summary.tokens) == (150, 150 * 8192)
    assert (summary.train_loss, summary.val_loss) == (2.9, 3.1)


@pytest.mark.parametrize(("command", "of_all"), [("report", 1), ("status", 3)])  # listings
@pytest.mark.parametrize("state", ["done", "interrupted", "failed"])
def test_a_list_asks_a_bucket_twice_for_a_run_that_has_ended_and_a_few_times_for_all(
    command: str,
    of_all: int,
    state: str,
    fresh_s3_store: Callable[[S3Account], S3Store],
    moto_server: S3Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = fresh_s3_store(moto_server)
    attempted(store, "train", 1, state="interrupted", started=1.0)
    attempted(store, "train", 2, state=state)
    store_summary(Run(store, done_run(store) if state == "done" else recorded(store)))
    monkeypatch.setattr("pipelines.store.s3_store.open_store", lambda uri: store)
    with counted_together():
        (status if command == "status" else report)(store=store.uri, as_json=command == "status")
        asked = traffic_here()
    output = capsys.readouterr().out
    if command == "report":
        assert output.splitlines()[1].split()[:2] == [RUN, state]
    else:
        assert [one["state"] for one in json.loads(output)] == [state]
    if state == "done" or command == "report":  # a status also shows the newest heartbeat of a run that can go on
        assert asked.reads + asked.writes == of_all + 2


def listed(store: LocalStore) -> Summary:
    (run,) = usable_runs(store, [], lambda run: run.listed, lambda text: None)
    return run.listed


def test_a_list_believes_only_the_summary_of_a_run_that_has_ended_and_not_begun_again(store: LocalStore) -> None:
    made = done_run(store)
    store_summary(Run(store, made))
    before = json.loads(store.get(f"summaries/{RUN}.json") or b"") | {"usd": 99.0}
    store.put(f"summaries/{RUN}.json", json.dumps(before).encode())
    assert listed(store).usd == 99.0 and read_run(store, RUN).listed.usd == pytest.approx(20.0)
    for body in (json.dumps(before | {"state": "running"}).encode(), b"{"):  # 0.2 stored one while the run worked
        store.put(f"summaries/{RUN}.json", body)
        assert listed(store).usd == pytest.approx(20.0)
    store.put(f"summaries/{RUN}.json", json.dumps(before).encode())
    recorded(store)
    assert listed(store).usd == pytest.approx(20.0)
    store.delete(f"summaries/{RUN}.json")
    store.delete(f"{TRAIN}/MANIFEST.json")
    attempted(store, "train", 2, state="running", process=this_process())
    store_summary(Run(store, made))
    assert store.get(f"summaries/{RUN}.json") is None


def test_a_failed_run_leaves_the_lists_once_its_recipe_has_a_newer_run(store: LocalStore) -> None:
    attempted(store, "train", state="failed")
    failed, notes = Run(store, recorded(store)), list[str]()
    newer, other = (Run(store, replace(failed.record, run=name)) for name in (f"{RUN[:-1]}x", "other-12345678"))
    assert without_failed_trials([failed, other], notes.append) == [failed, other] and not notes
    assert without_failed_trials([failed, other, newer], notes.append) == [other, newer]
    assert notes == ["1 failed runs with a newer one of their recipe are not shown; name them"]


def test_a_run_is_found_by_the_beginning_of_its_name(store: LocalStore) -> None:
    record = recorded(store)
    store.delete(f"runs/{RUN}.json")
    for number, run in enumerate(("smoke-1a2b3c4e", "smoke-1a2b3c4d", "gpt2-124m-99999999")):
        store.put(f"runs/{run}.json", replace(record, run=run, updated=number).to_json())
    assert full_names(store, ["gpt", "smoke-1a2b3c4d"]) == ["gpt2-124m-99999999", "smoke-1a2b3c4d"]
    for number, run in enumerate(("smoke-1a2b3c4d", "gpt2-124m-99999999", "smoke-1a2b3c4e")):  # in a copy of the store
        os.utime(store.path_of(f"runs/{run}.json"), (number, number))
    assert full_names(store) == ["smoke-1a2b3c4d", "gpt2-124m-99999999", "smoke-1a2b3c4e"]
    assert full_names(store, ["smoke"]) == ["smoke-1a2b3c4d"]  # the newest of the recipe
    with pytest.raises(UserError, match="smoke-1: the beginning of more than one run .*smoke-1a2b3c4d, smoke-1a2b3c4e"):
        full_names(store, ["smoke-1"])
    with pytest.raises(UserError, match="llama: no such run .* known runs: smoke"):
        full_names(store, ["llama"])


def test_a_run_is_planned_as_it_is_on_record_or_refused_in_a_line(store: LocalStore) -> None:
    made = recorded(store)
    loaded, plans = planned(f"run:{RUN}", [], store)
    assert loaded == RECIPE and {name: plan.prefix for name, plan in plans.items()} == made.prefixes
    other = replace(made, prefixes=made.prefixes | {"train": "train/smoke-00000000"})
    store.put(f"runs/{RUN}.json", other.to_json())
    with pytest.raises(UserError, match="and train/smoke-00000000 is on record; another version of skytrain recorded"):
        planned(f"run:{RUN}", [], store)
    recipe = made.recipe | {"train": made.recipe["train"] | {"max_rollbacks": 3}}  # a field of version 0.1
    store.put(f"runs/{RUN}.json", replace(made, recipe=recipe).to_json())
    with pytest.raises(UserError, match=r"^[^\n]*train.max_rollbacks: unknown field; [^\n]*$"):
        planned(f"run:{RUN}", [], store)


def test_a_damaged_heartbeat_is_named_and_the_others_are_still_billed(store: LocalStore) -> None:
    made = done_run(store)
    key = f"{TRAIN}/attempts/0001/heartbeat.json"
    store.put(key, b"")
    summary = Run(store, made).summary
    assert summary.usd == pytest.approx(15.0)
    assert [fault.split(": damaged")[0] for fault in summary.faults] == [f"{store.uri}/{key}"]
    claimed = attempted(store, "train", state="running", price_per_hour=10.0, machine=Machine(cluster="train-3"))
    store.put(key.replace("heartbeat", "claim"), replace(claimed, time=claimed.started).to_json())
    write_releases(store, RUN, [Release("train-3", claimed.started, claimed.started + 7200)])
    store.put(key, b"")
    assert Run(store, made).account.total.usd == pytest.approx(15.0 + 20.0)  # until the release


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"run": "x"}', b"[" * 100_000])
def test_running_its_recipe_mends_a_damaged_record_as_its_message_says(store: LocalStore, body: bytes) -> None:
    made = recorded(store)
    store.put(f"runs/{RUN}.json", body)
    with pytest.raises(UserError, match=f"runs/{RUN}.json: damaged .*; run its recipe to write it again"):
        read_run(store, RUN)
    recorded(store)
    again = read_run(store, RUN)
    assert (again.recipe, again.record.prefixes) == (RECIPE, made.prefixes)
