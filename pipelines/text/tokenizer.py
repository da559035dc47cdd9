"""Text to token ids, and the tokenizer as the files that `transformers` reads.

Both tokenizers are `tiktoken.Encoding`s. The files follow from the ranks of an encoding alone: tiktoken knows the rank
of every token and merges the pair of lowest rank first; GPT-2's own files list the pairs. A token of rank r is the
merge of two tokens of lower rank: encoded with the ranks below r, it leaves these two. Ordered by rank, the pairs are
OpenAI's merges, line for line.
"""

import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.recipe import vocab_size_of
from trainer.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    Tokens = np.ndarray[tuple[int], np.dtype[np.uint16]]

Ranks = dict[bytes, int]

END_OF_TEXT = "<|endoftext|>"
BATCH_CHARACTERS = 1 << 18  # ~60k tokens, 12 ms of work: a hundred times the cost of passing it to a thread
BATCH_TEXTS = 4_000  # the limit for tiny texts


@functools.cache
def tokenizer(name: str) -> "tiktoken.Encoding":
    """The tokenizer "gpt2" (OpenAI's; tiktoken downloads 1.5 MB once) or "bytes" (id = byte).

    UserError for an unknown name or a vocabulary that cannot be loaded.
    """
    vocab_size_of(name)
    import tiktoken

    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"(?s:.{1,64})",  # any length gives the same bytes; 64 is four times as fast as 1
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
            explicit_n_vocab=257,
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a damaged file is a ValueError
        raise UserError(
            f"tokens.tokenizer: the vocabulary of '{name}' could not be loaded ({error!r}); "
            "allow the download once, or set TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached it"
        ) from error


def token_stream(encoding: "tiktoken.Encoding", texts: Iterable[str], threads: int) -> "Generator[Tokens, None, None]":
    """Tokens of every text, in order: one uint16 array each, <|endoftext|> first.

    A literal "<|endoftext|>" inside a text is ordinary text. Lone surrogates become U+FFFD. tiktoken releases the
    GIL, so threads are enough. At most 2 x threads batches are pending; a batch ends with the document that fills it
    to 256k characters. Closing the stream ends its threads.
    """
    assert encoding.n_vocab <= 1 << 16, f"{encoding.n_vocab} ids do not fit into uint16"
    pending: deque[Future[list[Tokens]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
    try:
        for batch in _batches(texts):
            pending.append(pool.submit(_encode_batch, encoding, batch))
            if len(pending) >= 2 * threads:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(encoding: "tiktoken.Encoding", texts: list[str]) -> "list[Tokens]":
    import numpy as np

    rows = []
    for text in texts:
        ids = _encode(encoding, text)
        row = np.empty(len(ids) + 1, np.uint16)
        row[0], row[1:] = encoding.eot_token, ids
        rows.append(row)
    return rows


def _encode(encoding: "tiktoken.Encoding", text: str) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """The ids of `encode_ordinary` as an array: 40 bytes a token less than a list of ints."""
    import numpy as np

    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # lone surrogates; a pair of them is one character
        return _encode(encoding, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        # About 1M spaces before a word exhaust the regex's stack.
        parts = split_at_long_spaces(text, longest=100_000)
        if len(parts) == 1:
            raise
        return np.concatenate([_encode(encoding, part) for part in parts])


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


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the notation of GPT-2's own files, in which every byte is a visible character."""

    tokens: list[str]  # by id
    merges: list[str]  # "left right", by rank
    end_of_text: int


def vocabulary(encoding: "tiktoken.Encoding") -> Vocabulary:
    """The tokens and merges of an encoding."""
    assert encoding.n_vocab == encoding.max_token_value + 1, "ids have gaps"
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.n_vocab) if i != encoding.eot_token}
    symbols = byte_symbols()

    def visible(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    by_id = {rank: visible(token) for token, rank in ranks.items()} | {
        encoding.eot_token: encoding.decode([encoding.eot_token])
    }
    merges = [f"{visible(left)} {visible(right)}" for left, right in merges_of(ranks)]
    return Vocabulary([by_id[i] for i in range(encoding.n_vocab)], merges, encoding.eot_token)


def tokenizer_files(encoding: "tiktoken.Encoding", model_max_length: int) -> dict[str, bytes]:
    """File name -> content of a Hugging Face GPT-2 tokenizer with the ids of `encoding`.

    With them, `transformers.AutoTokenizer` gives the ids of `encoding.encode(text, allowed_special="all")`.
    transformers 4 and 5 need only tokenizer.json and tokenizer_config.json. The slow tokenizer of transformers 4 and
    tools outside Python read the other files. `model_max_length` is in tokens.
    """
    found = vocabulary(encoding)
    end_of_text = found.tokens[found.end_of_text]
    vocab = {token: i for i, token in enumerate(found.tokens)}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_of_text)
    config = special | {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": model_max_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # else decoding removes spaces before punctuation
    }
    return {
        "tokenizer.json": _json(_fast_tokenizer(vocab, found.merges, end_of_text)),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(special),
        "vocab.json": _json(vocab),
        "merges.txt": "\n".join(["#version: 0.2", *found.merges, ""]).encode(),
    }


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The pair that is merged into each token of at least two bytes, by ascending rank."""
    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    return [_last_pair(token, rank, ranks) for rank, token in by_rank]


def _last_pair(token: bytes, rank: int, ranks: Ranks) -> tuple[bytes, bytes]:
    """Byte pair encoding of `token` with the ranks below its own, which leaves two parts."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        lowest = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[lowest] < rank, f"token {rank} {token!r} is not a merge of lower ones"
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    left, right = parts
    return left, right


def byte_symbols() -> list[str]:
    """A visible character for each of the 256 bytes (method: `bytes_to_unicode` in OpenAI's GPT-2).

    A byte whose Latin-1 character is visible stands for itself; the 68 others take U+0100 upwards in turn.
    """
    spare = iter(range(0x100, 0x200))
    return [chr(byte if _is_visible(byte) else next(spare)) for byte in range(256)]


def _is_visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF  # 0xAD is the soft hyphen


def _fast_tokenizer(vocab: dict[str, int], merges: list[str], end_of_text: str) -> dict[str, Any]:
    """tokenizer.json: GPT-2's byte-level BPE in the format of the library `tokenizers`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    verbatim = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[end_of_text], "content": end_of_text, "special": True} | verbatim],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"
