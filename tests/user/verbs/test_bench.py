"""`skytrain bench` prints measured values that add up, and rejects numbers that are not finite."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from trainer.data.shards import write_shard

TINY = [
    "bench", "smoke", "--set", "train.batch_tokens=256", "--set", "runtime={device: cpu}",
    "--set", "model={n_layer: 1, n_head: 2, n_embd: 16, block_size: 32, vocab_size: 257}",
]  # fmt: skip


def benched(*options: str) -> Any:
    done = CliRunner().invoke(app, [*TINY, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_a_measurement_adds_up(tmp_path: Path) -> None:
    write_shard(tmp_path / "train_000000.bin", (np.arange(5000) % 250).astype(np.uint16))
    row = json.loads(benched("--json", "--steps", "21", "--data", str(tmp_path)).stdout)
    assert (row["device"], row["world_size"], row["text"]) == ("CPU", 1, str(tmp_path))
    assert row["engine"].startswith("eager") and row["precision"] == "fp32"
    assert row["micro_batch_size"] * row["accumulated"] * 32 == row["batch_tokens"] == 256
    speed, step = row["tokens_per_second"], row["step_seconds"]
    assert speed["median"] == pytest.approx(256 / step["median"])  # of an odd number of steps
    assert speed["least"] <= speed["low_quartile"] <= speed["median"] <= speed["high_quartile"] <= speed["most"]
    assert step["least"] <= 256 / row["sustained_tokens_per_second"] <= step["most"]
    assert 0 < row["last_loss"] < row["first_loss"] < 6
    # Values that a CPU does not have are left out, with a note.
    assert [row[name] for name in ("mfu", "allocated_bytes", "sm_mhz", "watts", "kernel_seconds")] == 5 * [None]
    assert "kernels" in row["left_out"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "19"], "--steps"),
        (["--set", "runtime.micro_batch_size=some"], "runtime.micro_batch_size"),
        (["--set", "train.precision=fp8"], "train.precision: fp8 needs the fused engine: it needs a CUDA device"),
        (["--set", "runtime.engine=fused"], "runtime.engine: fused cannot run here: it needs a CUDA device"),
    ],
)
def test_an_impossible_measurement_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*TINY, *options], env={"TRITON_INTERPRET": None})
    assert done.exit_code != 0 and message in f"{done.output} {done.exception}"
