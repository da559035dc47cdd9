"""benchmarks.beside_nanochat: results add up over calls."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.beside_nanochat import main
from trainer.config.errors import UserError
from trainer.data.shards import write_shard


def test_a_call_adds_the_runs_that_the_results_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}_000000.bin", np.arange(2_000, dtype=np.uint16))
    results = tmp_path / "results.jsonl"
    sizes = ["--depth", "2", "--T", "16", "--B", "2", "--batch", "64", "--steps", "40", "--speed", "1"]
    words = ["", "-", str(tmp_path), "--json", str(results), *sizes, "--arms", "ours"]
    for more in ([], ["ours+ramp2", "ours@32"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        main()
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [one["arm"] for one in found] == ["ours", "ours+ramp2", "ours@32"]
    assert all(one["last_loss"] == pytest.approx(10.825, abs=0.01) for one in found)  # ln 50257
    monkeypatch.setattr(sys, "argv", [*words[:-1], "nanochat"])
    with pytest.raises(UserError, match="-: has no nanochat/gpt.py; name a checkout of karpathy/nanochat"):
        main()
