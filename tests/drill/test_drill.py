"""The drill itself: it injects faults at the right points, and it fails on any difference."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, TINY, Project
from servers import S3Account
from typer.testing import CliRunner

from pipelines.artifacts.store import S3Store
from pipelines.drill.command import TrainingProgress
from pipelines.drill.faults import FAILPOINTS, KINDS, USUAL, Fault, chosen, schedule, unavailable
from pipelines.drill.outages import LOOPBACK, Proxy
from pipelines.drill.verdict import CommandRun, DrillReport, Outcome, Points, Verdict, verdicts
from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from pipelines.tracking.ledger import this_process
from pipelines.tracking.records import Heartbeat, ProcessId
from trainer.errors import UserError
from trainer.events import Row, Started, event_to_json
from trainer.process import DRILL, failpoint

# --- failpoints


def test_a_failpoint_without_a_drill_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRILL, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").touch()
    failpoint("copy")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_the_first_process_at_an_armed_failpoint_waits_and_others_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DRILL, str(tmp_path))
    failpoint("copy")  # not armed
    (tmp_path / "copy").touch()
    failpoint("upload")  # another one
    first = threading.Thread(target=failpoint, args=("copy",))
    first.start()
    while not (tmp_path / "copy.here").exists():
        time.sleep(0.001)
    failpoint("copy")  # a second one
    assert first.is_alive() and not (tmp_path / "copy").exists()
    (tmp_path / "copy.here").unlink()
    first.join(10)
    assert not first.is_alive()


def test_a_failpoint_ends_by_itself_if_the_drill_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRILL, str(tmp_path))
    monkeypatch.setattr("trainer.process.FAILPOINT_SECONDS", 0.05)
    (tmp_path / "copy").touch()
    failpoint("copy")
    assert (tmp_path / "copy.here").exists()


def test_every_failpoint_is_in_the_code() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "\n".join(path.read_text() for folder in ("trainer", "pipelines") for path in (root / folder).rglob("*.py"))
    for name in FAILPOINTS:
        assert f'failpoint("{name}")' in code or name in [f"manifest-{stage}" for stage in STAGES]
    assert 'failpoint(f"manifest-{stage}")' in code


def test_one_machine_can_play_another(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_process()
    monkeypatch.setenv("SKYTRAIN_DRILL_MACHINE", "drill-2")
    assert this_process() == replace(here, machine="drill-2")


def test_progress_is_that_of_the_newest_attempts_events(tmp_path: Path) -> None:
    assert TrainingProgress.of(tmp_path) is None
    folder = tmp_path / "work" / "store" / "train" / "tiny-1"
    for number, lines in ((1, [start(0), row_event(7)]), (2, [start(5)])):
        log = folder / f"a{number:04d}" / "events.jsonl"
        log.parent.mkdir(parents=True)
        log.write_text("".join(lines))
    assert TrainingProgress.of(tmp_path) == TrainingProgress(2, resumed_from=5, step=5, time=0.0)
    with log.open("a") as file:
        file.write("".join(row_event(step, phase="x" * 2000) for step in range(6, 40)) + row_event(40)[:-5])
    assert TrainingProgress.of(tmp_path) == TrainingProgress(2, resumed_from=5, step=39, time=139.0)


def start(step: int) -> str:
    return event_to_json(Started(step, 1, "cpu", "eager on a CPU", "fp32", 1, 1, "")) + "\n"


def row_event(step: int, phase: str = "train") -> str:
    return event_to_json(Row(step, 100.0 + step, {}, {}, phase)) + "\n"


# --- the schedule


def test_equal_seeds_give_equal_faults_and_other_seeds_others() -> None:
    kinds = list(KINDS)
    assert schedule(30, 1, kinds, 200, True) == schedule(30, 1, kinds, 200, True)
    assert schedule(30, 1, kinds, 200, True) != schedule(30, 2, kinds, 200, True)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_and_every_failpoint_gets_its_fault_where_it_has_an_effect(seed: int) -> None:
    faults = schedule(50, seed, list(KINDS), 200, True)
    assert len(faults) == 50
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.failpoint for fault in faults} == set(FAILPOINTS)
    assert all(fault.stage in KINDS[fault.kind] and fault.stage == FAILPOINTS[fault.failpoint] for fault in faults)
    assert all(0 <= fault.step < 200 for fault in faults)


def test_a_fault_in_an_evaluation_while_training_is_planned_where_the_recipe_has_one() -> None:
    for evaluates in (True, False):
        faults = schedule(60, 0, ["kill"], 200, evaluates)
        assert any(fault.failpoint == "scores" for fault in faults) == evaluates
        assert {fault.failpoint for fault in faults} | {"scores"} == set(FAILPOINTS)


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_in_the_order_in_which_a_run_passes_them(seed: int) -> None:
    faults = schedule(40, seed, list(KINDS), 100, True)
    assert [b.stage for b in faults] == sorted((b.stage for b in faults), key=STAGES.index)
    training = [b.step for b in faults if b.stage == "train" and b.failpoint != "manifest-train"]
    assert training == sorted(training)
    last = [b.failpoint == "manifest-train" for b in faults if b.stage == "train"]
    assert last == sorted(last)


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_is_planned_at_a_failpoint_that_an_outage_let_the_run_pass(seed: int) -> None:
    faults = schedule(40, seed, list(KINDS), 100, True)
    for number, fault in enumerate(faults):
        if fault.kind in ("cut", "mlflow") and (fault.stage != "train" or fault.failpoint == "manifest-train"):
            assert fault.failpoint not in {later.failpoint for later in faults[number + 1 :]}


def test_an_empty_schedule_is_possible() -> None:
    assert schedule(0, 1, ["kill"], 10, True) == []


def test_kinds_that_are_not_possible_are_left_out_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_TRACKING", "off")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    recipe = Recipe.model_validate(TINY)
    assert set(unavailable("file://somewhere", recipe, 1)) == {"cut", "odd", "twice", "mlflow"}
    assert "plain http" in unavailable("s3://bucket", recipe, 1)["cut"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("SKYTRAIN_TRACKING")
    assert unavailable("s3://bucket", recipe, 1) == {"eio": "the store is not a folder"}
    odd = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batch_tokens": 32})})
    assert "too few for 2 processes" in unavailable("s3://bucket", odd, 1)["world"]

    assert chosen(None, {"cut": "no S3"}) == [kind for kind in USUAL if kind != "cut"]
    assert set(USUAL) < set(KINDS) and chosen(["clock"], {}) == ["clock"]
    with pytest.raises(UserError, match="--kinds cut: not possible here: no S3"):
        chosen(["kill", "cut"], {"cut": "no S3"})
    with pytest.raises(UserError, match="--kinds hammer: unknown kind; choose from kill, "):
        chosen(["hammer"], {})


# --- the verdict


def beat(stage: str, number: int, started: float, ended: float, pid: int) -> Heartbeat:
    state = "done" if number > 1 or stage != "train" else "running"
    return Heartbeat("run", stage, number, state, started, ended, 0.0, ProcessId(pid=pid))


ROWS: tuple[dict[str, Any], ...] = (
    {"step": 0, "val/loss": 5.5},
    {"step": 1, "train/loss": 5.0, "train/lr": 0.1, "train/grad_norm": 1.0, "data/digest": 11},
    {"step": 2, "train/loss": 4.0, "train/lr": 0.2, "train/grad_norm": 2.0, "data/digest": 12, "val/loss": 4.5},
)
FILES = {
    "tokenize": {"train_000000.bin": "t"},
    "train": {"model.safetensors": "w"},
    "evaluate": {"report.json": "r"},
    "export": {"model.safetensors": "e"},
}
POINTS: Points = {
    "train/loss": [(1, 5.0), (2, 4.0)],
    "train/lr": [(1, 0.1), (2, 0.2)],
    "train/grad_norm": [(1, 1.0), (2, 2.0)],
    "val/loss": [(0, 5.5), (2, 4.5)],
}
UNDISTURBED = Outcome(ROWS, FILES, 4.4, {}, 1, 0.0)
# Killed once in training: at 107, after the last heartbeat at 105.
BEATS = {
    "tokenize": [beat("tokenize", 1, 101, 102, 7)],
    "train": [beat("train", 1, 102, 105, 7), beat("train", 2, 111, 115, 8)],
    "evaluate": [beat("evaluate", 1, 115, 116, 8)],
    "export": [beat("export", 1, 116, 117, 8)],
}
DISTURBED = Outcome(ROWS, FILES, 4.4, BEATS, 2, 10 / 3600)
FAULTS = (Fault("kill", "mid-step", "train", 1, injected_at=107.0, attempt=1, interrupted=True),)
COMMAND_RUNS = (CommandRun(7, 100, 107, True), CommandRun(8, 108, 118, False))


def judged(
    disturbed: Outcome = DISTURBED,
    faults: tuple[Fault, ...] = FAULTS,
    command_runs: tuple[CommandRun, ...] = COMMAND_RUNS,
    points: Points | None = POINTS,
) -> dict[str, bool | None]:
    return {verdict.what: verdict.equal for verdict in verdicts(UNDISTURBED, disturbed, faults, command_runs, points)}


def test_equal_outcomes_pass() -> None:
    assert set(judged().values()) == {True}
    assert judged(points=None)["MLflow series"] is None


def row(number: int, **changes: Any) -> Outcome:
    rows = [dict(each) for each in ROWS]
    rows[number] |= changes
    return replace(DISTURBED, rows=tuple(rows))


def files(stage: str, name: str) -> Outcome:
    return replace(DISTURBED, files=FILES | {stage: FILES[stage] | {name: "other"}})


@pytest.mark.parametrize(
    ("disturbed", "what"),
    [
        (row(2, **{"data/digest": 13}), "data digests"),
        (row(2, **{"train/loss": 4.000001}), "losses, rates, gradient norms"),
        (row(1, **{"train/lr": 0.11}), "losses, rates, gradient norms"),
        (row(1, **{"train/grad_norm": None}), "losses, rates, gradient norms"),
        (row(0, **{"val/loss": 5.6}), "losses, rates, gradient norms"),
        (replace(DISTURBED, rows=ROWS[:2]), "data digests"),
        (replace(DISTURBED, rows=(ROWS[0], ROWS[2], ROWS[1])), "losses, rates, gradient norms"),
        (files("train", "model.safetensors"), "final weights"),
        (files("tokenize", "train_000000.bin"), "artifacts"),
        (files("export", "config.json"), "artifacts"),
        (replace(DISTURBED, val_loss=4.41), "artifacts"),
        (replace(DISTURBED, attempts=3), "ledger: attempts"),
        (replace(DISTURBED, beats=BEATS | {"train": BEATS["train"][1:]}), "ledger: attempts"),
        (replace(DISTURBED, billed_hours=11 / 3600), "ledger: billed time"),
    ],
)
def test_one_thing_that_differs_fails_the_drill(disturbed: Outcome, what: str) -> None:
    assert judged(disturbed)[what] is False


def attempt_changed(number: int, **changes: Any) -> Outcome:
    train = list(BEATS["train"])
    train[number] = replace(train[number], **changes)
    beats = BEATS | {"train": train}
    hours = sum(b.billed_hours for stage in beats.values() for b in stage)
    return replace(DISTURBED, beats=beats, billed_hours=hours)


@pytest.mark.parametrize(
    ("disturbed", "command_runs"),
    [
        (attempt_changed(0, time=107.5), COMMAND_RUNS),  # beyond its death
        (DISTURBED, (replace(COMMAND_RUNS[0], ended=130), COMMAND_RUNS[1])),  # 25 s before its death
        (attempt_changed(1, process=ProcessId(pid=9)), COMMAND_RUNS),  # by a foreign process
        (attempt_changed(1, started=107.5), COMMAND_RUNS),  # before its process began
    ],
)
def test_a_ledger_that_disagrees_with_the_stopwatch_fails_the_drill(
    disturbed: Outcome, command_runs: tuple[CommandRun, ...]
) -> None:
    assert judged(disturbed, command_runs=command_runs)["ledger: billed time"] is False


@pytest.mark.parametrize(
    "doctored",
    [
        {"train/loss": [(1, 5.0)]},
        {"train/loss": [(1, 5.0), (2, 4.0), (2, 4.0)]},
        {"val/loss": [(0, 5.5), (2, 4.6)]},
        {"train/lr": []},
        {"train/lr": [*POINTS["train/lr"], (3, 0.3)]},
    ],
)
def test_an_mlflow_that_missed_or_doubled_a_point_fails_the_drill(doctored: Points) -> None:
    assert judged(points=POINTS | doctored)["MLflow series"] is False


def test_a_broken_promise_fails_the_drill() -> None:
    assert judged(faults=(replace(FAULTS[0], violation="exit code 1 instead of 75"),))["faults"] is False


def test_an_attempt_that_no_fault_explains_fails_the_drill() -> None:
    assert judged(faults=(replace(FAULTS[0], interrupted=False),))["ledger: attempts"] is False


def test_after_another_world_size_losses_are_compared_to_tolerance_and_digests_exactly() -> None:
    world = (replace(FAULTS[0], kind="world"),)
    close = judged(row(2, **{"train/loss": 4.001}), world)  # MLflow got step 2 before it was redone
    assert close["losses, rates, gradient norms"] is close["MLflow series"] is True and close["final weights"] is None
    assert judged(row(2, **{"train/loss": 4.001}))["MLflow series"] is False
    assert judged(faults=world, points=POINTS | {"train/loss": [(1, 5.0)]})["MLflow series"] is False
    assert judged(files("train", "model.safetensors"), world)["artifacts"] is True
    assert judged(row(2, **{"train/loss": 4.5}), world)["losses, rates, gradient norms"] is False
    assert judged(row(2, **{"data/digest": 13}), world)["data digests"] is False


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_code_is_the_verdict_and_the_report_holds_it_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, equal: bool | None, code: int
) -> None:
    from pipelines.cli import app

    made = DrillReport(
        "smoke", 3, "file://there", list(FAULTS), [Verdict("weights", equal, "…")], {"cut": "no S3"}, 1.0
    )
    asked: list[Any] = []

    def drill(*arguments: Any) -> DrillReport:
        asked.append(arguments)
        return made

    monkeypatch.setattr("pipelines.drill.drill.drill", drill)
    arguments = ["drill", "--kills", "1", "--seed", "3", "--kinds", "kill,term", "--store", "file://x"]
    done = CliRunner().invoke(app, [*arguments, "--report", str(tmp_path / "out.json"), "--set", "train.seed=1"])
    assert done.exit_code == code, done.output
    assert asked[0][:6] == ("smoke", ["train.seed=1"], "file://x", 1, 3, ["kill", "term"])
    assert "mid-step" in done.output and "weights" in done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"] is (code == 0)
    assert report["faults"][0]["failpoint"] == "mid-step" and report["verdicts"][0]["equal"] is equal


# --- outages


@contextmanager
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""
    listener = socket.create_server((LOOPBACK, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while data := connection.recv(1024):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def through(proxy: Proxy) -> socket.socket:
    return socket.create_connection((LOOPBACK, int(proxy.endpoint.rpartition(":")[2])), timeout=5)


def talk(connection: socket.socket) -> bytes:
    connection.sendall(b"hello")
    return connection.recv(1024)


def test_the_proxy_resets_or_swallows_and_lets_through_again() -> None:
    with echo() as endpoint, Proxy(endpoint) as proxy:
        with through(proxy) as connection:
            assert talk(connection) == b"hello"
            proxy.cut(silent=False)
            with pytest.raises(ConnectionError):
                talk(connection)
        with pytest.raises(ConnectionError), through(proxy) as connection:
            talk(connection)
        proxy.restore()
        with through(proxy) as connection:
            assert talk(connection) == b"hello"
            proxy.cut(silent=True)
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                talk(connection)
            proxy.restore()
            with pytest.raises(ConnectionError):
                talk(connection)
        with through(proxy) as connection:
            assert talk(connection) == b"hello"


# --- whole drills


def drilled(project: Project, *arguments: str) -> dict[str, Any]:
    """The report of a drill of the tiny recipe. The drill has to pass, and to leave no process."""
    with project.started("drill", "tiny.yaml", *arguments, "--report", "out.json") as process:
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
        assert project.alive() == []
    report = json.loads((project.folder / "out.json").read_text())
    assert report["passed"]
    assert all(fault["injected_at"] and fault["attempt"] for fault in report["faults"])
    return report


def test_a_run_that_is_killed_once_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    report = drilled(Project(tmp_path / FOLDER_NAME), "--kills", "1", "--seed", "1", "--kinds", "kill")
    assert [fault["kind"] for fault in report["faults"]] == ["kill"]


@pytest.mark.slow
def test_a_run_on_disk_survives_kills_stops_damage_and_a_rival(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    report = drilled(project, "--kills", "4", "--seed", "189", "--kinds", "kill,term,corrupt,rival")
    assert {"kill", "term", "corrupt", "rival"} == {fault["kind"] for fault in report["faults"]}
    verdicts = {verdict["what"]: verdict["equal"] for verdict in report["verdicts"]}
    assert verdicts.pop("MLflow series") is None and set(verdicts.values()) == {True}
    assert project.found("**/*.json") == []  # a drill that passes removes its files


@pytest.mark.slow
def test_a_run_on_s3_survives_outages_of_s3_and_mlflow_and_ships_everything_to_mlflow(
    s3_store: S3Store, tmp_path: Path
) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    del project.environment["SKYTRAIN_TRACKING"]
    report = drilled(project, "--kills", "4", "--seed", "16", "--kinds", "cut,mlflow,term", "--store", s3_store.uri)
    assert {"cut", "mlflow", "term"} == {fault["kind"] for fault in report["faults"]}
    assert {verdict["equal"] for verdict in report["verdicts"]} == {True}
    assert s3_store.entries("") == []


@pytest.mark.slow
def test_a_run_on_disk_survives_a_failing_folder_gc_a_thaw_after_a_takeover_and_a_wrong_clock(tmp_path: Path) -> None:
    kinds = "eio,gc,frozen,clock"
    report = drilled(Project(tmp_path / FOLDER_NAME), "--kills", "4", "--seed", "3", "--kinds", kinds)
    assert {fault["kind"] for fault in report["faults"]} == set(kinds.split(","))
    verdicts = {verdict["what"]: verdict["equal"] for verdict in report["verdicts"]}
    assert verdicts.pop("MLflow series") is None and set(verdicts.values()) == {True}


@pytest.mark.slow
def test_a_run_on_s3_survives_odd_answers_and_puts_that_are_delivered_twice(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store], tmp_path: Path
) -> None:
    store = fresh_s3_store(moto_server)
    project = Project(tmp_path / FOLDER_NAME)
    report = drilled(project, "--kills", "2", "--seed", "5", "--kinds", "odd,twice", "--store", store.uri)
    assert {fault["kind"] for fault in report["faults"]} == {"odd", "twice"}
    verdicts = {verdict["what"]: verdict["equal"] for verdict in report["verdicts"]}
    assert verdicts.pop("MLflow series") is None and set(verdicts.values()) == {True}
