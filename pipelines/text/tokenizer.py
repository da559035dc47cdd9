"""The tokenizers, and each as the files that `transformers` reads.

Both tokenizers are `tiktoken.Encoding`s. The files follow from the ranks of an encoding alone: tiktoken knows the rank
of every token and merges the pair of lowest rank first; GPT-2's own files list the pairs. A token of rank r is the
merge of two tokens of lower rank: encoded with the ranks below r, it leaves these two. Ordered by rank, the pairs are
OpenAI's merges, line for line.
"""

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.recipe import vocab_size_of
from trainer.errors import UserError

if TYPE_CHECKING:
    import tiktoken

Ranks = dict[bytes, int]

END_OF_TEXT = "<|endoftext|>"


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


def token_bytes(encoding: "tiktoken.Encoding") -> list[int]:
    """The number of bytes of text of each token id; 0 for <|endoftext|>."""
    ids = range(encoding.n_vocab)
    return [0 if i == encoding.eot_token else len(encoding.decode_single_token_bytes(i)) for i in ids]


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
