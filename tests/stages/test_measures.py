"""The measures of an evaluation while a run trains."""

import threading
from pathlib import Path

import pytest
import torch
from core_bundle import make_bundle
from tiny_models import model_of

from pipelines.recipe import load_recipe
from pipelines.stages.measures import CHECKED_CHARACTERS, encoder, evaluation_in_training
from pipelines.text.tokenizer import token_bytes, tokenizer
from trainer.core import TASKS
from trainer.errors import Interrupted
from trainer.parallel import World

ALONE = World(0, 0, 1, torch.device("cpu"))


def test_an_evaluation_while_training_scores_core_task_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.stages.measures.CHECKED_CHARACTERS", 100)
    changes = [f"evaluate.core={make_bundle(tmp_path / 'bundle')}", "evaluate.every=10", "tokens.tokenizer=bytes"]
    recipe = load_recipe("smoke", changes)
    assert recipe.benchmark_tokens > 10 * load_recipe("gpt2-124m").benchmark_tokens > 0  # so the plan counts it
    evaluation = evaluation_in_training(recipe, lambda: tokenizer("bytes"), tmp_path / "cache", ALONE)
    assert evaluation
    model = model_of(recipe.model.model_copy(update={"n_layer": 1, "vocab_size": 257}))
    checks: list[int] = []
    scores = evaluation.scores(model, ALONE, lambda: checks.append(threading.get_ident()))
    assert set(scores) == {"eval/core", *(f"core/{task}" for task in TASKS)} and len(checks) >= 22
    assert set(checks) == {threading.get_ident()}  # a check communicates: only one thread of a rank may
    assert scores["eval/core"] == pytest.approx(sum(scores[f"core/{task}"] for task in TASKS) / 22)


def test_a_stop_is_heard_while_a_benchmark_is_encoded() -> None:
    encoding, texts = tokenizer("bytes"), [f"text {i} " * 2000 for i in range(200)]  # 3.6 million characters
    checks: list[int] = []
    encode = encoder(encoding, ALONE, lambda: checks.append(1))
    assert [list(ids) for ids in encode(texts)] == encoding.encode_ordinary_batch(texts)
    assert len(checks) == sum(map(len, texts)) // CHECKED_CHARACTERS
    assert [list(ids) for ids in encode(["a"])] == [[97]] and len(encode([])) == 0

    def leave() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        encoder(encoding, ALONE, leave)(texts)


def test_tokens_have_the_bytes_of_their_text_and_end_of_text_has_none(shared_data: Path) -> None:
    for name in ("bytes", "gpt2"):
        encoding = tokenizer(name)
        sizes, text = token_bytes(encoding), "don't Größe 東京 \n\n 12"
        assert sum(sizes[i] for i in encoding.encode_ordinary(text)) == len(text.encode())
        assert sizes[encoding.eot_token] == 0 and len(sizes) == encoding.n_vocab and sizes.count(0) == 1
