"""Training speeds: those that were measured, and estimates that agree with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from pipelines.bench.measurements import Speed, measurements
from pipelines.cloud.throughput import (
    MEASURED,
    RUN_SHARE,
    MeasuredRun,
    Throughput,
    check_gpus,
    engine_of,
    memory_gib,
    speed_on,
)
from pipelines.recipe import load_recipe
from trainer.config import RuntimeConfig
from trainer.errors import UserError
from trainer.family import ANY_MODEL, plain_model
from trainer.metrics import mfu
from trainer.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
SKY = ROOT / "sky"
SMALL, LARGE = load_recipe("gpt2-124m"), load_recipe("gpt2-1558m")
COMPILED = RuntimeConfig(micro_batch_size=64, engine="compiled")


def runtime_of(known: MeasuredRun) -> RuntimeConfig:
    return RuntimeConfig(micro_batch_size=64, engine=known.engine.partition(" ")[0])  # type: ignore[arg-type]


def precision_of(known: MeasuredRun) -> str:
    return known.engine.partition(" ")[2] or "auto"


@pytest.mark.parametrize("known", MEASURED, ids=lambda m: f"{m.parameters:.0f} {m.gpu} {m.engine}")
def test_a_run_that_was_measured_is_planned_as_measured_on_warm_gpus(known: MeasuredRun) -> None:
    recipe = min((SMALL, LARGE), key=lambda r: abs(r.model.parameters - known.parameters))
    speed = speed_on(recipe.model, runtime_of(known), known.gpu, precision=precision_of(known))
    assert (speed.tokens_per_second, speed.kind) == (RUN_SHARE * known.tokens_per_second, "measured")
    assert f"{known.tokens_per_second:,}" in (ROOT / "docs" / "measurements.md").read_text()
    gpus = int(known.gpu.partition(":")[2])
    assert mfu(known.tokens_per_second, recipe.model, gpus, 989e12) == pytest.approx(known.mfu, abs=0.001)


@pytest.mark.parametrize("known", MEASURED, ids=lambda m: f"{m.parameters:.0f} {m.gpu} {m.engine}")
def test_the_estimate_alone_is_within_one_percent_of_the_measurements(known: MeasuredRun) -> None:
    recipe = min((SMALL, LARGE), key=lambda r: abs(r.model.parameters - known.parameters))
    there = known.gpu.replace(":", "-PCIE:")  # the same chip under a name that is not in the table
    speed = speed_on(recipe.model, runtime_of(known), there, precision=precision_of(known))
    assert speed.kind == "estimated"
    assert speed.tokens_per_second == pytest.approx(RUN_SHARE * known.tokens_per_second, rel=0.01)


@pytest.mark.parametrize(("gpus", "of_a_run"), [(1, 582_896), (2, 1_154_819), (2, 1_158_000)])
def test_the_whole_runs_that_were_measured_are_within_half_a_percent_of_the_plan(gpus: int, of_a_run: float) -> None:
    planned = speed_on(SMALL.model, SMALL.runtime, f"H100:{gpus}").tokens_per_second
    assert planned == pytest.approx(of_a_run, rel=0.005)


def test_a_doubling_of_the_gpus_keeps_what_was_measured_at_either_size() -> None:
    """fp8_head keeps 98.1% at 124M and 98.9% at 1558M, and a size between them something between."""

    def kept(recipe: Any) -> float:
        one, two = (
            speed_on(recipe.model, RuntimeConfig(micro_batch_size=64), f"H100-PCIE:{n}", precision="fp8_head")
            for n in (1, 2)
        )
        return two.tokens_per_second / one.tokens_per_second / 2

    small, middle, large = kept(SMALL), kept(load_recipe("gpt2-774m")), kept(LARGE)
    assert small == pytest.approx(measurements().value("two_gpus_fp8_head_124m"), rel=1e-4)
    assert large == pytest.approx(measurements().value("two_gpus_fp8_head_1558m"), rel=1e-4)
    assert small < middle < large


def test_a_peer_on_several_gpus_is_not_compared_with_one() -> None:
    assert "llm.c, its best flags (-r 0 -ge 2)" in measurements().peers()
    assert all("-z 1" not in peer for peer in measurements().peers())


@pytest.mark.parametrize(
    ("recipe", "gpus", "nodes", "hours"),
    [(SMALL, "A100-80GB:8", 1, 94 / 60), (LARGE, "H100:8", 1, 24), (LARGE, "H100:8", 2, 12)],
)
def test_llmc_as_published_is_faster_than_our_estimate_but_not_by_half(
    recipe: Any, gpus: str, nodes: int, hours: float
) -> None:
    ours = recipe.train_tokens / speed_on(recipe.model, COMPILED, gpus, nodes).tokens_per_second / 3600
    assert hours < ours < 1.5 * hours


def test_a_runs_own_measurement_is_used_there_and_corrects_the_estimate_elsewhere() -> None:
    plain = {gpus: speed_on(SMALL.model, COMPILED, gpus).tokens_per_second for gpus in ("H100:8", "A100-80GB:8")}
    own = [
        MeasuredRun(124.5e6, "RTX 4090:1", 1, "compiled", 0.0, 5e4, "measured on a GPU that the plan does not know"),
        MeasuredRun(
            124.5e6,
            "H100:8",
            1,
            engine_of(SMALL.model, COMPILED, "bf16"),
            0.0,
            0.8 * plain["H100:8"],
            "measured by attempt 3",
        ),
    ]
    there, elsewhere = (speed_on(SMALL.model, COMPILED, gpus, own=own) for gpus in plain)
    assert (there.tokens_per_second, there.kind) == (0.8 * plain["H100:8"], "measured")
    assert elsewhere.tokens_per_second == pytest.approx(0.8 * plain["A100-80GB:8"])
    assert elsewhere.kind == "assumed" and "times 0.80, as measured by attempt 3" in elsewhere.source


def test_settings_that_slow_training_slow_the_plan() -> None:
    def speed(gpus: str = "H100:8", nodes: int = 1, **runtime: Any) -> float:
        return speed_on(LARGE.model, COMPILED.model_copy(update=runtime), gpus, nodes).tokens_per_second

    assert speed(deterministic=True) < speed() > speed(recompute=True)
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


def test_an_h100_is_slower_than_an_h200_and_a_gpu_that_was_never_measured_is_called_assumed() -> None:
    runtime = RuntimeConfig(micro_batch_size=64)

    def speed(gpus: str, **changes: Any) -> Throughput:
        return speed_on(SMALL.model, runtime.model_copy(update=changes), gpus)

    assert (speed("H100:1").tokens_per_second, speed("H100:1").kind) == (RUN_SHARE * 606_648, "measured")
    compiled = (
        speed("H100:1", engine="compiled").tokens_per_second / speed("H200:1", engine="compiled").tokens_per_second
    )
    assert compiled == pytest.approx(606_648 / 622_727, rel=0.01)
    assert speed("H100:8").kind == "estimated" and "from 1 x H100" in speed("H100:8").source
    for gpus in ("L4:1", "A10:1", "A100-80GB:8", "V100:8", "T4:1"):
        name = gpus.partition(":")[0]
        assert speed(gpus).kind == "assumed" and f"as on H200; {name} was never measured" in speed(gpus).source


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


def test_a_gate_costs_memory_and_shared_keys_save_it() -> None:
    def share(engine: str, **fields: Any) -> float:
        size = {"family": "llama", "n_layer": 2, "n_head": 4, "n_embd": 384, "block_size": 64, "vocab_size": 128}
        return ANY_MODEL.validate_python(size | fields).kept_share(engine, recompute=False)

    # x, two norms, attention's output, the stream between, queries: 6; keys and values: 2; gate and MLP: 16/3
    assert share("fused") == pytest.approx((8 + 16 / 3) / 16)
    assert share("fused", n_kv_head=1) == pytest.approx((6.5 + 16 / 3) / 16)
    assert share("compiled", n_inner=1536) > 1 > share("compiled", n_inner=384)


def test_muon_needs_no_memory_for_a_second_moment_of_the_blocks_matrices() -> None:
    muon = SMALL.train.model_copy(update={"optimizer": "muon"})
    for ranks in (1, 8):
        one, other = (memory_gib(SMALL.model, t, SMALL.runtime, "H100:8", ranks, 1) for t in (SMALL.train, muon))
        assert one - other == pytest.approx(4 * SMALL.model.matrix_parameters / ranks / 2**30)


def test_muon_on_gpus_without_bf16_is_refused_before_they_are_rented() -> None:
    muon = SMALL.train.model_copy(update={"optimizer": "muon"})
    with pytest.raises(UserError, match="^train.optimizer: muon computes in bf16, which V100 does not have"):
        check_gpus(SMALL.model, muon, SMALL.runtime, "V100:8", 1)


def test_what_does_not_fit_on_a_card_is_refused_with_what_does() -> None:
    def check(gpus: str, **changes: Any) -> None:
        check_gpus(SMALL.model, SMALL.train, SMALL.runtime.model_copy(update=changes), gpus, 1)

    check("H100:1")
    with pytest.raises(
        UserError, match="64 sequences need about 24 GiB, and L4 has 21; [45][0-9] fit: --set"
    ) as refused:
        check("L4:1")
    fitting = int(str(refused.value).partition("micro_batch_size=")[2].partition(",")[0])
    check("L4:1", micro_batch_size=fitting)
    check("L4:1", micro_batch_size="auto")
    with pytest.raises(UserError, match="one sequence needs about [23][0-9] GiB, and L4 has 21; use runtime.recompute"):
        check_gpus(LARGE.model, LARGE.train, LARGE.runtime.model_copy(update={"micro_batch_size": "auto"}), "L4:1", 1)
    check("L4:1", device="cpu")
