"""Texts to token ids: by gigatoken where it gives tiktoken's ids, else by tiktoken.

gigatoken (https://github.com/marcelroed/gigatoken) encodes GPT-2's BPE some 25 times as fast as tiktoken, which is the
reference. Both were compared over all code points: their ids differ only around the characters that Unicode 17 added,
which gigatoken knows and tiktoken does not, so texts with these go to tiktoken.
"""

import base64
import functools
import importlib.util
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.text.columns import TextBatch, batch_of, utf8, without_surrogates

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    Ids = np.ndarray[tuple[int], np.dtype[np.uint32]]

COPY_IDS = 300  # a copy of so many ids takes the time of one step of a loop
# gigatoken keeps every word that it has met. New words take the time, so time bounds its memory: random words
# added 90 MB a second, the words of a Wikipedia less than 10.
CACHE_SECONDS = 8.0

LONG_BYTES = 1 << 20  # a longer document is encoded in pieces: text for tiktoken takes up to eight times its bytes
# Between two such words is always a border of tokens: GPT-2's pattern begins a word with the space before it.
BORDER = re.compile(rb"[A-Za-z](?= [A-Za-z])")

# The UTF-8 of all code points around which the two differ, and of some near them. tests/text/test_encode.py compares
# all code points. Most texts lack the first bytes, whose search is fast. One pattern for all three takes
# five times as long.
DIFFERENT = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e-\xb1]"),
    b"\xf0": re.compile(rb"\xf0[\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3]"),
}


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of some consecutive documents, each of which begins with <|endoftext|>."""

    tokens: "np.ndarray[Any, Any]"  # (n,), uint16; uint32 for a vocabulary above 65,536 ids
    starts: "np.ndarray[Any, np.dtype[np.int64]]"  # (documents,): where each begins
    text_bytes: int  # of UTF-8
    invalid: tuple[int, ...] = ()  # the documents in which U+FFFD stands for what was not valid

    def place(self, at: int) -> tuple[int, int]:
        """The document of token `at`, counted from the batch's first, and the token's number in it."""
        if at == len(self.tokens):
            return len(self.starts), 0
        document = int(self.starts.searchsorted(at, side="right")) - 1
        return document, at - int(self.starts[document])


def encoder_name(encoding: "tiktoken.Encoding") -> str:
    """The library and version that encodes."""
    library = "gigatoken" if has_fast_encoder(encoding) else "tiktoken"
    return f"{library} {version(library)}"


def has_fast_encoder(encoding: "tiktoken.Encoding") -> bool:
    """Whether gigatoken knows the tokenizer, and is installed."""
    return encoding.name != "bytes" and importlib.util.find_spec("gigatoken") is not None


def token_batches(encoder: "Encoder", batches: Iterable[TextBatch]) -> Iterator[TokenBatch]:
    """The tokens of all documents, in order. A literal "<|endoftext|>" inside a text is ordinary text."""
    return (with_ends_of_text(encoder.encoding, batch, *encoder.encode(batch)) for batch in batches)


def with_ends_of_text(encoding: "tiktoken.Encoding", texts: TextBatch, ids: "Ids", bounds: "np.ndarray") -> TokenBatch:
    """The ids of documents, with <|endoftext|> before each."""
    import numpy as np

    from trainer.data.shards import token_dtype

    tokens = np.empty(len(ids) + len(texts), token_dtype(encoding.n_vocab))
    starts = bounds[:-1] + np.arange(len(texts))
    if len(texts) * COPY_IDS > len(ids):
        tokens[:] = np.insert(ids, bounds[:-1], encoding.eot_token)
    else:
        tokens[starts] = encoding.eot_token
        for start, first, end in zip(starts.tolist(), bounds.tolist(), bounds[1:].tolist(), strict=False):
            tokens[start + 1 : start + 1 + end - first] = ids[first:end]
    return TokenBatch(tokens, starts, len(texts.content), texts.invalid)


class Encoder:
    """The ids of a tokenizer, by gigatoken if it knows the tokenizer. For one thread."""

    def __init__(self, encoding: "tiktoken.Encoding") -> None:
        self.encoding, self._is_fast = encoding, has_fast_encoder(encoding)
        self._fast: Any = None  # gigatoken's encoder; it knows no special tokens
        self._seconds = 0.0  # of work since it was made

    def encode(self, texts: TextBatch) -> "tuple[Ids, np.ndarray]":
        """The ids of all documents, one behind the other, and their bounds (documents + 1,)."""
        import numpy as np

        if not self._is_fast:
            rows = [encode(self.encoding, text) for text in texts.texts()]
            return np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        if int(np.diff(texts.bounds).max(initial=0)) > LONG_BYTES:
            pieces, first = in_pieces(texts)
            ids, bounds = self._encode(pieces)
            return ids, bounds[first]
        return self._encode(texts)

    def _encode(self, texts: TextBatch) -> "tuple[Ids, np.ndarray]":
        import numpy as np

        started = time.thread_time()
        documents = [texts.content[start:end] for start, end in itertools.pairwise(texts.bounds.tolist())]
        encoded = self.fast().encode_batch(documents, parallel=False)
        self._seconds += time.thread_time() - started
        ids, bounds = np.asarray(encoded.layout.content.data), np.asarray(encoded.layout.offsets.data)
        rows = {number: encode(self.encoding, texts.text(number)) for number in may_differ(texts)}
        if not rows:
            return ids, bounds
        pieces = [rows[n] if n in rows else ids[bounds[n] : bounds[n + 1]] for n in range(len(texts))]
        return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])

    def fast(self) -> Any:
        """gigatoken's encoder; a new one with an empty cache where it has become large."""
        if self._fast is None or self._seconds > CACHE_SECONDS:
            from gigatoken.gigatoken_rs import BPETokenizer

            self._fast = None  # its memory first
            with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
                Path(file.name).write_bytes(_rank_file(self.encoding))
                self._fast, self._seconds = BPETokenizer.from_tiktoken(file.name, "gpt2", None), 0.0
        return self._fast


def several_encoder(encoding: "tiktoken.Encoding") -> "Callable[[Sequence[str]], list[Ids]]":
    """A function that gives the ids of each of several texts."""
    encoder = Encoder(encoding)

    def encode_several(texts: Sequence[str]) -> "list[Ids]":
        if not texts:
            return []
        ids, bounds = encoder.encode(batch_of([utf8(text) for text in texts]))
        return [ids[begin:end] for begin, end in itertools.pairwise(bounds.tolist())]

    return encode_several


@functools.lru_cache(maxsize=1)
def _rank_file(encoding: "tiktoken.Encoding") -> bytes:
    """The ranks in tiktoken's file format: a line for each token, in base64, with its rank."""
    tokens = (encoding.decode_single_token_bytes(rank) for rank in range(encoding.eot_token))
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def in_pieces(texts: TextBatch) -> "tuple[TextBatch, np.ndarray]":
    """The documents with the long ones cut where the tokens of the pieces are those of the whole, as far as there are
    such places; and the number of each document's first piece (documents + 1,)."""
    import numpy as np

    bounds, first = [0], [0]
    for start, end in itertools.pairwise(texts.bounds.tolist()):
        while end - start > LONG_BYTES and (border := BORDER.search(texts.content, start + LONG_BYTES, end)):
            start = border.end()
            bounds.append(start)
        bounds.append(end)
        first.append(len(bounds) - 1)
    return TextBatch(texts.content, np.array(bounds, np.int64)), np.array(first)


def may_differ(texts: TextBatch) -> list[int]:
    """The documents that the two libraries may give other ids."""
    patterns = (pattern for first, pattern in DIFFERENT.items() if first in texts.content)
    found = (match.start() for pattern in patterns for match in pattern.finditer(texts.content))
    return sorted({int(texts.bounds.searchsorted(place, side="right")) - 1 for place in found})


def encode(encoding: "tiktoken.Encoding", text: str) -> "Ids":
    """The ids of tiktoken's `encode_ordinary` as an array: 40 bytes a token less than a list of ints."""
    import numpy as np

    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        return encode(encoding, without_surrogates(text))
    except ValueError:
        # About 1M spaces before a word exhaust the regex's stack.
        parts = split_at_long_spaces(text, longest=100_000)
        if len(parts) == 1:
            raise
        return np.concatenate([encode(encoding, part) for part in parts])


# White_Space of Unicode, which is \s in tiktoken's regex. Python's own \s has four characters more.
_SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")


def split_at_long_spaces(text: str, longest: int) -> list[str]:
    """Cut a text inside runs of more than `longest` spaces. The parts have the same tokens as the whole.

    GPT-2's pattern takes a run except its last character as one piece (`\\s+(?!\\S)`); the last character belongs to
    the next word. So a cut before that last character changes nothing.
    """
    ends = [run.end() for run in _SPACES.finditer(text) if run.end() - run.start() > longest]
    cuts = [0, *(end - 1 for end in ends if end < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]
