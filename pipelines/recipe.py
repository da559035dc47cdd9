"""A recipe: one YAML file with the text to tokenize, the model to train on it, its evaluation and its export.

Five sections decide the result and enter the fingerprints of the stages' artifacts; `runtime` does not. The
descriptions of the fields are the source of docs/recipes.md; a unit stands in brackets at their end.
"""

import difflib
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from trainer.config import ModelConfig, RuntimeConfig, Section, TrainConfig, explain, sequences_per_step, tokens_before
from trainer.errors import UserError

VOCAB_SIZES = {"gpt2": 50_257, "bytes": 257}  # token ids by tokenizer, <|endoftext|> included


class TokensConfig(Section):
    """The text, and how it becomes token shards. `pipelines/text/sources.py` documents the sources."""

    source: str = Field(
        description="python-stdlib, hf://datasets/ORG/NAME, or a path, glob or URL of .parquet, .jsonl or .txt files"
    )
    subset: str | None = Field(default=None, description="Configuration of a Hugging Face data set; null: its default")
    revision: str | None = Field(
        default=None,
        description="Version of a remote source, required there: the 40 hex digits of a Hugging Face commit, or a "
        "label of your own for another URL; null for local text",
    )
    text_column: str = Field(default="text", description="Column of parquet, or key of jsonl, that holds the text")
    tokenizer: Literal["gpt2", "bytes"] = Field(
        default="gpt2", description="gpt2: tiktoken's BPE, 50,257 ids; bytes: one id a byte, 257 ids"
    )
    shard_tokens: int = Field(
        default=100_000_000,
        ge=1024,
        lt=2**31,
        description="Size of a shard; the default is 200 MB of uint16, the header counts in int32 [tokens]",
    )
    max_tokens: int | None = Field(default=None, ge=1, description="End of the text; null: all of it [tokens]")
    val_shards: int = Field(
        default=1,
        ge=1,
        description="Number of shards held out for validation: the first, as in build-nanogpt and llm.c",
    )
    # Two digits name a part, and no source is worth more nodes.
    parts: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Number of streams that the source's files are dealt out to. Up to this many nodes work at once; "
        "the number decides the bytes, the number of nodes does not",
    )

    def tokens_of_part(self, part: int) -> int | None:
        """Upper limit of a part's tokens; the limits of all parts add up to max_tokens."""
        return None if self.max_tokens is None else len(range(part, self.max_tokens, self.parts))


class EvaluateConfig(Section):
    """The measures of the trained model."""

    val_tokens: int = Field(
        default=10_485_760, ge=1, description="Size of the validation, at most the held-out shards [tokens]"
    )
    hellaswag: str | None = Field(
        default=None,
        description="hf://datasets/Rowan/hellaswag, with @COMMIT if wanted, or a jsonl file; null: skip it",
    )


class ExportConfig(Section):
    """The format of the Hugging Face checkpoint."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="bfloat16", description="Number format of weights")


class Recipe(Section):
    """A whole run: data, model, training, evaluation, export and the way it is carried out."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the run and of its artifacts: up to 63 of a-z, 0-9, '.', '_' and '-'",
    )
    tokens: TokensConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        needed = vocab_size_of(self.tokens.tokenizer)
        if self.model.vocab_size < needed:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is smaller than the {needed} ids of "
                f"tokens.tokenizer '{self.tokens.tokenizer}'; use {needed}"
            )
        sequences_per_step(self.model, self.train)
        self._splits_hold_a_sequence()
        return self

    def _splits_hold_a_sequence(self) -> None:
        tokens, block_size = self.tokens, self.model.block_size
        if tokens.shard_tokens <= block_size:
            raise ValueError(
                f"tokens.shard_tokens {tokens.shard_tokens} holds no sequence of model.block_size "
                f"{block_size} + 1 tokens; use {block_size + 1} or more"
            )
        held_out = tokens.val_shards * tokens.shard_tokens
        first = tokens.tokens_of_part(0)
        if first is not None and first <= held_out + block_size:
            divided = f" in {tokens.parts} parts" if tokens.parts > 1 else ""
            raise ValueError(
                f"tokens.max_tokens {tokens.max_tokens}{divided} leaves nothing to train on: the first "
                f"{tokens.val_shards} shard(s) of {tokens.shard_tokens} tokens are held out; use more tokens"
                f"{', fewer parts' if divided else ''} or a smaller shard_tokens"
            )

    @property
    def train_tokens(self) -> int:
        return tokens_before(self.train.max_steps, self.train)

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole training: tokens x (6N + 12·L·C·T)."""
        return float(self.train_tokens * self.model.flops_per_token)


def vocab_size_of(tokenizer: str) -> int:
    """Number of token ids of a tokenizer, <|endoftext|> included. UserError for an unknown tokenizer."""
    if tokenizer not in VOCAB_SIZES:
        near = difflib.get_close_matches(tokenizer.lower(), VOCAB_SIZES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        known = " and ".join(VOCAB_SIZES)
        raise UserError(f"tokens.tokenizer: no tokenizer '{tokenizer}'; {hint}There are {known}")
    return VOCAB_SIZES[tokenizer]


def shipped() -> dict[str, Path]:
    """The recipes that come with skytrain, by name, smallest first."""
    folder = Path(str(resources.files("pipelines"))) / "recipes"
    order = ["smoke", "gpt2-124m", "gpt3-125m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"]
    paths = {path.stem: path for path in folder.glob("*.yaml")}
    return {name: paths[name] for name in sorted(paths, key=lambda n: (order + [n]).index(n))}


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """A shipped recipe or a file, with `section.field=value` changes. UserError names the wrong field and file."""
    path = shipped().get(name_or_path) or Path(name_or_path)
    if not os.path.isfile(path):
        near = difflib.get_close_matches(name_or_path, shipped(), 1)
        hint = f"did you mean '{near[0]}'?" if near else f"shipped are {', '.join(shipped())}"
        raise UserError(f"{name_or_path}: neither a shipped recipe nor a file; {hint}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf8"))
    except (yaml.YAMLError, ValueError) as error:  # PyYAML passes errors of int() and date() on
        raise UserError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe has sections (name, tokens, model, train, …); none found")
    for change in changes:
        _apply(values, change)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise explain(error, Recipe, name_or_path) from error
    except UserError as error:
        raise UserError(f"{name_or_path}: {error}") from error


def _apply(values: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    sections = path.split(".")
    if not equals or not 1 <= len(sections) <= 2 or not all(sections):
        raise UserError(f"--set {change}: not of the form section.field=value, such as train.max_steps=50")
    for section in sections[:-1]:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {change}: {section} has no fields")
    try:
        values[sections[-1]] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"--set {change}: {text!r} is not a YAML value") from error
