"""The engine `sharded` trains as plain PyTorch does on one rank, at any number of ranks, and across kills."""

import gc
import json
import multiprocessing
import os
import random
import signal
import traceback
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_command import Command, kill_tree
from trainer_runs import ALONE, LONG, configured

from trainer.base.events import EventLog, Started
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.weights import open_weights
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.data.shards import slices
from trainer.engines import sharded
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine
from trainer.engines.memory import memory_of
from trainer.engines.plain import PlainEngine
from trainer.eval.evaluation import TextSampler
from trainer.eval.scoring import ScoredRow, score_items
from trainer.models import language_model
from trainer.models.family import plain_model, section_of, to_hf
from trainer.models.modern_module import Modern
from trainer.optim.rates import rates_at

RANKS, STEPS = 4, 3
TRAIN = TrainConfig(batch_tokens=10 * 32, max_steps=STEPS, learning_rate=1e-3, grad_clip=0.3)
MUON = TRAIN.model_copy(update={"optimizer": "muon", "muon_learning_rate": 1e-3})
DIVIDED: dict[str, Any] = {"engine": "sharded", "tensor_parallel": 2}
SIZES = {"n_layer": 3, "n_head": 6, "n_embd": 36, "block_size": 32, "vocab_size": 70}
MODERN: dict[str, Any] = {"family": "modern", "window": 6, "n_kv_head": 2}
MODERN_INITIAL = Modern.initial
WAYS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"family": "gpt2", "n_head": 2, "n_embd": 38}, {"tensor_parallel": 2}),
    (
        {"family": "llama", "n_kv_head": 2, "tied_head": True, "qk_norm": True},
        {"recompute": True, "shard_size": 2, "tensor_parallel": 2},
    ),
    ({"family": "llama", "n_kv_head": 3}, {"recompute": "selective"}),
    (
        dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True) | MODERN,
        {"tensor_parallel": 2},
    ),
)
MODELS = [section_of(SIZES | section) for section, _ in WAYS]


def steps_of(engine: Engine, train: TrainConfig, world: World, most: int) -> list[float]:
    """What an engine measures in a few steps with micro-batches of up to `most` sequences."""
    numbers = []
    for step in range(STEPS):
        tokens = torch.randint(0, 70, (10, 33), generator=torch.Generator().manual_seed(step))
        share = slices(range(10), world.world_size)[world.rank]
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens[share.start : share.stop].split(most)]
        loss_and_norm = engine.accumulate(iter(batches), len(batches), 10 / world.world_size, step + 1)
        numbers += [world.sum(float(loss_and_norm[0]))[0] / world.world_size, float(loss_and_norm[1])]
        engine.update(rates_at(step, train, engine.config), loss_and_norm, step + 1)
        numbers.append(float(engine.loss(tokens[:, :-1], tokens[:, 1:])))
    return numbers


def trained(engine: Engine, train: TrainConfig, world: World, most: int) -> dict[str, Any]:
    """What an engine measures and holds after these steps."""
    numbers = steps_of(engine, train, world, most)
    # Items and texts that do not divide evenly: some ranks have none.
    scores = score_items(engine, 5, lambda which: [[ScoredRow([1, 2, 3 + i], 1)] for i in which], world)
    texts = TextSampler(0, str, seed=1, texts=1, tokens=4).texts_of(engine, world, lambda: None)
    return {"numbers": numbers + [score.loss for (score,) in scores], "texts": texts, "weights": dict(engine.weights())}


def begun(config: ModelConfig, train: TrainConfig, world: World, **runtime: Any) -> Engine:
    engine = make_engine(config, train, RuntimeConfig(**runtime), world)
    engine.initialize(7)
    return engine


def compare_with_eager(config: ModelConfig, train: TrainConfig, world: World, **runtime: Any) -> None:
    plain = begun(config, train, ALONE, engine="eager")
    sharded = begun(config, train, world, engine="sharded", **runtime)
    drawn = dict(plain.weights())
    for name, weight in sharded.weights():
        assert torch.equal(weight, drawn[name]), f"{name} was drawn otherwise"
    held = sum(piece.live.numel() for name, piece in sharded.pieces().items() if name.startswith("model."))
    whole = sum(weight.numel() for weight in drawn.values())
    assert held < 1.15 * whole / (runtime.get("shard_size") or world.world_size) + 64
    expected = trained(plain, train, ALONE, 10)
    found = trained(sharded, train, world, 1 + world.rank)  # unequal micro-batches
    assert found["numbers"] == pytest.approx(expected["numbers"], rel=2e-4)
    assert found["texts"] == expected["texts"] or train is MUON
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-3, atol=2e-4)
    state = {name: piece.live.clone() for name, piece in sharded.pieces().items()}
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    sharded.accumulate(iter([(tokens, tokens)]), 1, 1.0, STEPS + 1)
    sharded.update(rates_at(STEPS, train, config), torch.tensor([torch.nan, 1.0]), STEPS + 1)
    for name, piece in sharded.pieces().items():
        assert torch.equal(piece.live, state[name]), f"{name} moved by an update that is not finite"


def resume_in_any_shape(config: ModelConfig, world: World, folder: Path) -> None:
    """A commit of 2 x 2 ranks goes on bit for bit in this shape, and nearly so in others."""

    def checkpointer(world: World) -> Checkpointer:
        return Checkpointer(LocalStore(folder / "store"), "run", world, attempt=1)

    def resumed(world: World, **runtime: Any) -> list[float]:
        engine = make_engine(config, MUON, RuntimeConfig(**runtime), world)
        state = checkpointer(world).load_latest(engine.pieces(), EventLog(None, PhaseClock()))
        assert state is not None
        engine.restore(state)
        return steps_of(engine, MUON, world, 10)

    saving, log, first = checkpointer(world), EventLog(None, PhaseClock()), begun(config, MUON, world, **DIVIDED)
    steps_of(first, MUON, world, 10)
    log.row(STEPS, {"train/loss": 1.0})
    saving.save(TrainState(step=STEPS, optimizer_steps=STEPS), first.pieces(), log)
    saving.finish(log)
    expected = steps_of(first, MUON, world, 10)
    assert resumed(world, **DIVIDED) == expected
    for others in (resumed(world, engine="sharded"), resumed(ALONE, engine="eager")):
        assert others == pytest.approx(expected, rel=2e-3)


def first_gradient(config: ModelConfig, train: TrainConfig, world: World, **runtime: Any) -> Tensor:
    """The whole gradient of a first step with eight sequences in micro-batches of one, flattened."""
    engine = begun(config, train, world, **runtime)
    tokens = torch.randint(0, 70, (8, 33), generator=torch.Generator().manual_seed(1))
    share = tokens[world.rank :: world.world_size]
    batches = [(part[:, :-1], part[:, 1:]) for part in share.split(1)]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        numbers = engine.accumulate(iter(batches), len(batches), len(share), 1)
    if isinstance(engine, PlainEngine):
        return engine.gradients
    assert isinstance(engine, sharded.ShardedEngine)
    if runtime == {"engine": "sharded", "shard_size": 2}:  # copies add up their gradients once a step
        between = engine.mesh.get_group("replicate").group_name
        groups = [call.kwargs["group"].group_name for call in all_reduce.call_args_list if call.kwargs.get("group")]
        assert groups.count(between) == config.n_layer + 1
    gradients = [p.grad for p in engine.shards.whole.values()]
    flat = torch.cat([g.full_tensor().flatten() for g in gradients if isinstance(g, DTensor)])
    assert float(numbers[1]) == pytest.approx(float(flat.norm()), rel=1e-4)
    return flat


def check_gradients(world: World) -> None:
    """Each division of the work has the exact gradient; in bf16 all are as near to it: they add up in float32."""
    exact = first_gradient(MODELS[1], TRAIN, ALONE, engine="eager")
    for precision, error, once in (("fp32", 0.0, True), ("bf16", 0.007, False), ("bf16", 0.007, True)):
        train = TRAIN.model_copy(update={"precision": precision})
        sharded.gathers_once = lambda *_, once=once: once
        for runtime in ({}, {"tensor_parallel": 2}, {"shard_size": 2}, {"shard_size": 2, "tensor_parallel": 2}):
            found = first_gradient(MODELS[1], train, world, engine="sharded", **runtime)
            assert float((found - exact).norm() / exact.norm()) == pytest.approx(error, rel=0.1, abs=1e-5)


def saved_in_two_files(folder: Path) -> None:
    """The second model as others would save a large one."""
    config = MODELS[1]
    model = plain_model(config)
    model.initialize(3)
    state = to_hf({n: w for n, w in model.state_dict().items() if n in config.shapes}, config)
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2]), 1):
        save_file({name: state[name] for name in names}, folder / f"model-{number:05d}-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps(config.hf_config()))


def begins_with_the_files(config: ModelConfig, world: World, folder: Path) -> None:
    engine, plain = make_engine(config, TRAIN, RuntimeConfig(**DIVIDED), world), plain_model(config)
    open_weights(folder).fill(engine.pieces(), config)
    plain.initialize(3)
    for name, weight in engine.weights():
        assert torch.equal(weight, plain.get_parameter(name)), name


def save_large(folder: Path) -> None:
    """A model of 310 MB in float32, as others would save it."""
    folder.mkdir()
    state = to_hf({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in LARGE.shapes.items()}, LARGE)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LARGE.hf_config()))


REFAULTED = 32 << 20  # bytes of libraries that a loaded machine took back, and that come again meanwhile
LARGE = section_of({"family": "llama", "n_layer": 6, "n_head": 16, "n_embd": 1024, "block_size": 32, "vocab_size": 700})


def check_memory(world: World, folder: Path) -> None:
    """Neither drawing nor loading a model takes a rank more memory than its share and one layer."""
    engine = make_engine(LARGE, TRAIN, RuntimeConfig(engine="sharded"), world)
    layer = 4 * sum(prod(shape) for name, shape in LARGE.shapes.items() if name.startswith("h.0."))
    share = sum(piece.live.nbytes for name, piece in engine.pieces().items() if name.startswith("model."))
    status, weights = Path("/proc/self/status"), open_weights(folder / "large")

    def kilobytes(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    for work in (lambda: engine.initialize(1), lambda: weights.fill(engine.pieces(), LARGE)):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = kilobytes("VmRSS")
        work()
        taken = 1024 * (kilobytes("VmHWM") - before)
        assert taken < share + layer + REFAULTED, f"{taken:,} bytes; a share has {share:,}, a layer {layer:,}"


def no_zeros(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Modern's first weights, but none is 0: beside blocks that add nothing, the gradients of the residual stream's
    weights are rounding alone, and AdamW moves these by up to 0.5."""
    zero = name.endswith(("o_proj.weight", "down_proj.weight"))
    MODERN_INITIAL("q_proj.weight" if zero else name, p, config, generator)


def on_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    world = World(rank, rank, RANKS, torch.device("cpu"))
    try:
        patch.object(Modern, "initial", staticmethod(no_zeros)).start()
        for module in (sharded, language_model):  # so that most micro-batches have their loss in chunks
            patch.object(module, "HEAD_ROWS", 7).start()
        for model, (_, runtime) in zip(MODELS, WAYS, strict=True):
            for train in (TRAIN, MUON) if model.family != "llama" else (TRAIN,):
                once = train is MUON or runtime.get("recompute") is True  # as on GPUs with the memory for it
                sharded.gathers_once = lambda *_, once=once: once
                compare_with_eager(model, train, world, **runtime)
        resume_in_any_shape(MODELS[0], world, folder)
        begins_with_the_files(MODELS[1], world, folder)
        check_gradients(world)
        check_memory(world, folder)
        (folder / f"done-{rank}").touch()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others wait for it
    world.close()


@pytest.mark.slow
def test_four_ranks_draw_load_train_and_score_as_one_eager_rank(tmp_path: Path) -> None:
    saved_in_two_files(tmp_path)
    save_large(tmp_path / "large")
    gc.collect()
    gc.freeze()  # a finalizer of other tests' objects may join a thread, which a forked process does not have
    start = multiprocessing.get_context("fork").Process  # imports nothing again
    processes = [start(target=on_rank, args=(rank, tmp_path)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        process.kill()
    errors = [path.read_text() for path in sorted(tmp_path.glob("error-*"))]
    assert not errors, errors[0]
    assert len(list(tmp_path.glob("done-*"))) == RANKS


def test_gradients_in_float8_point_where_the_exact_ones_do() -> None:
    """torchao emulates fp8 on a CPU."""
    pytest.importorskip("torchao", reason="the extra float8 is not installed")
    model = section_of(SIZES | {"family": "llama", "n_head": 4, "n_embd": 64})
    trains = (TRAIN.model_copy(update={"precision": precision}) for precision in ("fp32", "bf16", "fp8"))
    try:
        exact, bf16, fp8 = (first_gradient(model, train, ALONE, engine="sharded") for train in trains)
    finally:
        ALONE.close()
    assert F.cosine_similarity(bf16, exact, dim=0) > 0.9998
    assert 0.99 < F.cosine_similarity(fp8, exact, dim=0) < 0.9998  # in fp8


def test_a_rank_of_a_thousand_holds_a_thousandth_of_200_gb() -> None:
    ranks, runtime = 1024, RuntimeConfig(engine="sharded", tensor_parallel=8)
    model = section_of({"n_layer": 7, "n_head": 128, "n_embd": 24576, "block_size": 2048})
    dist.init_process_group("fake", store=FakeStore(), rank=700, world_size=ranks)
    try:
        pieces = make_engine(model, TRAIN, runtime, World(700, 700, ranks, torch.device("cpu"))).pieces()
    finally:
        dist.destroy_process_group()
    held = sum(piece.live.nbytes for piece in pieces.values())
    assert 4 * model.parameters > 200e9
    assert ranks * held == pytest.approx(12 * model.parameters, rel=0.01)  # weights and moments
    assert memory_of("sharded", model, runtime, ranks).state * 3 / 4 == pytest.approx(held, rel=0.01)


@pytest.mark.slow
def test_a_run_killed_on_four_ranks_goes_on_with_two_and_ends_as_one_eager_rank(data: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = LONG | {"optimizer": "muon", "muon_learning_rate": 0.002}
    undisturbed = Command(data, tmp_path / "eager", configured(**run))
    undisturbed.finish()
    copies, chance = {"engine": "sharded", "shard_size": 2}, random.Random(41)
    for ranks, shape in ((4, DIVIDED), (4, copies), (2, DIVIDED)):
        command = Command(data, tmp_path / "out", configured(**shape, **run))
        with command.started(ranks) as process:
            command.wait_for_rows(chance.randint(1, 12), process)
            command.wait_for_commits(1, process)
            kill_tree(process)
            assert process.returncode == -signal.SIGKILL, "it finished before it was killed"
    Command(data, tmp_path / "out", configured(engine="eager", **run)).finish()
    starts = command.events_of(Started)
    assert [e.world_size for e in starts] == [4, 4, 2, 1] and starts[-1].step > 0
    rows, expected = command.rows(), undisturbed.rows()
    assert [row.get("data/checksum") for row in rows] == [row.get("data/checksum") for row in expected]
    for a, b in zip(expected, rows, strict=True):
        norms = [row.pop("train/grad_norm", 0.0) for row in (a, b)]
        assert b == pytest.approx(a, rel=5e-3) and norms[1] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize(
    ("model", "train", "runtime", "message"),
    [
        (0, {"precision": "fp8_head"}, {}, "train.precision: fp8_head needs the fused engine"),
        (0, {}, {"tensor_parallel": 3}, "tensor_parallel: 3 does not divide the model's 2 heads; use a divisor"),
        (0, {}, {"tensor_parallel": 2}, "tensor_parallel: 2 does not divide the 1 ranks of a copy of the state"),
        (
            3,
            {},
            {"tensor_parallel": 3},
            "tensor_parallel: 3 does not divide the model's 2 heads of keys; use a divisor",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_a_user_error(
    model: int, train: dict[str, Any], runtime: dict[str, Any], message: str
) -> None:
    try:
        with pytest.raises(UserError, match=message):
            make_engine(
                MODELS[model], TRAIN.model_copy(update=train), RuntimeConfig(engine="sharded", **runtime), ALONE
            )
    finally:
        ALONE.close()
