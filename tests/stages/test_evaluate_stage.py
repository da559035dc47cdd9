"""The stages evaluate and export: they leave soon after a stop. The evaluation and the export are stand-ins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.formats.hf import hf_config
from pipelines.stage import Work
from pipelines.stages import evaluate, export
from pipelines.weight_sources import pinned
from trainer.errors import Interrupted, UserError
from trainer.models.family import to_hf
from trainer.models.gpt2_module import GPT


def test_an_evaluation_stops_between_two_batches(work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, done = work("evaluate"), []

    def validation(*arguments: Any, on_batch: Callable[[], None]) -> tuple[float, float]:
        for batch in range(10):
            on_batch()
            done.append(batch)
            mine.stop.asked = batch == 3
        return 1.0, 1.0

    monkeypatch.setattr("trainer.eval.evaluation.validation", validation)
    with pytest.raises(Interrupted):
        evaluate.build(mine)
    assert done == [0, 1, 2, 3]


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
    monkeypatch.setattr("trainer.eval.evaluation.Sampling.texts_of", lambda *arguments: [""])
    built = evaluate.build(mine)
    assert logits == [torch.bfloat16 if computed == "bf16" else torch.float32]
    assert json.loads((mine.folder / "report.json").read_text())["precision"] == built.facts["precision"] == computed


@pytest.mark.parametrize("place", ["evaluate", "export"])
def test_a_stop_takes_effect_before_the_next_long_operation(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    mine, begun = work(place), []
    module = {"evaluate": evaluate, "export": export}[place]

    def stop_here(name: str) -> None:
        mine.stop.asked = True

    monkeypatch.setattr("trainer.eval.evaluation.validation", lambda *arguments, on_batch: (1.0, 1.0))
    monkeypatch.setattr(module, "failpoint", stop_here)
    for name in ("trainer.eval.evaluation.Sampling.texts_of", "pipelines.formats.hf.verify"):
        monkeypatch.setattr(name, lambda *arguments, **options: begun.append(1))
    with pytest.raises(Interrupted):
        module.build(mine)
    assert not begun


def test_a_baseline_is_measured_with_the_same_code(
    work: Callable[[str], Work], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline has the trained weights, so it must have their scores."""
    mine = work("evaluate")
    state, model = load_file(mine.fetch("train", "model.safetensors")), mine.recipe.model
    folder = tmp_path / "openai"
    folder.mkdir()
    save_file(to_hf(state, model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model, "float32", 0)))
    evaluated = mine.recipe.evaluate.model_copy(update={"baselines": [str(folder)]})
    mine.recipe = pinned(mine.recipe.model_copy(update={"evaluate": evaluated}), mine.store)
    monkeypatch.setattr("trainer.eval.evaluation.Sampling.texts_of", lambda *arguments: [""])
    facts = evaluate.build(mine).facts
    report = json.loads((mine.folder / "report.json").read_text())
    scores = {name: facts[name] for name in ("val/loss", "val/bits_per_byte")}
    assert facts["baselines"] == report["baselines"] == {str(folder): scores}

    # Another vocabulary or a shorter context can't read the text: named when the run is planned.
    (folder / "config.json").write_text(json.dumps(hf_config(model, "float32", 0) | {"n_positions": 4}))
    with pytest.raises(UserError, match="evaluate.baselines: .*openai"):
        pinned(mine.recipe, mine.store)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="evaluate.baselines: .*: no weights there"):
        pinned(mine.recipe, mine.store)
