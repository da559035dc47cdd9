"""A byte-level BPE of a user's own, trained by the library `tokenizers`.

Its vocabulary has the form of GPT-2's: the 256 bytes, then a token for each merge, then <|endoftext|>; and the words
that are merged are found by GPT-2's pattern. The same text gives the same file: the sample is the beginning of the text
in the order of its source, and the library breaks ties by the ids of a pair.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing

from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.text.sources import first_documents, text_of
from pipelines.run.text.tokenizer import byte_symbols, encoding_of, tokenizer_files
from pipelines.store.layout import TOKENIZER
from trainer.config.errors import UserError

DOCUMENT_CHARACTERS = 10_000  # of each document at most: a long one must not outweigh many others
# Bytes: llm.c's tokenizer has one byte for a length. Longer tokens are runs of spaces or dashes anyway.
LONGEST_TOKEN = 128


def text_sample(config: TokensConfig, limit: int) -> Iterator[str]:
    """The beginning of a text, up to `limit` characters: of each document its first ones."""
    with closing(first_documents(text_of(config))) as documents:
        for document in documents:
            text = document[: min(DOCUMENT_CHARACTERS, limit)]
            limit -= len(text)
            yield text
            if not limit:
                return


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """The tokenizer.json of a vocabulary of this many ids, with <|endoftext|>.

    UserError for a text that cannot be read, or that has too few different words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    bytes_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    ranks = {bytes(bytes_of[symbol] for symbol in token): i for token, i in trained.get_vocab().items()}
    if len(ranks) + 1 < vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: the sample of the text gives {len(ranks) + 1:,} ids; use a longer one, or a "
            "smaller vocabulary"
        )
    return tokenizer_files(encoding_of("own", ranks), 0)[TOKENIZER]
