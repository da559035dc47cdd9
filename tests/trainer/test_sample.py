"""Text from a model: the cache changes no logit, and a batch changes no text."""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
import trainer_runs

from trainer.errors import UserError
from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.sample import (
    PRECISIONS,
    Decoder,
    Product4,
    Sampling,
    draw,
    generate,
    multiplies_int8,
    nucleus,
    product,
    stream,
)

_one_thread = trainer_runs._one_thread

SMALL = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8], [11] * 16, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]]
WAYS = {
    "greedy": Sampling(0.0),
    "sampled": Sampling(),
    "top k": Sampling(0.7, 5),
    "top p": Sampling(1.3, None, 0.8),
    "both": Sampling(1.0, 20, 0.9),
}


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(SMALL)
    model.initialize(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def texts(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, seeds: Sequence[int], *how: object) -> list:
    found: list[list[int]] = [[] for _ in prompts]
    for step in stream(decoder, prompts, tokens, seeds, *how):  # type: ignore[arg-type]
        for number, token in step:
            found[number].append(token)
    return found


def uncached(model: GPT, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([list(row)]))[0, -1, : SMALL.vocab_size] for row in rows])


# --- the cache


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cached_logits_equal_those_of_the_whole_forward_pass_at_every_length(model: GPT, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    decoder, rows = Decoder(copy.deepcopy(model).to(device)), [list(prompt) for prompt in PROMPTS if len(prompt) < 16]
    logits = decoder.begin(rows, 16)
    for token in range(20, 23):
        torch.testing.assert_close(logits.cpu(), uncached(model, rows), rtol=1e-4, atol=1e-4)
        rows = [[*row, token + i] for i, row in enumerate(rows)]
        logits = decoder.step([row[-1] for row in rows])
    decoder.keep([2, 0])
    rows = [[*rows[2], 40], [*rows[0], 41]]
    torch.testing.assert_close(decoder.step([40, 41]).cpu(), uncached(model, rows), rtol=1e-4, atol=1e-4)


def test_a_padded_vocabulary_has_no_logits_of_its_padding(model: GPT) -> None:
    assert Decoder(model).begin([[1]]).shape == (1, SMALL.vocab_size)
    assert Decoder(model, ids=90).begin([[1], [2]]).shape == (2, 90)


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.03), ("int8", 0.05), ("int4", 0.3)])
def test_the_narrow_formats_differ_from_float32_by_their_rounding_only(
    model: GPT, precision: str, error: float
) -> None:
    decoder, rows = Decoder(model, precision), [PROMPTS[1], PROMPTS[2]]
    logits = decoder.begin(rows, 4)
    narrow = torch.cat([logits, decoder.step([20, 21])])
    exact = uncached(model, [*rows, [*rows[0], 20], [*rows[1], 21]])
    assert 1e-4 < float((narrow - exact).std() / exact.std()) < error


@pytest.mark.parametrize("hardware", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_product_of_any_number_of_rows_is_a_linear_layer(
    precision: str, rows: int, hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hardware and not multiplies_int8():
        pytest.skip("needs a processor with AVX-512 VNNI")
    monkeypatch.setattr("trainer.sample.multiplies_int8", lambda: hardware)
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((48, 64), (48,), (rows, 1, 64)))
    for b in (bias, None):
        y = product(weight, b, precision)(x)
        assert y.shape == (rows, 1, 48) and y.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
        bound = {"fp32": 1e-5, "bf16": 0.2, "int8": 0.4, "int4": 4.0}[precision]
        assert float((y.float() - F.linear(x, weight, b)).abs().max()) < bound


def test_int4_weights_of_few_levels_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-8, 8, (32, 64), generator=generator).float()
    weight[:, ::32], weight[:, 1::32] = -8, 7
    module, x = product(weight, None, "int4"), torch.randint(-4, 5, (3, 64), generator=generator).float()
    assert isinstance(module, Product4)
    torch.testing.assert_close(module(x).float(), F.linear(x, weight), rtol=0.01, atol=0.01)


# --- a batch


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_a_batch_gives_each_prompt_the_text_that_it_has_alone(model: GPT, how: Sampling) -> None:
    decoder, seeds = Decoder(model), [7, 8, 9, 7, 8]
    together = texts(decoder, PROMPTS, 40, seeds, how)  # every row slides, at other steps
    assert together == [texts(decoder, [p], 40, [s], how)[0] for p, s in zip(PROMPTS, seeds, strict=True)]
    assert [len(text) for text in together] == [40] * 5
    if how.temperature:
        assert texts(decoder, PROMPTS, 40, [1, 2, 3, 4, 5], how) != together


def test_a_row_that_ends_leaves_the_others_as_they_are(model: GPT) -> None:
    decoder, seeds = Decoder(model), [1, 2, 3, 4, 5]
    whole = texts(decoder, PROMPTS, 30, seeds, Sampling())
    end = whole[1][4]
    ended = texts(decoder, PROMPTS, 30, seeds, Sampling(), lambda _, token: token == end)
    assert ended == [text[: text.index(end)] if end in text else text for text in whole]
    assert len(ended[1]) <= 4 and max(map(len, ended)) == 30


def test_a_text_beyond_the_context_goes_on_from_the_last_half_of_it(model: GPT) -> None:
    ids = texts(Decoder(model), [[1, 2, 3]], 40, [0], Sampling(0.0))[0]
    context = [1, 2, 3]
    for token in ids:
        assert token == int(uncached(model, [context]).argmax())
        context = [*context, token] if len(context) < 16 else [*context, token][-8:]


def test_tokens_come_one_by_one(model: GPT) -> None:
    steps = stream(Decoder(model), [[1], [2]], 10**9, [0, 0], Sampling())
    assert [[number for number, _ in next(steps)] for _ in range(3)] == [[0, 1]] * 3


# --- drawing


def test_a_nucleus_is_the_smallest_set_of_likeliest_tokens_that_holds_the_share() -> None:
    assert (nucleus(torch.full((9,), 1 / 9 - 1e-17, dtype=torch.float64), 0.0) > 0).all()  # equal shares go together
    shares = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
    kept = {p: (nucleus(shares, p) > 0).nonzero()[:, 0].tolist() for p in (0.01, 0.4, 0.41, 0.7, 0.86, 0.9999)}
    assert kept == {0.01: [1], 0.4: [1], 0.41: [1, 3], 0.7: [1, 3, 4], 0.86: [0, 1, 3, 4], 0.9999: [0, 1, 2, 3, 4]}
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 10.0):
        shares = (spread * torch.randn(500, dtype=torch.float64, generator=generator)).softmax(0)
        order = shares.sort(descending=True)
        expected = order.indices[: int((order.values.cumsum(0) < 0.9).sum()) + 1]
        assert (nucleus(shares, 0.9) > 0).nonzero()[:, 0].tolist() == sorted(expected.tolist())


def test_only_tokens_that_are_asked_for_are_drawn() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)

    def drawn(sampling: Sampling) -> set[int]:
        return {draw(logits, sampling, generator) for _ in range(300)}

    assert drawn(Sampling(0.0)) == drawn(Sampling(1.0, 1)) == drawn(Sampling(1.0, None, 0.5)) == {1}
    assert drawn(Sampling(1e-30)) == {1}
    assert drawn(Sampling(3.0, 3)) == {1, 2, 3}
    assert drawn(Sampling(5.0, None)) == drawn(Sampling(5.0, 100)) == {0, 1, 2, 3, 4}
    assert drawn(Sampling(1.0, None, 0.8)) == {1, 3}


def test_weights_without_finite_logits_are_named() -> None:
    with pytest.raises(UserError, match="logits that are not finite"):
        draw(torch.tensor([0.0, float("nan")]), Sampling(), torch.Generator())


def test_generate_reads_the_end_of_a_long_prompt(model: GPT) -> None:
    assert generate(model, [60, *range(16)], 5) == generate(model, list(range(16)), 5)
