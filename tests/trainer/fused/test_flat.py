"""The flat state: its layout, and that its ranks together apply AdamW or Muon to the mean gradient.

The ranks are three processes that communicate over gloo, and with three GPUs also over NCCL. They start once, for all
tests: first two of them are a world, then all three. Each writes the outcome of every job to a file.
"""

import itertools
import math
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.distributed as dist
from once import once
from torch import Tensor

from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.model_config import ModelConfig
from trainer.engines.fused.flat import FlatState, Layout
from trainer.models.family import plain_model
from trainer.models.gpt2 import Gpt2Config
from trainer.models.modern import ModernConfig
from trainer.optim.optimizers import optimizer_for
from trainer.optim.rates import VECTORS, Group, Rates, group_of

# A width that leaves gaps between parameters, and a vocabulary with padding.
MODEL = Gpt2Config(n_layer=2, n_head=3, n_embd=24, block_size=16, vocab_size=70)
TRAIN = TrainConfig(batch_tokens=64, max_steps=9, learning_rate=0.01, weight_decay=0.3, beta2=0.9)
MUON = TRAIN.model_copy(update={"optimizer": "muon"})
# With vectors that every rank has in float32, and with wide and tall matrices.
OPTIONS: Any = dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True)
MODERN = ModernConfig(n_layer=3, n_head=3, n_kv_head=1, n_embd=24, block_size=16, vocab_size=70, **OPTIONS)
STEPS = 3


def rates(number: int, train: TrainConfig) -> Rates:
    """The rates of update `number`, from 1: other ones for each update and for each group."""
    rate = TRAIN.learning_rate / number
    if train is TRAIN:
        return Rates.adamw(rate)
    return Rates({group: (i + 1) * rate for i, group in enumerate(get_args(Group))}, 0.9, 0.3)


def model_of(train: TrainConfig) -> ModelConfig:
    return MODERN if train is MUON else MODEL


def gradients(step: int, rank: int, train: TrainConfig = TRAIN) -> dict[str, Tensor]:
    """Gradients as from a rank's backward pass: large enough to be clipped, and 0 in the padding of the vocabulary."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {
        name: torch.randn(slot.shape, generator=generator) for name, slot in Layout(model_of(train), 1).slots.items()
    }
    for name in model_of(train).vocabulary_rows:
        drawn[name][70:] = 0
    return drawn


def rounded_mean(gradients: list[Tensor]) -> Tensor:
    """The mean of two gradients that are reduced in bf16: halved, which is exact, and added in bf16."""
    first, second = (gradient.bfloat16() / 2 for gradient in gradients)
    return (first + second).float()


def mean(gradients: list[Tensor]) -> Tensor:
    return torch.stack(gradients).mean(0)


class Reference:
    """The plain model and its optimizer on the mean gradient."""

    def __init__(
        self,
        world_size: int,
        mean: Callable[[list[Tensor]], Tensor] = mean,
        train: TrainConfig = TRAIN,
    ):
        self.model, self.world_size, self.mean, self.train = plain_model(model_of(train)), world_size, mean, train
        self.model.initialize(TRAIN.seed)
        self.first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = optimizer_for(self.model, train)

    def step(self, number: int) -> float:
        """Update `number`, from 1; the norm before clipping."""
        ranks = [gradients(number, rank, self.train) for rank in range(self.world_size)]
        for name, p in self.model.named_parameters():
            p.grad = self.mean([each[name] for each in ranks])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), TRAIN.grad_clip or math.inf)
        self.optimizer.rates = rates(number, self.train)
        self.optimizer.step()
        return float(norm)


def flat_state(world: World, reduce_dtype: str = "fp32", train: TrainConfig = TRAIN) -> FlatState:
    runtime = RuntimeConfig(reduce_dtype=reduce_dtype)  # type: ignore[arg-type]
    state = FlatState(model_of(train), train, runtime, world)
    state.initialize(TRAIN.seed)
    return state


def backward(state: FlatState, gradients: dict[str, Tensor], loss: float = 0.0) -> Tensor:
    """Write gradients as a backward pass does, last block first; the result of `finish`."""
    for name, gradient in gradients.items():
        state.gradients[name].copy_(gradient)
    for bucket in (*reversed(range(state.config.n_layer)), state.config.n_layer):
        state.begin_reduce(bucket)
    return state.finish(torch.tensor(loss, device=state.master.device))


def assert_agrees(state: FlatState, reference: Reference) -> None:
    """Rank 0 gets all weights of the reference. Every rank has them in bf16: its own shard is its master, rounded."""
    state.ready()
    weights, pieces = dict(state.full_weights()), state.pieces()
    assert weights.keys() == (reference.model.state_dict().keys() if state.world.rank == 0 else set())
    for name, expected in reference.model.state_dict().items():
        rounded = state.weights[name].cpu()
        by_muon = reference.train is MUON and group_of(name, expected.dim()) == "matrix"
        if by_muon:  # a direction is computed in bf16, from a mean gradient that was added up in another order
            moved = float((expected - reference.first[name]).norm())
            # A GPU's products are rounded otherwise than a CPU's: up to 0.10 with the plain optimizer there, too.
            apart, allowed = float((rounded.float() - expected).norm()), 0.15 if state.master.is_cuda else 0.03
            assert apart <= allowed * moved + 2**-8 * float(expected.norm()), f"{name}: {apart} of {moved}"
        else:
            torch.testing.assert_close(rounded.float(), expected, atol=1e-6, rtol=2**-7)
        if piece := pieces.get(f"model.{name}"):
            assert torch.equal(rounded.view(-1)[piece.start : piece.end], piece.live.cpu().to(rounded.dtype)), name
        if state.world.rank == 0:
            if not by_muon:
                torch.testing.assert_close(weights[name], expected, atol=1e-6, rtol=1e-5)
            assert torch.equal(rounded, weights[name].to(rounded.dtype)), name
            assert (rounded.dtype == torch.float32) == (name in VECTORS), name


# --- jobs of the ranks


def updates_are_the_optimizers(world: World, folder: Path, train: TrainConfig, **options: str) -> None:
    rounded = options.get("reduce_dtype") == "bf16" and world.world_size > 1
    reference = Reference(world.world_size, rounded_mean if rounded else mean, train)
    state = flat_state(world, **options, train=train)
    assert_agrees(state, reference)
    for number in range(1, STEPS + 1):
        norm = reference.step(number)
        loss_and_norm = backward(state, gradients(number, world.rank, train), loss=float(world.rank))
        torch.testing.assert_close(loss_and_norm.cpu(), torch.tensor([(world.world_size - 1) / 2, norm]))
        state.update(rates(number, train), number, loss_and_norm)
        assert_agrees(state, reference)
    held = sum(tensor.numel() for tensor in (state.master, state.exp_avg, state.exp_avg_sq, state.momentum))
    cut = world.world_size
    if train is TRAIN:
        assert held == 3 * state.layout.size // cut
    elif cut == 1:
        assert held == 3 * state.layout.size - sum(bucket.muon for bucket in state.layout.buckets)


def reduce_in_bf16_is_adamw(world: World, folder: Path, train: TrainConfig) -> None:
    updates_are_the_optimizers(world, folder, train, reduce_dtype="bf16")


def one_ranks_nan_changes_nothing(world: World, folder: Path, train: TrainConfig) -> None:
    reference, state = Reference(world.world_size, train=train), flat_state(world, train=train)
    held = (state.master, state.exp_avg, state.exp_avg_sq, state.momentum, *state.owners.squares.values())
    reference.step(1)
    state.update(rates(1, train), 1, backward(state, gradients(1, world.rank, train)))
    before = [tensor.clone() for tensor in held]
    last_rank = world.rank == world.world_size - 1
    broken = gradients(2, world.rank, train)
    broken["wte.weight"][3] = math.nan if last_rank else 0.0
    for loss_and_norm in (
        backward(state, broken),
        backward(state, gradients(2, world.rank, train), loss=math.inf if last_rank else 0.0),
    ):
        assert not loss_and_norm.isfinite().all()
        state.update(rates(2, train), 2, loss_and_norm)
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    reference.step(2)
    state.update(rates(2, train), 2, backward(state, gradients(2, world.rank, train)))
    assert_agrees(state, reference)


def checkpointer(world: World, folder: Path) -> Checkpointer:
    return Checkpointer(LocalStore(folder), "run", world, world.world_size)


def saves_after_two_updates(world: World, folder: Path, train: TrainConfig) -> FlatState:
    state, log = flat_state(world, train=train), EventLog(None, PhaseClock())
    for number in (1, 2):
        state.update(rates(number, train), number, backward(state, gradients(number, world.rank, train)))
    saving = checkpointer(world, folder)
    saving.save(TrainState(step=2), state.pieces(), log)
    saving.finish(log)
    return state


def saves_muon_and_resumes_bit_for_bit(world: World, folder: Path, train: TrainConfig) -> None:
    first = saves_after_two_updates(world, folder, train)
    second = flat_state(world, train=train)
    assert checkpointer(world, folder).load_latest(second.pieces(), EventLog(None, PhaseClock()))
    second.restore()
    for state in (first, second):
        state.update(rates(3, train), 3, backward(state, gradients(3, world.rank, train)))
    for name, piece in first.pieces().items():
        assert torch.equal(piece.live, second.pieces()[name].live), name


def resumes_from_two_ranks(world: World, folder: Path, train: TrainConfig) -> None:
    """Load the checkpoint of two ranks of ZeRO-1, and take the third step as those two would have."""
    reference, state = Reference(2, train=train), flat_state(world, train=train)
    log = EventLog(None, PhaseClock())
    assert checkpointer(world, folder).load_latest(state.pieces(), log) == TrainState(step=2)
    state.restore()
    for number in (1, 2):
        reference.step(number)
    assert_agrees(state, reference)
    reference.step(3)
    # For any number of ranks, their mean gradient is that of the two.
    both = zip(gradients(3, 0, train).items(), gradients(3, 1, train).values(), strict=True)
    loss_and_norm = backward(state, {name: (a + b) / 2 for (name, a), b in both})
    state.update(rates(3, train), 3, loss_and_norm)
    assert_agrees(state, reference)


class Job(NamedTuple):
    work: Callable[[World, Path, TrainConfig], object]
    train: TrainConfig = TRAIN

    def outcome(self, folder: Path, world_size: int, rank: int) -> Path:
        """The file that tells how it ended."""
        return folder / f"{self.work.__name__}-{self.train.optimizer}-{rank}-of-{world_size}"


UPDATES = [Job(updates_are_the_optimizers, train) for train in (TRAIN, MUON)]
NAN = [Job(one_ranks_nan_changes_nothing, train) for train in (TRAIN, MUON)]
RESUMES = [Job(resumes_from_two_ranks, train) for train in (TRAIN, MUON)]
IN_BF16, SAVES = Job(reduce_in_bf16_is_adamw), Job(saves_after_two_updates)
SAVES_MUON = Job(saves_muon_and_resumes_bit_for_bit, MUON)
JOBS = {
    1: [*UPDATES, IN_BF16, *NAN, *RESUMES],
    2: [*UPDATES, IN_BF16, SAVES, SAVES_MUON],
    3: [*UPDATES, *NAN, *RESUMES],
}


def do_jobs(rank: int, folder: Path, kind: str, worlds: tuple[int, ...] = (2, 3)) -> None:
    """Run the jobs in one of three processes, or in the test's own."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    for world_size in worlds:
        if rank >= world_size:
            continue
        if world_size > 1:
            meeting = f"file://{folder}/meeting-{world_size}"
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, meeting, timedelta(seconds=60), rank=rank, world_size=world_size)
        for job in JOBS[world_size]:
            outcome = job.outcome(folder, world_size, rank)
            try:
                job.work(World(rank, rank, world_size, device), folder / job.train.optimizer, job.train)
            except BaseException:
                outcome.write_text(traceback.format_exc())
                return  # other ranks may wait for this one: later jobs would only time out
            outcome.write_text("done")
        if world_size > 1:
            dist.destroy_process_group()


@pytest.fixture(params=["cpu", "cuda"])
def ranks(shared_folder: Path, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs all jobs, once a session; returns an assertion that no rank of a world of this size failed in some jobs."""
    kind: str = request.param
    if kind == "cuda" and torch.cuda.device_count() < 3:
        pytest.skip("needs three GPUs")

    def run(folder: Path) -> None:
        # A fork imports nothing, and cannot use CUDA that another test began.
        spawned = kind == "cuda" or torch.cuda.is_initialized()
        context: Any = multiprocessing.get_context("spawn" if spawned else "fork")
        processes = [context.Process(target=do_jobs, args=(rank, folder, kind)) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(150)
            process.kill()
        do_jobs(0, folder, kind, worlds=(1,))

    folder = once(shared_folder / f"flat-{kind}", run)

    def assert_done(world_size: int, *jobs: Job) -> None:
        for job, rank in itertools.product(jobs, range(world_size)):
            path = job.outcome(folder, world_size, rank)
            assert path.exists(), f"rank {rank} did not reach it"
            assert path.read_text() == "done"

    return assert_done


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_updates_of_any_number_of_ranks_are_adamws_on_the_mean_gradient(
    ranks: Callable[..., None], world_size: int
) -> None:
    ranks(world_size, *UPDATES)


def test_reducing_gradients_in_bf16_only_rounds_them(ranks: Callable[..., None]) -> None:
    ranks(2, IN_BF16)
    ranks(1, IN_BF16)  # no reduce, no rounding


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    ranks: Callable[..., None], world_size: int
) -> None:
    ranks(world_size, *NAN)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_three(ranks: Callable[..., None], world_size: int) -> None:
    ranks(2, SAVES, SAVES_MUON)  # Muon's bit for bit on the same ranks, too
    ranks(world_size, *RESUMES)
