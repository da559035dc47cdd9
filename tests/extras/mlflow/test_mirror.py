"""MLflow gets what the store has of a run, each point once, and cannot stop, slow or fail the run."""

from __future__ import annotations

import base64
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from answers import Request, answering
from faulty_proxy import Fault, FaultyProxy
from mlflow_runs import Seen, own_experiment
from pipeline_runs import PRICE, Project, committed
from run_records import GONE, PLANS, RECIPE, RUN, TRAIN, attempted, done_run, finished, recorded, row, segment
from safetensors.torch import save_file
from servers import S3Account, free_ports
from text_runs import CONTEXT
from text_runs import RECIPE as speaker
from tiny_models import greedy, model_of
from waiting import until

from pipelines.extras.mlflow import child
from pipelines.extras.mlflow.child import MirrorProcess
from pipelines.extras.mlflow.mirror import Mirror, rebuild
from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.text.tokenizer import tokenizer
from pipelines.run.trackers import trackers_of
from pipelines.store.manifest import scratch, upload
from pipelines.store.process_id import process_started, this_process
from pipelines.store.records import Progress
from pipelines.store.s3_store import S3Store
from pipelines.user.cloud.checks import mlflow_answers
from trainer.base.events import EVENTS_FILE, Row, event_to_json
from trainer.base.store import LocalStore
from trainer.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def experiment(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return own_experiment(monkeypatch)


def send(store: LocalStore, uri: str) -> Mirror:
    mirror = Mirror(store, RUN, uri)
    mirror.send(ended=True)
    return mirror


# --- what MLflow has


def test_a_run_is_one_run_of_mlflow_however_often_it_is_sent(
    store: LocalStore, mlflow_server: str, experiment: str
) -> None:
    done_run(store, evaluate={"lm_eval/piqa/acc": 0.62, "lm_eval/gsm8k/../exact_match@strict-match": 0.5})
    progress = Progress(world_size=8, device="NVIDIA H100", engine="fused", highest_step=200)
    attempted(store, "train", 2, price_per_hour=10.0, progress=progress)
    segment(store, 2, 1, [row(1, 5.0), row(2, 4.0)])
    for _ in range(2):
        rebuild(store, RUN, mlflow_server)

    seen = Seen(mlflow_server, experiment)
    assert seen.run.info.status == "FINISHED"
    assert seen.points("train/loss") == [(1, 5.0), (2, 4.0)]
    assert seen.points("final/val/loss") == [(200, 2.45678)]
    assert seen.points("final/lm_eval/piqa/acc") == [(200, 0.62)]
    assert seen.points("final/lm_eval/exact_match-strict-match") == [(200, 0.5)]
    assert seen.points("cost/usd") == [(200, pytest.approx(30.0))]
    tags, params = seen.run.data.tags, seen.run.data.params
    assert (tags["device"], tags["world_size"]) == ("NVIDIA H100", "8")
    assert tags["skytrain.fingerprint.train"] == PLANS["train"].fingerprint
    assert {"parameters", "train.batch_tokens", "model.n_layer"} <= params.keys() and params["train.max_steps"] == "200"


def test_one_metric_that_mlflow_refuses_costs_no_other(
    store: LocalStore,
    mlflow_server: str,
    experiment: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pipelines.extras.mlflow.mirror.legal_name", lambda name: name)
    recorded(store, "train")
    mirror = send(store, mlflow_server)
    mirror.send_rows([row(1, 5.0) | {"a/b@c": 1.0}, row(2, 4.0)])
    assert Seen(mlflow_server, experiment).points("train/loss") == [(1, 5.0), (2, 4.0)]
    assert mirror.refused and "MLflow refuses a/b@c at step 1" in capsys.readouterr().out


def test_a_redone_step_and_an_interrupted_run_that_goes_on_make_nothing_twice(
    store: LocalStore, mlflow_server: str, experiment: str
) -> None:
    attempted(store, "train", 1, state="interrupted", progress=Progress(step=3))
    recorded(store, "train")
    send(store, mlflow_server).send_rows([row(step, 10.0 - step) for step in (1, 2, 3)])
    before = Seen(mlflow_server, experiment).run
    assert before.info.status == "KILLED"

    attempted(store, "train", 2, state="running", process=this_process(), progress=Progress(step=5))
    mirror = Mirror(store, RUN, mlflow_server)  # as on another machine
    mirror.send(ended=False)
    mirror.send_rows([row(step, 10.0 - step) | {"time": 9.0} for step in (3, 4, 5)])
    seen = Seen(mlflow_server, experiment)
    assert (seen.run.info.run_id, seen.run.info.status) == (before.info.run_id, "RUNNING")
    assert seen.points("train/loss") == losses(5)


def test_a_run_whose_command_is_killed_runs_no_more_while_its_ranks_commit(
    store: LocalStore, mlflow_server: str, experiment: str
) -> None:
    recorded(store, "train")
    for command, status in ((this_process(), "RUNNING"), (replace(GONE, children=(this_process(),)), "KILLED")):
        attempted(store, "train", 1, state="running", process=command)
        send(store, mlflow_server)
        assert Seen(mlflow_server, experiment).run.info.status == status


def test_runs_of_one_name_in_two_stores_are_two_runs_of_mlflow(
    store: LocalStore, tmp_path: Path, mlflow_server: str, experiment: str
) -> None:
    mirrors = []
    for one in (store, LocalStore(tmp_path / "theirs")):
        recorded(one, "train")
        mirrors.append(send(one, mlflow_server))
    ours, theirs = mirrors
    assert ours.run_id != theirs.run_id
    assert send(store, mlflow_server).run_id == ours.run_id


def test_a_finished_export_is_one_version_with_the_target_that_it_passed(
    store: LocalStore, mlflow_server: str, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "uri", f"s3://bucket/{experiment}")  # a server refuses local folders
    done_run(store, train={"stopped_by": "hellaswag"})
    recorded(store, recipe=RECIPE.model_copy(update={"name": experiment}))  # all tests share the registry
    for _ in range(2):
        send(store, mlflow_server)
    client = Seen(mlflow_server, experiment).client
    (version,) = client.search_model_versions(f"name = '{experiment}'")
    assert version.source == version.tags["skytrain.uri"] and version.tags["skytrain.passed"] == "hellaswag"


@pytest.mark.slow
def test_a_registered_model_loads_from_the_registry_and_generates_what_the_weights_say(
    fresh_s3_store: Callable[[S3Account], S3Store],
    moto_server: S3Account,
    mlflow_server: str,
    experiment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    store = fresh_s3_store(moto_server)
    trained = model_of(speaker.model)
    with torch.no_grad():
        trained.wte.weight[257:] = 0  # ids without bytes
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    weights = Weights(tmp_path / "trained.safetensors", speaker.model, tokenizer("bytes"), "speaker")
    paths = hf.write(weights, tmp_path, "float32")
    names = [path.relative_to(tmp_path).as_posix() for path in paths]
    prefix = PLANS["export"].prefix
    files = [upload(store, prefix, 1, path, name) for path, name in zip(paths, names, strict=True)]
    finished(store, "train")
    finished(store, "export", tuple(files))
    recorded(store, recipe=RECIPE.model_copy(update={"name": experiment}))
    Mirror(store, RUN, mlflow_server).send(ended=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    model = mlflow.pyfunc.load_model(f"models:/{experiment}/1")
    asked = {"inputs": ["ab"], "params": {"do_sample": False}}
    served = TestClient(scoring_server.init(model)).post("/invocations", json=asked)  # as `mlflow models serve`
    assert served.json() == {
        "predictions": [tokenizer("bytes").decode([*b"ab", *greedy(trained, [*b"ab"], CONTEXT - 2)])]
    }


def test_a_server_that_refuses_the_version_has_the_rest(
    store: LocalStore, mlflow_server: str, experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done_run(store)  # its export lies in a local folder
    recorded(store, recipe=RECIPE.model_copy(update={"name": experiment}))  # all tests share the registry
    send(store, mlflow_server)
    assert capsys.readouterr().out.count("refuses the export") == 1
    assert Seen(mlflow_server, experiment).run.info.status == "FINISHED"


# --- the process


class Training:
    """A run that trains on this machine, and its mirror. `rows` writes as rank 0 does."""

    def __init__(self, store: LocalStore, home: Path) -> None:
        attempted(store, "train", state="running", process=this_process(), progress=Progress(step=0))
        recorded(store, "train")
        self.store, self.mirror = store, MirrorProcess(store.uri, RUN, home)
        self.events = scratch(home, store, TRAIN) / "a0001" / EVENTS_FILE
        self.events.parent.mkdir(parents=True)
        self.mirror.start()

    def rows(self, steps: range) -> None:
        with self.events.open("a") as file:
            for step in steps:
                texts = ["a text"] if step == steps[-1] else None
                row = Row(step, 1e9 + step, {"train/loss": 10.0 - step}, {}, "train", texts)
                file.write(event_to_json(row) + "\n")

    def end(self) -> str | None:
        """The end of the command; what it tells the user."""
        attempted(self.store, "train", state="interrupted", progress=Progress(step=9))
        return self.mirror.end(None)


@pytest.fixture
def train(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Training]]:
    monkeypatch.setattr(child, "RESTART_SECONDS", 0.0)
    made: list[Training] = []

    def begin(uri: str) -> Training:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        made.append(Training(store, tmp_path / "home"))
        return made[-1]

    yield begin
    for one in made:
        if one.mirror._child:
            one.mirror._child.kill()


def losses(steps: int) -> list[tuple[int, float]]:
    return [(step, 10.0 - step) for step in range(1, steps + 1)]


def test_rows_arrive_while_the_run_trains_and_a_killed_mirror_loses_and_doubles_nothing(
    train: Callable[[str], Training], mlflow_server: str, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "120")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    run = train(mlflow_server)
    run.rows(range(1, 4))
    until(lambda: Seen(mlflow_server, experiment).points("train/loss") == losses(3), "the rows arrive")
    assert run.mirror._child
    os.kill(run.mirror._child.pid, signal.SIGKILL)
    run.mirror._child.wait()
    run.rows(range(4, 7))
    run.mirror.start()  # as with the next heartbeat
    until(lambda: Seen(mlflow_server, experiment).points("train/loss") == losses(6), "the rows arrive")
    measured = "system/cpu_utilization_percentage"
    until(lambda: Seen(mlflow_server, experiment).points(measured), "the machine is measured")
    run.rows(range(7, 10))
    assert run.end() is None
    seen = Seen(mlflow_server, experiment)
    assert seen.points("train/loss") == losses(9)
    assert seen.run.info.status == "KILLED"


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_gets_everything(
    train: Callable[[str], Training], mlflow_server: str, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "120")
    with FaultyProxy(mlflow_server) as proxy:
        run = train(proxy.endpoint)
        run.rows(range(1, 4))
        until(lambda: Seen(mlflow_server, experiment).points("train/loss") == losses(3), "the rows arrive")
        proxy.fail(Fault(), Fault(502))
        run.rows(range(4, 10))
        until(lambda: "will try again" in run.mirror.log.read_text(), "a fault is noticed")
        assert run.end() is None
    assert Seen(mlflow_server, experiment).points("train/loss") == losses(9)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts every connection and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def lying() -> Iterator[str]:
    """A gateway that answers, but never as MLflow does."""
    statuses = itertools.cycle((200, 403, 500, 400))
    with answering(lambda request: request.respond(next(statuses), b"<html>\x9b31m")) as address:
        yield address


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server whose answer never ends: a byte every 0.2 s."""

    def drip(request: Request) -> None:
        request.respond(200, Content_Length="1000000")
        while True:
            request.wfile.write(b" ")
            time.sleep(0.2)

    with answering(drip) as address:
        yield address


@pytest.mark.parametrize("kind", ["silent", "lying", "dripping"])
def test_a_server_that_is_silent_or_lies_costs_the_run_a_line(
    kind: str, request: pytest.FixtureRequest, train: Callable[[str], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0.5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    run = train(request.getfixturevalue(kind))
    run.rows(range(1, 4))
    until(lambda: "will try again" in run.mirror.log.read_text(), "the fault is noticed")
    assert str(run.end()).startswith("MLflow lacks records of this run (the reason is in ")
    assert run.mirror._child and run.mirror._child.poll() is not None
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="takes no records"):
        rebuild(run.store, RUN, run.mirror.uri)


def test_a_run_goes_on_without_an_importable_mlflow(
    train: Callable[[str], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "mlflow.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/broken:{ROOT}")
    run = train("http://127.0.0.1:9")
    until(lambda: run.mirror._child and run.mirror._child.poll() is not None, "the mirror gives up")
    run.mirror.start()
    assert "--rebuild-mlflow" in str(run.end())
    assert run.mirror.log.read_text().count("needs the package mlflow") == 1


def test_the_command_never_imports_mlflow_and_its_mirror_ends_with_it(
    store: LocalStore, tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent)
    recorded(store, "train")
    script = (
        "import os, signal, sys; from pathlib import Path; from pipelines.extras.mlflow.child import MirrorProcess\n"
        f"m = MirrorProcess({store.uri!r}, {RUN!r}, Path({str(tmp_path)!r})); m.start()\n"
        "print('mlflow' in sys.modules, m._child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    imported, pid = done.stdout.split()
    assert imported == "False"
    until(lambda: process_started(int(pid)) is None, "the mirror is gone")


def test_a_home_that_cannot_be_written_costs_a_line_and_tracking_off_starts_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    mirror = MirrorProcess(store.uri, RUN, tmp_path / "file")
    mirror.start()
    assert "MLflow lacks records" in str(mirror.end(None))
    monkeypatch.setenv("SKYTRAIN_TRACKING", "off")
    assert trackers_of(store.uri, RUN, tmp_path / "home") == []


@pytest.mark.slow
def test_a_run_that_is_killed_and_run_again_has_each_step_once_its_costs_and_a_rebuilt_server_has_the_same(
    tmp_path: Path, mlflow_server: str, experiment: str
) -> None:
    project = Project(tmp_path / "project")
    project.environment |= {
        "SKYTRAIN_TRACKING": "on",
        "MLFLOW_TRACKING_URI": mlflow_server,
        "MLFLOW_EXPERIMENT_NAME": experiment,
        "SKYTRAIN_MLFLOW_FLUSH_SECONDS": "120",
    }
    options = "--price-per-hour", str(PRICE)
    with project.started("run", "tiny.yaml", *options) as process:
        project.wait_until(committed(project, 20), process)
        project.kill_all(process)
    made = project.result(*options)
    seen = Seen(mlflow_server, experiment, made["run"])
    steps = [(row["step"], row["train/loss"]) for row in project.series()]
    assert seen.run.info.status == "FINISHED" and seen.points("train/loss") == steps
    assert seen.run.data.metrics["cost/usd"] == pytest.approx(made["usd"])
    assert seen.run.data.metrics["final/val/loss"] == made["val_loss"]

    fresh = f"sqlite:///{tmp_path}/rebuilt.db"
    project.environment["MLFLOW_TRACKING_URI"] = fresh
    project.run("report", "--rebuild-mlflow")
    again = Seen(fresh, experiment, made["run"])
    assert again.points("train/loss") == steps
    assert (again.run.data.params, again.run.info.status) == (seen.run.data.params, "FINISHED")
    assert again.run.data.metrics.items() <= seen.run.data.metrics.items()


# --- passwords and settings

CANARY, QUOTED = "hunter2/canary", "hunter2%2Fcanary"


def test_no_file_of_a_mirrored_run_holds_the_servers_password(
    train: Callable[[str], Training],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    uri = f"postgresql://ann:{QUOTED}@127.0.0.1:{free_ports(1)[0]}/db"
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0.1")
    run = train(uri)
    until(lambda: "needs the package mlflow" in (log := run.mirror.log.read_text()) or "try again" in log, "it fails")
    assert run.mirror._child
    print(Path(f"/proc/{run.mirror._child.pid}/cmdline").read_text(), run.end())
    with pytest.raises(UserError, match=r"takes no records .*start it, or name") as error:
        rebuild(run.store, RUN, run.mirror.uri)
    print(error.value, *mlflow_answers(uri, os.environ).__dict__.values())

    texts = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()}
    texts[Path("output")] = "".join(capfd.readouterr())
    assert [str(path) for path, text in texts.items() if CANARY in text or QUOTED in text] == []
    assert run.mirror.log.stat().st_mode & 0o777 == 0o600


def test_a_server_that_repeats_the_headers_of_a_request_brings_no_password_into_the_log_or_an_error(
    train: Callable[[str], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", CANARY)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0.1")
    with answering(lambda request: request.respond(400, f"got {request.headers['Authorization']}")) as repeating:
        run = train(repeating)
        until(lambda: "got Basic" in run.mirror.log.read_text(), "the server repeats the header")
        run.end()
        with pytest.raises(UserError, match="got Basic") as error:
            rebuild(run.store, RUN, repeating)
    sent = base64.b64encode(f"ann:{CANARY}".encode()).decode()
    assert sent not in run.mirror.log.read_text() + str(error.value)
