"""Promises of the tokenizer.json of a model on the Hub: its own ids, in training, in the export, and beside weights."""

import json
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from texts import CUT_TEXT, ODD_TEXTS, hub_file
from tokenizers import Tokenizer, normalizers

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import TokenizerFile
from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.stage import Work, plans_of
from pipelines.run.stages import tokenize
from pipelines.run.text import encode
from pipelines.run.text.encode import Encoder
from pipelines.run.text.tokenizer import check_tokenizer, own_tokenizer, store_tokenizer, tokenizer, tokenizer_files
from pipelines.run.weight_sources import check_sources, pinned
from trainer.base.store import LocalStore
from trainer.config.errors import UserError
from trainer.models.family import plain_model, section_of, to_hf

TEXTS = [
    *ODD_TEXTS,
    "I'LL pay 1234567 é\u0301 größer\r\n\r\n  東京",
    "a <|end_of_text|> b",
    "<think>x</think>",
    "\ud800",
]


def recipe_with(text: Path, value: Any, *changes: str) -> Recipe:
    return load_recipe(
        "smoke", [f"tokens.source={text}", f"tokens.tokenizer={value}", "model.vocab_size=450", *changes]
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("I'll pay 1234567 for größer things <|end_of_text|>\n" * 2000)
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_text_gets_the_ids_of_transformers_and_the_export_carries_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    body = hub_file(kind)
    encoding = pickle.loads(pickle.dumps(own_tokenizer(body, "it")))
    assert encoding.eot_token == Tokenizer.from_buffer(body).token_to_id(
        "<|end_of_text|>" if kind == "llama" else "<|endoftext|>"
    )
    config = section_of(
        {"family": "llama", "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 64, "vocab_size": encoding.n_vocab}
    )
    save_file(plain_model(config).state_dict(), tmp_path / "trained.safetensors")
    hf.write(Weights(tmp_path / "trained.safetensors", config, encoding, "tiny"), tmp_path, "float32")
    assert (tmp_path / "tokenizer.json").read_bytes() == body
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == theirs.pad_token_id == encoding.eot_token
    for one in TEXTS[:-1]:
        ids = encoding.encode_ordinary(one)
        assert ids == theirs(one, add_special_tokens=False, split_special_tokens=True)["input_ids"], one
        assert encoding.decode(ids) == (one if kind == "llama" else normalizers.NFC().normalize_str(one))
        assert encoding.eot_token not in ids
    rows = Encoder(encoding).rows(TEXTS)
    assert [row.tolist() for row in rows] == [encoding.encode_ordinary(one) for one in TEXTS]
    long, parts = " ".join([*TEXTS[:-1], CUT_TEXT]), []
    for size in range(1, 40):
        monkeypatch.setattr(encode, "HUB_BYTES", size)
        parts.append(Encoder(encoding).tokens([long.encode()]).tokens[1:].tolist())
    assert parts == [encoding.encode_ordinary(long)] * len(parts)
    monkeypatch.setattr(encode, "WORD_BYTES", 100)
    other = own_tokenizer(body.replace(b"Isolated", b"MergedWithNext"), "it")  # a word may hold a space
    with pytest.raises(UserError, match="cannot be encoded in parts: from byte 0 on .* pre-tokenizer is not GPT-2's"):
        Encoder(other).tokens([long.encode()])


def test_a_path_is_pinned_by_content_and_the_shards_have_its_ids(
    work: Callable[[str], Work], text: Path, tmp_path: Path
) -> None:
    (tmp_path / "llama.json").write_bytes(body := hub_file("llama"))
    mine = work("tokenize")
    changes = ("tokens.shard_tokens=4096", "tokens.max_tokens=null")
    mine.recipe = pinned(recipe_with(text, tmp_path / "llama.json", *changes), mine.store)
    own = mine.recipe.tokens.tokenizer
    assert isinstance(own, TokenizerFile) and own.digest == sha256(body).hexdigest()
    mine.plan = plans_of(mine.recipe)["tokenize"]
    assert mine.plan.identity["tokenizer"] == {"sha256": own.digest}
    check_tokenizer(mine.recipe, mine.plan, mine.store)
    store_tokenizer(mine.recipe, mine.plan, mine.store)
    (tmp_path / "llama.json").unlink()
    built = tokenize.build(mine)
    encoding = own_tokenizer(body, "it")
    assert built.facts["tokens"] == 1 + len(encoding.encode_ordinary(text.read_text()))
    other = recipe_with(text, f"{{file: 'x.json@sha256:{own.digest}', end_of_text: <|begin_of_text|>}}")
    assert plans_of(other)["tokenize"].fingerprint != mine.plan.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"type": "WordPiece"}}, "it is not a byte-level BPE"),
        ({"added_tokens": []}, r"it has no token <\|endoftext\|> or .*; name the one between documents"),
        ({"model": {"type": "BPE", "vocab": {"é\u1234": 0}, "merges": []}}, "KeyError"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}, "Exception|ValueError"),
        ([], "TypeError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(change: Any, message: str) -> None:
    body = json.dumps(json.loads(hub_file("qwen")) | change if change else []).encode()
    with pytest.raises(UserError, match=f"it.json: not a tokenizer.json that can be used \\(.*({message})") as error:
        own_tokenizer(body, "it.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        ("hf://Qwen/Qwen3-0.6B@main", [], r"write hf://Qwen/Qwen3-0.6B@ and the 40 hex digits"),
        ("qwen.json", ["export.formats=[hf, gguf]"], "export.formats: gguf cannot carry the tokenizer 'own, sha256 "),
        ("qwen.json", ["model.vocab_size=300"], "model.vocab_size 300 is smaller than the 40[0-9] ids"),
    ],
)
def test_a_recipe_that_cannot_use_the_file_is_refused(
    text: Path, tmp_path: Path, value: str, changes: list[str], message: str
) -> None:
    (tmp_path / "qwen.json").write_bytes(hub_file("qwen"))
    store = LocalStore(tmp_path / "store")
    with pytest.raises(UserError, match=message):
        recipe = pinned(recipe_with(text, value.replace("qwen.json", f"{tmp_path}/qwen.json"), *changes), store)
        check_tokenizer(recipe, plans_of(recipe)["tokenize"], store)


@pytest.mark.parametrize(("beside", "fits"), [("qwen", True), ("llama", False), ("bytes", False), (None, True)])
def test_weights_with_a_tokenizer_refuse_tokens_of_another(
    text: Path, tmp_path: Path, beside: str | None, fits: bool
) -> None:
    (tmp_path / "qwen.json").write_bytes(hub_file("qwen"))
    model = plain_model(recipe_with(text, tmp_path / "qwen.json").model)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(to_hf(model.state_dict(), model.config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf.hf_config(model.config, "float32", 0)))
    if beside:
        body = tokenizer_files(tokenizer("bytes"), 0)["tokenizer.json"] if beside == "bytes" else hub_file(beside)
        (folder / "tokenizer.json").write_bytes(body)
    store = LocalStore(tmp_path / "store")
    recipe = pinned(recipe_with(text, tmp_path / "qwen.json", f"train.init_from={folder}"), store)
    if fits:
        return check_sources(recipe, plans_of(recipe), store)
    with pytest.raises(
        UserError, match=r"its tokenizer.json has other ids than tokens.tokenizer 'own, .*; set tokens.tok"
    ):
        check_sources(recipe, plans_of(recipe), store)
