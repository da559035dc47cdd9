"""modern's part of a fused step: nothing in a norm has weights, ReLU², capped logits."""

from trainer.families.modern import EPSILON, SOFTCAP
from trainer.fused.products import Operand, Products
from trainer.fused.rotary_step import Block, RotaryStep, SavedMlp


class ModernStep(RotaryStep[Operand]):
    """The step of the family modern."""

    UP, EPSILON, SENSE = ("mlp.up_proj",), EPSILON, -1
    norms_heads = norms_embedding = True
    cap = SOFTCAP

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        kept, act = p.linear_activated(block.up, y, block.down, "relu2")
        return act, SavedMlp(kept, None if p.recompute_activation else p.saved(act))

    def mlp_backward(
        self, p: Products[Operand], block: Block, dy: Operand, saved: SavedMlp[Operand], add: bool
    ) -> Operand:
        act = p.activated(block.down, saved.kept, "relu2") if saved.act is None else saved.act
        p.weight_grad(block.down, dy, act, add)
        return p.input_grad_activated(block.down, dy, saved.kept, block.up, "relu2")
