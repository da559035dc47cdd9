"""The section `tokens` of a recipe: text, tokenizer, packing and split. A mixture has several sources of text."""

import difflib
import sys
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from trainer.config.config_errors import explain
from trainer.config.errors import UserError, shown
from trainer.config.model_config import Section
from trainer.config.source import HUB, Kind, Source, unpinned

VOCAB_SIZES = {"gpt2": 50_257, "bytes": 257}  # token ids by tokenizer, <|endoftext|> included
LLMC = "llmc://"  # before the place of shards that exist
TOKENIZERS: tuple[Kind, ...] = ("model", "path")
VAL_FRACTION = 0.01  # of the text, if a recipe does not name its split


class TokenizerFile(Section):
    """A tokenizer in a file."""

    file: str = Field(
        max_length=1100,
        description="Path of a tokenizer.json, or hf://ORG/NAME@COMMIT; its content, which decides the fingerprint, is "
        "recorded as @sha256:…",
    )
    end_of_text: str | None = Field(
        default=None, description="Token that begins each document; null: <|endoftext|>, <|end_of_text|> or </s>"
    )

    @field_validator("file")
    @classmethod
    def _is_a_source(cls, file: str) -> str:
        Source.of(file, "", TOKENIZERS)
        return file

    @property
    def named(self) -> Source:
        return Source.of(self.file, "tokens.tokenizer", TOKENIZERS)

    @property
    def digest(self) -> str:
        """The sha256 of the file, which every planned recipe has."""
        assert self.named.sha256, "not pinned"
        return self.named.sha256

    def __str__(self) -> str:
        own = self.named
        return f"{own.unpinned if own.kind == 'model' else 'own'}, sha256 {(own.sha256 or '?')[:12]}"


class SourceConfig(Section):
    """One source of a mixture."""

    source: str = Field(min_length=1, max_length=1100, description="As tokens.source")
    weight: float = Field(gt=0, description="Share of the training's tokens, beside the others'")
    subset: str | None = Field(default=None, description="As tokens.subset")
    text_column: str = Field(default="text", description="As tokens.text_column")
    max_tokens: int | None = Field(default=None, ge=1, description="As tokens.max_tokens, of this source [tokens]")


class TokensConfig(Section):
    """The text, and how it becomes token shards. `pipelines/run/text/sources.py` documents the sources."""

    source: str = Field(
        default="",
        max_length=1100,
        description="python-stdlib, hf://datasets/ORG/NAME@COMMIT, or a path, glob or s3:// URL of .parquet, .jsonl or "
        ".txt files; llmc://FOLDER or llmc://s3://BUCKET/PREFIX adopts shards where they lie, with their own split",
    )
    sources: list[SourceConfig] | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Instead of source: a mixture, a list of {source, weight, …}. Each source is tokenized and split "
        "as if it were alone; training draws from them by weight",
    )
    subset: str | None = Field(default=None, description="Configuration of a Hugging Face data set; null: its default")
    text_column: str = Field(default="text", description="Column of parquet, or key of jsonl, that holds the text")
    tokenizer: Literal["gpt2", "bytes"] | TokenizerFile = Field(
        default="gpt2",
        description="gpt2: tiktoken's BPE, 50,257 ids; bytes: 257 ids; or a file of `skytrain tokenizer train` or of a "
        "model of the Hub (byte-level BPE): a path or hf://ORG/NAME@COMMIT, short for {file: …}",
    )
    packing: Literal["stream", "documents"] = Field(
        default="stream",
        description="Sequences of the training split. stream: every window of the text; documents: each sequence "
        "begins with a document, and the ends of documents that do not fit are cropped (best fit, as nanochat)",
    )
    shard_tokens: int = Field(
        default=100_000_000, ge=1024, lt=2**31, description="Size of a shard; the default is 200 MB [tokens]"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="End of the text; null: all of it [tokens]")
    val_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Size of the validation split, the start of the text; null: val_shards, else 1% of the text and at "
        "most one shard [tokens]",
    )
    val_shards: int | None = Field(
        default=None, ge=1, description="Instead of val_tokens: hold out the first shards whole, as llm.c does"
    )

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _name_or_file(cls, value: Any) -> Any:
        """One error for the member of the union that the user means."""
        if isinstance(value, dict):
            try:
                return TokenizerFile.model_validate(value)
            except ValidationError as error:
                raise ValueError("; ".join(str(explain(error, TokenizerFile, "")).splitlines())) from error
        if isinstance(value, str) and (value.startswith(HUB) or value.partition("@sha256:")[0].endswith(".json")):
            return cls._name_or_file({"file": value})
        if not isinstance(value, TokenizerFile) and value not in [*VOCAB_SIZES]:
            near = difflib.get_close_matches(str(value).lower(), VOCAB_SIZES, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"must be 'gpt2', 'bytes', a tokenizer.json or hf://ORG/NAME@COMMIT (got {shown(value)}){hint}"
            )
        return value

    @property
    def tokenizer_identity(self) -> str | dict[str, str]:
        """The tokenizer as it decides the bytes: where its file lies does not."""
        if isinstance(self.tokenizer, str):
            return self.tokenizer
        end = self.tokenizer.end_of_text
        return {"sha256": self.tokenizer.digest} | ({"end_of_text": end} if end else {})

    @model_validator(mode="after")
    def _one_text_and_one_split(self) -> Self:
        if bool(self.source) == (self.sources is not None):
            raise ValueError(
                "source and sources are both given; remove one" if self.source else "source: missing; name the text"
            )
        for field in ("subset", "max_tokens") if self.sources else ():
            if getattr(self, field) is not None:
                raise ValueError(f"{field} belongs to one source: move it into sources")
        if self.val_tokens is not None and self.val_shards is not None:
            raise ValueError("val_tokens and val_shards are both given; remove one")
        return self

    def each(self) -> list["TokensConfig"]:
        """The section for each source of a mixture alone; itself for a single text."""
        fields = ("source", "subset", "text_column", "max_tokens")
        return [
            self.model_copy(update={"sources": None, **{field: getattr(one, field) for field in fields}})
            for one in self.sources or ()
        ] or [self]

    @property
    def named(self) -> str:
        """The text or the mixture, for people."""
        if not self.sources:
            return " ".join(filter(None, (unpinned(self.source), self.subset)))
        shares = (weight / sum(self.weights) for weight in self.weights)
        return " + ".join(f"{share:.0%} {one.named}" for share, one in zip(shares, self.each(), strict=True))

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the sources of a mixture; none of a single text."""
        return tuple(one.weight for one in self.sources or ())

    @property
    def val_wanted(self) -> int:
        """Tokens that the fields hold out of a large text; 0 without such a field."""
        return self.val_tokens or (self.val_shards or 0) * self.shard_tokens

    @property
    def undecided_shards(self) -> int:
        """Number of first shards whose split only the size of the text decides."""
        return -(-self.held_out(sys.maxsize) // self.shard_tokens)

    def held_out(self, tokens: int) -> int:
        """How many of a text's tokens validation gets: a tenth if the text is no larger than val_wanted."""
        if self.val_wanted:
            return self.val_wanted if self.val_wanted < tokens else tokens // 10
        return min(self.shard_tokens, int(tokens * VAL_FRACTION))

    def check_splits(self, train: int, val: int, block_size: int) -> None:
        """UserError unless the largest shard of each split, with this many tokens, holds a sequence."""
        for split, largest in (("training", train), ("validation", val)):
            if largest <= block_size:
                raise UserError(
                    f"tokens: {self.named}: no {split} shard holds a sequence of {block_size + 1} tokens: the largest "
                    f"has {largest:,}; use more text or a smaller model.block_size, or change tokens.val_tokens"
                )

    @property
    def adopts(self) -> bool:
        """Whether the source is shards that exist."""
        return self.source.startswith(LLMC)

    def split_identity(self) -> dict[str, Any]:
        """The fields that decide the split, for the fingerprint."""
        if self.val_tokens is not None:
            return {"val_tokens": self.val_tokens}
        if self.val_shards is not None:
            return {"val_shards": self.val_shards}
        return {"val_shards": 1, "val_fraction": VAL_FRACTION}  # of former fields
