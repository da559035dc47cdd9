"""Promises of the export of `modern` with options: transformers runs our modeling_skytrain.py, and no command does."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_work import tiny_work
from tiny_models import greedy, model_of

from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.stages import export
from pipelines.run.text.tokenizer import tokenizer
from trainer.models.family import plain_model
from trainer.models.language_model import LanguageModel
from trainer.models.modern import ModernConfig

ROOT = Path(__file__).resolve().parents[3]
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True),
    "window": 6,
    "qk_scale": 1.2,
}
CHANGES = ["model.family=modern", *(f"model.{name}={str(value).lower()}" for name, value in OPTIONS.items())]
SIZES: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 36, "head_dim": 10, "block_size": 64}
PROMPTS = [[5, 9, 2, 7, 7, 1, 3, 250, 11], [8, 100, 3], [256]]

transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Any]:
    """A model with all options, and its export in transformers."""
    folder = tmp_path_factory.mktemp("export")
    ours = model_of(ModernConfig(**SIZES, **OPTIONS, vocab_size=257)).eval()
    save_file(ours.state_dict(), folder / "trained.safetensors")
    hf.write(Weights(folder / "trained.safetensors", ours.config, tokenizer("bytes"), "tiny"), folder, "float32")
    return ours, transformers.AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True).eval()


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[256] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("steps", [[20], [1] * 20, [9, 1, 1, 1, 8], [4, 16]])
def test_cached_decoding_gives_our_logits(both: tuple[LanguageModel, Any], steps: list[int]) -> None:
    ours, theirs = both
    tokens = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    cache, parts = None, list[torch.Tensor]()
    for part in tokens.split(steps, 1):
        made = theirs(part, past_key_values=cache)
        cache, parts = made.past_key_values, [*parts, made.logits]
    torch.testing.assert_close(torch.cat(parts, 1), ours(tokens)[..., :257], atol=1e-4, rtol=0)


@torch.no_grad()
def test_padding_on_the_left_changes_no_logits_and_generate_continues_as_we_do(both: tuple[LanguageModel, Any]) -> None:
    ours, theirs = both
    ids, mask = padded(PROMPTS)
    logits = theirs(ids, attention_mask=mask).logits
    for row, found in zip(PROMPTS, logits, strict=True):
        torch.testing.assert_close(found[-len(row) :], ours(torch.tensor([row]))[0, :, :257], atol=1e-4, rtol=0)
    plain = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    made = theirs.generate(ids, attention_mask=mask, **plain)
    assert [row[-12:] for row in made.tolist()] == [greedy(ours, row, 12) for row in PROMPTS]
    beams = [
        theirs.generate(ids, attention_mask=mask, num_beams=3, use_cache=cached, **plain) for cached in (True, False)
    ]
    assert torch.equal(*beams)


def test_it_trains_as_a_model_of_transformers_does(both: tuple[LanguageModel, Any]) -> None:
    ours, theirs = both
    tokens = torch.tensor([PROMPTS[0]])
    loss = theirs(tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(ours(tokens[:, :-1], tokens[:, 1:]).item(), abs=1e-4)
    loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in theirs.parameters())
    theirs.zero_grad()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The export by the stage, and its folder."""
    work = tiny_work(tmp_path_factory.mktemp("work"), "export", *CHANGES)
    return work, export.build(work), work.folder


def test_the_manifest_names_the_code_and_only_who_trusts_it_runs_it(exported: tuple[Any, Any, Path]) -> None:
    work, built, folder = exported
    digest = sha256((ROOT / "pipelines/extras/formats/modeling_skytrain.py").read_bytes()).hexdigest()
    assert {file.name: file.sha256 for file in built.files}["modeling_skytrain.py"] == digest
    card = (folder / "README.md").read_text()
    assert "trust_remote_code=True" in card and "This model is remote code" in card and digest in card
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False)
    generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True, device="cpu")
    ours = plain_model(work.recipe.model).eval()
    ours.load_state_dict(load_file(work.fetch("train", "model.safetensors")))
    (made,) = generate("ab", max_new_tokens=4, do_sample=False)
    assert made["generated_text"] == tokenizer("bytes").decode([*b"ab", *greedy(ours, [*b"ab"], 4)])


def test_mlflow_loads_the_folder_as_its_registered_model(exported: tuple[Any, Any, Path]) -> None:
    import mlflow.transformers

    (answer,) = mlflow.transformers.load_model(str(exported[2]))("ab", max_new_tokens=4)
    assert answer["generated_text"].startswith("ab")


def test_no_command_of_ours_loads_an_export_with_its_code() -> None:
    trusting = {
        path.relative_to(ROOT).as_posix()
        for room in ("pipelines", "trainer")
        for path in (ROOT / room).rglob("*.py")
        if "trust_remote_code" in path.read_text()
    }
    # lm-eval reads weights that this installation has just written, with the code of this installation.
    assert trusting == {
        *(
            "pipelines/extras/formats/modeling_skytrain.py",
            "pipelines/run/formats/hf.py",
            "pipelines/run/stages/model_card.py",
        ),
        "pipelines/extras/lm_eval/harness.py",
    }
