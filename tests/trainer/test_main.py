"""`python -m trainer`, alone and under torchrun: killed, stopped, resumed with other ranks, and its messages."""

import json
import signal
from pathlib import Path

import pytest
import yaml
from in_process import signals_unchanged
from trainer_command import Command, kill_tree
from trainer_runs import CONFIG, LONG, STEPS, configured, flip_a_byte

from trainer.__main__ import claim, main
from trainer.base.events import Started
from trainer.base.store import LocalStore
from trainer.config.errors import UserError

WITHOUT_COMPILER = """import sys, torch; from trainer.__main__ import main
assert main() == 0 and torch.are_deterministic_algorithms_enabled()
assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()"""


def test_a_deterministic_run_imports_no_compiler(data: Path, tmp_path: Path) -> None:
    Command(data, tmp_path / "out", configured(deterministic=True, max_steps=4), ("-c", WITHOUT_COMPILER)).finish()


@pytest.mark.slow
def test_a_run_resumes_with_fewer_and_with_more_ranks(data: Path, tmp_path: Path) -> None:
    undisturbed = Command(data, tmp_path / "undisturbed", configured(**LONG))
    undisturbed.finish()
    command = Command(data, tmp_path / "out", configured(**LONG))
    for ranks in (3, 1):
        with command.started(ranks) as process:
            command.wait_for_rows(8, process)
            command.wait_for_commits(2, process)  # one will be damaged
            kill_tree(process)
            assert process.returncode == -signal.SIGKILL, "it finished before it was killed"
    flip_a_byte(command.commits()[-1].parent)
    output = command.finish(2)
    assert output.count("DAMAGED checkpoint") == 1
    assert f"step {STEPS} of {STEPS}: train/loss" in output  # a log shows the progress
    starts = command.events_of(Started)
    assert [e.world_size for e in starts] == [3, 1, 2]
    assert [e.step > 0 for e in starts] == [False, True, True]
    rows, expected = command.rows(), undisturbed.rows()
    assert [row.get("data/checksum") for row in rows] == [row.get("data/checksum") for row in expected]
    for a, b in zip(expected, rows, strict=True):
        assert b == pytest.approx(a, rel=2e-3)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (yaml.safe_dump(CONFIG | {"train": CONFIG["train"] | {"learning_rte": 1}}), "did you mean 'learning_rate'?"),
        ("- a list\n", "not a YAML file with sections model, train, runtime"),
        ("", "not a YAML file with sections model, train, runtime"),
        ("a: [", "not a YAML file: while parsing"),
        (yaml.safe_dump(CONFIG), "contains no train_*.bin shards; give a folder of tokenize, llm.c or nanoGPT"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str, line: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(body)
    monkeypatch.setattr("sys.argv", ["trainer", str(config), "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    with signals_unchanged():
        assert main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and line in err and err.count("\n") == 1


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    store, shards = LocalStore(tmp_path), {"train_000000.bin": 900}
    claim(store, tmp_path, configured(), shards)
    recorded = json.loads(store.get("run/config.json") or b"")
    store.put("run/config.json", json.dumps(recorded, sort_keys=True).encode())  # another version, another order
    claim(store, tmp_path, configured(keep_last=7, micro_batch_size=4), shards)  # runtime may change
    with pytest.raises(UserError) as mistake:
        claim(store, tmp_path, configured(max_steps=9, n_layer=3), {"train_000000.bin": 901})
    assert str(mistake.value) == (
        f"{tmp_path}: holds a run with another model, train, data; use another --out, or remove it"
    )
