"""ONNX: token ids in, logits out, in float32, for any batch and any sequence up to the context.

The graph has no cache between tokens. torch's exporter holds whole models in memory, as the other formats do not.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.formats.weights import Weights, require

if TYPE_CHECKING:
    from torch import Tensor, nn

FILE = "model.onnx"
LARGEST = 1 << 30  # bytes of weights inside the graph; protobuf ends at 2 GiB, and more go into a file beside it


def write(weights: Weights, folder: Path) -> list[Path]:
    """Write model.onnx, and the weights of a large model as model.onnx.data."""
    import torch
    from torch.export import Dim

    model = plain_model(weights)
    tokens = torch.zeros((2, min(3, weights.config.block_size)), dtype=torch.int64)
    with without_warnings():
        program = torch.onnx.export(
            model,
            (tokens,),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"tokens": {0: Dim("batch"), 1: Dim("sequence", max=weights.config.block_size)}},
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(folder / FILE, external_data=4 * weights.config.parameters > LARGEST)
    return sorted(folder.iterdir())


@contextmanager
def without_warnings() -> Iterator[None]:
    """torch's exporter warns that torchvision is missing, and of its own use of torch."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def plain_model(weights: Weights) -> "nn.Module":
    """The model in float32, whose head leaves out the padding."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from trainer.model import GPT, Embedding

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(weights.config).eval()
            self.gpt.wte = Embedding(weights.config.vocab_size, weights.config.n_embd)

        def forward(self, tokens: "Tensor") -> "Tensor":
            return F.linear(self.gpt.hidden(tokens), self.gpt.wte.weight)

    with torch.device("meta"):
        model = Logits().eval()
    state = {f"gpt.{name}": tensor for name, tensor in weights.each(torch.float32)}
    model.load_state_dict(state, assign=True)
    return model


def verify(weights: Weights, folder: Path) -> None:
    """RuntimeError unless the file, read back, has the bits of every trained tensor. The exporter transposes matrices,
    stores equal tensors once and renames both, so names are not compared."""
    import onnx
    import torch

    path = folder / FILE
    model = onnx.load(path)
    onnx.checker.check_model(path)
    stored = {onnx.numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer}
    for name, tensor in weights.each(torch.float32):
        found = any(
            one.contiguous().numpy().tobytes() in stored for one in (tensor, tensor.mT if tensor.dim() == 2 else tensor)
        )
        require(found, path, name)
