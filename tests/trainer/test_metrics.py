"""Model FLOPs utilization."""

import pytest

from trainer.base.metrics import mfu, peak_flops
from trainer.models.gpt2 import Gpt2Config


def test_mfu_is_tokens_times_flops_over_the_peak_of_all_gpus() -> None:
    # 124M at 8 x A100 and 1.5M tokens/s: 1.5e6 x (6 x 123.7M + 12 x 12 x 768 x 1024) / (8 x 312e12).
    model = Gpt2Config(n_layer=12, n_head=12, n_embd=768, block_size=1024)
    peak = peak_flops("NVIDIA A100-SXM4-80GB")
    assert peak == 312e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("Tesla T4") is None
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA H100 NVL") == 835e12
    n = 124_475_904 - 1024 * 768
    assert mfu(1.5e6, model, 8, peak) == pytest.approx(1.5e6 * (6 * n + 113_246_208) / 2.496e15)
