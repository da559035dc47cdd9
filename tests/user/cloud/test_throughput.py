"""Training speeds: those that were measured, and estimates that agree with them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipelines.extras.bench.gpus import check_gpus, engine_of
from pipelines.extras.bench.measurements import Speed, measurements
from pipelines.extras.bench.throughput import RUN_SHARE, network_bytes, speed_on
from pipelines.recipe.loader import load_recipe
from trainer.base.metrics import mfu
from trainer.config.errors import UserError
from trainer.engines.choice import choose_engine

ROOT = Path(__file__).resolve().parents[3]
SMALL = load_recipe("gpt2-124m")
MEASURED = [speed for speed in measurements().speeds if speed.plan]


@pytest.mark.parametrize("known", MEASURED, ids=lambda m: f"{m.size} {m.gpus} {m.name}")
def test_a_step_that_was_measured_is_planned_as_measured_on_warm_gpus_and_estimated_alike(known: Speed) -> None:
    name = {"124M": "gpt2-124m", "1558M": "gpt2-1558m"}.get(known.size, known.size)
    precision = "auto" if known.precision == "bf16" else known.precision
    recipe = load_recipe(name, [f"runtime.engine={known.engine}", f"train.precision={precision}"])
    speed = speed_on(recipe, known.gpus)
    share = 1.0 if known.sustained else RUN_SHARE
    assert (speed.tokens_per_second, speed.kind) == (share * known.tokens_per_second, "measured")
    assert f"{known.tokens_per_second:,}" in (ROOT / "docs" / "measurements.md").read_text()
    gpu, _, gpus = known.gpus.partition(":")
    assert mfu(known.tokens_per_second, recipe.model, int(gpus), 989e12) == pytest.approx(known.mfu, abs=0.001)
    elsewhere = speed_on(recipe, f"{gpu}-PCIE:{gpus}")  # a name of no measurement
    assert elsewhere.kind == "estimated"
    assert elsewhere.tokens_per_second == pytest.approx(speed.tokens_per_second, rel=0.035)


@pytest.mark.parametrize(("gpus", "of_a_run"), [(1, 582_896), (2, 1_154_819), (2, 1_158_000)])
def test_the_whole_runs_that_were_measured_are_within_half_a_percent_of_the_plan(gpus: int, of_a_run: float) -> None:
    planned = speed_on(SMALL, f"H100:{gpus}").tokens_per_second
    assert planned == pytest.approx(of_a_run, rel=0.005)


def test_fp8_gains_in_the_sharded_engine_what_it_gains_in_the_fused_one() -> None:
    def speed(engine: str, precision: str) -> float:
        recipe = load_recipe("gpt2-1558m", [f"runtime.engine={engine}", f"train.precision={precision}"])
        return speed_on(recipe, "H200:1").tokens_per_second

    fused = speed("fused", "fp8") / speed("fused", "bf16")
    assert speed("sharded", "fp8") / speed("sharded", "bf16") == pytest.approx(fused, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "changes", "gpus", "nodes", "engine", "why"),
    [
        ("gpt2-124m", [], "H100:8", 1, "fused", ""),
        ("llama-8b", [], "H100:8", 1, "sharded", "fused would need about "),
        ("llama-124m", ["model.qk_norm=true"], "H100:8", 1, "compiled", "not fused: its norm of queries and keys"),
        ("llama-8b", ["model.qk_norm=true"], "H100:8", 2, "sharded", "not fused: its norm of queries and keys"),
        ("gpt3-175b", [], "H100:8", 8, "sharded", "not fused: model.n_embd 12288 is more than 8192"),
        ("gpt3-175b", [], "H100:1", 1, "compiled", "not fused: model.n_embd 12288 is more than 8192"),
        ("gpt2-1558m", ["train.precision=fp32"], "H100:2", 1, "compiled", "not fused: it computes in bf16"),
        ("gpt3-6.7b", ["train.precision=fp32"], "H100:8", 1, "sharded", "not fused: it computes in bf16"),
        ("gpt3-6.7b", [], "V100:8", 1, "sharded", "not fused: V100 has no bf16"),
    ],
)
def test_a_plan_and_a_run_on_mocked_gpus_take_the_same_engine_for_the_same_reason(
    recipe: str,
    changes: list[str],
    gpus: str,
    nodes: int,
    engine: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, old = load_recipe(recipe, changes), gpus.startswith("V100")
    found, reason = engine_of(one, gpus, nodes)
    assert found == engine and reason.startswith(why)
    if old or "H100:1" in gpus:
        with pytest.raises(UserError, match=r"B parameters take about .* GB on each GPU \(engine \w+\)"):
            check_gpus(one, gpus, nodes)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16e9 if old else 80e9)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0) if old else (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not old)
    ranks = nodes * int(gpus.partition(":")[2])
    chosen = choose_engine(one.model, one.train, one.runtime, torch.device("cuda"), ranks)
    assert chosen[0] == engine
    assert old or chosen[1].removeprefix(f"{engine}, on a GPU (sm_90)") == (f"; {reason}" if reason else "")


@pytest.mark.parametrize(
    ("recipe", "changes", "nodes", "per_parameter", "words"),
    [
        ("gpt2-1558m", [], 1, 0, "the network between nodes"),
        ("gpt2-1558m", [], 2, 4 + 2, "the network between nodes"),
        ("gpt2-1558m", ["runtime.reduce_dtype=bf16"], 2, 2 + 2, "the network between nodes"),
        ("gpt2-1558m", ["runtime.engine=compiled"], 2, 2 * 4, "the network between nodes"),
        ("gpt2-1558m", ["runtime.engine=sharded"], 2, 2 + 4, "once a step"),
        ("llama-8b", ["runtime.micro_batch_size=1"], 2, 16 * (2 + 2 + 4), "in each of 16 micro-batches"),
        ("llama-8b", ["runtime.micro_batch_size=1", "runtime.shard_size=8"], 2, 2 * 4, "the network between nodes"),
        ("gpt3-175b", [], 8, 24 * (2 + 2 + 4), "in each of 24 micro-batches"),
        ("gpt3-175b", ["runtime.shard_size=64"], 16, 12 * (2 + 2 + 4) + 2 * 4 / 8, "in each of 12 micro-batches"),
    ],
)
def test_what_nodes_exchange_in_a_step_is_what_the_engine_gathers_and_reduces(
    recipe: str, changes: list[str], nodes: int, per_parameter: float, words: str
) -> None:
    one = load_recipe(recipe, changes)
    sent, limit = network_bytes(one, engine_of(one, "H100:8", nodes)[0], "H100:8", nodes)
    assert sent == pytest.approx(per_parameter * one.model.parameters) and words in limit
