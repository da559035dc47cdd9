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
from texts import ODD_TEXTS

from pipelines.text import columns, encode
from pipelines.text.columns import Batches, TextBatch, batch_of, packed
from pipelines.text.encode import (
    Encoder,
    encoder_name,
    may_differ,
    several_encoder,
    split_at_long_spaces,
    token_batches,
)
from pipelines.text.tokenizer import tokenizer

CHARACTERS = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


@pytest.fixture
def gpt2(shared_data: Path) -> tiktoken.Encoding:
    return tokenizer("gpt2")


def corpus(shared_data: Path, documents: int) -> list[str]:
    return pq.read_table(shared_data / "corpus" / "000_00000.parquet")["text"].to_pylist()[:documents]


def batches(texts: Iterable[str]) -> Batches:
    yield from packed((text, False) for text in texts)


def one_batch(*texts: str) -> TextBatch:
    return batch_of([text.encode() for text in texts])


def rows(encoding: tiktoken.Encoding, texts: Iterable[str]) -> list[list[int]]:
    """The ids of each document."""
    found = []
    for batch in token_batches(Encoder(encoding), batches(texts)):
        assert batch.tokens.dtype == np.uint16
        found += [row.tolist() for row in np.split(batch.tokens, batch.starts[1:])]
    return found


@pytest.mark.parametrize("fast", [False, True])
def test_a_stream_is_end_of_text_and_encode_ordinary_of_every_document_in_order(
    gpt2: tiktoken.Encoding, shared_data: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(columns, "BATCH_BYTES", 100_000)
    if not fast:
        monkeypatch.setattr(encode, "has_fast_encoder", lambda encoding: False)
    texts = corpus(shared_data, 150) + ODD_TEXTS + ["one<|endoftext|>two", "of Unicode 17: \u088f's \U0002b73a'll"]
    expected = [[50_256, *gpt2.encode_ordinary(text)] for text in texts]
    assert rows(gpt2, iter(texts)) == expected


def test_a_long_document_has_its_tokens_though_it_is_encoded_in_pieces(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "LONG_BYTES", 20)

    @settings(max_examples=40, deadline=None)
    @given(words=st.lists(st.text("ab Z1'sl\u088f\u00e9\n.", max_size=12), max_size=60), before=st.text(max_size=5))
    def check(words: list[str], before: str) -> None:
        text = " ".join(words)
        texts = [before, text, "", f"{text} and {text}", text + before]
        assert rows(gpt2, texts) == [[50_256, *gpt2.encode_ordinary(one)] for one in texts]

    check()


def test_gpt2s_text_is_encoded_by_the_fast_library_and_other_text_by_tiktoken(gpt2: tiktoken.Encoding) -> None:
    assert encoder_name(gpt2).startswith("gigatoken ")
    assert encoder_name(tokenizer("bytes")).startswith("tiktoken ")


@pytest.mark.parametrize("around", ["{}'s ", "a{}1 ", " {}!\n"])
def test_both_libraries_agree_around_every_code_point_that_is_not_left_to_tiktoken(
    gpt2: tiktoken.Encoding, around: str
) -> None:
    fast = Encoder(gpt2).fast()
    texts = [around.replace("{}", one) for one in CHARACTERS]
    different = set(may_differ(one_batch(*texts)))
    same = [text for number, text in enumerate(texts) if number not in different]
    assert len(same) > 0.95 * len(texts)
    for start in range(0, len(same), 8192):
        block = "".join(same[start : start + 8192])
        assert np.array_equal(fast.encode(block), gpt2.encode_to_numpy(block))


def test_the_libraries_differ_somewhere_so_the_exception_is_needed(gpt2: tiktoken.Encoding) -> None:
    text = "\u088f's"
    assert may_differ(one_batch("a", text)) == [1]
    assert Encoder(gpt2).fast().encode(text).tolist() != gpt2.encode_ordinary(text)
    assert rows(gpt2, [text]) == [[50_256, *gpt2.encode_ordinary(text)]]


def test_several_texts_have_tiktokens_ids(gpt2: tiktoken.Encoding) -> None:
    texts = ["", "a b", "\u088f's", "x\ud800", " \n"]
    encode_several = several_encoder(gpt2)
    assert [ids.tolist() for ids in encode_several(texts)] == gpt2.encode_ordinary_batch(texts)
    assert encode_several([]) == []


def test_both_libraries_give_the_same_ids_of_sample_text(gpt2: tiktoken.Encoding, shared_data: Path) -> None:
    texts = corpus(shared_data, 400)
    assert rows(gpt2, texts) == [[50_256, *gpt2.encode_ordinary(text)] for text in texts]


def test_both_libraries_agree_on_random_texts(gpt2: tiktoken.Encoding) -> None:
    fast = Encoder(gpt2)
    pieces = st.sampled_from(
        [" ", "  ", "\n", "\t", "'", "'s", "'LL", "<|endoftext|>", "\u3000", "\x85", "\u200b", "½"]
    )

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.one_of(st.text(max_size=8), pieces), max_size=30).map("".join))
    def check(text: str) -> None:
        ids, bounds = fast.encode(one_batch(text))
        assert ids.tolist() == encode.encode(gpt2, text).tolist() and bounds.tolist() == [0, len(ids)]

    check()


def test_lone_surrogates_become_the_replacement_character_and_pairs_become_one(gpt2: tiktoken.Encoding) -> None:
    for encoding in (tokenizer("bytes"), gpt2):
        (row,) = rows(encoding, ["a\ud800b\ud83d\ude00"])
        assert encoding.decode(row[1:]) == "a\ufffdb😀"


@pytest.mark.parametrize("fast", [False, True])
def test_a_million_spaces_before_a_word_do_not_exhaust_the_regex(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    if not fast:
        monkeypatch.setattr(encode, "has_fast_encoder", lambda encoding: False)
    spaces = " " * 1_200_000
    (row,) = rows(gpt2, [f"see {spaces}word\n{spaces}"])
    assert gpt2.decode(row[1:]) == f"see {spaces}word\n{spaces}"


def test_cutting_long_spaces_changes_no_token(gpt2: tiktoken.Encoding) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet=" \n\t\r\u3000\x1c\x85ab1'.s", max_size=40))
    def check(document: str) -> None:
        parts = split_at_long_spaces(document, longest=2)
        assert "".join(parts) == document
        apart = [token for part in parts for token in gpt2.encode_ordinary(part)]
        assert apart == gpt2.encode_ordinary(document)

    check()
    assert split_at_long_spaces("a    b", longest=2) == ["a   ", " b"]
