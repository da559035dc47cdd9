"""The Hugging Face checkpoint: config, generation config, tokenizer and model.safetensors, or several such files with
an index.

`transformers` and vLLM load its folder. A `modern` with options has modeling_skytrain.py beside it, which transformers
runs if its user says trust_remote_code=True; no command of ours loads an export in this way.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from pipelines.run.formats.export_weights import Weights
from pipelines.run.text.tokenizer import tokenizer_files
from trainer.checkpoint.weights import safetensors_header
from trainer.config.model_config import ModelConfig
from trainer.models import modern

INDEX = "model.safetensors.index.json"
MOST_BYTES = 10 * 10**9  # of a file
REMOTE_CODE = f"{modern.REMOTE_CODE}.py"  # of a model that transformers has no class for
COMPONENTS = "components"  # the folder where MLflow looks for the tokenizer
TENSORS_AT_ONCE = 8  # in memory; the largest of 1558M has 0.3 GB in float32
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # names in safetensors


def write(weights: Weights, folder: Path, dtype: str) -> list[Path]:
    """Write the checkpoint with weights in `dtype`: one file of them, or several of at most MOST_BYTES."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    end_of_text = weights.encoding.eot_token
    config = hf_config(weights.config, dtype, end_of_text)
    tokenizer = tokenizer_files(weights.encoding, weights.config.block_size)
    tokenizer_class = json.loads(tokenizer["tokenizer_config.json"])["tokenizer_class"]
    texts = {
        "config.json": _json(config),
        # Without a length, a pipeline of transformers, so also MLflow, generates 256 tokens, beyond a short context.
        "generation_config.json": _json(
            dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
            | {"max_length": weights.config.block_size}
        ),
        **tokenizer,
        # So that MLflow loads the folder as the registered model.
        "MLmodel": _json(mlmodel(config["architectures"][0], tokenizer_class, dtype, weights.config.block_size)),
        **{f"{COMPONENTS}/tokenizer/{name}": body for name, body in tokenizer.items()},
    }
    if "auto_map" in config:
        texts[REMOTE_CODE] = remote_code()
    ours, number = {weights.config.hf_name(name): name for name in weights.shapes}, getattr(torch, dtype)
    sizes = {theirs: torch.empty(weights.shapes[name], dtype=number, device="meta") for theirs, name in ours.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=MOST_BYTES)
    files = split.filename_to_tensors
    for file, names in files.items():
        write_safetensors(weights, folder / file, {theirs: ours[theirs] for theirs in names}, dtype)
    if split.is_sharded:
        texts[INDEX] = _json({"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    for name, body in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return [folder / name for name in (*files, *texts)]


def remote_code() -> bytes:
    """The module of a model that transformers has no class for."""
    return (resources.files("pipelines.extras.formats") / REMOTE_CODE).read_bytes()


def mlmodel(architecture: str, tokenizer: str, dtype: str, block_size: int) -> dict[str, Any]:
    """MLflow's description of the folder as a pipeline of transformers, which samples as `sample` does, or as the
    params of a request say. Source: mlflow.transformers 3.17; JSON is YAML."""
    text = '[{"type": "string", "required": true}]'
    flavor = {
        "components": ["tokenizer"],
        "framework": "pt",
        "instance_type": "TextGenerationPipeline",
        "model_binary": ".",
        "pipeline_model_type": architecture,
        "task": "text-generation",
        "tokenizer_type": tokenizer,
        "torch_dtype": f"torch.{dtype}",
    }
    flavors = {"python_function": {"loader_module": "mlflow.transformers"}, "transformers": flavor}
    params = {"do_sample": ("boolean", True), "temperature": ("double", 1.0), "top_k": ("long", 50)}
    params |= {"top_p": ("double", 1.0), "max_length": ("long", block_size)}
    schema = [{"name": name, "type": kind, "default": value, "shape": None} for name, (kind, value) in params.items()]
    return {"flavors": flavors, "signature": {"inputs": text, "outputs": text, "params": json.dumps(schema)}}


def write_safetensors(weights: Weights, path: Path, names: dict[str, str], dtype: str) -> None:
    """Write some tensors, a few at a time. `names`: our name by the file's."""
    import torch

    from trainer.models.family import to_hf

    config = weights.config
    shapes = {theirs: weights.shapes[name] for theirs, name in names.items()}
    shapes = {theirs: shape[::-1] if config.hf_transposed(names[theirs]) else shape for theirs, shape in shapes.items()}
    start, begins = safetensors_header(shapes, TYPES[dtype], {"format": "pt"})
    path.write_bytes(start)

    def put(stored: str) -> None:
        (tensor,) = to_hf({names[stored]: weights.rounded(names[stored], getattr(torch, dtype))}, config).values()
        with path.open("r+b") as file:
            file.seek(begins[stored])
            file.write(tensor.view(torch.uint8).numpy().data)

    threads, at_once = torch.get_num_threads(), min(TENSORS_AT_ONCE, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(at_once, "export", torch.set_num_threads, (1,)) as pool:  # each tensor on one core
            list(pool.map(put, names))
    finally:
        torch.set_num_threads(threads)


def hf_config(config: ModelConfig, dtype: str, end_of_text: int) -> dict[str, Any]:
    """The fields of transformers' configuration that describe the same model."""
    return config.hf_config() | {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": dtype}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode()
