"""Odd texts; tokenizers of other tools; and a text of four files, with the work of an attempt that tokenizes it."""

import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.text.shard_writer import ShardsJob, make_shards
from pipelines.run.text.sources import open_source
from pipelines.store.manifest import ArtifactPlan, upload
from trainer.base.store import LocalStore
from trainer.data.shards import read_shard

CUT_TEXT = "f(x)+=1.5;a\tb\nc\r\n_d 1,2 3\u2003x \u0301 e\u0301 'x й 'y 字。字,한 글 ي ,न ,x" * 9
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ODD_TEXTS = [
    "",
    " ",
    "\n\n  x",
    "x \n\t y  ",
    "I'm you'LL 're  ' s don't",
    "\u3000\u3000x",
    "e\u0301 é 👩‍👩‍👧 \ufeffz ﷽",
    "a\x1cb \x1d\x85 c\xa0 d",
    "\0\0 \x7f",
    " " * 700 + "x" * 700 + "\n" * 700,
    "tabs\t\tand 1234567 ½ Ⅷ ٣",
    "日本語のテキスト 한국어 ไทย हिन्दी",
]


MIXED_TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([" ", "  ", "\n", "\t", "'", "'s", "'LL", "<|endoftext|>", "\u3000", "\x85", "\u200b", "½"]),
        st.sampled_from(["a word", "of some more words", "IT'S", "3.14", "字。", "é\u0301", " x", ", "]),
    ),
    max_size=30,
).map("".join)


def hub_file(kind: str) -> bytes:
    """A byte-level BPE as `kind`'s: its pattern, normalizer and special tokens."""
    made = Tokenizer(models.BPE(ignore_merges=kind == "llama"))
    split = pre_tokenizers.Split(Regex(LLAMA if kind == "llama" else LLAMA.replace("{1,3}", "")), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    if kind == "llama":
        made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
        begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
        made.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[begin])
        made.enable_truncation(8)
    else:
        made.normalizer = normalizers.NFC()
        made.add_special_tokens(["<|endoftext|>"])
        made.add_tokens(["<think>", "</think>"])
    return made.to_str().encode()


class FourFiles:
    """Four text files in a folder; or the files there of a pattern, with other fields."""

    def __init__(self, folder: Path, pattern: str | None = None, **fields: Any) -> None:
        for name in () if pattern else range(4):
            (folder / f"{name}.txt").write_text(f"{name} " * 2000)
        standard = {"tokenizer": "bytes", "shard_tokens": 1500, "max_tokens": 13_001, "val_shards": 2}
        self.config = TokensConfig(source=f"{folder}/{pattern or '*.txt'}", **(fields if pattern else standard))
        text = open_source(self.config.source, None, "text").identity()
        self.plan = ArtifactPlan("tokenize", "files", {"stage": "tokenize", "text": text})

    def job(self, store: Path, attempt: int = 1, processes: int = 1, **fields: Any) -> ShardsJob:
        """Its shards, made in an attempt with its own folder and a store."""
        opened, folder = LocalStore(store), store.with_name(f"{store.name} scratch {uuid.uuid4().hex}")
        folder.mkdir()
        put = partial(upload, opened, self.plan.prefix, attempt)
        job = ShardsJob(self.config, self.plan, opened, folder, put, lambda: None, lambda text: None)
        return replace(job, processes=processes, **fields)


def made(job: ShardsJob) -> tuple[int, int]:
    """Do a job. Returns the tokens of the text, and those of them that it made."""
    before, *rest = [sum(receipt.tokens for receipt in receipts) for receipts in make_shards(job)]
    return (last := [before, *rest][-1]), last - before


def shards_in(store: Path) -> dict[str, list[int]]:
    """The tokens of all shards of a store, decided or not."""
    paths = sorted(path for path in store.glob("tokens/*/a*/**/*") if path.suffix in (".bin", ".tokens"))
    return {path.name: read_shard(path).tolist() for path in paths}
