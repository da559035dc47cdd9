"""Promises of encoding: tiktoken's ids for every text, whichever library makes them."""

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import ODD_TEXTS, FourFiles

from pipelines.text import columns, encode, opened, parts
from pipelines.text.columns import Batches, TextBatch, batch_of, packed
from pipelines.text.encode import (
    EncodersDiffer,
    FastEncoder,
    encoder_name,
    may_differ,
    several_encoder,
    split_at_long_spaces,
    token_stream,
)
from pipelines.text.parts import finished_part, make_parts
from pipelines.text.tokenizer import tokenizer
from trainer.shards import read_shard

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


def rows(encoding: tiktoken.Encoding, texts: Iterable[str], threads: int = 1, **options: Any) -> list[list[int]]:
    """The ids of each document."""
    found = []
    for batch in token_stream(encoding, batches(texts), threads, **options):
        assert batch.tokens.dtype == np.uint16
        found += [row.tolist() for row in np.split(batch.tokens, batch.starts[1:])]
    return found


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("threads", [1, 5])
def test_a_stream_is_end_of_text_and_encode_ordinary_of_every_document_in_order(
    gpt2: tiktoken.Encoding, shared_data: Path, monkeypatch: pytest.MonkeyPatch, threads: int, reference: bool
) -> None:
    monkeypatch.setattr(columns, "BATCH_BYTES", 100_000)
    texts = corpus(shared_data, 150) + ODD_TEXTS + ["one<|endoftext|>two", "of Unicode 17: \u088f's \U0002b73a'll"]
    expected = [[50_256, *gpt2.encode_ordinary(text)] for text in texts]
    assert rows(gpt2, iter(texts), threads, reference=reference) == expected


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
    assert encoder_name(gpt2, reference=True).startswith("tiktoken ")
    assert encoder_name(tokenizer("bytes")).startswith("tiktoken ")


@pytest.mark.parametrize("around", ["{}'s ", "a{}1 ", " {}!\n"])
def test_both_libraries_agree_around_every_code_point_that_is_not_left_to_tiktoken(
    gpt2: tiktoken.Encoding, around: str
) -> None:
    fast = FastEncoder(gpt2)._encoder()
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
    assert FastEncoder(gpt2)._encoder().encode(text).tolist() != gpt2.encode_ordinary(text)
    assert rows(gpt2, [text]) == [[50_256, *gpt2.encode_ordinary(text)]]


def test_several_texts_have_tiktokens_ids_and_tiktoken_takes_over_after_a_difference(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", "a b", "\u088f's", "x\ud800", " \n"]
    expected = gpt2.encode_ordinary_batch(texts)
    encode_several = several_encoder(gpt2, threads=2)
    assert [ids.tolist() for ids in encode_several(texts)] == expected and encode_several([]) == []

    def differ(*_: object) -> None:
        raise EncodersDiffer

    monkeypatch.setattr(FastEncoder, "_compare", differ)
    assert [ids.tolist() for ids in encode_several(texts)] == expected
    monkeypatch.setattr(FastEncoder, "encode", None)  # it is asked no more
    assert [ids.tolist() for ids in encode_several(texts)] == expected


def test_both_libraries_agree_on_random_texts(gpt2: tiktoken.Encoding) -> None:
    fast = FastEncoder(gpt2)
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


@pytest.mark.parametrize("reference", [False, True])
def test_a_million_spaces_before_a_word_do_not_exhaust_the_regex(gpt2: tiktoken.Encoding, reference: bool) -> None:
    spaces = " " * 1_200_000
    (row,) = rows(gpt2, [f"see {spaces}word\n{spaces}"], reference=reference)
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


def test_a_stream_reads_only_a_few_batches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BATCH_BYTES", 100)
    taken = itertools.count()
    texts = ("x" * 50 for _ in taken)  # endless
    stream = token_stream(tokenizer("bytes"), batches(texts), threads=2)
    assert [len(next(stream).tokens) for _ in range(5)] == [102] * 5
    stream.close()
    assert next(taken) <= 10 + 2 * (2 * 2 + opened.BATCHES_AHEAD)


def test_a_full_cache_is_given_up_without_a_change_of_ids(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CACHE_SECONDS", 0.0)
    fast, text = FastEncoder(gpt2), "some words, again and again"
    encoders = set()
    for _ in range(3):
        ids, _ = fast.encode(one_batch(text))
        assert ids.tolist() == gpt2.encode_ordinary(text)
        encoders.add(id(fast._of_thread.encoder))
    assert fast._of_thread.seconds > 0


def test_after_the_first_difference_tiktoken_encodes_from_the_last_stored_shard_on_and_receipts_say_so(
    gpt2: tiktoken.Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BATCH_TEXTS", 1)
    monkeypatch.setattr(parts.os, "cpu_count", lambda: 1)
    (tmp_path / "text").mkdir()
    files = FourFiles(tmp_path / "text")
    config = files.config.model_copy(update={"tokenizer": "gpt2", "parts": 1, "shard_tokens": 1024, "max_tokens": None})

    def made(name: str) -> tuple[list[list[int]], list[str | None], list[str]]:
        """The tokens of all shards, the libraries that encoded them, and the notes on the way."""
        notes: list[str] = []
        job = files.job(range(1), tmp_path / name, config=config, note=notes.append)
        list(make_parts(job))
        receipts = finished_part(job.store, job.plan, 0) or []
        shards = [read_shard(tmp_path / name / job.plan.prefix / one.file.key).tolist() for one in receipts]
        return shards, [one.encoder for one in receipts], notes

    sound = made("sound")
    encoder = FastEncoder(gpt2)._encoder()

    class Erring:
        def encode_batch(self, texts: Any, parallel: bool) -> Any:
            return encoder.encode_batch([text.replace(b"2", b"7") for text in texts], parallel=parallel)

    def erring(self: FastEncoder) -> Any:
        self._of_thread.seconds = 0.0
        return Erring()

    monkeypatch.setattr(FastEncoder, "_encoder", erring)
    wrong = made("wrong")
    assert wrong[0] == sound[0] and len(sound[0]) == 8
    fast, reference = encoder_name(gpt2), encoder_name(gpt2, reference=True)
    assert (set(sound[1]), sound[2]) == ({fast}, [])
    assert wrong[1] == [fast] * 3 + [reference] * 5  # the third text begins in the fourth shard
    assert [note for note in wrong[2] if "gave other ids than tiktoken" in note]


@pytest.mark.parametrize("texts", [["two words"], ["", "\u088f", "two words " * 10_000]])
def test_a_difference_in_any_batch_is_an_error_of_the_stream(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    monkeypatch.setattr(encode, "encode", lambda encoding, text: np.array([1], np.uint32))
    with pytest.raises(EncodersDiffer, match="gave other ids than tiktoken"):
        rows(gpt2, texts)
