"""The trained weights, one tensor at a time: an export holds no whole model in memory.

1558M has 6.2 GB of weights in float32, and its largest tensor 0.3 GB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer.checkpoint.weights import read_tensor
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig

if TYPE_CHECKING:
    import tiktoken
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """What every format is made of: the weights in a file with our names, the model and its tokenizer.

    The padding rows of the vocabulary are left out. `check` is called before every tensor; it may raise Interrupted.
    """

    path: Path
    config: ModelConfig
    encoding: "tiktoken.Encoding"
    name: str  # of the run
    check: Callable[[], None] = lambda: None
    chat: bool = False  # whether the model was tuned to answer, with the tokens of ChatML after the tokenizer's

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name, in the order of the model."""
        return self.config.shapes

    def tensor(self, name: str) -> "Tensor":
        """A tensor in float32."""
        self.check()
        tensor = read_tensor(self.path, name)
        return (tensor[: self.config.vocab_size] if name in self.config.vocabulary_rows else tensor).float()

    def rounded(self, name: str, dtype: "torch.dtype") -> "Tensor":
        """A tensor in `dtype`. UserError if a weight is too large for it."""
        tensor = self.tensor(name)
        rounded = tensor.to(dtype)
        if not all_finite(rounded) and all_finite(tensor):
            largest = float(tensor.abs().max())
            raise UserError(f"export: {name} has a weight of {largest:.3g}, which {dtype} cannot hold; use bfloat16")
        return rounded


def all_finite(tensor: "Tensor") -> bool:
    """Whether no element is infinite or NaN. `aminmax` passes NaN on, and takes a thirtieth of `isfinite().all()` in
    bf16."""
    return all(math.isfinite(bound) for bound in tensor.aminmax())


class Format:
    """A format of the export beside Hugging Face's, in the group `skytrain.formats`: the base of its class."""

    families: ClassVar[tuple[str, ...]] = ()  # that it can hold; (): all

    def check(self) -> None:
        """UserError if a package that it needs is not installed."""

    def write(self, weights: Weights, folder: Path) -> list[Path]:
        """Write the files of the format. Returns their paths."""
        raise NotImplementedError
