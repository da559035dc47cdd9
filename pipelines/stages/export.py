"""export: the trained weights as a Hugging Face GPT-2 checkpoint, read back and compared before the commit."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.recipe import Recipe
from pipelines.stage import Built, Work
from pipelines.text.tokenizer import tokenizer, tokenizer_files
from trainer.config import ModelConfig
from trainer.process import failpoint

if TYPE_CHECKING:
    from torch import Tensor


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the checkpoint: the trained weights, and the dtype."""
    identity = {"stage": "export", "train": plans["train"].fingerprint, "dtype": recipe.export.dtype}
    return ArtifactPlan("export", recipe.name, identity)


def build(work: Work) -> Built:
    """Write the checkpoint. RuntimeError if its weights, read back, give other logits."""

    import torch
    from safetensors.torch import load_file, save_file

    from trainer.model import to_hf

    config, dtype = work.recipe.model, getattr(torch, work.recipe.export.dtype)
    work.clock.enter("export")
    state = load_file(work.fetch("train", "model.safetensors"))
    hf = {name: tensor.to(dtype) for name, tensor in to_hf(state, config).items()}
    encoding = tokenizer(work.recipe.tokens.tokenizer)
    save_file(hf, work.folder / "model.safetensors", metadata={"format": "pt"})
    texts = {
        "config.json": json.dumps(hf_config(config, work.recipe.export.dtype, encoding.eot_token), indent=2).encode(),
        "generation_config.json": json.dumps(
            {"bos_token_id": encoding.eot_token, "eos_token_id": encoding.eot_token}, indent=2
        ).encode(),
        **tokenizer_files(encoding, config.block_size),
    }
    for name, body in texts.items():
        (work.folder / name).write_bytes(body)
    failpoint("export")
    work.check()
    difference = reload_difference(work.folder / "model.safetensors", state, config, dtype)
    if difference:
        raise RuntimeError(f"the exported weights, read back, give other logits: largest difference {difference}")
    names = ["model.safetensors", *texts]
    return Built(
        [work.upload(work.folder / name) for name in names],
        {"dtype": work.recipe.export.dtype, "parameters": sum(t.numel() for t in hf.values())},
    )


def hf_config(config: ModelConfig, dtype: str, end_of_text: int) -> dict[str, Any]:
    """The fields of transformers' GPT2Config that describe the same model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": "gelu_new",  # the tanh approximation
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
    }


def reload_difference(path: Path, state: "dict[str, Tensor]", config: ModelConfig, dtype: Any) -> float:
    """The largest difference in logits between the file and the trained weights rounded to its dtype."""
    import torch
    from safetensors.torch import load_file

    from trainer.model import GPT, from_hf

    tokens = torch.randint(
        config.vocab_size, (2, min(64, config.block_size)), generator=torch.Generator().manual_seed(0)
    )
    logits = []
    for weights in (state, from_hf(load_file(path), config)):
        model = GPT(config).eval()
        model.load_state_dict({name: tensor.to(dtype).float() for name, tensor in weights.items()})
        with torch.no_grad():
            logits.append(model(tokens)[..., : config.vocab_size])
    return float((logits[0] - logits[1]).abs().max())
