"""The automatic micro-batch is the largest that fits, and no larger one is ever tried."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_runs import ALONE

from trainer.checkpoint.commits import TrainState
from trainer.config.amounts import micro_batch_of
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.engines.choice import make_engine
from trainer.engines.micro_batch import choose_micro_batch, largest_that_fits, memory_settings
from trainer.models.gpt2 import Gpt2Config

MODEL = Gpt2Config(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=100)


def recorded(law: Callable[[int], float], tried: list[int]) -> Callable[[int], int]:
    def peak(size: int) -> int:
        tried.append(size)
        return math.ceil(law(size))

    return peak


@settings(max_examples=30)
@given(
    st.integers(1, 4096),  # share
    st.integers(1, 256),  # most
    st.integers(0, 10_000),  # weights
    st.integers(1, 5_000),  # a sequence
    st.integers(0, 3_000),  # a sequence in the head, up to a chunk of some
    st.integers(1, 16),
    st.integers(0, 500_000),  # memory beyond one sequence
    st.booleans(),  # whether a trial may fail
)
def test_the_fewest_micro_batches_that_fit_are_found_without_running_out_of_memory(
    share: int, most: int, weights: int, each: int, head: int, chunk: int, more: int, safe: bool
) -> None:
    def law(size: int) -> float:
        return weights + each * size + head * min(size, chunk)

    tried: list[int] = []
    room = int(law(1)) + more
    size, used = largest_that_fits(recorded(law, tried), share, most, room, weights if safe else 0)
    # A head that goes in chunks makes the line too steep at its beginning: a little may be left then.
    even = [n for n in range(1, most + 1) if micro_batch_of(share, n) == n]
    surely = max(n for n in even if n == 1 or law(n) + head * n <= room)
    fits = max(n for n in even if law(n) <= room)
    assert used == law(size) <= room and surely <= size <= fits and (head or size == fits)
    assert all(law(n) <= room for n in tried if n != 2 or (safe and weights)) and len(tried) < 12


def test_a_model_without_room_for_one_sequence_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"one sequence takes 3\.0 GiB of GPU memory, and 2\.0 GiB are available"):
        largest_that_fits(lambda size: 3 * 2**30, 64, 64, 2 * 2**30)


def test_a_resumed_run_keeps_its_micro_batches_on_as_many_such_devices() -> None:
    runtime = RuntimeConfig(micro_batch_size="auto")
    train = TrainConfig(batch_tokens=48 * MODEL.block_size, max_steps=1, learning_rate=1.0)
    engine = make_engine(MODEL, train, runtime, ALONE)
    found = "micro-batches of 8: 48 sequences in equal parts of up to 8"
    for ranks, devices, why in (
        (1, "cpu", "micro-batches of 3, as before the resume"),
        (2, "cpu", found),
        (1, "NVIDIA H200 (sm_90)", found),
    ):
        settings = memory_settings(engine, runtime)
        state = TrainState(micro_batch_size=3, world_size=ranks, devices=devices, memory_settings=settings)
        assert choose_micro_batch(engine, MODEL, train, runtime, state, ALONE).why == why
