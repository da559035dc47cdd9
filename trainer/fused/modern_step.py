"""modern's part of a fused step: nothing in a norm has weights, ReLU², capped logits."""

from torch import Tensor

from trainer.families.modern import EPSILON, SOFTCAP
from trainer.fused import rotary
from trainer.fused.products import Operand
from trainer.fused.rotary_step import RotaryStep


class ModernStep(RotaryStep[Operand]):
    """The step of the family modern."""

    UP, EPSILON, SENSE = ("mlp.up_proj",), EPSILON, -1
    norms_heads = norms_embedding = True
    cap = SOFTCAP

    def activated(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        rotary.relu2(pre)
        return pre, pre

    def activated_backward(self, gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        rotary.relu2_backward(gradient, saved)
        return gradient, saved
