"""Crashes are interruptions, up to some in a row without a new checkpoint."""

from typing import Any

import pytest
from run_records import committed

from pipelines.store.crashes import MOST_CRASHES, UNFIT, after_crash, seconds_between_failures
from pipelines.store.ledger import attempts, claim, close_attempt, is_alive
from pipelines.store.records import Billing
from trainer.base.store import LocalStore
from trainer.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, ending_of

PREFIX = "train/tiny-0123"


def crashed(
    store: LocalStore, number: int, cause: str = "rank 0 was killed by SIGSEGV after step 7", **progress: Any
) -> int:
    """Claims an attempt that a signal then ends; the exit code."""
    attempt = claim(store, PREFIX, "tiny-0123", "train", number, Billing())
    assert attempt
    ending = ending_of(after_crash(store, PREFIX, number, cause))
    assert ending
    with attempt:
        attempt.report(**progress or {"killed": cause})
    return ending.exit_code


def test_a_crash_at_the_same_step_ends_the_run_after_some_attempts(store: LocalStore) -> None:
    committed(store, 5, 1, PREFIX)
    codes = [crashed(store, number) for number in range(1, MOST_CRASHES + 3)]
    # The first attempt made a commit before it crashed.
    assert codes == [EXIT_INTERRUPTED] * (MOST_CRASHES + 1) + [EXIT_FAILED]


def test_a_new_commit_begins_a_new_count(store: LocalStore) -> None:
    committed(store, 5, 1, PREFIX)
    for number in range(1, MOST_CRASHES + 2):
        crashed(store, number)
    committed(store, 9, MOST_CRASHES + 2, PREFIX)
    assert crashed(store, MOST_CRASHES + 2) == EXIT_INTERRUPTED


def test_a_run_tries_one_other_machine_after_one_with_unfit_gpus(store: LocalStore) -> None:
    causes = ["rank 1 was killed by SIGKILL", f"{UNFIT}no GPU", "rank 1 was killed by SIGKILL", f"{UNFIT}no GPU"]
    codes = [crashed(store, number, cause) for number, cause in enumerate(causes, 1)]
    assert codes == [EXIT_INTERRUPTED] * 3 + [EXIT_FAILED]


def test_attempts_that_lost_their_machine_do_not_count(store: LocalStore) -> None:
    committed(store, 5, 1, PREFIX)
    for number in range(2, 9):
        assert claim(store, PREFIX, "tiny-0123", "train", number, Billing())
    assert crashed(store, 9) == EXIT_INTERRUPTED


@pytest.mark.parametrize(("damaged", "progress"), [(False, {}), (True, {}), (False, {"unsaved_since": 1.0})])
def test_crashes_before_the_first_sound_commit_start_over_and_count_too(
    store: LocalStore, damaged: bool, progress: dict[str, Any]
) -> None:
    if damaged:
        body = store.path_of(committed(store, 5, 1, PREFIX))
        body.write_bytes(body.read_bytes().replace(b'"step": 5', b'"step": 6'))
    codes = [crashed(store, number, **progress) for number in range(1, MOST_CRASHES + 2)]
    assert codes == [EXIT_INTERRUPTED] * MOST_CRASHES + [EXIT_FAILED]


def test_a_killed_command_is_billed_until_its_crash_is_recorded(store: LocalStore) -> None:
    attempt = claim(store, PREFIX, "tiny-0123", "train", 1, Billing(3.6))
    assert attempt
    attempt.__enter__()
    (beat,) = attempts(store, PREFIX)
    close_attempt(store, PREFIX, beat, "interrupted", "skytrain run was killed by SIGKILL")
    (last,) = attempts(store, PREFIX)
    billed = sum(last.phases.values()) - sum(beat.phases.values())
    assert last.time > beat.time and billed == pytest.approx(last.time - beat.time, abs=0.01)
    assert last.progress.killed and is_alive(last) is False
    assert seconds_between_failures([last], 100.0) == pytest.approx(50.0, abs=1)
    attempt._ending.set()
