"""The benchmark of weights in 8 bits gives a result without compiling anything."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import model_of

from benchmarks.int8 import measure
from trainer.families.gpt2 import Gpt2Config
from trainer.family import to_hf
from trainer.shards import write_shard


def test_int8_weights_are_measured_beside_bf16_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao", reason="needs torchao (pip)")
    monkeypatch.setattr(torch, "compile", None)
    config = Gpt2Config(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256)
    save_file(to_hf(model_of(config).state_dict(), config), tmp_path / "model.safetensors")
    values = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_positions": config.block_size}))
    write_shard(tmp_path / "val_000000.bin", np.arange(2000, dtype=np.uint16) % 256)
    found = measure(tmp_path, tmp_path, 1000, repeats=1)
    assert found["int8"]["bytes"] < 0.9 * found["bf16"]["bytes"]
    assert found["int8"]["loss"] == pytest.approx(found["bf16"]["loss"], abs=0.02)
    assert {"one token, ms", "8 x 32, ms"} < found["int8"].keys()
