"""The tokenizers, and each as the files that `transformers` reads.

Every tokenizer is a `tiktoken.Encoding`. One of a user's own (pipelines/run/text/bpe.py) is the tokenizer.json below,
with GPT-2's pattern and a vocabulary in the order of its merges: so tiktoken, gigatoken and transformers give the same
ids. Any other file is read by `tokenizers` (hub_tokenizer.py). The file lies beside the tokens in the store, for every
machine that works on the run.

The files of an export follow from the ranks of an encoding alone: tiktoken knows the rank of every token and merges the
pair of lowest rank first; GPT-2's own files list the pairs. A token of rank r is the merge of two tokens of lower rank:
encoded with the ranks below r, it leaves these two. Ordered by rank, the pairs are OpenAI's merges, line for line.
"""

import functools
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import TokenizerFile, TokensConfig
from pipelines.run.fetch import bytes_of, hub_file, path_of
from pipelines.run.text.hub import reason_of
from pipelines.store.layout import TOKENIZER
from pipelines.store.manifest import ArtifactPlan, DamagedArtifact, File
from trainer.base.store import Store
from trainer.config.errors import UserError

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer

Ranks = dict[bytes, int]

END_OF_TEXT = "<|endoftext|>"
HUB_NAME = "hub-"  # begins the names of tokenizers that `tokenizers` reads
# The pre-tokenizer of GPT-2's pattern.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@functools.cache
def tokenizer(name: str) -> "tiktoken.Encoding":
    """The tokenizer "gpt2" (OpenAI's; tiktoken downloads 1.5 MB once) or "bytes" (id = byte).

    UserError for a vocabulary that cannot be loaded.
    """
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
            f"the vocabulary of the tokenizer '{name}' could not be loaded ({reason_of(error)}); "
            "allow the download once, or set TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached it"
        ) from error


def tokenizer_of(tokens: TokensConfig, store: Store, prefix: str) -> "tiktoken.Encoding":
    """The tokenizer of a run whose tokens are the artifact under `prefix`: its file is in the store, or not yet.

    UserError if it cannot be loaded; DamagedArtifact if the file in the store is not the one of the recipe.
    """
    if isinstance(tokens.tokenizer, str):
        return tokenizer(tokens.tokenizer)
    own, where = tokens.tokenizer, f"{store.uri}/{prefix}/{TOKENIZER}"
    body = store.get(f"{prefix}/{TOKENIZER}")
    if body is None:
        return own_tokenizer(tokenizer_file_bytes(own), f"tokens.tokenizer: {own.named.unpinned}", own.end_of_text)
    if sha256(body).hexdigest() != own.digest:
        raise DamagedArtifact(where, "damaged (sha256 differs)", "remove it, and `skytrain run` brings it again")
    return own_tokenizer(body, where, own.end_of_text)


def check_tokenizer(recipe: Recipe, plan: ArtifactPlan, store: Store) -> None:
    """UserError unless the file of the tokenizer can be had, the model has its ids, and the formats can carry it."""
    if isinstance(recipe.tokens.tokenizer, str):
        return
    encoding = tokenizer_of(recipe.tokens, store, plan.prefix)
    if encoding.name.startswith(HUB_NAME) and (others := recipe.export.other_formats):
        raise UserError(
            f"export.formats: {others[0]} cannot carry the tokenizer '{recipe.tokens.tokenizer}', only GPT-2's, bytes "
            "and what `skytrain tokenizer train` makes; remove it, and use hf"
        )
    recipe.check_vocab_size(encoding.n_vocab)
    if recipe.model.vocab_size > 1.25 * encoding.n_vocab + 128:  # more than padding
        message = "model.vocab_size %d: the tokenizer has %d ids, and the other rows learn nothing; use %d"
        logging.getLogger(__name__).warning(message, recipe.model.vocab_size, encoding.n_vocab, encoding.n_vocab)


def store_tokenizer(recipe: Recipe, plan: ArtifactPlan, store: Store) -> None:
    """Put the file of the tokenizer below the tokens' artifact: other machines have the store alone."""
    own, key = recipe.tokens.tokenizer, f"{plan.prefix}/{TOKENIZER}"
    if isinstance(own, TokenizerFile) and store.get(key) is None:
        store.create(key, tokenizer_file_bytes(own))


def stored_tokenizer(config: TokensConfig, store: Store, prefix: str) -> list[File]:
    """The file of the tokenizer as a part of the tokens' artifact; none for a tokenizer with a name."""
    if isinstance(config.tokenizer, str):
        return []
    size = {entry.key: entry.size for entry in store.entries(f"{prefix}/{TOKENIZER}")}
    return [File(TOKENIZER, TOKENIZER, size.get(f"{prefix}/{TOKENIZER}", 0), config.tokenizer.digest)]


def tokenizer_file_bytes(own: TokenizerFile) -> bytes:
    """The content of a tokenizer's file, on this machine or on the Hub. UserError if it is missing, or another one."""
    source, field = own.named, "tokens.tokenizer"
    path = hub_file(source, TOKENIZER, field) if source.kind == "model" else path_of(source)
    return bytes_of(source, field, path, "`skytrain tokenizer train` makes such a file")


@functools.lru_cache(maxsize=2)
def own_tokenizer(body: bytes, where: str, end_of_text: str | None = None) -> "tiktoken.Encoding":
    """The tokenizer of a tokenizer.json, with the ids that `transformers` gives.

    tiktoken's, if `tokenizer_files` gives the same content; else one of `tokenizers`. UserError for any other file.
    """
    try:
        from tokenizers import Tokenizer

        values = json.loads(body)
        if values["pre_tokenizer"] == BYTE_LEVEL and not end_of_text:
            bytes_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
            vocab = sorted((int(i), token) for token, i in values["model"]["vocab"].items() if token != END_OF_TEXT)
            ranks = {bytes(bytes_of[symbol] for symbol in token): i for i, token in vocab}
            with suppress(AssertionError):  # its ids are not in the order of its merges
                encoding = encoding_of(f"own-{sha256(body).hexdigest()[:12]}", ranks)
                theirs, ours = Tokenizer.from_buffer(body), _fast_tokenizer(vocabulary(encoding))
                theirs.decoder, theirs.post_processor = ours.decoder, ours.post_processor  # which decide no ids
                if theirs.to_str() == ours.to_str():
                    return encoding
        from pipelines.run.text.hub_tokenizer import HubTokenizer

        return HubTokenizer(f"{HUB_NAME}{sha256(body).hexdigest()[:12]}", body, byte_symbols(), end_of_text)
    except Exception as error:  # whatever a stranger's values raise
        raise UserError(f"{where}: not a tokenizer.json that can be used ({reason_of(error)})") from error


def ids_in(body: bytes, where: str) -> dict[str, int]:
    """The ids of a tokenizer.json by token. UserError for a damaged file."""
    try:
        values = json.loads(body)
        added = {str(one["content"]): int(one["id"]) for one in values.get("added_tokens", [])}
        return {str(token): int(i) for token, i in values["model"]["vocab"].items()} | added
    except Exception as error:  # whatever a stranger's values raise
        raise UserError(f"{where}: not a tokenizer.json ({reason_of(error)}); fetch it again") from error


def encoding_of(name: str, ranks: Ranks) -> "tiktoken.Encoding":
    """A tokenizer with GPT-2's pattern; <|endoftext|> comes after all ranks."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    assert set(ranks.values()) == set(range(len(ranks))), "ids have gaps"
    return tiktoken.Encoding(
        name,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )


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

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def vocabulary(encoding: "tiktoken.Encoding") -> Vocabulary:
    """The tokens and merges of an encoding."""
    assert encoding.n_vocab == encoding.max_token_value + 1, "ids have gaps"
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.n_vocab) if i != encoding.eot_token}
    symbols = byte_symbols()

    def visible(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    tokens = [visible(token) for token in ranks]
    tokens.insert(encoding.eot_token, encoding.decode([encoding.eot_token]))
    merges = [f"{visible(left)} {visible(right)}" for left, right in merges_of(ranks)]
    return Vocabulary(tokens, merges, encoding.eot_token)


def tokenizer_files(encoding: "tiktoken.Encoding", model_max_length: int) -> dict[str, bytes]:
    """File name -> content of a Hugging Face tokenizer with the ids of `encoding`.

    With them, `transformers.AutoTokenizer` gives the ids of `encoding.encode(text, allowed_special="all")`.
    transformers 4 and 5 need only tokenizer.json and tokenizer_config.json. The slow tokenizer of transformers 4 and
    tools outside Python read the other files. `model_max_length` is in tokens.
    """
    end_of_text = encoding.decode([encoding.eot_token])
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end_of_text) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,  # else decoding removes spaces before punctuation
    }
    if body := getattr(encoding, "body", None):  # a HubTokenizer's, as it came
        return {TOKENIZER: body, "tokenizer_config.json": _json(config)}
    config |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    found = vocabulary(encoding)
    return {
        TOKENIZER: _fast_tokenizer(found).to_str().encode(),
        "tokenizer_config.json": _json(config),
        "vocab.json": _json(found.ids),
        "merges.txt": "\n".join(["#version: 0.2", *found.merges, ""]).encode(),
    }


def merges_of(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """The pair that is merged into each token of at least two bytes, by ascending rank.

    Byte pair encoding of a token with the ranks below its own leaves two parts.
    """
    for token, rank in sorted(ranks.items(), key=itemgetter(1)):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            lowest = min(range(len(pairs)), key=pairs.__getitem__)
            assert pairs[lowest] < rank, f"token {rank} {token!r} is not a merge of lower ones"
            parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def byte_symbols() -> list[str]:
    """A visible character for each of the 256 bytes (method: `bytes_to_unicode` in OpenAI's GPT-2).

    A byte whose Latin-1 character is visible stands for itself; the 68 others take U+0100 upwards in turn.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # 0xAD is the soft hyphen
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _fast_tokenizer(found: Vocabulary) -> "Tokenizer":
    """GPT-2's byte-level BPE as a tokenizer of the library `tokenizers`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in found.merges)]
    made = Tokenizer(models.BPE(found.ids, pairs, continuing_subword_prefix="", end_of_word_suffix=""))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens([AddedToken(found.tokens[found.end_of_text], normalized=False)])
    return made


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"
