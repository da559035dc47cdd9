"""llama's part of a fused step: norms with weights, SwiGLU, a head that may be tied."""

from torch import Tensor

from trainer.families.llama import EPSILON, LlamaConfig
from trainer.fused import rotary
from trainer.fused.products import Operand
from trainer.fused.rotary_step import RotaryStep
from trainer.model_config import ModelConfig


class LlamaStep(RotaryStep[Operand]):
    """The step of the family llama."""

    UP, EPSILON = ("mlp.gate_proj", "mlp.up_proj"), EPSILON

    @classmethod
    def head_name(cls, config: ModelConfig) -> str:
        assert isinstance(config, LlamaConfig)
        return "wte" if config.tied_head else "lm_head"

    def norm_name(self, place: str | None) -> str | None:
        return "norm" if place is None else f"{place}_norm"

    def activated(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.swiglu(pre), pre

    def activated_backward(self, gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.swiglu_backward(gradient, saved)
