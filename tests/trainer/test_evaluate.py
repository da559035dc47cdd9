"""Validation loss against the plain way of computing it; text that a model samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trainer_runs
from tiny_models import model_of

from trainer.data import TokenData
from trainer.evaluate import validation, validation_loss
from trainer.families.gpt2 import Gpt2Config
from trainer.model import LanguageModel
from trainer.parallel import World
from trainer.sample import generate
from trainer.shards import Shard, write_shard

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
SMALL = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97)


_one_thread = trainer_runs._one_thread


# --- validation loss


def val_data(folder: Path, sizes: list[int]) -> TokenData:
    random = np.random.RandomState(0)
    shards = [Shard(f"val_{i:06d}.bin", n) for i, n in enumerate(sizes)]
    for shard in shards:
        write_shard(folder / shard.name, random.randint(0, SMALL.vocab_size, shard.tokens).astype(np.uint16))
    return TokenData(shards, folder.joinpath, SMALL.block_size, seed=0)


def naive_loss(model: LanguageModel, tokens: list[np.ndarray], windows: int) -> float:
    """One window at a time from the raw tokens, log-probabilities added up one by one."""
    losses = []
    for shard in tokens:
        for start in range(0, len(shard) - SMALL.block_size, SMALL.block_size):
            window = torch.from_numpy(shard[start : start + SMALL.block_size + 1].astype(np.int64))
            log_p = model(window[None, :-1])[0].double().log_softmax(-1)
            losses.append([-log_p[t, window[t + 1]].item() for t in range(SMALL.block_size)])
    return float(np.mean(losses[:windows]))


def read_all(data: TokenData, folder: Path) -> list[np.ndarray]:
    return [np.frombuffer((folder / s.name).read_bytes()[1024:], dtype="<u2") for s in data.shards]


def test_bits_per_byte_are_the_mean_over_bytes_of_text_without_special_tokens(tmp_path: Path) -> None:
    data, model = val_data(tmp_path, [100, 0, 16, 150]), model_of(SMALL)
    sizes = torch.arange(SMALL.vocab_size) % 5
    bits, count = 0.0, 0
    for shard in read_all(data, tmp_path):
        for start in range(0, len(shard) - SMALL.block_size, SMALL.block_size):
            window = torch.from_numpy(shard[start : start + SMALL.block_size + 1].astype(np.int64))
            with torch.no_grad():
                log_p = model(window[None, :-1])[0].double().log_softmax(-1)
            for t, target in enumerate(window[1:].tolist()):
                if size := int(sizes[target]):
                    bits -= log_p[t, target].item() / np.log(2)
                    count += size
    for batch_size in (1, 4, 64):
        loss, bits_per_byte = validation(model.losses, data, 10**9, batch_size, ALONE, sizes)
        assert bits_per_byte == pytest.approx(bits / count, rel=1e-6)
        assert loss == pytest.approx(validation_loss(model.loss, data, 10**9, batch_size, ALONE), rel=1e-6)
    assert validation(model.losses, data, 10**9, 4, ALONE, 0 * sizes)[1] == np.inf


@pytest.mark.parametrize(("max_tokens", "windows"), [(10**9, 15), (16 * 7, 7), (16 * 7 + 15, 7), (1, 1)])
def test_val_loss_is_the_mean_over_the_first_tokens(tmp_path: Path, max_tokens: int, windows: int) -> None:
    data, model = val_data(tmp_path, [100, 0, 16, 150]), model_of(SMALL)
    with torch.no_grad():
        expected = naive_loss(model, read_all(data, tmp_path), windows)
    for batch_size in (1, 4, 64):
        assert validation_loss(model, data, max_tokens, batch_size, ALONE) == pytest.approx(expected, rel=1e-6)


def test_every_rank_validates_in_as_many_rounds(tmp_path: Path) -> None:
    data, rounds = val_data(tmp_path, [170]), []  # 10 windows: shares of 4, 3 and 3, in batches of 3
    for rank in range(3):
        on_batch: list[int] = []

        class Alone(World):
            def sum(self, *values: float) -> list[float]:
                return list(values)

        validation_loss(
            lambda tokens, _: tokens.float().mean(),
            data,
            10**9,
            3,
            Alone(rank, 0, 3, torch.device("cpu")),
            lambda: on_batch.append(1),  # noqa: B023
        )
        rounds.append(len(on_batch))
    assert rounds == [2, 2, 2]


def test_val_loss_leaves_the_model_as_it_found_it(tmp_path: Path) -> None:
    data, model = val_data(tmp_path, [100]), model_of(SMALL)
    for training in (True, False):
        model.train(training)
        validation_loss(model, data, 64, 4, ALONE)
        assert model.training is training
    assert all(p.grad is None for p in model.parameters())


# --- sampling


def test_sampling_repeats_for_a_seed_and_varies_between_seeds() -> None:
    model = model_of(SMALL)
    first = generate(model, [1, 2, 3], 40, seed=4)
    assert len(first) == 40
    assert generate(model, [1, 2, 3], 40, seed=4) == first
    assert generate(model, [1, 2, 3], 40, seed=5) != first


def test_padding_is_never_sampled() -> None:
    model = model_of(SMALL)
    with torch.no_grad():
        model.wte.weight[SMALL.vocab_size :] = 50.0  # even rows with the largest logits
    drawn = {t for seed in range(5) for t in generate(model, [5], 60, seed, temperature=50.0, top_k=10_000)}
    assert max(drawn) < SMALL.vocab_size
    assert len(drawn) > 75  # nearly all others do come up


def test_one_candidate_is_the_likeliest_token() -> None:
    model = model_of(SMALL).eval()
    ids = [3, 1, 4]
    for token in generate(model, ids, SMALL.block_size - len(ids) + 1, top_k=1):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


def test_frequencies_follow_the_models_probabilities() -> None:
    model = model_of(SMALL).eval()
    top = (model(torch.tensor([[7]]))[0, -1] / 1.5).topk(3)
    expected = dict(zip(top.indices.tolist(), F.softmax(top.values, 0).tolist(), strict=True))
    drawn = [generate(model, [7], 1, seed, temperature=1.5, top_k=3)[0] for seed in range(300)]
    for token, p in expected.items():
        # Four standard deviations of a binomial share over 300 draws.
        assert abs(drawn.count(token) / 300 - p) < 4 * (p * (1 - p) / 300) ** 0.5
