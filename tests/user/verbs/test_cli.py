"""The command for programs and people: exit codes, one clear line for a mistake, and no secret anywhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import in_process
import pytest
from pipeline_runs import Project
from servers import S3Account
from typer.testing import CliRunner

from pipelines.cli import SHORT_RETRIES, app
from trainer.base.store import Store
from trainer.config.errors import Interrupted, Stopped, StoreUnavailable, UserError

# Runs several commands in one process and prints their exit codes at the end.
SEVERAL = """
import json, sys
from pipelines.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["skytrain", *arguments]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print("exit codes", codes, file=sys.stderr)
"""
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
HEAVY = ["torch", "mlflow", "boto3", "datasets", "transformers", "sky", "tiktoken", "numpy", "pydantic", "yaml"]

TINY = """
name: tiny
tokens: {source: python-stdlib, tokenizer: bytes, shard_tokens: 1024, max_tokens: 4096}
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16, vocab_size: 257}
train: {batch_tokens: 64, max_steps: 2, learning_rate: 1.0e-3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return in_process.clean_environment(SKYTRAIN_TRACKING="off", AWS_SECRET_ACCESS_KEY=SECRET) | more


def skytrain(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """The command, in this process."""
    return in_process.skytrain(folder, environment(**more), *arguments)


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["run", "tiny.yaml", "--json", "--set", "train.learning_rte=1"],
            "error: tiny.yaml: train.learning_rte: unknown field; did you mean 'learning_rate'?",
        ),
        (
            ["run", "tiny.yaml", "--stage", "trian"],
            "error: --stage trian: the recipe has no such stage; choose one of tokenize, train, evaluate, export",
        ),
        (
            ["run", "tiny.yaml", "--store", "ftp://host/x"],
            "error: store 'ftp://host/x': not a store; give s3://BUCKET/PREFIX, file://PATH or a path (./NAME)",
        ),
        (
            ["run", "tiny.yaml", "--store", "my-bucket"],
            "error: store 'my-bucket': neither a bucket nor a folder that exists; write s3://my-bucket or ./my-bucket",
        ),
        (["run", "tiny.yaml", "--store", ""], "error: store '': not a store; give s3://BUCKET/PREFIX"),
        (["plan", "tiny.yaml", "--set", "tokens.source=nowhere/*.txt"], "error: tokens.source: no file matches"),
        (["report", "nope"], "error: nope: no such run in file://"),
        # Wrong options.
        (["run"], "error: run: missing argument 'RECIPE'; see skytrain run --help"),
        (["run", "tiny.yaml", "--price-per-hour", "nan"], "error: run: invalid value for '--price-per-hour': "),
        (["run", "tiny.yaml", "--budget", "inf"], "error: run: invalid value for '--budget': inf is not a finite"),
        (["launch", "tiny.yaml", "--budget", "inf"], "error: launch: invalid value for '--budget': inf is not"),
        (["run", "tiny.yaml", "--pric-per-hour", "1"], "error: run: no such option: --pric-per-hour"),
        (["rnu", "tiny.yaml"], "error: no such command 'rnu'"),
        (["tokenizer", "trian"], "error: tokenizer: no such command 'trian'"),
        (["report", "--html"], "error: report: option '--html' requires an argument; see skytrain report --help"),
        (["launch", "tiny.yaml", "--nodes", "0"], "error: launch: invalid value for '--nodes': "),
    ],
)
def test_a_user_error_exits_with_2_and_one_line_before_anything_starts(
    folder: Path, arguments: list[str], line: str
) -> None:
    done = skytrain(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["tiny.yaml"]


WITHOUT_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # root reads and writes what it may not


@pytest.fixture(scope="session")
def as_a_user() -> list[str]:
    """The beginning of a command in which the modes of files count."""
    if os.geteuid() != 0:
        return []
    if subprocess.run([*WITHOUT_ROOT, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root, and no setpriv that gives its rights up")
    return WITHOUT_ROOT


def test_hostile_input_ends_with_2_and_one_line(folder: Path, as_a_user: list[str]) -> None:
    def variant(name: str, old: str, new: str) -> str:
        (folder / name).write_text(TINY.replace(old, new))
        return name

    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    (folder / "large.jsonl").write_text('{"text": "a", "n": ' + "9" * 6000 + "}\n")
    (folder / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "text" / name).write_text("hello")
    (folder / "text" / "b.txt").chmod(0)
    (folder / "no.yaml").touch(0)
    full = folder / "store" / "tokens" / "x-12345678" / "a0001"
    full.mkdir(parents=True)
    (full / "train_000000.bin").touch()
    for each in (full, *full.parents[:3]):
        each.chmod(0o555)
    (folder / "locked").mkdir(0o500)
    for name in ("pipe.txt", "pipe.jsonl", "pipe.json", "pipe.yaml"):
        os.mkfifo(folder / name)
    long = "a" * 300
    commands = [
        ["plan", variant("d400.yaml", "max_steps: 2", "max_steps: " + "9" * 400)],
        ["plan", variant("d6000.yaml", "max_steps: 2", "max_steps: " + "9" * 6000)],
        ["plan", "tiny.yaml", "--set", "train.max_steps=" + "9" * 6000],
        ["plan", variant("deep.yaml", "name: tiny", "name: tiny\nx: " + "[" * 3000 + "]" * 3000)],
        ["plan", variant("deepj.yaml", "python-stdlib", "deep.jsonl")],
        ["plan", variant("largej.yaml", "python-stdlib", "large.jsonl")],
        ["plan", "no.yaml"],
        ["plan", "pipe.yaml"],
        ["plan", "tiny.yaml", "--set", "tokens.source=pipe.txt"],
        ["plan", "tiny.yaml", "--set", "tokens.source=pipe.jsonl"],
        ["plan", "tiny.yaml", "--set", "tokens.tokenizer=pipe.json"],
        ["plan", variant("unreadable.yaml", "python-stdlib", "'text/*.txt'")],
        ["plan", "tiny.yaml", "--store", "~nosuch/x"],
        ["plan", "tiny.yaml", "--store", long],
        ["plan", long],
        ["plan", f"run:{long}"],
        ["plan", "tiny.yaml", "--set", f"tokens.source={long}.txt"],
        ["run", "tiny.yaml", "--budget", "9" * 400],
        ["run", "tiny.yaml", "--store", "locked/store"],
        ["run", "tiny.yaml", "--store", "file:///proc/x"],
        ["report", "--store", "store", long],
        ["gc", "--store", "store", "--older-than-days", "0"],
    ]
    done = subprocess.run(
        [*as_a_user, sys.executable, "-c", SEVERAL, json.dumps(commands)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    *lines, codes = done.stderr.splitlines()
    assert codes == f"exit codes {[2] * len(commands)}", done.stderr
    for command, line in zip(commands, lines, strict=True):
        assert line.startswith("error: ") and len(line) < 1000, command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Interrupted(), 75, "interrupted: run the same command to resume\n"),
        (KeyboardInterrupt(), 75, "interrupted: run the same command to resume\n"),
        (StoreUnavailable("no route to s3"), 75, "error: no route to s3; run the same command to resume\n"),
        (Stopped("budget"), 76, "stopped (budget): nothing restarts this run automatically\n"),
        (RuntimeError("wheels came off"), 1, None),
        (EOFError("wheels came off"), 1, None),
        (BrokenPipeError(32, "wheels came off"), 1, None),  # another pipe than the output
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code_and_only_a_bug_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str | None
) -> None:
    def load_recipe(*_: object) -> None:
        raise error

    monkeypatch.setattr("pipelines.recipe.loader.load_recipe", load_recipe)
    monkeypatch.setattr("pipelines.run.stage.load_recipe", load_recipe)
    done = skytrain(folder, "run", "tiny.yaml", "--stage", "tokenize")
    assert (done.returncode, done.stdout) == (code, "")
    if line is None:
        assert "Traceback" in done.stderr and "wheels came off" in done.stderr and "in load_recipe" in done.stderr
    else:
        assert done.stderr == line


# --- imports


# Runs the command and prints at the end the heavy modules that it loaded.
LISTING_IMPORTS = (
    "import atexit, json, sys\nfrom pipelines.cli import main\n"
    f"atexit.register(lambda: print(json.dumps([m for m in {HEAVY} if m in sys.modules]), file=sys.stderr))\nmain()"
)


def test_help_and_reports_import_nothing_heavy(undisturbed: Callable[[int], Project]) -> None:
    for verb, loaded in (("--help", set()), ("report", {"pydantic", "yaml"})):
        assert set(json.loads(undisturbed(1).run(verb, code=LISTING_IMPORTS).stderr)) <= loaded


def test_short_help_version_and_completion_answer(folder: Path) -> None:
    helped = skytrain(folder, "run", "-h")
    assert helped.returncode == 0
    for option in ("--stage", "--store", "--set", "--price-per-hour", "--json", "-h, --help"):
        assert option in helped.stdout
    assert skytrain(folder, "--version").stdout.startswith(f"skytrain {metadata.version('skytrain')}")
    asked = {"_SKYTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "skytrain re", "COMP_CWORD": "1"}
    assert skytrain(folder, **asked).stdout.split() == ["recipes", "report", "resume"]


# --- output


FIRST_CHILD = """
import subprocess, sys
from pipelines.cli import main
try:
    main()
except SystemExit:
    print("✓ 東京")
sys.exit(subprocess.run([sys.executable, "-c", "import json; print('✓')"]).returncode)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_no_terminal_ends_a_command_and_no_module_of_the_working_folder_runs_in_its_processes(
    folder: Path, encoding: str
) -> None:
    (folder / "json.py").write_text("import os; os._exit(9)")
    command = [sys.executable, "-P", "-c", FIRST_CHILD, "--version"]
    done = subprocess.run(
        command, cwd=folder, env=environment(PYTHONIOENCODING=encoding), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"? ??" in done.stdout


def test_results_go_to_stdout_as_one_object_and_messages_to_stderr(folder: Path) -> None:
    done = skytrain(folder, "run", "tiny.yaml", "--stage", "tokenize", "--json", "--price-per-hour", "3.5")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert set(result) == {"run", "state", "attempts", "usd", "billed_hours", "unpriced_hours", "val_loss", "artifacts"}
    assert (result["state"], result["attempts"], result["val_loss"]) == ("done", 1, None)
    assert result["usd"] == pytest.approx(3.5 * result["billed_hours"]) and result["usd"] > 0
    tokens = result["artifacts"]["tokenize"]
    assert tokens["skipped"] is False and len(tokens["fingerprint"]) == 64
    assert tokens["uri"] == f"file://{folder}/.skytrain/store/tokens/python-stdlib-{tokens['fingerprint'][:8]}"
    again = json.loads(skytrain(folder, "run", "tiny.yaml", "--stage", "tokenize", "--json").stdout)
    assert again == result | {"artifacts": {"tokenize": tokens | {"skipped": True}}}
    shown = skytrain(folder, "status").stdout.splitlines()  # without a step: it does not train
    assert len(shown) == 2 and shown[0].endswith("done") and shown[1].endswith("so far, in 1 attempt")


def test_the_list_of_recipes_has_a_size_for_each_that_trains(folder: Path) -> None:
    _, *rows = skytrain(folder, "recipes").stdout.splitlines()
    assert len(rows) > 15 and not re.search(r" 0\.0(M|B|e| min)", "".join(rows))
    assert [row.split()[0] for row in rows if "tunes a given model" in row] == ["gpt2-124m-chat"]


def test_the_secret_key_is_in_no_output_and_no_object(
    folder: Path, moto_server: S3Account, fresh_s3_store: Callable[[S3Account], Store]
) -> None:
    store = fresh_s3_store(moto_server)
    aws = moto_server.environment | {"AWS_SECRET_ACCESS_KEY": SECRET}
    output = ""
    for options in ([], ["--json"]):
        done = skytrain(folder, "run", "tiny.yaml", "--stage", "tokenize", "--store", store.uri, *options, **aws)
        assert done.returncode == 0, done.stderr
        output += done.stdout + done.stderr
    looks = [["plan", "tiny.yaml"], ["report"], ["report", "--json"], ["gc", "--dry-run"], ["report", "nope"]]
    codes = []
    for look in looks:
        done = skytrain(folder, *look, "--store", store.uri, **aws)
        codes.append(done.returncode)
        output += done.stdout + done.stderr
    assert codes == [0, 0, 0, 0, 2], output
    objects = [store.get(entry.key) or b"" for entry in store.entries("")]
    left = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert "tiny-" in output and any(b"git_commit" in body for body in objects)
    assert SECRET not in output and not any(SECRET.encode() in body for body in [*objects, *left])


@pytest.mark.parametrize("verb", sorted(SHORT_RETRIES))
def test_a_command_that_only_asks_gives_up_a_silent_store_soon_and_names_what_works_without_it(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_in_vain(uri: str) -> Store:
        raise StoreUnavailable(f"{uri}: silent for {os.environ['SKYTRAIN_STORE_SECONDS']} s")

    monkeypatch.setenv("SKYTRAIN_STORE_SECONDS", "120")
    monkeypatch.delenv("SKYTRAIN_STORE_SECONDS")
    monkeypatch.setattr("pipelines.store.s3_store.open_store", wait_in_vain)
    error = CliRunner().invoke(app, [verb, "smoke", "--store", "s3://b/x"]).exception
    assert isinstance(error, UserError) and str(error).startswith(f"{verb}: s3://b/x: silent for 10 s")
    assert ("`skytrain down RUN` works" in str(error)) == (verb not in ("down", "report", "plan"))
