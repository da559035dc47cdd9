"""llm.c's checkpoints: model.bin in bfloat16 (version 5), model_fp32.bin (version 3), and tokenizer.bin.

A header of 256 int32 and then the tensors, those of all blocks one kind after the other. Matrices are (out, in). The
vocabulary is padded to a multiple of 128 with zeros, as in our own model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.formats.export_weights import Weights, require, same

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MODEL_MAGIC, TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240326, 20240328, 2
HEADER = 256  # int32
FILES = {"model.bin": ("bfloat16", 5), "model_fp32.bin": ("float32", 3)}  # dtype and version
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # of a block, each weight, then bias


def write(weights: Weights, folder: Path) -> list[Path]:
    """Write both checkpoints and the tokenizer."""
    import torch

    for name, (dtype, version) in FILES.items():
        with (folder / name).open("wb") as file:
            model_header(weights, version).tofile(file)
            for _, tensor in tensors(weights, dtype):
                tensor.contiguous().view(torch.uint8).numpy().tofile(file)
    (folder / "tokenizer.bin").write_bytes(tokenizer(weights))
    return [folder / name for name in (*FILES, "tokenizer.bin")]


def model_header(weights: Weights, version: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    config = weights.config
    shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    return header(MODEL_MAGIC, version, *shape, config.padded_vocab_size)


def header(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    import numpy as np

    filled = np.zeros(HEADER, np.dtype("<i4"))
    filled[: len(values)] = values
    return filled


def order(weights: Weights) -> Iterator[str]:
    """The names of the tensors in llm.c's order."""
    yield from ("wte.weight", "wpe.weight")
    for kind in KINDS:
        for part in ("weight", "bias"):
            yield from (f"h.{block}.{kind}.{part}" for block in range(weights.config.n_layer))
    yield from ("ln_f.weight", "ln_f.bias")


def tensors(weights: Weights, dtype: str) -> "Iterator[tuple[str, Tensor]]":
    """The tensors in llm.c's order, with the padding of the vocabulary."""
    import torch
    from torch.nn import functional as F

    for name in order(weights):
        tensor = weights.rounded(name, getattr(torch, dtype))
        if name == "wte.weight":
            tensor = F.pad(tensor, (0, 0, 0, weights.config.padded_vocab_size - tensor.size(0)))
        yield name, tensor


def tokenizer(weights: Weights) -> bytes:
    """Each token as a byte with its length and its bytes."""
    encoding = weights.encoding
    start = header(TOKENIZER_MAGIC, TOKENIZER_VERSION, encoding.n_vocab, encoding.eot_token)
    tokens = [encoding.decode_bytes([i]) for i in range(encoding.n_vocab)]
    return start.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens)


def verify(weights: Weights, folder: Path) -> None:
    """RuntimeError unless the files, read back, have every trained weight in their number format."""
    import numpy as np
    import torch

    for name, (dtype, version) in FILES.items():
        path, offset = folder / name, 4 * HEADER
        require(np.array_equal(np.fromfile(path, "<i4", HEADER), model_header(weights, version)), path, "its header")
        for tensor_name, expected in tensors(weights, dtype):
            size = expected.numel() * expected.element_size()
            read = torch.from_numpy(np.fromfile(path, np.uint8, size, offset=offset)).view(expected.dtype)
            require(read.numel() == expected.numel(), path, f"{tensor_name}: its size")
            require(same(read.view(expected.shape), expected), path, tensor_name)
            offset += size
        require(path.stat().st_size == offset, path, "its size")
