"""Training speeds: those that were measured, and estimates that agree with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from pipelines.bench.measurements import Speed, measurements
from pipelines.bench.throughput import (
    RUN_SHARE,
    OwnSpeed,
    check_gpus,
    memory_gib,
    speed_on,
)
from pipelines.recipe import load_recipe
from trainer.config import RuntimeConfig
from trainer.errors import UserError
from trainer.metrics import mfu
from trainer.models.family import ANY_MODEL, plain_model
from trainer.models.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL, LARGE = load_recipe("gpt2-124m"), load_recipe("gpt2-1558m")
COMPILED = RuntimeConfig(micro_batch_size=64, engine="compiled")
MEASURED = [speed for speed in measurements().speeds if speed.plan]


@pytest.mark.parametrize("known", MEASURED, ids=lambda m: f"{m.size} {m.gpus} {m.name}")
def test_a_step_that_was_measured_is_planned_as_measured_on_warm_gpus_and_estimated_alike(known: Speed) -> None:
    recipe = load_recipe({"124M": "gpt2-124m", "1558M": "gpt2-1558m"}.get(known.size, known.size))
    runtime = RuntimeConfig(micro_batch_size=64, engine=known.engine)  # type: ignore[arg-type]
    precision = "auto" if known.precision == "bf16" else known.precision
    speed = speed_on(recipe.model, runtime, known.gpus, precision=precision)
    assert (speed.tokens_per_second, speed.kind) == (RUN_SHARE * known.tokens_per_second, "measured")
    assert f"{known.tokens_per_second:,}" in (ROOT / "docs" / "measurements.md").read_text()
    gpu, _, gpus = known.gpus.partition(":")
    assert mfu(known.tokens_per_second, recipe.model, int(gpus), 989e12) == pytest.approx(known.mfu, abs=0.001)
    elsewhere = speed_on(recipe.model, runtime, f"{gpu}-PCIE:{gpus}", precision=precision)  # a name of no measurement
    assert elsewhere.kind == "estimated"
    assert elsewhere.tokens_per_second == pytest.approx(speed.tokens_per_second, rel=0.035)


@pytest.mark.parametrize(("gpus", "of_a_run"), [(1, 582_896), (2, 1_154_819), (2, 1_158_000)])
def test_the_whole_runs_that_were_measured_are_within_half_a_percent_of_the_plan(gpus: int, of_a_run: float) -> None:
    planned = speed_on(SMALL.model, SMALL.runtime, f"H100:{gpus}").tokens_per_second
    assert planned == pytest.approx(of_a_run, rel=0.005)


@pytest.mark.parametrize(
    ("recipe", "gpus", "nodes", "hours"),
    [(SMALL, "A100-80GB:8", 1, 94 / 60), (LARGE, "H100:8", 1, 24), (LARGE, "H100:8", 2, 12)],
)
def test_llmc_as_published_is_faster_than_our_estimate_but_not_by_half(
    recipe: Any, gpus: str, nodes: int, hours: float
) -> None:
    ours = recipe.train_tokens / speed_on(recipe.model, COMPILED, gpus, nodes).tokens_per_second / 3600
    assert hours < ours < 1.5 * hours


def test_a_runs_own_speed_is_used_on_such_machines_only() -> None:
    own = [OwnSpeed("H100:8", 1, 2e6, "attempt 3 of this run"), OwnSpeed("RTX 4090:1", 1, 5e4, "attempt 2 of this run")]
    there, elsewhere = (speed_on(SMALL.model, COMPILED, "H100:8", nodes, own) for nodes in (1, 2))
    assert (there.tokens_per_second, there.kind, there.source) == (2e6, "measured", "attempt 3 of this run")
    assert elsewhere == speed_on(SMALL.model, COMPILED, "H100:8", 2)
    assert speed_on(SMALL.model, COMPILED, "RTX 4090:1", own=own).kind == "measured"


def test_settings_that_slow_training_slow_the_plan() -> None:
    def speed(gpus: str = "H100:8", nodes: int = 1, **runtime: Any) -> float:
        return speed_on(LARGE.model, COMPILED.model_copy(update=runtime), gpus, nodes).tokens_per_second

    assert speed() > speed(recompute=True)
    assert (
        speed("A100-80GB:8") < speed()
        and "A100-80GB was never measured" in speed_on(LARGE.model, COMPILED, "A100-80GB:8").source
    )
    assert speed(engine="eager") < speed()
    assert speed() < speed(nodes=2) < 2 * speed()
    assert 7 * speed("H100:1") < speed() < 8 * speed("H100:1")
    smoke = load_recipe("smoke")  # so small that kernel launches take all the time
    assert speed_on(smoke.model, smoke.runtime, "H100:1").source.startswith("1 ms a layer")
    with pytest.raises(UserError, match="K80:8: the speed of this GPU is unknown; known are H100"):
        speed("K80:8")


def test_the_plan_knows_how_fast_a_precision_is_and_where_it_can_be_had() -> None:
    def speed(gpus: str, precision: str) -> float:
        return speed_on(LARGE.model, RuntimeConfig(), gpus, precision=precision).tokens_per_second

    head, blocks, bf16, fp16 = (speed("H100:8", precision) for precision in ("fp8_head", "fp8", "auto", "fp16"))
    assert min(head, blocks) > bf16 > fp16
    assert speed("A100:8", "bf16") == speed("A100:8", "auto")
    for precision in ("fp8", "fp8_head"):
        train = SMALL.train.model_copy(update={"precision": precision})
        check_gpus(SMALL.model, train, SMALL.runtime, "H100-MEGA-80GB:8", 1)
        with pytest.raises(UserError, match=f"train.precision {precision}; these GPUs have it: H100, H200"):
            check_gpus(SMALL.model, train, SMALL.runtime, "A100:8", 1)
    muon = SMALL.train.model_copy(update={"optimizer": "muon"})
    with pytest.raises(UserError, match="^train.optimizer: muon computes in bf16, which V100 does not have"):
        check_gpus(SMALL.model, muon, SMALL.runtime, "V100:8", 1)


PEAKS = [speed for speed in measurements().speeds if speed.trainer == "skytrain" and speed.memory_gib]


@pytest.mark.parametrize("known", PEAKS, ids=lambda s: f"{s.size} {s.name} {s.gpus}")
def test_the_expected_memory_is_within_six_percent_of_every_measured_peak(known: Speed) -> None:
    recipe = {"124M": SMALL, "1558M": LARGE}.get(known.size) or load_recipe(known.size)
    size = measurements().sizes[known.size]
    runtime = RuntimeConfig(engine="auto" if known.engine == "fused" else known.engine, recompute=known.recompute)  # type: ignore[arg-type]
    ranks = int(known.gpus.partition(":")[2])
    train = recipe.train.model_copy(update={"precision": known.precision})
    needed = memory_gib(recipe.model, train, runtime, known.gpus, ranks, size.micro_batch_size)
    assert needed == pytest.approx(known.memory_gib, rel=0.06)


@pytest.mark.parametrize("family", ["gpt2", "llama", "grouped llama", "modern", "all options of modern"])
def test_the_bytes_of_a_familys_layer_are_those_that_autograd_keeps(family: str) -> None:
    options = {"residual_lambdas": True, "value_embeddings": True, "window": 64, "smear": True, "n_kv_head": 2}
    sections: dict[str, dict[str, Any]] = {"grouped llama": {"n_kv_head": 2}, "all options of modern": options}

    def model_of(layers: int) -> ModelConfig:
        size = {"n_layer": layers, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 128}
        return ANY_MODEL.validate_python({"family": family.split()[-1], **size, **sections.get(family, {})})

    def kept(layers: int, sequences: int) -> int:
        module, storages, alive = plain_model(model_of(layers)), {}, []
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # so that no other tensor takes its place
            return tensor

        tokens = torch.zeros(sequences, 128, dtype=torch.long)
        with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
            module(tokens, tokens)
        return sum(storages.values())

    # Without the outer parts of the model, and without the copies of weights, which grow with no sequence.
    more, fewer = (kept(3, sequences) - kept(1, sequences) for sequences in (4, 2))
    three, one = (layers * model_of(layers).kept_share("eager", recompute=False) for layers in (3, 1))
    expected = 36.1 * (three - one) / 2  # GPT-2's bytes for each of its width
    assert (more - fewer) / 2 / 2 / (128 * 128) == pytest.approx(expected, rel=0.03)


def test_what_does_not_fit_on_a_card_is_refused_with_what_does() -> None:
    def check(gpus: str, **changes: Any) -> None:
        check_gpus(SMALL.model, SMALL.train, SMALL.runtime.model_copy(update=changes), gpus, 1)

    check("H100:1")
    with pytest.raises(UserError, match="64 sequences need about 24 GiB, and L4 has 21; lower it, or set it to auto"):
        check("L4:1")
    check("L4:1", micro_batch_size="auto")
    with pytest.raises(UserError, match="one sequence needs about [23][0-9] GiB, and L4 has 21; use runtime.recompute"):
        check_gpus(LARGE.model, LARGE.train, LARGE.runtime.model_copy(update={"micro_batch_size": "auto"}), "L4:1", 1)
    check("L4:1", device="cpu")
