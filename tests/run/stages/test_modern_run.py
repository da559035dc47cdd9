"""A run of the family `modern` with Muon through all stages: trained, evaluated, sampled and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, TINY, Project
from safetensors.torch import save_file

from pipelines.recipe.loader import load_recipe
from pipelines.run.stage import plans_of
from pipelines.run.weight_sources import check_model
from trainer.checkpoint.weights import open_weights
from trainer.config.errors import UserError
from trainer.models.family import plain_model, to_hf

OPTIONS = dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True) | {
    "window": 8,
    "qk_scale": 1.2,
}
MODERN: dict[str, Any] = TINY | {
    "model": TINY["model"] | {"family": "modern", "n_head": 4, "n_kv_head": 2} | OPTIONS,
    "train": TINY["train"] | {"optimizer": "muon", "embedding_learning_rate": 0.1, "learning_rate": 4.0e-3},
}


@pytest.mark.slow
def test_transformers_says_the_text_of_a_run_of_modern_and_muon(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    finished = Project(tmp_path / FOLDER_NAME, MODERN)
    run = finished.result()["run"]
    assert finished.artifact("evaluate").facts["val/loss"] < 2.4

    prompt = "the store keeps"
    words = ["sample", run, "--prompt", prompt, "--tokens", "30", "--temperature", "0"]
    said = finished.run(*words, "--precision", "fp32").stdout.rstrip("\n")
    folder = finished.path("export", "config.json").parent
    generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    made = generate(f"<|endoftext|>{prompt}", max_new_tokens=30, do_sample=False)[0]["generated_text"]
    assert made.removeprefix("<|endoftext|>") == said and len(said) > len(prompt) + 20
    card = (folder / "README.md").read_text()
    assert "A nanochat language model" in card and "logits capped at 15" in card and "is remote code" in card


TWO_LAYERS = ["model.n_layer=2", "model.backout=true"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([*TWO_LAYERS, "train.precision=fp8"], "train.precision: fp8 needs the fused engine, and it has no step for"),
        ([*TWO_LAYERS, "runtime.engine=fused"], "runtime.engine: fused needs the fused engine, and it has no step for"),
        (
            ["export.formats=[hf, llmc]"],
            "export.formats: llmc cannot hold model.family modern, only gpt2",
        ),
        (["model.family=gpt"], "model.family: unknown family 'gpt'; installed are gpt2"),
    ],
)
def test_what_a_family_does_not_have_is_refused_before_any_work(changes: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        plans_of(load_recipe("smoke-modern", changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_of_another_family_are_refused_by_name(tmp_path: Path) -> None:
    gpt2, modern = load_recipe("smoke").model, load_recipe("smoke-modern", ["model.smear=true"]).model
    (tmp_path / "config.json").write_text(json.dumps(modern.hf_config()))
    model = plain_model(modern)
    model.initialize(1)
    save_file(to_hf(model.state_dict(), modern), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="its family is modern, and model.family is gpt2; --set model.family=modern"):
        open_weights(tmp_path).check(gpt2)
    open_weights(tmp_path).check(modern)
    (tmp_path / "config.json").write_text(json.dumps(modern.hf_config() | {"gate_scale": 9.0}))
    with pytest.raises(UserError, match="config.json: gate_scale is 9.0; skytrain's modern has 3.0"):
        open_weights(tmp_path)
    with pytest.raises(UserError, match="its family is gpt2, and model.family is modern"):
        check_model(gpt2, modern, "run:other")
