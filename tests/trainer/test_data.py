"""Shards are llm.c's, byte for byte; the order reads every window once, for any number of ranks."""

import struct
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LONG_SECONDS

from trainer.config.amounts import batch_tokens_at, tokens_before
from trainer.config.config import TrainConfig
from trainer.config.errors import UserError
from trainer.data.batches import TokenData
from trainer.data.shards import Order, Shard, local_shards, read_shard, sequences_of, token_dtype, write_shard
from trainer.models.gpt2 import Gpt2Config

MODEL = Gpt2Config(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=1000)
CPU = torch.device("cpu")


def shards_of(sizes: list[int]) -> list[Shard]:
    return [Shard(f"train_{i:06d}.bin", tokens) for i, tokens in enumerate(sizes)]


def numbered_data(folder: Path, sizes: list[int], block_size: int) -> TokenData:
    """Shards whose tokens contain their position: 1000 x shard + position."""
    shards = shards_of(sizes)
    for i, shard in enumerate(shards):
        write_shard(folder / shard.name, (1000 * i + np.arange(shard.tokens)).astype(np.uint16))
    return TokenData(shards, folder.joinpath, block_size, seed=0)


# --- the file format


def test_a_shard_is_written_as_llmc_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "train_000000.bin"
    write_shard(path, np.array([50256, 0, 65535, 7], dtype=np.uint16))
    body = path.read_bytes()
    assert len(body) == 1024 + 8
    header = struct.unpack("<256i", body[:1024])
    assert header == (20240520, 1, 4) + (0,) * 253
    assert struct.unpack("<4H", body[1024:]) == (50256, 0, 65535, 7)


def test_a_shard_that_llmc_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, 3, *range(253)) + struct.pack("<3H", 50256, 40000, 1))
    tokens = read_shard(path)
    assert tokens.dtype == np.uint16 and tokens.tolist() == [50256, 40000, 1]


def test_a_vocabulary_above_65536_ids_has_shards_as_llmc_writes_them_for_llama_3(tmp_path: Path) -> None:
    ids = np.array([128_000, 7, 65_536, 2**31 - 1, 0], dtype=token_dtype(2**31 - 1))
    write_shard(tmp_path / "train_000000.bin", ids)
    body = (tmp_path / "train_000000.bin").read_bytes()
    assert struct.unpack("<256i", body[:1024]) == (20240801, 7, 5) + (0,) * 253
    assert struct.unpack("<5I", body[1024:]) == (128_000, 7, 65_536, 2**31 - 1, 0)
    shards = local_shards(tmp_path, "train")
    assert shards == [Shard("train_000000.bin", 5, token_bytes=4)]
    ((tokens, targets),) = TokenData(shards, tmp_path.joinpath, 4, 0).micro_batches(range(1), 1, CPU)
    assert (tokens.tolist(), targets.tolist()) == ([ids[:-1].tolist()], [ids[1:].tolist()])
    assert token_dtype(65_536) == np.uint16  # the shards of smaller vocabularies stay as they are


GOOD = struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + struct.pack("<3H", 1, 2, 3)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not a token shard"),
        (b"hello", "not a token shard"),
        (b"PAR1" * 400, "not a token shard"),
        (struct.pack("<256i", 20240520, 2, 3, *[0] * 253) + bytes(12), "not a token shard"),
        (struct.pack("<256i", 20240801, 1, 3, *[0] * 253) + bytes(12), "not a token shard"),
        (struct.pack("<256i", 20240801, 7, 3, *[0] * 253) + bytes(6), "1030 bytes, but its header requires 1036"),
        (GOOD[:-1], "1029 bytes, but its header requires 1030"),
        (GOOD[:1024], "1024 bytes, but its header requires 1030"),
        (GOOD[:600], "600 bytes, but its header requires 1030"),
        (GOOD + b"\0\0", "1032 bytes, but its header requires 1030"),
        (struct.pack("<256i", 20240520, 1, -5, *[0] * 253), "1024 bytes, but its header requires 1014"),
    ],
)
def test_a_truncated_or_foreign_file_is_named_and_refused(tmp_path: Path, body: bytes, complaint: str) -> None:
    path = tmp_path / "train_000000.bin"
    path.write_bytes(body)
    with pytest.raises(UserError, match=complaint) as refusal:
        read_shard(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


# --- the order

sizes = st.lists(st.integers(0, 60), min_size=1, max_size=6)
seeds = st.integers(0, 2**63 - 1)


@settings(max_examples=30)
@given(sizes, st.integers(1, 9), seeds, st.integers(0, 3))
def test_every_window_is_read_exactly_once_an_epoch(sizes: list[int], block: int, seed: int, epoch: int) -> None:
    shards = shards_of(sizes)
    # Written from the format's definition: window w of a shard needs tokens w·block … w·block + block.
    expected = {(s, w) for s, n in enumerate(sizes) for w in range(n) if w * block + block + 1 <= n}
    if not expected:
        with pytest.raises(UserError, match="no shard contains"):
            Order(shards, block, seed)
        return
    order = Order(shards, block, seed)
    assert order.sequences_per_epoch == len(expected)
    first = epoch * len(expected)
    read = [order[g] for g in range(first, first + len(expected))]
    assert len(read) == len(set(read)) and set(read) == expected
    # The windows of a shard are contiguous, so that training can start with one local shard.
    changes = sum(a[0] != b[0] for a, b in zip(read, read[1:], strict=False))
    assert changes == len({s for s, _ in expected}) - 1


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(0, 9), st.integers(1, 9), st.integers(1, 3000))
def test_ranks_share_a_step_without_gap_or_overlap_and_batches_grow_as_in_gpt3(
    world_size: int, more: int, multiples: int, ramp: int
) -> None:
    first = MODEL.block_size * (world_size + more)
    full = first * multiples
    grows: Any = {"batch_ramp_from": first, "batch_ramp_tokens": ramp} if multiples > 1 else {}
    train = TrainConfig(batch_tokens=full, **grows, max_steps=400, learning_rate=0.1)
    read = 0
    for step in range(100):
        parts = [sequences_of(step, MODEL, train, rank, world_size) for rank in range(world_size)]
        count, tokens = sum(map(len, parts)), read * MODEL.block_size
        assert [g for part in parts for g in part] == list(range(read, read + count))
        assert all(len(part) in (count // world_size, -(-count // world_size)) for part in parts)
        # Brown et al. 2020: linear from the first batch to the full one over the first tokens; in multiples here.
        line = full if tokens >= ramp else first + (full - first) * Fraction(tokens, ramp)
        assert count * MODEL.block_size == line // first * first == batch_tokens_at(step, train)
        assert tokens == tokens_before(step, train)
        read += count


def test_the_order_of_a_seed_never_changes() -> None:
    # Runs that began with an older version resume with this one: these numbers never change.
    order = Order(shards_of([20, 0, 33, 9]), 4, 1337)
    assert [order[g] for g in range(18)] == PINNED


# fmt: off
PINNED = [
    (2, 1), (2, 3), (2, 5), (2, 0), (2, 7), (2, 6), (2, 4), (2, 2), (3, 0), (3, 1), (0, 2), (0, 1), (0, 0), (0, 3),
    (3, 0), (3, 1), (2, 1), (2, 3),
]
# fmt: on


# --- reading


def test_a_window_is_inputs_and_targets_of_one_sequence(tmp_path: Path) -> None:
    data = numbered_data(tmp_path, [22, 9], block_size=5)
    assert data.windows([(0, 3), (1, 0)]).tolist() == [
        [15, 16, 17, 18, 19, 20],
        [1000, 1001, 1002, 1003, 1004, 1005],
    ]
    read = []
    for tokens, targets in data.micro_batches(range(0, 5), 2, CPU):
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens + 1, targets)
        read += tokens[:, 0].tolist()
    assert len(read) == 5
    assert read == [1000 * s + 5 * w for s, w in (data.order[g] for g in range(5))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_fed_the_same_tokens_while_it_is_busy(tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    ids = np.random.RandomState(0).randint(0, 2**16, 40_000).astype(np.uint16)  # the upper half is negative as int16
    write_shard(tmp_path / "train_000000.bin", ids)
    data = TokenData(local_shards(tmp_path, "train"), tmp_path.joinpath, 33, seed=5)
    work, fed = torch.randn(2048, 2048, device=gpu), []
    for step in range(20):
        mine, then = range(24 * step, 24 * step + 24), range(24 * step + 24, 24 * step + 48)
        for tokens, targets in data.micro_batches(mine, 8, gpu, then):
            for _ in range(20):  # the memory of a micro-batch may not be reused before this is through
                work = work @ work / work.norm()
            fed.append((tokens.clone(), targets.clone()))
    expected = data.micro_batches(range(480), 8, CPU)
    for (tokens, targets), (right_tokens, right_targets) in zip(fed, expected, strict=True):
        assert tokens.dtype == torch.int64 and tokens.is_contiguous() and targets.is_contiguous()
        assert torch.equal(tokens.cpu(), right_tokens) and torch.equal(targets.cpu(), right_targets)


def test_training_starts_when_only_the_first_shard_is_local(tmp_path: Path) -> None:
    sizes = [41, 41, 41]
    numbered_data(tmp_path, sizes, block_size=4)
    fetched: list[str] = []
    second_wanted, second_there = threading.Event(), threading.Event()

    def fetch(name: str) -> Path:
        fetched.append(name)
        if len(fetched) == 2:
            second_wanted.set()
            assert second_there.wait(LONG_SECONDS)
        return tmp_path / name

    data = TokenData(shards_of(sizes), fetch, 4, seed=3)
    assert fetched == []  # nothing before the first read
    first, second = data.order[0][0], data.order[10][0]
    list(data.micro_batches(range(0, 2), 2, CPU))
    assert fetched[0] == f"train_{first:06d}.bin"
    assert second_wanted.wait(LONG_SECONDS)  # prefetched before the first read
    assert fetched[1] == f"train_{second:06d}.bin"
    rest = [t for tokens, _ in data.micro_batches(range(2, 10), 2, CPU) for t in tokens[:, 0].tolist()]
    assert len(rest) == 8  # the first shard to its end, with the second still on its way
    second_there.set()
    ((tokens, _),) = data.micro_batches(range(10, 11), 1, CPU)
    assert tokens[0, 0] // 1000 == second
    assert fetched.count(f"train_{second:06d}.bin") == 1


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    numbered_data(tmp_path, [41, 41], block_size=4)  # ids up to 40, and from 1000 to 1040
    shards = local_shards(tmp_path, "train")
    data = TokenData(shards, tmp_path.joinpath, 4, 0, vocab_size=1023)
    assert data.windows([(0, 9)]).max() == 40
    with pytest.raises(UserError) as refused:
        data.windows([(0, 0), (1, 0)])  # before any of the shard's tokens is used
    assert str(refused.value) == (
        "train_000001.bin: token 23 has the id 1023, but model.vocab_size is 1023; use the vocabulary of the shards"
    )
    known = [Shard("train_000000.bin", 41, max_id=40), Shard("train_000001.bin", 41, max_id=1040)]
    with pytest.raises(UserError, match="train_000001.bin: its largest id is 1040, but model.vocab_size is 1023"):
        TokenData(known, tmp_path.joinpath, 4, 0, vocab_size=1023)  # nothing is fetched for that
    everything = TokenData(shards, tmp_path.joinpath, 4, 0, vocab_size=1041)
    assert len(list(everything.micro_batches(range(20), 20, CPU))) == 1


def test_a_checksum_distinguishes_other_data_and_is_the_sum_over_ranks(tmp_path: Path) -> None:
    data = numbered_data(tmp_path, [200, 150], block_size=4)
    assert len({data.checksum(range(8 * step, 8 * step + 8)) for step in range(10)}) == 10
    assert data.checksum(range(8)) == data.checksum(range(5)) + data.checksum(range(5, 8))
    # A step's sum travels as a float64: exact up to 2^53.
    assert data.checksum(range(8192)) < 2**53
