"""llm.c's checkpoints: model.bin in bfloat16 (version 5), model_fp32.bin (version 3), and tokenizer.bin.

A header of 256 int32 and then the tensors, those of all blocks one kind after the other. Matrices are (out, in). The
vocabulary is padded to a multiple of 128 with zeros, as in our own model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipelines.run.formats.export_weights import Format, Weights

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MODEL_MAGIC, TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240326, 20240328, 2
HEADER = 256  # int32
FILES = {"model.bin": ("bfloat16", 5), "model_fp32.bin": ("float32", 3)}  # dtype and version
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # of a block, each weight, then bias


class Llmc(Format):
    """Both checkpoints and the tokenizer."""

    families: ClassVar[tuple[str, ...]] = ("gpt2",)

    def write(self, weights: Weights, folder: Path) -> list[Path]:
        import torch

        config = weights.config
        shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
        for name, (dtype, version) in FILES.items():
            with (folder / name).open("wb") as file:
                header(MODEL_MAGIC, version, *shape, config.padded_vocab_size).tofile(file)
                for _, tensor in tensors(weights, dtype):
                    tensor.contiguous().view(torch.uint8).numpy().tofile(file)
        (folder / "tokenizer.bin").write_bytes(tokenizer(weights))
        return [folder / name for name in (*FILES, "tokenizer.bin")]


def header(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    import numpy as np

    filled = np.zeros(HEADER, np.dtype("<i4"))
    filled[: len(values)] = values
    return filled


def tensors(weights: Weights, dtype: str) -> "Iterator[tuple[str, Tensor]]":
    """The tensors in llm.c's order, with the padding of the vocabulary."""
    import torch
    from torch.nn import functional as F

    blocks, parts = range(weights.config.n_layer), ("weight", "bias")
    in_blocks = [f"h.{block}.{kind}.{part}" for kind in KINDS for part in parts for block in blocks]
    for name in ("wte.weight", "wpe.weight", *in_blocks, "ln_f.weight", "ln_f.bias"):
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
