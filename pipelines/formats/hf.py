"""The Hugging Face checkpoint: config, generation config, tokenizer and model.safetensors.

`transformers` and vLLM load its folder.
"""

import json
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.formats.weights import Weights, require, same
from pipelines.text.tokenizer import tokenizer_files
from trainer.models.model_config import ModelConfig
from trainer.models.weights import read_tensor

if TYPE_CHECKING:
    from torch import Tensor

FILE = "model.safetensors"
COMPONENTS = "components"  # the folder where MLflow looks for the tokenizer
TENSORS_AT_ONCE = 4  # in memory; the largest of 1558M has 0.3 GB in float32
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # names in safetensors


def write(weights: Weights, folder: Path, dtype: str) -> list[Path]:
    """Write the checkpoint with weights in `dtype`."""
    end_of_text = weights.encoding.eot_token
    config, tokenizer = (
        hf_config(weights.config, dtype, end_of_text),
        tokenizer_files(weights.encoding, weights.config.block_size),
    )
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(
            {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
        ),
        **tokenizer,
        # So that MLflow loads the folder as the registered model.
        "MLmodel": _json(mlmodel(config["architectures"][0], json.loads(tokenizer["tokenizer_config.json"]), dtype)),
        **{f"{COMPONENTS}/tokenizer/{name}": body for name, body in tokenizer.items()},
    }
    write_safetensors(weights, folder / FILE, dtype)
    for name, body in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return [folder / name for name in (FILE, *texts)]


def mlmodel(architecture: str, tokenizer: dict[str, Any], dtype: str) -> dict[str, Any]:
    """MLflow's description of the folder as a pipeline of transformers. Source: mlflow.transformers 3.17; JSON is
    YAML."""
    text = '[{"type": "string", "required": true}]'
    flavor = {
        "components": ["tokenizer"],
        "framework": "pt",
        "instance_type": "TextGenerationPipeline",
        "model_binary": ".",
        "pipeline_model_type": architecture,
        "task": "text-generation",
        "tokenizer_type": tokenizer["tokenizer_class"],
        "torch_dtype": f"torch.{dtype}",
    }
    flavors = {"python_function": {"loader_module": "mlflow.transformers"}, "transformers": flavor}
    return {"flavors": flavors, "signature": {"inputs": text, "outputs": text, "params": None}}


def write_safetensors(weights: Weights, path: Path, dtype: str) -> None:
    """The bytes of safetensors' own `save_file`, written a few tensors at a time: it orders tensors of one type by
    name."""
    import torch

    config = weights.config
    names = {config.hf_name(name): name for name in weights.shapes}
    shapes, size, offset = weights.shapes, getattr(torch, dtype).itemsize, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for stored in sorted(names):
        shape = shapes[names[stored]]
        shape = shape[::-1] if config.hf_transposed(names[stored]) else shape
        end = offset + torch.Size(shape).numel() * size
        header[stored] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)

    def put(stored: str) -> None:
        with path.open("r+b") as file:
            file.seek(8 + len(text) + header[stored]["data_offsets"][0])
            file.write(hf_tensor(weights, names[stored], dtype).view(torch.uint8).numpy().data)

    in_threads(put, names)


def hf_tensor(weights: Weights, name: str, dtype: str) -> "Tensor":
    """A tensor as transformers has it."""
    import torch

    from trainer.models.family import to_hf

    (tensor,) = to_hf({name: weights.rounded(name, getattr(torch, dtype))}, weights.config).values()
    return tensor


def verify(weights: Weights, folder: Path, dtype: str) -> None:
    """RuntimeError unless the file, read back by safetensors, has every trained weight, rounded to `dtype`."""
    import torch
    from safetensors import safe_open

    path, config = folder / FILE, weights.config
    with safe_open(path, "pt") as file:
        stored = set(file.keys())
    require(stored == {config.hf_name(name) for name in weights.shapes}, path, "the names of the tensors")

    def compare(name: str) -> None:
        found = read_tensor(path, config.hf_name(name))
        found = found.t() if config.hf_transposed(name) else found
        require(same(found, weights.rounded(name, getattr(torch, dtype))), path, name)

    in_threads(compare, weights.shapes)


def in_threads(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Do the work for each name. Raises the first error."""
    with ThreadPoolExecutor(TENSORS_AT_ONCE, thread_name_prefix="export") as pool:
        list(pool.map(work, names))


def hf_config(config: ModelConfig, dtype: str, end_of_text: int) -> dict[str, Any]:
    """The fields of transformers' configuration that describe the same model."""
    return config.hf_config() | {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": dtype}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode()
