"""The stages evaluate and export. Validation and texts of the evaluation are stand-ins."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import start_ranks_here

from pipelines.extras.lm_eval.harness import progress_in
from pipelines.run.stage import Work
from pipelines.run.stages import evaluate, export, follow
from pipelines.user.show import console
from trainer.config.errors import Interrupted
from trainer.models.gpt2_module import GPT


@pytest.fixture(autouse=True)
def rank_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "start_ranks", start_ranks_here)


@pytest.mark.parametrize(("configured", "computed"), [("auto", "fp32"), ("bf16", "bf16"), ("fp8", "bf16")])
def test_an_evaluation_computes_in_the_precision_of_the_training_and_names_it(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch, configured: str, computed: str
) -> None:
    mine = work("evaluate")
    train = mine.recipe.train.model_copy(update={"precision": configured})
    mine.recipe = mine.recipe.model_copy(update={"train": train})
    logits: list[torch.dtype] = []

    def validation(
        losses_of: Callable[..., torch.Tensor], *arguments: Any, on_batch: Callable[[], None]
    ) -> tuple[float, float]:
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        return float(losses_of(tokens, tokens).mean()), 1.0

    head = GPT.head

    def noted(model: GPT, x: torch.Tensor) -> torch.Tensor:
        logits.append(head(model, x).dtype)
        return head(model, x)

    monkeypatch.setattr(GPT, "head", noted)
    monkeypatch.setattr("trainer.eval.evaluation.validation", validation)
    monkeypatch.setattr("trainer.eval.evaluation.TextSampler.texts_of", lambda *arguments: [""])
    built = evaluate.build(mine)
    assert logits == [torch.bfloat16 if computed == "bf16" else torch.float32]
    assert json.loads((mine.folder / "report.json").read_text())["precision"] == built.facts["precision"] == computed


def test_an_evaluation_shows_how_far_it_is_and_that_fewer_tokens_are_held_out_than_it_is_to_read(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = work("evaluate")
    tokens = mine.inputs["tokenize"]
    mine.inputs["tokenize"] = replace(tokens, facts=tokens.facts | {"val_tokens": 100})
    mine.screen = console.TerminalScreen()
    monkeypatch.setattr(evaluate, "SHOW_SECONDS", 0.0)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    monkeypatch.setattr("trainer.eval.evaluation.TextSampler.texts_of", lambda *arguments: [""])
    evaluate.build(mine)
    note, *lines = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    wanted = f"{mine.recipe.evaluate.val_tokens:,}"
    assert note == f"evaluate reads the 100 held-out tokens: evaluate.val_tokens is {wanted}"
    assert lines[0].startswith("evaluate val loss: batch 1 of ")
    number, _, batches = [line for line in lines if "batch" in line][-1].rpartition("batch ")[2].partition(" of ")
    assert number == batches.split()[0]  # the elapsed time follows


def test_the_harness_shows_the_bar_that_it_draws(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "a line\nRunning loglikelihood requests:   0%|   | 0/99 [00:00<?]\rRunning loglikelihood"
        " requests:  12%|█▏   | 12/99 [00:01<00:09, 9it/s]\n"
    )
    assert progress_in(tmp_path / "log") == "Running loglikelihood requests 12% 12/99"


def test_a_stop_takes_effect_before_an_export_is_uploaded(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, begun = work("export"), list[int]()
    monkeypatch.setattr(export, "failpoint", lambda name: setattr(mine.stop, "asked", True))
    monkeypatch.setattr("pipelines.run.stages.export.model_card", lambda *arguments, **options: begun.append(1))
    with pytest.raises(Interrupted):
        export.build(mine)
    assert not begun
