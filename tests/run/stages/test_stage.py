"""The stage runner skips existing artifacts, builds missing ones once, and puts every start on the account.

The stages here are small stand-ins; store, ledger, manifests and processes are the real ones.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_work import NoSignals
from waiting import until

import pipelines.run.pipeline
from pipelines.recipe.loader import load_recipe
from pipelines.run.pipeline import Pipeline
from pipelines.run.stage import STAGES, Built, Work
from pipelines.run.watch import Summary, Watch
from pipelines.store import ledger
from pipelines.store.crashes import MOST_CRASHES, seconds_between_failures
from pipelines.store.ledger import SILENT_SECONDS, attempts, claim
from pipelines.store.manifest import ArtifactPlan, Manifest, commit, find
from pipelines.store.process_id import this_process
from pipelines.store.records import Billing, Heartbeat, Machine, ProcessId
from pipelines.store.store_id import settled_store_id
from pipelines.user.show.console import TerminalScreen
from trainer.base.process import StopSignal
from trainer.base.store import LocalStore, Store
from trainer.config.errors import Crashed, Interrupted, Stopped, StoreUnavailable, UserError

PLANS = {name: ArtifactPlan(name, "tiny", {"stage": name, "version": 1}) for name in STAGES}
TOKENS = PLANS["tokenize"].prefix
ELSEWHERE = ProcessId("other/boot", 1, "1")

Build = Callable[[Work], Built]


class StandIns:
    """All four stages; `builds` replaces their work. `built` lists the built stages, in order."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.builds: dict[str, Build] = {}

    def named(self, name: str) -> SimpleNamespace:
        def build(work: Work) -> Built:
            self.built.append(name)
            return self.builds.get(name, write_a_file)(work)

        return SimpleNamespace(build=build)


def write_a_file(work: Work) -> Built:
    path = work.folder / "out.txt"
    path.write_text(f"by attempt {work.attempt.number}")
    facts = {"steps": 5, "train/loss": 2.0} if work.plan.stage == "train" else {}
    return Built([work.upload(path)], facts)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    stand_ins = StandIns()
    monkeypatch.setattr("pipelines.run.pipeline.stage_named", stand_ins.named)
    return stand_ins


def pipeline(store: Store, home: Path, price: float = 0.0, stop: StopSignal | None = None) -> Pipeline:
    screen, recipe = TerminalScreen(quiet=True), load_recipe("smoke")
    return Pipeline(recipe, store, home, Billing(price), screen, stop or NoSignals(), dict(PLANS))


def execute(store: Store, home: Path, until: str = "tokenize", **options: Any) -> Pipeline:
    made = pipeline(store, home, **options)
    made.execute(until)
    return made


def states(store: Store, prefix: str = TOKENS) -> list[str]:
    return [beat.state for beat in attempts(store, prefix)]


def raising(error: BaseException) -> Build:
    def build(work: Work) -> Built:
        write_a_file(work)
        raise error

    return build


# --- existing and missing artifacts


def test_an_artifact_names_its_inputs_its_files_and_its_origin(
    stages: StandIns, store: LocalStore, tmp_path: Path
) -> None:
    execute(store, tmp_path, "train")
    made = find(store, PLANS["train"])
    assert made is not None
    assert made.inputs == {"tokenize": PLANS["tokenize"].fingerprint}
    assert [(f.name, f.key) for f in made.files] == [("out.txt", "a0001/out.txt")]
    assert (made.run, made.attempt) == (PLANS["train"].name, 1)
    assert set(made.provenance) == {"git_commit", "git_dirty", "image", "python", "platform", "versions"}
    assert made.provenance["versions"]["torch"] is not None


# --- stages that end early


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("boom"), "failed"),
        (UserError("no such column"), "failed"),
        (StoreUnavailable("away"), "interrupted"),
        (Interrupted(), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_stage_that_ends_early_leaves_nothing_that_looks_finished_and_the_next_run_redoes_it(
    stages: StandIns, store: LocalStore, tmp_path: Path, error: BaseException, state: str
) -> None:
    stages.builds["tokenize"] = raising(error)
    with pytest.raises(type(error)):
        execute(store, tmp_path)
    assert find(store, PLANS["tokenize"]) is None
    assert [p.name for p in (tmp_path / "work").rglob("*") if p.is_file()] == ["out.txt"]
    assert states(store) == [state]
    assert pipeline(store, tmp_path).snapshot().summary.state == state
    stages.builds.clear()
    again = execute(store, tmp_path)
    assert again.made["tokenize"].attempt == 2 and again.made["tokenize"].files[0].key == "a0002/out.txt"
    assert states(store) == [state, "done"]
    assert [p for p in (tmp_path / "work").rglob("*") if p.is_file()] == []  # nor of earlier attempts
    assert (again.snapshot().summary.state, again.snapshot().summary.attempts) == ("done", 2)


def test_a_run_asked_to_stop_starts_no_further_stage(stages: StandIns, store: LocalStore, tmp_path: Path) -> None:
    stop = NoSignals()

    def asked_meanwhile(work: Work) -> Built:
        stop.asked = True
        return write_a_file(work)

    stages.builds["tokenize"] = asked_meanwhile
    with pytest.raises(Interrupted):
        execute(store, tmp_path, "export", stop=stop)
    assert stages.built == ["tokenize"]
    assert find(store, PLANS["tokenize"]) is not None  # the finished part is kept


class Seen(Watch):
    """A watch that notes what it sees. With a stop signal, it asks the run to stop, and fails."""

    def __init__(self, stop: StopSignal | None = None) -> None:
        self.moments, self.stop = list[str](), stop

    def start(self) -> None:
        self.moments.append("start")

    def before_build(self, work: Work) -> None:
        self.moments.append("before_build")

    def heartbeat(self, beat: Heartbeat) -> None:
        self.moments.append("heartbeat")
        if self.stop:
            self.stop.ask("budget of 3 dollars", Stopped)
            raise RuntimeError("a bug")

    def commit(self, manifest: Manifest) -> None:
        self.moments.append(f"commit {manifest.stage}")

    def end(self, error: BaseException | None) -> None:
        self.moments.append(f"end {type(error).__name__}")


def test_a_watch_stops_the_run_for_good_and_one_that_fails_silences_no_other(
    stages: StandIns, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "HEARTBEAT_SECONDS", 0.02)
    stop = NoSignals()

    def long(work: Work) -> Built:
        for _ in range(1000):
            work.check()
            time.sleep(0.01)
        raise AssertionError("nobody stopped it")

    stages.builds["tokenize"] = long
    made = pipeline(store, tmp_path, stop=stop)
    first, second, third = Seen(), Seen(stop), Seen()
    made.watches = [first, second, Summary(), third]
    with pytest.raises(Stopped, match="budget of 3 dollars"):
        made.execute("tokenize")
    # A watch that fails silences no other one; all end, in the reverse order.
    assert first.moments[:3] == third.moments[:3] == ["start", "before_build", "heartbeat"]
    assert [one.moments[-1] for one in (first, second, third)] == ["end Stopped"] * 3
    (seen,) = attempts(store, TOKENS)
    assert (seen.state, seen.progress.notice) == ("stopped", "budget of 3 dollars")
    assert made.snapshot().summary.state == "stopped"
    assert seconds_between_failures([seen], 100.0) == pytest.approx(100.0 + 3600 * seen.billed_hours)  # no death


def test_a_machine_that_is_preempted_before_a_stop_request_leaves_the_run_recoverable() -> None:
    stop = NoSignals()
    stop.ask("SIGTERM")
    stop.ask("budget", Stopped)
    with pytest.raises(Interrupted) as raised:
        stop.check()
    assert not isinstance(raised.value, Stopped) and stop.reason == "SIGTERM"


# --- rivals in this process


def finish(store: Store, attempt: int) -> Manifest:
    plan = PLANS["tokenize"]
    made = Manifest("tokenize", plan.label, plan.fingerprint, plan.identity, {}, (), {}, {}, "other", attempt, 1.0)
    return commit(store, made)


@pytest.mark.parametrize("looks", [True, False])
def test_an_attempt_that_was_superseded_commits_nothing_and_waits_for_the_winner(
    stages: StandIns, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    monkeypatch.setattr(ledger, "HEARTBEAT_SECONDS", 0.02)
    winners: list[threading.Thread] = []

    def win() -> None:
        with claim(store, TOKENS, "other", "tokenize", 2, Billing()) as rival:  # type: ignore[union-attr]
            time.sleep(0.5)
            finish(store, rival.number)

    def is_overtaken(work: Work) -> Built:
        winners.append(threading.Thread(target=win))
        winners[0].start()
        until(lambda: work.attempt.superseded() and (not looks or work.attempt.lost), "the winner has claimed")
        if looks:
            work.check()
            raise AssertionError("check lets a stale attempt go on")
        assert find(store, PLANS["tokenize"]) is None
        return write_a_file(work)

    stages.builds["tokenize"] = is_overtaken
    done = execute(store, tmp_path)
    winners[0].join()
    assert done.made["tokenize"].attempt == 2 and done.skipped["tokenize"]
    assert states(store) == ["stale", "done"]
    assert stages.built == ["tokenize"]


def put_heartbeat(store: Store, **changes: Any) -> None:
    """Attempt 1 of tokenize as another machine's process last reported it."""
    assert claim(store, TOKENS, "other", "tokenize", 1, Billing())
    now = time.time()
    beat = replace(Heartbeat("other", "tokenize", 1, "running", now, now, 0.0, ELSEWHERE), **changes)
    store.put(f"{TOKENS}/attempts/0001/heartbeat.json", beat.to_json())


@pytest.mark.parametrize("silent", [-9e9, 0.0, 60.0, 9e9])
def test_an_attempt_on_another_machine_is_taken_over_after_a_silence_that_was_watched_whatever_the_dates(
    stages: StandIns, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: float
) -> None:
    slept: list[float] = []
    fake = SimpleNamespace(time=time.time, sleep=slept.append, monotonic=lambda: time.monotonic() + sum(slept))
    monkeypatch.setattr(pipelines.run.pipeline, "time", fake)
    put_heartbeat(store, time=1.0)  # the clock of its machine is wrong
    beat = store.path_of(f"{TOKENS}/attempts/0001/heartbeat.json")
    os.utime(beat, (0, max(0.0, store.clock() - silent)))  # the clock of the store may be wrong, too
    assert execute(store, tmp_path).made["tokenize"].attempt == 2
    assert sum(slept) == pytest.approx(SILENT_SECONDS, abs=1.5)
    assert states(store) == ["running", "done"]


@pytest.mark.parametrize("rented", [False, True])
def test_a_rented_machine_starts_again_after_a_crash_and_another_one_leaves(
    stages: StandIns, store: LocalStore, tmp_path: Path, rented: bool
) -> None:
    crashes = iter([Crashed("rank 1 was killed by SIGKILL")] * MOST_CRASHES)

    def crash(work: Work) -> Built:
        for error in crashes:
            raise error
        return write_a_file(work)

    stages.builds["train"] = crash
    run = pipeline(store, tmp_path)
    run.billing = Billing(machine=Machine("aws", cluster="train-9" if rented else None))
    with nullcontext() if rented else pytest.raises(Crashed):
        run.execute("train")
    beats = attempts(store, PLANS["train"].prefix)
    assert [beat.state for beat in beats] == (["interrupted"] * MOST_CRASHES + ["done"] if rented else ["interrupted"])
    assert all(bool(beat.progress.restarting) == rented for beat in beats[:1])
    seconds = [sum(beat.phases.values()) for beat in beats]
    assert sum(seconds) <= beats[-1].time - beats[0].started + 0.01  # no second is billed twice


@pytest.mark.parametrize("state", ["failed", "interrupted", "done"])
def test_no_run_waits_for_an_attempt_that_has_ended(
    stages: StandIns, store: LocalStore, tmp_path: Path, state: str
) -> None:
    put_heartbeat(store, state=state, process=this_process())
    assert execute(store, tmp_path).made["tokenize"].attempt == 2


@pytest.mark.parametrize(("rivals", "ending"), [("train-8", Stopped), ("train-9", Interrupted)], ids=["job", "machine"])
def test_a_rented_machine_that_only_waits_for_another_one_is_released(
    stages: StandIns,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rivals: str,
    ending: type[Interrupted],
) -> None:
    monkeypatch.setattr(pipelines.run.pipeline, "RIVAL_SECONDS", 0.0)
    put_heartbeat(store, machine=Machine("aws", cluster=rivals))
    waiting = pipeline(store, tmp_path)
    waiting.billing = replace(waiting.billing, machine=Machine("aws", cluster="train-9"))
    with pytest.raises(Interrupted) as ended:
        waiting.execute("tokenize")
    assert type(ended.value) is ending
    assert "attempt 1 on other works on tokenize, so this rented machine is released" in (waiting.stop.reason or "")
    assert stages.built == [] and states(store) == ["running"]


@pytest.mark.parametrize("body", [None, Heartbeat("x", "tokenize", 999_999_999, "failed", 1.0, 2.0, 0.0).to_json()])
def test_a_claim_that_the_store_refuses_for_ever_ends_the_run(
    stages: StandIns, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes | None
) -> None:
    monkeypatch.setattr(pipelines.run.pipeline, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    if body:
        store.put(f"{TOKENS}/attempts/999999999/heartbeat.json", body)
        store.put(f"{TOKENS}/attempts/1000000000/claim.json", body)
    else:
        settled_store_id(store)
        monkeypatch.setattr(LocalStore, "create", lambda *_: False)
    with pytest.raises(UserError, match=f"{TOKENS}/attempts/: the store refuses to create attempt"):
        execute(store, tmp_path)
