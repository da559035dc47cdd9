"""Text from a model: the cache changes no logit, and the other texts of a prompt change no text."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import model_of

from trainer.config.errors import UserError
from trainer.models.decoder import Decoder, Sampling, draw, stream
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT

SMALL = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97)
WAYS = {"greedy": Sampling(0.0), "top k": Sampling(0.7, 5), "top p": Sampling(1.3, None, 0.8)}


@pytest.fixture(scope="module")
def model() -> GPT:
    return model_of(SMALL).eval()


def texts(model: GPT, seeds: list[int], how: Sampling) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in seeds]
    for step in stream(Decoder(model), [1, 2, 3], 40, seeds, how):
        for number, token in step:
            found[number].append(token)
    return found


def uncached(model: GPT, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(rows))[:, -1, : SMALL.vocab_size]


# --- the cache


def test_a_tokenizer_may_have_fewer_ids_than_the_model(model: GPT) -> None:
    logits = Decoder(model, ids=90).begin([[1], [2]])
    torch.testing.assert_close(logits, uncached(model, [[1], [2]])[:, :90])


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.03), ("int8", 0.05)])
def test_the_narrow_formats_differ_from_float32_by_their_rounding_only(
    model: GPT, precision: str, error: float
) -> None:
    decoder, rows = Decoder(model, precision), [[5, 6, 7], [9, 8, 1]]
    narrow = torch.cat([decoder.begin(rows, 4), decoder.step([20, 21])])
    exact = torch.cat([uncached(model, rows), uncached(model, [[*rows[0], 20], [*rows[1], 21]])])
    assert 1e-4 < float((narrow - exact).std() / exact.std()) < error


# --- several texts


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_each_seed_gives_the_text_that_it_gives_alone(model: GPT, how: Sampling) -> None:
    together = texts(model, [7, 8, 9], how)  # all slide
    assert together == [texts(model, [seed], how)[0] for seed in (7, 8, 9)]
    assert [len(text) for text in together] == [40] * 3
    if how.temperature:
        assert together[0] != together[1]


def test_a_text_beyond_the_context_goes_on_from_the_last_half_of_it(model: GPT) -> None:
    context = [1, 2, 3]
    for token in texts(model, [0], Sampling(0.0))[0]:
        assert token == int(uncached(model, [context]).argmax())
        context = [*context, token] if len(context) < 16 else [*context, token][-8:]


# --- drawing


def test_only_tokens_that_are_asked_for_are_drawn() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)

    def drawn(sampling: Sampling) -> set[int]:
        return {draw(logits, sampling, generator) for _ in range(300)}

    assert drawn(Sampling(0.0)) == drawn(Sampling(1.0, 1)) == drawn(Sampling(1.0, None, 0.5)) == {1}
    assert drawn(Sampling(1e-30)) == drawn(Sampling(1.0, None, 0.0)) == {1}
    assert drawn(Sampling(3.0, 3)) == {1, 2, 3}
    assert drawn(Sampling(5.0, None)) == drawn(Sampling(5.0, 100)) == {0, 1, 2, 3, 4}
    assert drawn(Sampling(1.0, None, 0.8)) == {1, 3}


def test_frequencies_follow_the_models_probabilities(model: GPT) -> None:
    top = (model(torch.tensor([[7]]))[0, -1] / 1.5).topk(3)
    expected = dict(zip(top.indices.tolist(), F.softmax(top.values, 0).tolist(), strict=True))
    (step,) = stream(Decoder(model), [7], 1, list(range(200)), Sampling(1.5, 3))
    drawn = [token for _, token in step]
    for token, p in expected.items():
        # Four standard deviations of a binomial share over 200 draws.
        assert abs(drawn.count(token) / 200 - p) < 4 * (p * (1 - p) / 200) ** 0.5


def test_weights_without_finite_logits_are_named() -> None:
    with pytest.raises(UserError, match="logits that are not finite"):
        draw(torch.tensor([0.0, float("nan")]), Sampling(), torch.Generator())
