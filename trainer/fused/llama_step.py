"""llama's part of a fused step: norms with weights, SwiGLU, a head that may be tied."""

from trainer.fused import rotary
from trainer.fused.products import Operand, Products
from trainer.fused.rotary_step import Block, RotaryStep, SavedMlp
from trainer.models.llama import EPSILON, LlamaConfig
from trainer.models.model_config import ModelConfig


class LlamaStep(RotaryStep[Operand]):
    """The step of the family llama."""

    UP, EPSILON = ("mlp.gate_proj", "mlp.up_proj"), EPSILON

    @classmethod
    def head_name(cls, config: ModelConfig) -> str:
        assert isinstance(config, LlamaConfig)
        return "wte" if config.tied_head else "lm_head"

    def norm_name(self, place: str | None) -> str | None:
        return "norm" if place is None else f"{place}_norm"

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        pre = p.linear(block.up, y)
        return p.input(block.down, rotary.swiglu(pre)), SavedMlp(pre, None)

    def mlp_backward(
        self, p: Products[Operand], block: Block, dy: Operand, saved: SavedMlp[Operand], add: bool
    ) -> Operand:
        dpre, act = rotary.swiglu_backward(p.input_grad(block.down, dy), saved.kept)
        p.weight_grad(block.down, dy, p.saved(p.input(block.down, act)), add)
        del act
        return p.output_grad(block.up, dpre)
