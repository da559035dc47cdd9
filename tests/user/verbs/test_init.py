"""`skytrain init`, and `skytrain.yaml`, which every command reads."""

import os
import pty
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import in_process
import pytest
import yaml
from in_process import clean_environment
from servers import S3Account
from sky_catalog import sky_environment, write_catalog

from pipelines.recipe.project import Project
from trainer.config.errors import UserError


def skytrain(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return in_process.skytrain(folder, clean_environment(HOME=str(folder), **more), *arguments)


COMMAND = [sys.executable, "-c", "from pipelines.cli import main; main()"]


def in_a_process(folder: Path, *arguments: str, stdin: Any = None, **more: str) -> "subprocess.CompletedProcess[str]":
    """SkyPilot keeps what it finds at its first import."""
    command, environment = [*COMMAND, *arguments], clean_environment(**{"HOME": str(folder)} | more)
    return subprocess.run(command, cwd=folder, env=environment, stdin=stdin, capture_output=True, text=True)


def written(folder: Path, text: str) -> Path:
    path = folder / "skytrain.yaml"
    path.write_text(text)
    return path


# --- the file


def test_an_option_wins_over_the_environment_and_both_over_the_file(tmp_path: Path) -> None:
    written(tmp_path, "store: ./from-file\ntracking: 'https://mlflow.example.org'\n")
    for arguments, more, store in (
        (["--store", "./from-option"], {"SKYTRAIN_STORE": "./from-variable"}, "./from-option"),
        ([], {"SKYTRAIN_STORE": "./from-variable"}, "./from-variable"),
        ([], {}, "./from-file"),
    ):
        done = skytrain(tmp_path, "status", "nobody", *arguments, **more)
        assert done.returncode == 2 and f"no such run in file://{tmp_path}{store[1:]}" in done.stderr

    project = Project.read(tmp_path / "skytrain.yaml")
    for shell, then in (
        ({}, "https://mlflow.example.org"),
        ({"MLFLOW_TRACKING_URI": "http://mine"}, "http://mine"),
        ({"SKYTRAIN_TRACKING": "off"}, None),
    ):
        project.set_in(shell)
        assert shell.get("MLFLOW_TRACKING_URI") == then
    off, shell = Project(tracking="off"), {"MLFLOW_TRACKING_URI": "http://mine"}
    off.set_in(shell)
    assert "SKYTRAIN_TRACKING" not in shell
    off.set_in(shell := {})
    assert shell == {"SKYTRAIN_TRACKING": "off"}


@pytest.mark.slow
def test_a_launch_takes_place_budget_and_image_of_the_file_unless_an_option_gives_them(tmp_path: Path) -> None:
    written(tmp_path, "store: ./runs\ninfra: aws/us-east-1\nbudget: 7\nimage: example.org/me/skytrain:1\n")
    write_catalog(tmp_path)
    more = sky_environment(tmp_path) | {"SKYPILOT_API_SERVER_ENDPOINT": "http://127.0.0.1:9"}
    job = in_a_process(tmp_path, "launch", "smoke", "--dry-run", "--budget", "9", **more).stdout
    assert "SKYTRAIN_BUDGET: '9'" in job and "SKYTRAIN_IMAGE: example.org/me/skytrain:1" in job
    assert "infra: aws/us-east-1" in job and "us-west-2" not in job and f"SKYTRAIN_STORE: file://{tmp_path}/runs" in job


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stroe: a", "stroe: unknown field; did you mean 'store'?"),
        ("budget: much", "budget: must be a valid number (got 'much')"),
        ("budget: 0", "budget: must be greater than 0 (got 0)"),
        ("budget: .nan", "budget: must be a finite number"),
        ("store: ''", "store: empty, or blanks around it"),
        ("tracking: mlflow.example.org", "tracking: not an http(s) URL of an MLflow server, not off, and no tracker"),
        ("tracking: https://me:secret@mlflow.example.org", "tracking: has a user or password in it"),
        ("- store", "not of the form NAME: VALUE; its names are store, tracking, infra, budget, image"),
        ("a: b: c", "not a YAML file: "),
    ],
)
def test_a_wrong_key_or_value_of_the_file_is_one_line_without_the_secret(tmp_path: Path, text: str, line: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        Project.read(path)
    assert str(error.value).startswith(f"{path}: {line}")
    assert "\n" not in str(error.value) and "secret@" not in str(error.value)


def test_every_command_but_help_and_init_ends_with_2_on_a_wrong_file(tmp_path: Path) -> None:
    written(tmp_path, "stroe: a\n")
    for verb in (["plan", "smoke"], ["report"], ["doctor"]):
        done = skytrain(tmp_path, *verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: skytrain.yaml: stroe: unknown field; did you mean 'store'?\n"
    assert skytrain(tmp_path, "plan", "--help").returncode == 0


# --- the command


@pytest.mark.slow
def test_init_writes_the_file_checks_the_bucket_and_replaces_no_file_without_a_word(
    tmp_path: Path, moto_server: S3Account
) -> None:
    done = skytrain(tmp_path, "init")
    assert done.returncode == 2 and done.stderr.startswith("error: init: name a store: --store s3://")

    nowhere = "http://127.0.0.1:9"  # no catalog can be fetched, either
    more = moto_server.environment | {"SKYPILOT_API_SERVER_ENDPOINT": nowhere, "HTTPS_PROXY": nowhere}
    options = ("init", "--store", f"s3://none-{uuid.uuid4().hex[:12]}/runs", "--tracking", "off", "--infra", "aws/us-x")
    done = in_a_process(tmp_path, *options, **more)
    assert done.returncode == 2 and "the bucket does not exist" in done.stdout and "next: " not in done.stdout
    assert "infra/aws/stack.yaml" in done.stdout
    text = (tmp_path / "skytrain.yaml").read_text()
    assert yaml.safe_load(text) == {"store": options[2], "tracking": "off", "infra": "aws/us-x"}
    assert moto_server.secret_key not in done.stdout + text

    done = skytrain(tmp_path, "init", "--store", "./runs", **more)
    assert done.returncode == 2 and done.stderr.startswith("error: init: skytrain.yaml exists; edit it, or add --repl")
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"my-bucket\n./runs\n")
    done = in_a_process(tmp_path, "init", "--replace", stdin=terminal, **more)
    assert done.returncode == 0 and "is writable, and refuses a second create" in done.stdout
    assert "write s3://my-bucket or ./my-bucket" in done.stdout + done.stderr
    assert Project.read(tmp_path / "skytrain.yaml") == Project(store="./runs")


@pytest.mark.parametrize(("code", "line"), [(75, "interrupted: run the same"), (2, "error: the input ends before")])
def test_a_question_without_an_answer_ends_in_a_line(tmp_path: Path, code: int, line: str) -> None:
    keyboard, terminal = pty.openpty()
    more: Any = {"env": clean_environment(HOME=str(tmp_path)), "stdin": terminal, "text": True}
    pipe = subprocess.PIPE
    command = ["env", "--default-signal=INT", *COMMAND, "init"]  # a job in the background ignores it
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, **more) as process:
        try:
            assert process.stdout and process.stdout.read(7) == "store ("
            process.send_signal(signal.SIGINT) if code == 75 else os.write(keyboard, b"\4")  # Ctrl-D
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code and errors.startswith(line) and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "wrong", "message"),
    [
        ("--store", "my-bucket", "store 'my-bucket': neither a bucket nor a folder"),
        ("--tracking", "mlflow.example.org", "init: tracking: not an http(s) URL"),
        ("--budget", "0", "init: invalid value for '--budget'"),
        ("--image", "A B", "--image A B: not the name of an image"),
    ],
)
def test_init_checks_each_answer_before_it_writes(tmp_path: Path, option: str, wrong: str, message: str) -> None:
    done = skytrain(tmp_path, "init", "--store", "./runs", option, wrong)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "skytrain.yaml").exists()
