"""What a family does not have, and weights of another family, are refused by name."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from pipelines.recipe import load_recipe
from pipelines.weight_sources import check_model
from trainer.errors import UserError
from trainer.models.family import plain_model, to_hf
from trainer.models.weights import open_weights

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
        (["model.family=gpt"], "model.family: unknown family 'gpt'; did you mean 'gpt2'?"),
    ],
)
def test_what_a_family_does_not_have_is_refused_before_any_work(changes: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe("smoke-modern", changes)
    assert str(error.value).startswith("smoke-modern: ") and message in str(error.value)
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
