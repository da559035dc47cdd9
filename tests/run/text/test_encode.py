"""Promises of encoding: tiktoken's ids for every text, whichever library makes them."""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import MIXED_TEXTS, ODD_TEXTS, hub_file

from pipelines.run.text import documents, encode
from pipelines.run.text.documents import batches_of, utf8
from pipelines.run.text.encode import Encoder, has_fast_encoder, may_differ
from pipelines.run.text.tokenizer import own_tokenizer, tokenizer
from trainer.config.errors import UserError

CHARACTERS = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


@pytest.fixture
def gpt2(shared_data: Path) -> tiktoken.Encoding:
    return tokenizer("gpt2")


def corpus(shared_data: Path, documents: int) -> list[str]:
    return pq.read_table(shared_data / "corpus" / "000_00000.parquet")["text"].to_pylist()[:documents]


def rows(encoding: tiktoken.Encoding, texts: Iterable[str]) -> list[list[int]]:
    """The ids of each document."""
    found = []
    for batch in map(Encoder(encoding).tokens, batches_of(map(utf8, texts))):
        assert batch.tokens.dtype == np.uint16
        found += [row.tolist() for row in np.split(batch.tokens, batch.starts[1:])]
    return found


@pytest.mark.parametrize("fast", [False, True])
def test_a_stream_is_end_of_text_and_encode_ordinary_of_every_document_in_order(
    gpt2: tiktoken.Encoding, shared_data: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(documents, "BATCH_BYTES", 100_000)
    if not fast:
        monkeypatch.setattr(encode, "has_fast_encoder", lambda encoding: False)
    texts = (
        corpus(shared_data, 150)
        + ODD_TEXTS
        + ["one<|endoftext|>two", "of Unicode 17: \u088f's \U0002b73a'll", "a\ud800b\ud83d\ude00"]
    )
    expected = [[50_256, *gpt2.encode_ordinary(text)] for text in texts]
    assert rows(gpt2, texts) == expected


@pytest.mark.parametrize("name", ["gpt2", "bytes", "llama", "qwen"])
def test_threads_encode_the_parts_of_any_long_document_to_the_ids_of_the_whole(name: str, shared_data: Path) -> None:
    encoding = own_tokenizer(hub_file(name), name) if name in ("llama", "qwen") else tokenizer(name)
    encoder, cut = Encoder(encoding), 0
    encoder.threads = 3

    @settings(max_examples=300, derandomize=True)
    @given(MIXED_TEXTS, st.integers(1, 20))
    def check(text: str, size: int) -> None:
        nonlocal cut
        encoder._part_bytes = size
        whole = [encoding.eot_token, *encode.encode(encoding, text).tolist()]
        assert encoder.tokens([text.encode()]).tokens.tolist() == whole
        cut += len(list(encode.parts_of(text.encode(), size, encoder._cut))) > 3

    check()
    assert cut > 30


def test_a_document_that_cannot_be_cut_is_refused_before_it_takes_the_memory(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "LONG_BYTES", 100)
    monkeypatch.setattr(encode, "WORD_BYTES", 100)
    assert gpt2.decode(rows(gpt2, ["a " * 60 + "x" * 180])[0][1:]) == "a " * 60 + "x" * 180
    with pytest.raises(UserError, match="document of 302 bytes .* from byte 101 .* no space .* 'a a a"):
        rows(gpt2, ["a " * 60 + "x" * 182])


def test_gpt2s_text_is_encoded_by_the_fast_library_and_other_text_by_tiktoken(gpt2: tiktoken.Encoding) -> None:
    assert has_fast_encoder(gpt2) and not has_fast_encoder(tokenizer("bytes"))


@pytest.mark.parametrize("around", ["{}'s ", "a{}1 ", " {}!\n"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_both_libraries_agree_around_every_code_point_that_is_not_left_to_tiktoken(
    gpt2: tiktoken.Encoding, around: str, every: int
) -> None:
    fast = Encoder(gpt2).fast()
    texts = [around.replace("{}", one) for one in CHARACTERS[::every]]
    same = [text for text in texts if not may_differ(text.encode())]
    assert len(same) > 0.95 * len(texts)
    for start in range(0, len(same), 8192):
        block = "".join(same[start : start + 8192])
        assert np.array_equal(fast.encode(block), gpt2.encode_to_numpy(block))


def test_a_million_spaces_before_a_word_are_no_trouble_and_tiktoken_names_a_document_that_it_cannot_encode(
    gpt2: tiktoken.Encoding,
) -> None:
    spaces = " " * 1_200_000
    (row,) = rows(gpt2, [f"see {spaces}word\n{spaces}"])
    assert gpt2.decode(row[1:]) == f"see {spaces}word\n{spaces}"
    with pytest.raises(UserError, match="cannot encode a document .*: 'see'"):
        rows(gpt2, [f"see {spaces}word \u088f's"])
