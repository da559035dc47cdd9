"""`skytrain sample`: the text of a run's weights, whole or token by token."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import text_runs
import torch
import trainer_runs
from text_runs import CONTEXT, RUN, TRAIN
from tiny_models import model_of
from typer.testing import CliRunner

from pipelines import cli
from pipelines.run.sample import load_text_model
from trainer.base.store import LocalStore
from trainer.checkpoint.commits import committed_folders, delete_checkpoint
from trainer.config.errors import UserError

_one_thread = trainer_runs._one_thread

Command = Callable[..., str]


@pytest.fixture
def sample(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command on a finished run, in this process."""
    text_runs.finish(store, tmp_path, model_of(text_runs.RECIPE.model))
    monkeypatch.setenv("SKYTRAIN_HOME", str(tmp_path / "home"))

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["sample", RUN, "--store", store.uri, "--precision", "fp32", *words])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


# --- the command


def test_many_prompts_have_the_texts_that_each_has_alone(sample: Command) -> None:
    prompts = ("def ", "import", "The history of a thing")
    words = ["--tokens", "90", "--temperature", "0.8", "--top-p", "0.95", "--seed", "5"]
    found = json.loads(
        sample(*(word for text in prompts for word in ("--prompt", text)), "--number", "2", *words, "--json")
    )
    assert [(one["prompt"], one["seed"]) for one in found] == [(prompt, seed) for prompt in prompts for seed in (5, 6)]
    assert {one["finish"] for one in found} <= {"stop", "length"} and len({one["text"] for one in found}) == 6
    for one in found:
        (alone,) = json.loads(sample("--prompt", one["prompt"], *words, "--seed", str(one["seed"]), "--json"))
        assert alone == one


def test_a_terminal_gets_each_token_at_once_and_a_pipe_the_same_text(
    sample: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--prompt", "def ", "--tokens", "30", "--number", "2"]
    whole = sample(*words)
    assert whole.startswith("--- 1 of 2, seed 0\ndef ")
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True)
    assert sample(*words) == whole


def test_a_prompt_must_fit_into_the_context(sample: Command) -> None:
    sample("--prompt", "x" * (CONTEXT - 1), "--tokens", "2")
    with pytest.raises(UserError, match=r"--prompt: 64 tokens, and speaker-\w+ takes 63 .* shorten 'xxx"):
        sample("--prompt", "short", "--prompt", "x" * CONTEXT)


# --- the weights


def test_an_unfinished_run_speaks_with_its_newest_commit_or_the_one_of_a_step(
    store: LocalStore, tmp_path: Path
) -> None:
    for step in (5, 10):
        text_runs.commit(store, tmp_path, model_of(text_runs.RECIPE.model, step), step)

    def head(at: int | None) -> tuple[int | None, torch.Tensor]:
        model = load_text_model(store, tmp_path / "cache", RUN, at, "fp32")
        return model.step, model.decoder.model.wte.weight

    for asked, step in ((None, 10), (5, 5), (10, 10)):
        found, weights = head(asked)
        assert found == step and torch.equal(weights, model_of(text_runs.RECIPE.model, step).wte.weight)
    with pytest.raises(UserError, match=f"--at 7: {RUN} has no such commit; it has 5, 10"):
        head(7)
    text_runs.finish(store, tmp_path, model_of(text_runs.RECIPE.model))
    for final in (None, 20):
        assert head(final)[0] is None
    assert head(5)[0] == 5
    assert not any((tmp_path / "cache").glob("*"))  # a commit leaves no copy
    for entry in list(store.entries(f"{TRAIN}/checkpoints/")):  # as gc does
        store.delete(entry.key)
    with pytest.raises(UserError, match=f"--at 5: {RUN} has no commit any more, only its final weights"):
        head(5)


def test_a_run_without_weights_and_a_damaged_commit_are_named(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_runs.record(store, RUN, text_runs.RECIPE, text_runs.PLANS, "export")
    with pytest.raises(UserError, match="no trained weights yet, and no commit"):
        load_text_model(store, tmp_path / "cache", RUN)
    text_runs.commit(store, tmp_path, model_of(text_runs.RECIPE.model), 5)
    (folder,) = committed_folders(store, TRAIN)
    path = store.path_of(f"{folder}/rank-00000-of-00001.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="is damaged: .* do not have the sha256"):
        load_text_model(store, tmp_path / "cache", RUN)
    read_into = store.read_into

    def read_too_late(key: str, start: int, buffer: memoryview) -> int:
        delete_checkpoint(store, folder)
        return read_into(key, start, buffer)

    monkeypatch.setattr(store, "read_into", read_too_late)
    with pytest.raises(UserError, match="was removed while it was read"):
        load_text_model(store, tmp_path / "cache", RUN)


# --- the text
