"""Texts to token ids: by gigatoken where it gives tiktoken's ids, else by tiktoken.

gigatoken (https://github.com/marcelroed/gigatoken) encodes GPT-2's BPE some 25 times as fast as tiktoken, which is the
reference. Both were compared over all code points: their ids differ only around the characters that Unicode 17 added,
which gigatoken knows and tiktoken does not, so texts with these go to tiktoken.
"""

import base64
import functools
import itertools
import pickle
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run.text.documents import utf8
from pipelines.run.text.tokenizer import HUB_NAME
from trainer.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    Ids = np.ndarray[tuple[int], np.dtype[np.uint32]]

# gigatoken keeps every word that it has met. New words take the time, so time bounds its memory: random words
# added 90 MB a second, the words of a Wikipedia less than 10.
CACHE_SECONDS = 8.0

# The UTF-8 of all code points around which the two differ, and of some near them. tests/run/text/test_encode.py
# compares all code points. Most texts lack the first bytes, whose search is fast. One pattern for all three takes
# five times as long.
DIFFERENT = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e-\xb1]"),
    b"\xf0": re.compile(rb"\xf0[\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3]"),
}


# Of a document, which is encoded in parts, by several threads: an encoder takes several times the size of a part.
LONG_BYTES = 4 << 20
HUB_BYTES = 1 << 20  # the same for `tokenizers`, which takes 120 times its size
WORD_BYTES = 28 << 20  # of a document without a place to cut, at most: one word takes 40 times its size
# Where the patterns of GPT-2, GPT-4, Llama 3 and Qwen begin a new word: at a space behind anything but white space
# (no white space has these bytes), and at a comma or full stop behind a Chinese character.
CUT = re.compile(
    rb"(?:[A-Za-z0-9,.;]|[\xc3-\xdf][\x80-\xbf]|[\xe0\xe4-\xed][\x80-\xbf]{2})(?= )"
    rb"|[\xe5-\xe9][\x80-\xbf]{2}(?=\xe3\x80\x82|\xef\xbc\x8c)"
)
# GPT-2's also behind an ASCII letter or digit, but for the apostrophe of "it's" and for what may go on with the word.
GPT2_CUT = re.compile(CUT.pattern + rb"|[A-Za-z0-9](?=[\x00-&(-/:-@\[-`{-\x7f])")


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of some consecutive documents, each of which begins with <|endoftext|>."""

    tokens: "np.ndarray[Any, Any]"  # (n,), uint16; uint32 for a vocabulary above 65,536 ids
    starts: "np.ndarray[Any, np.dtype[np.int64]]"  # (documents,): where each begins

    def place(self, at: int) -> tuple[int, int]:
        """The document of token `at`, counted from the batch's first, and the token's number in it."""
        if at == len(self.tokens):
            return len(self.starts), 0
        document = int(self.starts.searchsorted(at, side="right")) - 1
        return document, at - int(self.starts[document])


def has_fast_encoder(encoding: "tiktoken.Encoding") -> bool:
    """Whether gigatoken knows the tokenizer."""
    return not encoding.name.startswith(("bytes", HUB_NAME))


class Encoder:
    """The tokens of a tokenizer, by gigatoken if it knows the tokenizer. For one thread, which has others encode parts
    of a long document if `threads` is more than 1: the libraries work without Python's lock.

    Another process loads tiktoken's encoding only for a text that needs it.
    """

    def __init__(self, encoding: "tiktoken.Encoding") -> None:
        from trainer.data.shards import token_dtype

        self.eot, self.dtype, self._pickled = encoding.eot_token, token_dtype(encoding.n_vocab), pickle.dumps(encoding)
        hub = encoding.name.startswith(HUB_NAME)
        self._part_bytes, self._cut = HUB_BYTES if hub else LONG_BYTES, CUT if hub else GPT2_CUT
        self._cuts = getattr(encoding, "has_known_words", True)
        self.ranks = _rank_file(encoding) if has_fast_encoder(encoding) else None  # for gigatoken
        self._fast: Any = None  # gigatoken's encoder; it knows no special tokens
        self._seconds = 0.0  # of work since it was made
        self.threads = 1

    @functools.cached_property
    def encoding(self) -> "tiktoken.Encoding":
        return pickle.loads(self._pickled)  # noqa: S301  (made above)

    def tokens(self, documents: Sequence[bytes]) -> TokenBatch:
        """The tokens of documents, each behind <|endoftext|>. A literal "<|endoftext|>" inside a text is ordinary.

        UserError for a document that cannot be cut and is too long."""
        import numpy as np

        if len(documents) == 1 and len(documents[0]) > self._part_bytes:
            tokens, end = np.empty(len(documents[0]) + 1, self.dtype), 1  # a token has a byte at least
            tokens[0] = self.eot
            parts = parts_of(documents[0], self._part_bytes, self._cut if self._cuts else None)
            if self.ranks is not None:
                self.fast()  # else each thread would make one
            with ThreadPoolExecutor(self.threads, "encode") as threads:
                while several := list(itertools.islice(parts, self.threads)):
                    for ids, _ in threads.map(self.encode, [[part] for part in several]):
                        tokens[end : end + len(ids)] = ids
                        end += len(ids)
            return TokenBatch(tokens[:end], np.zeros(1, np.int64))
        ids, bounds = self.encode(documents)
        tokens = np.empty(len(ids) + len(documents), self.dtype)
        starts = bounds[:-1] + np.arange(len(documents))
        tokens[starts] = self.eot
        for start, first, end in zip(starts.tolist(), bounds.tolist(), bounds[1:].tolist(), strict=False):
            tokens[start + 1 : start + 1 + end - first] = ids[first:end]
        return TokenBatch(tokens, starts)

    def encode(self, documents: Sequence[bytes]) -> "tuple[Ids, np.ndarray]":
        """The ids of all documents, one behind the other, and their bounds (documents + 1,)."""
        import numpy as np

        if self.ranks is None:
            rows = [encode(self.encoding, document.decode()) for document in documents]
            return np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        started = time.thread_time()
        encoded = self.fast().encode_batch(list(documents), parallel=False)
        self._seconds += time.thread_time() - started
        ids, bounds = np.asarray(encoded.layout.content.data), np.asarray(encoded.layout.offsets.data)
        different = {n: encode(self.encoding, one.decode()) for n, one in enumerate(documents) if may_differ(one)}
        if not different:
            return ids, bounds
        rows = [different[n] if n in different else ids[bounds[n] : bounds[n + 1]] for n in range(len(documents))]
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    def rows(self, texts: Sequence[str]) -> "list[Ids]":
        """The ids of each of several texts."""
        ids, bounds = self.encode([utf8(text) for text in texts])
        return [ids[begin:end] for begin, end in itertools.pairwise(bounds.tolist())]

    def fast(self) -> Any:
        """gigatoken's encoder; a new one with an empty cache where it has become large."""
        if (fast := self._fast) is None or self._seconds > CACHE_SECONDS:
            from gigatoken.gigatoken_rs import BPETokenizer

            self._fast = fast = None  # its memory first
            with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
                Path(file.name).write_bytes(self.ranks or b"")
                self._fast, self._seconds = (fast := BPETokenizer.from_tiktoken(file.name, "gpt2", None)), 0.0
        return fast  # not self._fast, which another thread may renew


def parts_of(document: bytes, part_bytes: int, cut: "re.Pattern[bytes] | None") -> Iterator[bytes]:
    """Parts of about `part_bytes` of a document, cut where that does not change its tokens; None: nowhere.

    UserError if more than WORD_BYTES have no place to cut.
    """
    first = 0
    while cut and (found := cut.search(document, first + part_bytes, first + part_bytes + WORD_BYTES)):
        yield document[first : found.end()]
        first = found.end()
    if len(document) - first > part_bytes + WORD_BYTES:
        raise UserError(
            f"tokens.source: a document of {len(document):,} bytes cannot be encoded in parts: from byte {first:,} on "
            f"it has no space behind a word in {WORD_BYTES:,} bytes, or the tokenizer's pre-tokenizer is not GPT-2's, "
            f"Llama 3's or Qwen's: {document[:40].decode(errors='ignore').strip()!r}…; split or remove it"
        )
    yield document[first:]


@functools.lru_cache(maxsize=1)
def _rank_file(encoding: "tiktoken.Encoding") -> bytes:
    """The ranks in tiktoken's file format: a line for each token, in base64, with its rank."""
    tokens = (encoding.decode_single_token_bytes(rank) for rank in range(encoding.eot_token))
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def may_differ(document: bytes) -> bool:
    """Whether the two libraries may give other ids."""
    return any(first in document and pattern.search(document) for first, pattern in DIFFERENT.items())


def encode(encoding: "tiktoken.Encoding", text: str) -> "Ids":
    """The ids of tiktoken's `encode_ordinary` as an array: 40 bytes a token less than a list of ints."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError as error:  # about 1M spaces before a word exhaust the stack of its regular expressions
        raise UserError(f"tiktoken cannot encode a document ({error}): {text[:40].strip()!r}…; remove it") from error
