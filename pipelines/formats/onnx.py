"""ONNX: token ids in, logits out, in float32, for any batch and any sequence up to the context.

The graph has no cache between tokens.
"""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.formats.weights import Weights, require, same
from trainer.model_config import ModelConfig
from trainer.process import die_with_parent

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    import torch

FILE, DATA = "model.onnx", "model.onnx.data"
ALIGNMENT = 1 << 16  # bytes, as ONNX recommends for files that a runtime maps
PREFIX = "gpt."  # of our names in the graph
POLL_SECONDS = 0.2
LARGEST = 1 << 30  # bytes of weights inside the graph; protobuf ends at 2 GiB, and more go into a file beside it


def write(weights: Weights, folder: Path) -> list[Path]:
    """Write model.onnx, and the weights of a large model as model.onnx.data.

    torch exports a model without weights. It does not optimize the graph, which every runtime does as it loads: it
    would need the weights in memory, and rename them. The weights of a large model are written one tensor at a time.
    """
    import onnx_ir
    import torch

    make_graph(weights, folder / FILE)
    model = onnx_ir.load(folder / FILE)
    if 4 * weights.config.parameters > LARGEST:
        write_beside(weights, model, folder)
    else:
        for name, tensor in weights.each(torch.float32):
            value = onnx_ir.tensor(tensor.contiguous().numpy(), name=PREFIX + name)
            model.graph.initializers[PREFIX + name].const_value = value
    onnx_ir.save(model, folder / FILE)  # with the weights, or their places in the file beside it
    return sorted(folder.iterdir())


def make_graph(weights: Weights, path: Path) -> None:
    """Write the graph without its weights.

    For a large model torch takes many seconds, in which no stop would be heard. So a process of its own does it, and
    a stop kills that process.
    """
    process = get_context("spawn").Process(target=save_graph, args=(weights.config, path), daemon=True)
    process.start()
    try:
        while process.is_alive():
            weights.check()
            process.join(POLL_SECONDS)
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that makes the graph of ONNX ended with code {process.exitcode}")


def save_graph(config: ModelConfig, path: Path) -> None:
    """The work of that process. It leaves signals to its parent."""
    import onnx_ir

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    model = exported(config).model
    for name, shape in config.shapes.items():
        rows = (config.vocab_size, *shape[1:]) if name in config.vocabulary_rows else shape
        place = onnx_ir.ExternalTensor(
            DATA, 0, 0, onnx_ir.DataType.FLOAT, shape=onnx_ir.Shape(rows), name=PREFIX + name, base_dir=path.parent
        )
        model.graph.initializers[PREFIX + name].const_value = place
    onnx_ir.save(model, path)


def write_beside(weights: Weights, model: "onnx_ir.Model", folder: Path) -> None:
    """Write the weights into a file, and refer to their places in the graph."""
    import onnx_ir
    import torch

    with (folder / DATA).open("wb") as file:
        for name, tensor in weights.each(torch.float32):
            file.write(bytes(-file.tell() % ALIGNMENT))
            at, body = file.tell(), tensor.contiguous().numpy()
            file.write(body.data)
            shape, kind = onnx_ir.Shape(body.shape), onnx_ir.DataType.FLOAT
            model.graph.initializers[PREFIX + name].const_value = onnx_ir.ExternalTensor(
                DATA, at, body.nbytes, kind, shape=shape, name=PREFIX + name, base_dir=folder
            )


def exported(config: ModelConfig) -> "torch.onnx.ONNXProgram":
    """The graph of the model, whose head leaves out the padding."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.export import Dim
    from torch.nn import functional as F

    from trainer.families.gpt2_module import GPT
    from trainer.model import Embedding

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(config)
            self.gpt.wte = Embedding(config.vocab_size, config.n_embd)

        def forward(self, tokens: "torch.Tensor") -> "torch.Tensor":
            return F.linear(self.gpt.hidden(tokens), self.gpt.wte.weight)

    with without_warnings(), FakeTensorMode():
        program = torch.onnx.export(
            Logits().eval(),
            (torch.zeros((2, min(3, config.block_size)), dtype=torch.int64),),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"tokens": {0: Dim("batch"), 1: Dim("sequence", max=config.block_size)}},
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program


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


def verify(weights: Weights, folder: Path) -> None:
    """RuntimeError unless the file, read back, has every trained weight."""
    import onnx
    import torch

    path = folder / FILE
    onnx.checker.check_model(path)  # on disk: with its weights, a large model is more than protobuf can hold
    stored = {tensor.name: tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    for name, expected in weights.each(torch.float32):
        require(PREFIX + name in stored, path, f"{name} is missing")
        require(same(read(stored[PREFIX + name], folder), expected), path, name)


def read(tensor: "onnx.TensorProto", folder: Path) -> "torch.Tensor":
    """A float32 tensor of the graph, or of the file beside it."""
    import numpy as np
    import onnx
    import torch

    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place:
        return torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
    found = np.fromfile(folder / place["location"], "<f4", int(place["length"]) // 4, offset=int(place["offset"]))
    return torch.from_numpy(found).view(*tensor.dims)
