"""A tokenizer as the files that `transformers` reads, made from nothing but tiktoken's ranks.

tiktoken knows the rank of every token and merges the lowest pair first; GPT-2's own files list the pairs.
A token of rank r came into being by merging two tokens of lower rank: encode it with the ranks below r, and
the two parts that are left are its pair. Ordered by rank, the pairs are OpenAI's merges, line for line.
"""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tiktoken

Ranks = dict[bytes, int]


def tokenizer_files(encoding: "tiktoken.Encoding", model_max_length: int) -> dict[str, bytes]:
    """File name -> content of a Hugging Face GPT-2 tokenizer with the ids of `encoding`.

    `transformers.AutoTokenizer` then gives the ids of `encoding.encode(text, allowed_special="all")`.
    tokenizer.json and tokenizer_config.json are all that transformers 4 and 5 ask for; vocab.json and
    merges.txt are for the slow tokenizer of transformers 4 and for tools outside Python. A file
    special_tokens_map.json is read by neither when the config names the tokens. `model_max_length` is in
    tokens.
    """
    assert encoding.n_vocab == encoding.max_token_value + 1, "ids have gaps"
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.n_vocab)}
    end_of_text = encoding.decode([encoding.eot_token])
    del ranks[end_of_text.encode()]
    symbols = byte_symbols()

    def shown(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    merges = [f"{shown(left)} {shown(right)}" for left, right in merges_of(ranks)]
    vocab = {shown(token): rank for token, rank in ranks.items()} | {end_of_text: encoding.eot_token}
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_of_text) | {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": model_max_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # else decoding would eat spaces before punctuation
    }
    return {
        "tokenizer.json": _json(_fast_tokenizer(vocab, merges, end_of_text)),
        "tokenizer_config.json": _json(config),
        "vocab.json": _json(vocab),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
    }


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The pair that each token of two bytes and more is merged from, by ascending rank."""
    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    return [_last_pair(token, rank, ranks) for rank, token in by_rank]


def _last_pair(token: bytes, rank: int, ranks: Ranks) -> tuple[bytes, bytes]:
    """Byte pair encoding of `token` by the ranks below its own: two parts are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        lowest = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[lowest] < rank, f"token {rank} {token!r} is not made of lower ones"
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    left, right = parts
    return left, right


def byte_symbols() -> list[str]:
    """A visible character for each of the 256 bytes (method: `bytes_to_unicode` in OpenAI's GPT-2).

    A byte whose Latin-1 character is visible stands for itself; the 68 others take U+0100 upwards in turn.
    """
    spare = iter(range(0x100, 0x200))
    return [chr(byte if _visible(byte) else next(spare)) for byte in range(256)]


def _visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF  # 0xAD is the soft hyphen


def _fast_tokenizer(vocab: dict[str, int], merges: list[str], end_of_text: str) -> dict[str, Any]:
    """tokenizer.json: GPT-2's byte-level BPE as the library `tokenizers` writes it down."""
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
