"""Validation loss and HellaSwag against the plain way of computing them; text that a model samples."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trainer_runs

from trainer.config import ModelConfig
from trainer.data import TokenData
from trainer.errors import UserError
from trainer.evaluate import (
    HellaSwagItem,
    HellaSwagScore,
    _ending_losses,
    _Row,
    hellaswag,
    read_hellaswag,
    read_hellaswag_file,
    validation_loss,
)
from trainer.model import GPT
from trainer.parallel import World
from trainer.sample import generate
from trainer.shards import Shard, write_shard

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97)
GPT2 = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=128, vocab_size=50_257)


_one_thread = trainer_runs._one_thread


def model_of(config: ModelConfig, seed: int = 0, spread: float = 0.2) -> GPT:
    model = GPT(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(spread * torch.randn(p.shape, generator=generator))
    return model


# --- validation loss


def val_data(folder: Path, sizes: list[int]) -> TokenData:
    random = np.random.RandomState(0)
    shards = [Shard(f"val_{i:06d}.bin", n) for i, n in enumerate(sizes)]
    for shard in shards:
        write_shard(folder / shard.name, random.randint(0, SMALL.vocab_size, shard.tokens).astype(np.uint16))
    return TokenData(shards, folder.joinpath, SMALL.block_size, seed=0)


def naive_loss(model: GPT, tokens: list[np.ndarray], windows: int) -> float:
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


# --- HellaSwag


@pytest.fixture
def gpt2_tokens(shared_data: Path) -> Callable[[str], list[int]]:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken (pip)")
    return tiktoken.get_encoding("gpt2").encode_ordinary


@pytest.fixture
def real_items(shared_data: Path) -> list[HellaSwagItem]:
    return read_hellaswag_file(shared_data / "hellaswag_val.jsonl")[:40]


@torch.no_grad()
def naive_hellaswag(
    model: GPT, items: list[HellaSwagItem], encode: Callable[[str], list[int]]
) -> tuple[HellaSwagScore, list[list[float]]]:
    """One ending at a time, all logits, probabilities looked up one by one."""
    sums, means = [], []
    for item in items:
        losses, lengths = [], []
        for ending in item.endings:
            end = encode(" " + ending)
            tokens = encode(item.context) + end
            tokens = tokens[-(model.config.block_size + 1) :]
            logits = model(torch.tensor([tokens[:-1]]))[0]
            scored = range(len(tokens) - len(end), len(tokens))
            log_p = {t: logits[t - 1].double().log_softmax(-1)[tokens[t]].item() for t in scored}
            losses.append(-sum(log_p.values()))
            lengths.append(len(end))
        sums.append(losses)
        means.append([loss / n for loss, n in zip(losses, lengths, strict=True)])
    labels = [item.label for item in items]
    return HellaSwagScore(
        acc=sum(row.index(min(row)) == label for row, label in zip(sums, labels, strict=True)) / len(items),
        acc_norm=sum(row.index(min(row)) == label for row, label in zip(means, labels, strict=True)) / len(items),
        items=len(items),
    ), sums


def test_hellaswag_equals_scoring_one_ending_at_a_time(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]]
) -> None:
    model = model_of(GPT2)
    expected, _ = naive_hellaswag(model, real_items, gpt2_tokens)
    assert expected.acc != expected.acc_norm  # the two differ
    for tokens_at_once in (300, 16_384):
        assert hellaswag(model, real_items, gpt2_tokens, CPU, tokens_at_once) == expected


def test_hellaswag_cuts_contexts_that_are_too_long_from_the_left(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]]
) -> None:
    short = GPT2.model_copy(update={"block_size": 48})
    model = model_of(short)
    long = [item for item in real_items if len(gpt2_tokens(item.context)) > 30][:12]
    longest = max(len(gpt2_tokens(i.context)) + len(gpt2_tokens(" " + e)) for i in long for e in i.endings)
    assert longest > short.block_size + 1
    expected, _ = naive_hellaswag(model, long, gpt2_tokens)
    assert hellaswag(model, long, gpt2_tokens, CPU) == expected


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


BYTES = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=257)


def test_the_losses_of_endings_do_not_depend_on_their_neighbours_in_a_batch() -> None:
    model = model_of(BYTES)
    items = [HellaSwagItem("a" * n, ("b", "some longer ending " * 2, "xyz"), 0) for n in (1, 7, 20)]
    _, expected = naive_hellaswag(model, items, as_bytes)
    model.requires_grad_(False)
    rows = [
        _Row(i, e, as_bytes(f"{item.context} {ending}"), len(item.context))
        for i, item in enumerate(items)
        for e, ending in enumerate(item.endings)
    ]
    rows.sort(key=lambda row: -len(row.tokens))
    together = _ending_losses(model, rows, CPU)
    for row, loss in zip(rows, together.tolist(), strict=True):
        assert loss == pytest.approx(expected[row.item][row.ending], rel=1e-5)
        assert loss == pytest.approx(float(_ending_losses(model, [row], CPU)), rel=1e-5)


def test_an_ending_longer_than_the_block_is_still_scored() -> None:
    items = [HellaSwagItem("context", ("x" * 200, "y" * 100), 0)]
    score = hellaswag(model_of(BYTES), items, as_bytes, CPU)
    assert score.items == 1 and score.acc_norm in (0.0, 1.0)


def test_items_may_have_different_numbers_of_endings() -> None:
    items = [HellaSwagItem("one", ("a", "b", "c", "d"), 2), HellaSwagItem("two", ("e", "f"), 1)]
    model = model_of(BYTES)
    assert hellaswag(model, items, as_bytes, CPU) == naive_hellaswag(model, items, as_bytes)[0]


def test_a_model_that_prefers_the_right_endings_scores_one() -> None:
    # This model depends on the last token only; its head prefers 'r' for every token.
    model = GPT(BYTES)
    model.initialize(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("h.") and "c_proj" in name:
                p.zero_()
        model.ln_f.weight.zero_()
        model.ln_f.bias.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[:, 0] = 0.0
        model.wte.weight[ord("r"), 0] = 5.0
    # The right ending is longer, so that its sum is larger while its mean is smaller.
    endings = ("w", "r" * 30, "ww", "wr")
    items = [HellaSwagItem("what is right?", (*endings[k:], *endings[:k]), (1 - k) % 4) for k in range(4)]
    seen: list[int] = []
    score = hellaswag(model, items, as_bytes, CPU, tokens_at_once=100, progress=seen.append)
    assert score.acc_norm == 1.0 and score.items == 4
    assert seen == sorted(seen) and seen[-1] == 4


def test_the_shared_file_has_all_items(shared_data: Path) -> None:
    items = read_hellaswag_file(shared_data / "hellaswag_val.jsonl")
    assert len(items) == 10_042
    assert items[0] == HellaSwagItem(
        "A man is sitting on a roof. he",
        (
            "is using wrap to wrap a pair of skis.",
            "is ripping level tiles off.",
            "is holding a rubik's cube.",
            "starts pulling up roofing on a roof.",
        ),
        3,
    )


def test_a_label_may_be_text_as_on_the_hub() -> None:
    row = {"ctx": "a", "endings": ["b", "c"], "label": "1", "ind": 4}
    assert read_hellaswag(iter([row]), "hub") == [HellaSwagItem("a", ("b", "c"), 1)]


GOOD_ROW = {"ctx": "a", "endings": ["b", "c"], "label": 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": 2}, "label 2 is not the index of one of the 2 endings"),
        ({"label": -1}, "label -1 is not the index of one of the 2 endings"),
        ({"label": ""}, "an item needs ctx, endings and a label"),
        ({"label": None}, "an item needs ctx, endings and a label"),
        ({"endings": None}, "an item needs ctx, endings and a label"),
        ({"endings": "bc"}, "endings a list of strings"),
        ({"endings": ["b", 3]}, "endings a list of strings"),
        ({"endings": ["b", ""]}, "none may be empty"),
        ({"endings": []}, "label 1 is not the index of one of the 0 endings"),
        ({"ctx": None}, "ctx must be a string"),
        ({"ctx": ""}, "none may be empty"),
    ],
)
def test_a_bad_item_is_named(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD_ROW, GOOD_ROW | change)))
    with pytest.raises(UserError) as mistake:
        read_hellaswag_file(path)
    message = str(mistake.value)
    assert message.startswith(f"{path}: item 2: ") and complaint in message and "\n" not in message


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "contains no HellaSwag items"),
        (b"ctx,label\n", "not a jsonl file"),
        (b"\xff\xfe\x00", "not a jsonl file"),
        (b"[1, 2]\n", "an item needs ctx, endings and a label"),
        (b'{"ctx": "a", "endings": ["b"]}\n', "an item needs ctx, endings and a label"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, body: bytes, complaint: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(body)
    with pytest.raises(UserError, match=complaint):
        read_hellaswag_file(path)


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jsonl: No such file or directory; give a jsonl file"):
        read_hellaswag_file(tmp_path / "gone.jsonl")


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
    for token in generate(model, ids, 25, top_k=1):
        context = torch.tensor([ids[-SMALL.block_size :]])
        assert token == int(model(context)[0, -1].argmax())
        ids.append(token)


def test_frequencies_follow_the_models_probabilities() -> None:
    model = model_of(SMALL).eval()
    top = (model(torch.tensor([[7]]))[0, -1] / 1.5).topk(3)
    expected = dict(zip(top.indices.tolist(), F.softmax(top.values, 0).tolist(), strict=True))
    drawn = [generate(model, [7], 1, seed, temperature=1.5, top_k=3)[0] for seed in range(300)]
    for token, p in expected.items():
        # Four standard deviations of a binomial share over 300 draws.
        assert abs(drawn.count(token) / 300 - p) < 4 * (p * (1 - p) / 300) ** 0.5
