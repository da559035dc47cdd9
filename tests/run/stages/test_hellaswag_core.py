"""The measures of an evaluation while a run trains."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from core_bundle import make_bundle
from tiny_models import model_of
from trainer_runs import ALONE

from pipelines.recipe.loader import load_recipe
from pipelines.run.stages import hellaswag_core
from pipelines.run.stages.hellaswag_core import core_identity, core_tasks, evaluation_in_training
from pipelines.run.text.tokenizer import token_bytes, tokenizer
from trainer.config.errors import UserError
from trainer.eval.core import TASKS, read_items


def test_an_evaluation_while_training_scores_core_task_by_task(tmp_path: Path) -> None:
    changes = [f"evaluate.core={make_bundle(tmp_path / 'bundle')}", "evaluate.every=10", "tokens.tokenizer=bytes"]
    recipe = load_recipe("smoke", changes)
    assert recipe.benchmark_tokens > 10 * load_recipe("gpt2-124m").benchmark_tokens > 0  # so the plan counts it
    evaluation = evaluation_in_training(recipe, lambda: tokenizer("bytes"), tmp_path / "cache", ALONE)
    model = model_of(recipe.model.model_copy(update={"n_layer": 1, "vocab_size": 257}))
    checks: list[int] = []
    scores = evaluation.scores(model, ALONE, lambda: checks.append(1))
    assert set(scores) == {"eval/core", *(f"core/{task}" for task in TASKS)} and len(checks) >= 22
    assert scores["eval/core"] == pytest.approx(sum(scores[f"core/{task}"] for task in TASKS) / 22)


def test_a_copy_of_hellaswag_is_fetched_again_once_it_was_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"ctx": "a", "endings": ["b", "c"], "label": 1}]
    library = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setattr(hellaswag_core, "datasets_library", lambda: library)
    for overwritten in (b"", b'{"ctx": "x", "endings": ["y"], "label": 0}\n'):
        for fetched in (rows, []):
            monkeypatch.setattr(library, "load_dataset", lambda *_, found=fetched, **__: found)
            (item,) = hellaswag_core.hellaswag_items("hf://datasets/Rowan/hellaswag", tmp_path)
            assert (item.context, item.endings, item.label) == ("a", ("b", "c"), 1)
        (copy,) = tmp_path.iterdir()
        copy.write_bytes(overwritten)


def test_a_hub_that_cannot_be_reached_is_named_whatever_its_client_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = httpx.Client()
    client.close()  # by huggingface_hub, before it asks again
    library = SimpleNamespace(load_dataset=lambda *_, **__: client.get("http://127.0.0.1:9"))
    monkeypatch.setattr(hellaswag_core, "datasets_library", lambda: library)
    with pytest.raises(UserError, match=r"\(ConnectionError: the Hub cannot be reached\); name a jsonl file"):
        hellaswag_core.hellaswag_items("hf://datasets/Rowan/hellaswag", tmp_path, 0.01)


def test_tokens_have_the_bytes_of_their_text_and_end_of_text_has_none(shared_data: Path) -> None:
    for name in ("bytes", "gpt2"):
        encoding = tokenizer(name)
        sizes, text = token_bytes(encoding), "don't Größe 東京 \n\n 12"
        assert sum(sizes[i] for i in encoding.encode_ordinary(text)) == len(text.encode())
        assert sizes[encoding.eot_token] == 0 and len(sizes) == encoding.n_vocab and sizes.count(0) == 1


# --- CORE's bundle

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"hf://datasets/org/bundle@{COMMIT}"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache in a folder, without network."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub (pip)")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_dataset_that_was_fetched_once_is_used_without_network(tmp_path: Path, hub_cache: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    snapshot = hub_cache / "datasets--org--bundle" / "snapshots" / COMMIT
    shutil.copytree(bundle, snapshot)
    shutil.copytree(bundle, snapshot / "inside")
    assert (
        core_identity(SOURCE)
        == core_identity(str(bundle))
        == core_identity(f"hf://datasets/org/bundle/inside@{COMMIT}")
    )
    assert sum(len(read_items(task)) for task in core_tasks(SOURCE)) == 22 * 5


def test_a_dataset_that_is_not_here_is_named_without_network(hub_cache: Path) -> None:
    with pytest.raises(UserError, match=rf"^evaluate\.core: {SOURCE}: cannot be fetched from") as error:
        core_tasks(SOURCE)
    assert "\n" not in str(error.value) and "or null to leave CORE out" in str(error.value)


@pytest.mark.parametrize(
    "source", ["hf://datasets/org/bundle", "hf://datasets/org/bundle@main", f"hf://datasets/org/b/../..@{COMMIT}"]
)
def test_a_dataset_without_a_commit_is_refused(source: str) -> None:
    with pytest.raises(
        UserError, match=r"^evaluate\.core: .*(40 hex digits|use hf://datasets/ORG/NAME@COMMIT, a path)"
    ):
        core_tasks(source)
