"""A tokenizer.json of another tool: a byte-level BPE with a normalizer and a pre-tokenizer of its own, as Llama 3 has.

The library `tokenizers` encodes with it, so the ids equal `transformers`'; tiktoken decodes.
"""

import json
from typing import TYPE_CHECKING, Any

import tiktoken

from pipelines.run.text.documents import utf8

if TYPE_CHECKING:
    import numpy as np

# Of GPT-4 and Llama 3, and of Qwen.
PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in ("{1,3}", "")
]
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # tokens between documents, by what is usual


class HubTokenizer(tiktoken.Encoding):
    """Each token is bytes, as in tiktoken. Special tokens inside a text are ordinary text."""

    def __init__(self, name: str, body: bytes, symbols: list[str], end_of_text: str | None) -> None:
        """ValueError, with what to do, if this is not a byte-level BPE, or if no token ends its documents.

        `symbols` are the visible characters of the 256 bytes.
        """
        from tokenizers import Tokenizer

        values = json.loads(body)
        parts = values["decoder"].get("decoders", [values["decoder"]])
        if values["model"].get("type", "BPE") != "BPE" or "ByteLevel" not in [one["type"] for one in parts]:
            raise ValueError("it is not a byte-level BPE, such as GPT-2's, Llama 3's and Qwen's")
        if values["model"].get("dropout"):
            raise ValueError("its merges are random (dropout); set model.dropout to null in the file")
        added = {str(one["content"]): int(one["id"]) for one in values["added_tokens"]}
        ends = [name for name in ([end_of_text] if end_of_text else ENDS) if name in added]
        if not ends:
            raise ValueError(
                f"it has no token {end_of_text or ' or '.join(ENDS)}; name the one between documents: "
                "{file: …, end_of_text: …}"
            )
        bytes_of = {symbol: byte for byte, symbol in enumerate(symbols)}
        vocab = {str(token): int(i) for token, i in values["model"]["vocab"].items() if token not in added}
        unused = {*range(max([*vocab.values(), *added.values()]))} - {*vocab.values(), *added.values()}
        super().__init__(
            name,
            pat_str=r"(?s:.)",  # not used
            mergeable_ranks={bytes(bytes_of[symbol] for symbol in token): i for token, i in vocab.items()},
            special_tokens=added | {f"<|unused {i}|>": i for i in unused},
        )
        self.body, self._made_from, self._end = body, (name, body, symbols, end_of_text), added[ends[0]]
        self.has_known_words = has_known_words(values)  # so a long text may be cut between two
        self._tokenizer = Tokenizer.from_buffer(body)
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True

    def __reduce__(self) -> Any:
        return type(self), self._made_from

    @property
    def eot_token(self) -> int:
        """The token that begins each document."""
        return self._end

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of a text, without the tokens that the file's template would add."""
        (encoded,) = self._tokenizer.encode_batch_fast([utf8(text).decode()], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def encode_to_numpy(self, text: str, **special: Any) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        """`encode_ordinary` as an array; `special` is tiktoken's, and every special token is ordinary here."""
        import numpy as np

        return np.array(self.encode_ordinary(text), np.uint32)


def has_known_words(values: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json splits texts as GPT-2, GPT-4, Llama 3 or Qwen do: so its tokens never
    reach over a space behind a letter (CUT in encode.py)."""
    steps, splits = values["pre_tokenizer"] or {}, 0
    for step in steps.get("pretokenizers", [steps]):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                splits += step.get("use_regex", True)
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
                if regex not in PATTERNS:
                    return False
                splits += 1
            case {"type": "Digits"}:
                pass
            case _:
                return False
    ordinary = [one for one in values["added_tokens"] if not one["special"]]
    spaces = any(" " in one["content"] or one["lstrip"] or one["rstrip"] for one in ordinary)
    return splits > 0 and not spaces and (values["normalizer"] or {"type": "NFC"})["type"] == "NFC"
