"""The fused step has the loss and the gradients of the reference, within the precision of bf16 or fp8.

On a CPU its kernels run in Triton's interpreter and its products in plain torch, so shapes are small. They are odd.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trainer_runs
from torch import Tensor
from trainer_runs import ALONE, Runners, weights

from trainer.base.parallel import World
from trainer.config.amounts import micro_batch_count
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import WIDEST_NORM, ModelConfig
from trainer.data.shards import slices
from trainer.engines.choice import choose_engine, make_engine
from trainer.engines.fused.engine import FusedEngine
from trainer.engines.fused.flat import FlatState
from trainer.engines.plain import PlainEngine
from trainer.eval.evaluation import Evaluation, TextSampler
from trainer.eval.scoring import Scored, ScoredRow, score_rows
from trainer.models.family import plain_model, section_of
from trainer.models.gpt2 import Gpt2Config
from trainer.models.language_model import LanguageModel
from trainer.models.modern_module import SCALARS
from trainer.optim.rates import rates_of

pytest.importorskip("triton", reason="needs triton (pip)")
from trainer.config.extensions import FUSED_STEPS, extension  # noqa: E402
from trainer.engines.fused import kernels  # noqa: E402
from trainer.engines.fused.bf16 import Bf16Products  # noqa: E402
from trainer.engines.fused.kernels import norm_warps  # noqa: E402

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: here is a GPU, TRITON_INTERPRET=1 does without", allow_module_level=True)
data, endings, runner = trainer_runs.data, trainer_runs.endings, trainer_runs.runner  # fixtures
TRAIN = TrainConfig(batch_tokens=64, max_steps=10, learning_rate=1e-3, weight_decay=0.1)
SHORT: dict[str, Any] = {"max_steps": 6, "val_every": 3, "val_tokens": 64, "batch_tokens": 64}
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True),
    "qk_scale": 1.2,
}
SHAPES = {  # family, layers, heads, width, tokens, vocabulary, sequences, micro-batches
    "25 heads, one sequence": ({}, 2, 25, 200, 19, 257, 1, 2),
    "a prime number of tokens": ({}, 2, 4, 64, 37, 300, 3, 1),
    "one layer": ({}, 1, 2, 48, 11, 130, 2, 3),
    "modern": ({"family": "modern"}, 2, 4, 64, 37, 300, 3, 1),
    "modern, grouped": ({"family": "modern", "n_kv_head": 1}, 1, 3, 72, 11, 257, 1, 2),
    "modern, short and long layers": ({"family": "modern", "window": 5}, 2, 2, 32, 13, 130, 1, 2),
    "modern, embedded values": ({"family": "modern", "value_embeddings": True}, 3, 2, 48, 11, 130, 2, 3),
    "modern, few embedded": ({"family": "modern", "value_embeddings": True, "n_kv_head": 1}, 1, 3, 72, 11, 257, 1, 2),
    "modern, weighted stream": ({"family": "modern", "residual_lambdas": True}, 2, 2, 48, 11, 130, 2, 3),
    "modern, smear": ({"family": "modern", "smear": True}, 1, 2, 48, 11, 130, 3, 2),
    "modern, backout": ({"family": "modern", "backout": True}, 4, 2, 48, 11, 130, 2, 2),
    "modern, all options": ({"family": "modern", "window": 5, **OPTIONS}, 3, 3, 72, 13, 257, 2, 2),
    "llama": ({"family": "llama"}, 2, 3, 48, 13, 130, 2, 2),
    "llama, grouped, tied, wide heads": (
        {"family": "llama", "n_kv_head": 2, "tied_head": True, "head_dim": 24, "epsilon": 1e-3},
        2,
        4,
        64,
        11,
        257,
        1,
        2,
    ),
}

# The interpreter takes seconds for each shape: these run everywhere, the others on machines with a GPU.
EVERYWHERE = ("25 heads, one sequence", "modern, all options", "llama, grouped, tied, wide heads")
MARKS = {name: pytest.mark.gpu for name in SHAPES if name not in EVERYWHERE}


def a_model(
    layers: int, heads: int, width: int, tokens: int, vocabulary: int, **more: Any
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A shape, and weights that make every gradient large; bf16 represents those exactly that the step has in bf16."""
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": tokens, "vocab_size": vocabulary}
    config, weights = section_of(sizes | more), {}
    for name, w in plain_model(config).state_dict().items():
        norm = name == "resid_lambdas" or (w.dim() == 1 and name.endswith("weight"))  # around 1
        weights[name] = torch.randn(w.shape) * 0.1 + norm
        if w.dim() > 1 or not more:
            weights[name] = weights[name].bfloat16().float()
    for name in config.vocabulary_rows:
        if name in weights:
            weights[name][vocabulary:] = 0
    return config, weights


def gradients(
    model: LanguageModel, batches: list[tuple[Tensor, Tensor]], autocast: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over the batches and its gradients, by autograd."""
    total = 0.0
    for tokens, targets in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model.head(model.hidden(tokens)).flatten(0, 1)
        if autocast:
            logits = logits.float()
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten()) / len(batches)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    print(f"seed {torch.seed()}")  # a new one each time; pytest shows it if a test fails
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [pytest.param(s, id=n, marks=MARKS.get(n, ())) for n, s in SHAPES.items()])
def test_loss_and_every_gradient_are_as_close_to_float64_as_autocasts(
    shape: tuple[Any, ...], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, layers, heads, width, block, vocabulary, sequences, count = shape
    config, weights = a_model(layers, heads, width, block, vocabulary, **family)
    tokens = torch.randint(0, vocabulary, (count, sequences, config.block_size + 1))
    batches = [(t[:, :-1], t[:, 1:]) for t in tokens]
    monkeypatch.setattr(
        "trainer.engines.fused.products.LOGIT_BYTES", 2 * config.padded_vocab_size * 16
    )  # several chunks, the last one short
    state = FlatState(config, TRAIN, RuntimeConfig(), ALONE)
    state.load(weights)
    step = extension(FUSED_STEPS, config.family)(
        config, state, Bf16Products(ALONE.device, recompute), deterministic=False
    )
    for gradient in state.gradients.values():
        gradient.fill_(torch.nan)  # no old value may stay
    scale = 1 / (count * sequences * config.block_size)
    step.begin(1)
    losses = [float(step.backward(*batch, scale, last=i == count - 1)) for i, batch in enumerate(batches)]
    exact_model, rounded_model = plain_model(config).double(), plain_model(config)
    for other in (exact_model, rounded_model):
        other.load_state_dict(weights)
    exact_loss, exact = gradients(exact_model, batches)
    plain_loss, plain = gradients(rounded_model, batches, autocast=True)
    assert sum(losses) == pytest.approx(exact_loss, abs=0.01 + 2 * abs(plain_loss - exact_loss))
    for name, gradient in exact.items():
        if name in SCALARS:  # sums over all tokens that nearly cancel, so their error is absolute
            apart, plains = ((g.double() - gradient).abs().max() for g in (state.gradients[name], plain[name]))
            assert apart < 2 * plains + 0.01 * gradient.abs().max() + 0.005, name
        else:
            assert error(state.gradients[name], gradient) < 2 * error(plain[name], gradient) + 0.01, name
    assert float(step.loss(*batches[0])) == pytest.approx(count * losses[0], rel=1e-5)


def engines(train: TrainConfig = TRAIN, **family: Any) -> tuple[FusedEngine, PlainEngine]:
    config, weights = a_model(family.pop("n_layer", 2), 2, 32, 16, 140, **family)
    ways = [RuntimeConfig(engine=way) for way in ("fused", "eager")]
    one, other = (make_engine(config, train, way, ALONE) for way in ways)
    assert isinstance(one, FusedEngine) and isinstance(other, PlainEngine)
    one.state.load(weights)
    other.model.load_state_dict(weights)
    return one, other


def updates(engine: FusedEngine | PlainEngine, count: int, train: TrainConfig = TRAIN) -> list[float]:
    """Losses of a few updates on random tokens."""
    noise, losses = torch.Generator().manual_seed(0), []
    for number in range(1, count + 1):
        tokens = torch.randint(0, 140, (2, 2, 17), generator=noise)
        found = engine.accumulate(iter([(t[:, :-1], t[:, 1:]) for t in tokens]), 2, 4, number)
        rate = 1e-2 if train.optimizer == "adamw" else train.learning_rate  # Muon's own rate follows it
        engine.update(rates_of(rate, number - 1, train, engine.config), found, number)
        losses.append(float(found[0]))
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "family"),
    [("adamw", {}), ("muon", {"family": "modern", "n_layer": 3, **OPTIONS}), ("muon", {"family": "llama"})],
)
def test_updates_follow_the_reference(optimizer: str, family: dict[str, Any]) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer})
    one, other = engines(train, **family)
    near = 4e-3 if optimizer == "adamw" else 1e-2  # Muon enlarges rounding along small singular values
    assert updates(one, 6, train=train) == pytest.approx(updates(other, 6, train=train), rel=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"warmup_steps": 1, "precision": "fp8_head", "n_layer": 1}, marks=pytest.mark.gpu)],
    ids=["bf16", "fp8"],
)
def test_an_interrupted_run_resumes_bit_for_bit(runner: Runners, changes: dict[str, Any]) -> None:
    settings = SHORT | {"max_steps": 4, "engine": "fused"} | changes
    whole, run = (runner(name, **settings) for name in ("whole", "stopped"))
    model, state = whole.attempt()
    run.attempt(stop_after=3)
    resumed, state_resumed = run.attempt()
    assert weights(resumed) == weights(model) and run.rows() == whole.rows() and state_resumed == state
    assert whole.rows()[-1]["train/loss"] < whole.rows()[1]["train/loss"]


@pytest.mark.slow
def test_an_evaluation_leaves_the_fused_engine_as_it_is(runner: Runners) -> None:
    short: dict[str, Any] = SHORT | {"max_steps": 3, "val_every": None}
    plain, run = (runner(name, engine="fused", **short) for name in ("plain", "evaluated"))
    model, _ = plain.attempt()
    rows = [ScoredRow(list(range(1, n)), 1) for n in (4, 20)]

    def measure(engine: Scored, world: World, check: Callable[[], None]) -> dict[str, float]:
        return {"eval/core": sum(score.loss for score in score_rows(engine, rows, world, before_batch=check))}

    run.evaluation = Evaluation(2, (measure,), TextSampler(0, str, seed=1, texts=2, tokens=3))
    same, state = run.attempt()
    assert weights(same) == weights(model) and run.rows() == plain.rows()
    assert state.evaluated_step == 3 and state.scores["eval/core"] > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_eager_engine_resumes_from_a_commit_of_the_fused_engine_and_back(runner: Runners, optimizer: str) -> None:
    plain, mixed = (runner(name, engine="eager", optimizer=optimizer, **SHORT) for name in ("plain", "mixed"))
    plain.attempt()
    for stop_after, engine in ((2, "eager"), (2, "fused"), (None, "eager")):
        runtime = mixed.config.runtime.model_copy(update={"engine": engine})
        mixed.config = mixed.config.model_copy(update={"runtime": runtime})
        mixed.attempt(stop_after)
    for a, b in zip(plain.rows(), mixed.rows(), strict=True):
        assert a.get("train/loss", 0) == pytest.approx(b.get("train/loss", 0), rel=5e-3)


def set_weights(engine: FusedEngine | PlainEngine, weights: dict[str, Tensor]) -> None:
    """Set the weights that a step reads, without the communication between the ranks of ZeRO-1."""
    if isinstance(engine, PlainEngine):
        engine.model.load_state_dict(weights)
        return
    for name, weight in engine.state.weights.items():
        weight.copy_(weights[name])


@pytest.mark.parametrize("way", ["eager", "fused"])
def test_unequal_shares_and_micro_batches_together_have_the_loss_and_gradient_of_the_whole_batch(way: str) -> None:
    config, weights = a_model(1, 2, 32, 16, 140)
    tokens = torch.randint(0, 140, (8, 17))
    runtime = RuntimeConfig(engine=way)

    def of_rank(rank: int, world_size: int, most: int) -> tuple[Tensor, Tensor]:
        """The loss and all gradients of a rank, before the ranks communicate."""
        engine = make_engine(config, TRAIN, runtime, World(rank, 0, world_size, torch.device("cpu")))
        assert isinstance(engine, FusedEngine | PlainEngine)
        set_weights(engine, weights)
        share = slices(range(8), world_size)[rank]
        several = slices(share, micro_batch_count(len(share), most))
        batches = ((tokens[part.start : part.stop, :-1], tokens[part.start : part.stop, 1:]) for part in several)
        loss = engine.accumulate(batches, len(several), 8 / world_size)[0]
        every = (
            engine.state.gradients
            if isinstance(engine, FusedEngine)
            else {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
        )
        return loss, torch.cat([every[name].flatten() for name in weights])

    whole_loss, whole = of_rank(0, 1, 8)
    for world_size, most in ((1, 3), (3, 2), (5, 2)):
        losses, gradients = zip(*(of_rank(rank, world_size, most) for rank in range(world_size)), strict=True)
        assert float(sum(losses)) / world_size == pytest.approx(float(whole_loss), rel=1e-5)
        assert error(sum(gradients) / world_size, whole.double()) < (1e-5 if way == "eager" else 0.02)


@pytest.mark.parametrize(
    ("way", "precision"), [("eager", "auto"), ("fused", "auto"), pytest.param("fused", "fp8", marks=pytest.mark.gpu)]
)
def test_a_rehearsal_waits_for_no_other_rank(way: str, precision: str) -> None:
    config, weights = a_model(1, 1, 32, 16, 140)
    runtime = RuntimeConfig(engine=way)
    of_two = World(0, 0, 2, torch.device("cpu"))  # the other one never comes: there is no process group
    engine = make_engine(config, TRAIN.model_copy(update={"precision": precision}), runtime, of_two)
    assert isinstance(engine, FusedEngine | PlainEngine)
    set_weights(engine, weights)
    tokens = torch.randint(0, 140, (2, 17))
    for number in (0, 0):
        assert engine.accumulate(iter([(tokens[:, :-1], tokens[:, 1:])]), 1, len(tokens), number)[0].isfinite()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        engine.accumulate(iter([(tokens[:, :-1], tokens[:, 1:])]), 1, len(tokens), 1)


def test_the_reason_why_it_cannot_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Gpt2Config(n_layer=1, n_head=1, n_embd=12, block_size=4)
    with pytest.raises(
        UserError, match="runtime.engine: fused cannot run here: the head size 12 is not a multiple of 8"
    ):
        make_engine(config, TRAIN, RuntimeConfig(engine="fused"), ALONE)
    wide = Gpt2Config(n_layer=1, n_head=65, n_embd=65 * 128, block_size=16)
    with pytest.raises(UserError, match="n_embd 8320 is more than 8192, the widest row of its norm"):
        make_engine(wide, TRAIN, RuntimeConfig(engine="fused"), ALONE)
    assert choose_engine(wide, TRAIN, RuntimeConfig(), ALONE.device)[0] == "eager"
    assert norm_warps(WIDEST_NORM, columns=8) == 32  # of a GPU's 32 warps a program
    monkeypatch.delenv("TRITON_INTERPRET")
    config = Gpt2Config(n_layer=1, n_head=1, n_embd=16, block_size=4)
    with pytest.raises(UserError, match="it needs a CUDA device, this is cpu; use 'auto'"):
        make_engine(config, TRAIN, RuntimeConfig(engine="fused"), ALONE)
    assert make_engine(config, TRAIN, RuntimeConfig(), ALONE).why == "eager, on cpu; no CUDA device was found"


# --- fp8


@pytest.mark.parametrize(
    ("shape", "words"),
    [((25, 200, 16), "model.n_embd 200 is not a multiple of 16"), ((2, 64, 24), "model.block_size 24 is not a mult")],
)
def test_fp8_is_rejected_for_shapes_whose_products_would_not_be_in_fp8(shape: tuple[int, int, int], words: str) -> None:
    config, _ = a_model(1, *shape, 140)
    with pytest.raises(UserError, match=f"train.precision: fp8 needs the fused engine: {words}"):
        make_engine(config, TRAIN.model_copy(update={"precision": "fp8"}), RuntimeConfig(engine="fused"), ALONE)


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("gpt2", "fp8_head"),
        pytest.param("gpt2", "fp8", marks=pytest.mark.gpu),
        pytest.param("modern", "fp8_head", marks=pytest.mark.gpu),
    ],
)
def test_fp8_gradients_point_where_the_exact_ones_do(family: str, precision: str) -> None:
    config, weights = a_model(2, 2, 64, 16, 140, family=family)
    tokens = torch.randint(0, 140, (2, 3, 17))
    batches = [(t[:, :-1], t[:, 1:]) for t in tokens]
    train = TRAIN.model_copy(update={"precision": precision})
    engine = make_engine(config, train, RuntimeConfig(engine="fused"), ALONE)
    assert isinstance(engine, FusedEngine) and engine.precision == precision
    engine.state.load(weights)
    exact_model = plain_model(config).double()
    exact_model.load_state_dict(weights)
    exact_loss, exact = gradients(exact_model, batches)
    for number in (1, 100):  # the first one measures its scales before, and each hundredth counts
        found = engine.accumulate(iter(batches), 2, 2 * len(batches[0][0]), number)
        assert float(found[0]) == pytest.approx(exact_loss, rel=0.01)
        for name, gradient in exact.items():
            # e5m2 has 2 bits behind the point: rounding has an error of 7% on average, in every factor.
            assert error(engine.state.gradients[name], gradient) < 0.25, name
    metrics = engine.extra_metrics()
    assert set(metrics) == {
        f"fp8/{k}_{what}" for k in ("activations", "gradients") for what in ("saturated", "underflown")
    }
    assert metrics["fp8/activations_saturated"] == 0 and 0 < metrics["fp8/gradients_underflown"] < 0.2
    assert engine.extra_metrics() == {}


def fp8_engine(config: ModelConfig, weights: dict[str, Tensor], recompute: bool = False, **train: Any) -> FusedEngine:
    runtime = RuntimeConfig(engine="fused", recompute=recompute)
    engine = make_engine(config, TRAIN.model_copy(update={"precision": "fp8"} | train), runtime, ALONE)
    assert isinstance(engine, FusedEngine)
    engine.state.load(weights)
    return engine


@pytest.mark.gpu
def test_fp8_begins_after_the_warmup_and_a_rehearsal_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = a_model(1, 1, 32, 16, 140)
    train = TRAIN.model_copy(update={"precision": "fp8", "warmup_steps": 1})
    one, other = (make_engine(config, train, RuntimeConfig(engine="fused"), ALONE) for _ in range(2))
    tokens = torch.randint(0, 140, (2, 17))
    batch = (tokens[:, :-1], tokens[:, 1:])
    found = []
    for engine in (one, other):
        assert isinstance(engine, FusedEngine)
        engine.state.load(weights)
        if engine is other:
            engine.accumulate(iter(2 * [batch]), 2, 2 * len(tokens))
        assert not engine.pieces()["fp8.magnitudes"].live.any()
        saved = engine.pieces()["fp8.magnitudes"].live
        found.append([engine.accumulate(iter([batch]), 1, len(tokens), number) for number in (1, 2)])
        if engine is other:  # as when a run resumes: the scales are known
            with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
                patch.setattr(engine.step, "_embed_backward", out_of_memory)
                engine.accumulate(iter([(tokens[:, 1:], tokens[:, 1:])]), 1, len(tokens))
        found[-1].append(engine.accumulate(iter([batch]), 1, len(tokens), 2))
        assert not saved.any()  # micro-batches may run while a checkpoint still copies it
        assert engine.pieces()["fp8.magnitudes"].live.any()
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.gpu
def test_fp8_gradients_stay_in_range_when_the_micro_batch_size_changes() -> None:
    engine = fp8_engine(*a_model(1, 2, 32, 16, 140))
    tokens = torch.randint(0, 140, (2, 17))
    found = []
    for number, scale in ((1, 1 / 512), (2, 1 / 16)):
        engine.step.begin(number)
        engine.step.backward(tokens[:, :-1], tokens[:, 1:], scale, last=True)
        found.append({name: gradient / scale for name, gradient in engine.state.gradients.items()})
    assert all(error(found[1][name], gradient.double()) < 0.1 for name, gradient in found[0].items())


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "again"), [("gpt2", "cast8"), ("modern", "transpose8")])
def test_recomputing_the_activation_in_fp8_changes_no_bit(
    family: str, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = a_model(2, 2, 32, 16, 140, family=family)
    tokens = torch.randint(0, 140, (2, 17))
    kernel, found = getattr(kernels, again), []
    counts: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[-1] += 1
        return kernel(*arguments, **options)

    monkeypatch.setattr(kernels, again, counted)
    for recompute in (False, True):
        engine = fp8_engine(config, weights, recompute, warmup_steps=1)
        for number in (1, 2, 3):
            counts.append(0)
            engine.accumulate(iter([(tokens[:, :-1], tokens[:, 1:])]), 1, len(tokens), number)
        found.append(torch.cat([gradient.flatten() for gradient in engine.state.gradients.values()]))
    assert counts[-1] - counts[2] == config.n_layer
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_micro_batch_that_ran_out_of_memory_changes_no_later_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(family="modern", n_layer=3, **OPTIONS)
    tokens = torch.randint(0, 140, (2, 17))
    batch, found = (tokens[:, :-1], tokens[:, 1:]), []
    for _ in range(2):
        engine.accumulate(iter([batch]), 1, len(tokens), 1)
        found.append(torch.cat([gradient.flatten() for gradient in engine.state.gradients.values()]))
        with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
            patch.setattr(engine.step, "_embed_backward", out_of_memory)
            engine.accumulate(iter([batch]), 1, len(tokens))
    assert torch.allclose(found[0], found[1], atol=1e-6)  # on a GPU, atomic additions change the last bits


def out_of_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError


@pytest.mark.gpu
def test_an_infinite_micro_batch_does_not_ruin_the_next_in_fp8() -> None:
    engine = fp8_engine(*a_model(1, 1, 32, 16, 140))
    tokens, bias = torch.randint(0, 140, (2, 17)), engine.state.weights["h.0.ln_1.bias"]
    batch = (tokens[:, :-1], tokens[:, 1:])
    engine.accumulate(iter([batch]), 1, len(tokens), 1)
    bias[0] = torch.inf
    engine.accumulate(iter([batch]), 1, len(tokens), 2)
    bias[0] = 0.0
    assert engine.accumulate(iter([batch]), 1, len(tokens), 3).isfinite().all()
