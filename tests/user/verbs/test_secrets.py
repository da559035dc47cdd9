"""Each process gets the secrets of the services that it asks, and no message repeats one."""

import base64
import io
import json
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from in_process import clean_environment, skytrain
from run_records import RUN
from waiting import until

from pipelines.extras.lm_eval.harness import environment
from pipelines.extras.mlflow.child import MirrorProcess
from pipelines.recipe.loader import load_recipe
from pipelines.run.nodes import launcher_process
from pipelines.run.nodes.address import NodeAddress
from pipelines.run.nodes.ranks import RankTask, start_ranks
from pipelines.run.text import files
from pipelines.run.text.encode import Encoder
from pipelines.run.text.pool import tokens_of
from pipelines.run.text.sources import open_source
from pipelines.run.text.tokenizer import tokenizer
from pipelines.store.secrets import SECRETS, redacted

AWS = {name for name in SECRETS if name.startswith("AWS_")}
OWN = {name.replace("AWS_", "SKYTRAIN_S3_") for name in AWS}  # with these, AWS keys are for other uses
MLFLOW = {name for name in SECRETS if name.startswith("MLFLOW_")} | {"MLFLOW_TRACKING_URI", "PGPASSWORD"}
PASSWORD = "hunter2/canary é"  # noqa: S105


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, clean_shell: None) -> dict[str, str]:
    """A shell with every secret, of others too, and a proxy, which has a password for everybody."""
    names = (*SECRETS, "GITHUB_TOKEN", "WANDB_API_KEY", "PGPASSWORD")
    secrets = {name: f"canary of {name}" for name in names if not name.startswith("SKYTRAIN_")}
    secrets |= {"MLFLOW_TRACKING_URI": "postgresql://ann:canary@127.0.0.1:9/db"}
    for name, value in (secrets | {"https_proxy": "http://ann:canary@proxy:3128"}).items():
        monkeypatch.setenv(name, value)
    return secrets


def found(environment: dict[str, str]) -> set[str]:
    """The names of the secrets in an environment, which has to have the proxy."""
    names = {name for name, value in environment.items() if "canary" in value}
    assert "https_proxy" in names
    return names - {"https_proxy"}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment of a process, which the kernel shows as empty until its program has begun."""
    until(process.environ, "the process has begun")
    return dict(process.environ())


def test_each_process_that_a_run_starts_gets_the_secrets_of_its_services_alone(
    shell: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = launcher_process.new_launcher()
    assert found(environment_of(psutil.Process(launcher.pid))) == set()  # its ranks' come with their task
    launcher.communicate()
    assert found(environment()) == {"HF_TOKEN"}  # of lm-eval

    for store, expected in ((f"file://{tmp_path}/s", MLFLOW), ("s3://bucket", MLFLOW | AWS)):
        mirror = MirrorProcess(store, RUN, tmp_path / "home")
        mirror.start()
        assert mirror._child and found(environment_of(psutil.Process(mirror._child.pid))) == expected
        mirror._child.kill()
        mirror.end(None)

    monkeypatch.setattr(files, "PIECE_BYTES", 20_000)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": f"a document {n}"}) + "\n" for n in range(2000)))
    source = open_source(str(tmp_path / "lines.jsonl"), None, "text")
    with closing(tokens_of(source, Encoder(tokenizer("bytes")), 0, tmp_path / "scratch", processes=2)) as stream:
        next(stream)
        (pool,) = [one for one in psutil.Process().children() if "pipelines.run.text.pool" in one.cmdline()]
        assert found(environment_of(pool)) == set()


@pytest.mark.parametrize(
    ("store", "changes", "expected"),
    [
        ("file:///s", ["tokens.source=s3://b/*.txt"], set()),
        ("s3://bucket/p", [], AWS),
        ("s3://bucket/p", [], OWN),
        ("file:///s", ["tokens.source=llmc://s3://bucket/p"], AWS),
        ("file:///s", [f"train.init_from=hf://openai-community/gpt2@{'0' * 40}"], {"HF_TOKEN"}),
        ("file:///s", [f"train.init_from=run:smoke-1@sha256:{'0' * 64}"], set()),
    ],
)
def test_ranks_get_the_keys_of_the_bucket_and_the_token_of_the_hub_only_where_they_read_there(
    store: str,
    changes: list[str],
    expected: set[str],
    shell: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OWN & expected:
        monkeypatch.setenv(name, "canary")
    process = subprocess.Popen(["tee", tmp_path / "task"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    launcher_process._prepared.append((process, io.BytesIO()))  # a launcher that writes its task down
    recipe = load_recipe("smoke", changes)
    task = RankTask(stage="train", recipe=recipe, store=store, tokens="tokens/a", started=0.0, processes=1)
    start_ranks(task, tmp_path, tmp_path, 1.0, NodeAddress()).launcher.wait()
    *_, given = json.loads((tmp_path / "task").read_text())
    assert found(given) == expected


@pytest.mark.parametrize(
    "text",
    [
        PASSWORD,
        "hunter2%2Fcanary%20%C3%A9",
        base64.b64encode(f"ann:{PASSWORD}".encode()).decode(),
        "Authorization: Basic c29tZWJvZHk6Y2FuYXJ5",  # of an account that another file has
        '{"authorization": "Bearer canary"}',
        "http://ann:canary@host/b",
        "s3://ann:can/ary@bucket: no such bucket",
        "https://canary@host/b",
        "https://ann:can@ary@host",
    ],
)
def test_a_secret_is_redacted_in_each_form_in_which_others_repeat_it(
    text: str, monkeypatch: pytest.MonkeyPatch, clean_shell: None
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    hidden = redacted(f"the server says: {text}.")
    assert "***" in hidden and hidden.startswith("the server says: ")
    assert not [
        part for part in ("can", "ary", "c29tZWJv", base64.b64encode(b"ann:hunter2").decode()) if part in hidden
    ]


def test_addresses_without_a_password_are_shown_whole(clean_shell: None) -> None:
    for text in (
        *("http://127.0.0.1:9000/bucket/a@b", f"hf://datasets/a/b@{'0' * 40}", "authorization required"),
        *("ghcr.io/ann/skytrain@sha256:0", "run:a@12", "file:///mnt/ann@work/store", "s3://bucket/runs@home"),
    ):
        assert redacted(text) == text


@pytest.mark.parametrize("uri", ["http://ann:canary@host/b", "s3://ann:canary@bucket/p", "s3://ann:can/ary@bucket"])
@pytest.mark.parametrize(
    "command", ["status --store ", "init --store ", "doctor --json --store ", "plan smoke --set tokens.source="]
)
def test_a_password_in_a_uri_is_refused_and_not_repeated(uri: str, command: str, tmp_path: Path) -> None:
    done = skytrain(tmp_path, clean_environment(HOME=str(tmp_path)), *f"{command}{uri}/x.jsonl".split())
    shown = done.stdout + done.stderr
    assert done.returncode == 2 and "a user" in shown or "***@" in shown
    assert not [part for part in ("canary", "ary@") if part in shown]
    assert not (tmp_path / "skytrain.yaml").exists()
