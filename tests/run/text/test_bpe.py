"""Promises of a tokenizer of one's own: the same file every time, the same ids everywhere."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import yaml
from pipeline_runs import REPOSITORY, Project
from texts import ODD_TEXTS

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.stage import Work, plans_of
from pipelines.run.stages import tokenize
from pipelines.run.text.bpe import text_sample, train_bpe
from pipelines.run.text.encode import Encoder
from pipelines.run.text.tokenizer import (
    check_tokenizer,
    encoding_of,
    own_tokenizer,
    store_tokenizer,
    tokenizer_files,
)
from pipelines.store.layout import TOKENIZER
from pipelines.store.manifest import fetch
from trainer.base.store import LocalStore
from trainer.config.errors import UserError
from trainer.data.shards import read_shard

IDS = 700


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(REPOSITORY.glob("pipelines/run/text/*.py")):
        (folder / f"{path.stem}.txt").write_text(path.read_text() + "größer 東京 <|endoftext|>\n")
    return folder


@pytest.fixture(scope="module")
def trained(text: Path) -> bytes:
    return train_bpe(text_sample(TokensConfig(source=f"{text}/*.txt"), 10**6), IDS)


@pytest.fixture
def recipe(trained: bytes, text: Path, tmp_path: Path) -> Recipe:
    (tmp_path / "own.json").write_bytes(trained)
    return recipe_with(tmp_path / "own.json", sha256(trained).hexdigest(), text)


def recipe_with(file: Path, digest: str, text: Path, vocab_size: int = IDS) -> Recipe:
    tokenizer = f"tokens.tokenizer={{file: '{file}@sha256:{digest}'}}"
    return load_recipe("smoke", [f"tokens.source={text}/*.txt", tokenizer, f"model.vocab_size={vocab_size}"])


def test_the_same_text_gives_the_same_tokenizer_in_another_process(trained: bytes, text: Path) -> None:
    code = f"""
import sys
from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.text.bpe import text_sample, train_bpe
sys.stdout.buffer.write(train_bpe(text_sample(TokensConfig(source={f"{text}/*.txt"!r}), 10**6), {IDS}))
"""
    again = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=True)
    assert again.stdout == trained


def test_transformers_tiktoken_and_gigatoken_give_an_own_tokenizer_the_same_ids(
    trained: bytes, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    encoding = own_tokenizer(trained, "it")
    assert encoding.n_vocab == IDS and encoding.eot_token == IDS - 1
    for name, content in tokenizer_files(encoding, 64).items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == theirs.bos_token_id == IDS - 1 and len(theirs) == IDS
    texts = [*ODD_TEXTS, *(path.read_text().replace("<|endoftext|>", "") for path in sorted(text.glob("*.txt")))]
    ours = [encoding.encode_ordinary(one) for one in texts]
    assert theirs(texts)["input_ids"] == ours
    assert [theirs.decode(ids) for ids in ours] == texts
    ids, bounds = Encoder(encoding).encode([one.encode() for one in texts])
    assert ids.tolist() == [i for row in ours for i in row] and bounds.tolist() == list(
        itertools.accumulate(map(len, ours), initial=0)
    )


def test_the_sample_is_the_beginning_of_the_text_and_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 50_000)
    (tmp_path / "b.txt").write_text("b" * 50_000)
    sample = list(text_sample(TokensConfig(source=f"{tmp_path}/*.txt"), 12_000))
    assert sample == ["a" * 10_000, "b" * 2_000]
    with pytest.raises(UserError, match=r"--vocab-size 900: the sample of the text gives 27\d ids"):
        train_bpe(sample, 900)


def test_the_sha256_of_the_file_decides_the_fingerprint_and_its_path_does_not(
    recipe: Recipe, text: Path, tmp_path: Path
) -> None:
    own = plans_of(recipe)["tokenize"]
    moved = recipe_with(tmp_path / "elsewhere.json", recipe.tokens.tokenizer.digest, text)  # type: ignore[union-attr]
    assert plans_of(moved)["tokenize"].fingerprint == own.fingerprint
    assert plans_of(recipe_with(tmp_path / "own.json", "0" * 64, text))["tokenize"].fingerprint != own.fingerprint
    assert plans_of(load_recipe("smoke"))["tokenize"].identity["tokenizer"] == "bytes"  # as ever


def test_the_ids_of_a_large_vocabulary_of_ones_own_go_into_uint32_shards(
    work: Callable[[str], Work], tmp_path: Path
) -> None:
    letters = set(b"abcdef")
    pairs = sorted(itertools.product(range(256), repeat=2), key=letters.issuperset)  # those of letters get the last ids
    ranks = {bytes(token): i for i, token in enumerate([*((byte,) for byte in range(256)), *pairs])}
    encoding = encoding_of("own", ranks)
    content = tokenizer_files(encoding, 0)[TOKENIZER]
    (tmp_path / "own.json").write_bytes(content)
    (tmp_path / "a.txt").write_text("größer abcdef 東京 " * 100)
    mine, ids = work("tokenize"), 65_793
    own = recipe_with(tmp_path / "own.json", sha256(content).hexdigest(), tmp_path, ids)
    mine.recipe = own.model_copy(update={"tokens": own.tokens.model_copy(update={"shard_tokens": 1000})})
    mine.plan = plans_of(mine.recipe)["tokenize"]
    store_tokenizer(mine.recipe, mine.plan, mine.store)
    built = tokenize.build(mine)
    shards = [file for file in built.files if file.name.endswith(".bin")]
    found = [read_shard(fetch(mine.store, mine.plan.prefix, file, tmp_path / "cache")) for file in shards]
    assert {tokens.dtype for tokens in found} == {np.dtype("<u4")}
    expected = [ids - 1, *encoding.encode_ordinary("größer abcdef 東京 " * 100)]
    assert sorted(np.concatenate(found).tolist()) == sorted(expected) and sum(i > 65_535 for i in expected) > 200
    assert max(built.facts["max_ids"].values()) == ids - 1


@pytest.mark.parametrize(
    ("content", "digest", "vocab_size", "message"),
    [
        (None, None, IDS, r"own.json: cannot be read \(No such file or directory\)"),
        (b"same", "0" * 64, IDS, r"its sha256 is .*, and the recipe has 0000"),
        (b"same", None, IDS - 1, r"model.vocab_size 699 is smaller than the 700 ids of tokens.tokenizer 'own, sha256 "),
        (b"{", None, IDS, r"own.json: not a tokenizer.json that can be used \(JSONDecodeError"),
    ],
)
def test_a_wrong_tokenizer_file_is_refused_in_a_line(
    trained: bytes, text: Path, tmp_path: Path, content: bytes | None, digest: str | None, vocab_size: int, message: str
) -> None:
    content = trained if content == b"same" else content
    if content is not None:
        (tmp_path / "own.json").write_bytes(content)
    recipe = recipe_with(tmp_path / "own.json", digest or sha256(content or b"").hexdigest(), text, vocab_size)
    with pytest.raises(UserError, match=message) as error:
        check_tokenizer(recipe, plans_of(recipe)["tokenize"], LocalStore(tmp_path / "store"))
    assert "\n" not in str(error.value)


def test_far_more_rows_than_ids_are_reported(recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wide = recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": 2 * IDS})})
    check_tokenizer(wide, plans_of(wide)["tokenize"], LocalStore(tmp_path / "store"))
    assert "model.vocab_size 1400: the tokenizer has 700 ids" in caplog.text


@pytest.mark.slow
def test_a_run_with_its_own_tokenizer_is_exported_with_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    project = Project(tmp_path / "project")
    values = yaml.safe_load((project.folder / "tiny.yaml").read_text())
    values["train"] |= {"max_steps": 4, "warmup_steps": 1, "val_every": None}
    values["tokens"] |= {"max_tokens": 20_000, "val_shards": 2}
    values["evaluate"] |= {"val_tokens": 2048}
    values["export"] |= {"formats": ["hf", "gguf"]}
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    project.run("tokenizer", "train", "tiny.yaml", "--vocab-size", "280", "--out", "own.json")
    content = (project.folder / "own.json").read_bytes()
    values["tokens"]["tokenizer"] = f"own.json@sha256:{sha256(content).hexdigest()}"
    values["model"]["vocab_size"] = 280
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    project.run("run", "tiny.yaml")
    (project.folder / "own.json").unlink()
    assert project.path("tokenize", "tokenizer.json").read_bytes() == content
    facts = project.artifact("evaluate").facts
    encoding = own_tokenizer(content, "it")
    assert 0 < facts["val/bits_per_byte"] < facts["val/loss"] / np.log(2)  # its tokens have several bytes
    theirs = AutoTokenizer.from_pretrained(project.path("export", "tokenizer.json").parent)
    line = "the store keeps what größer ist"
    assert theirs(line)["input_ids"] == encoding.encode_ordinary(line)
    assert project.run("sample", "tiny", "--prompt", "the ", "--tokens", "5").stdout.startswith("the ")
