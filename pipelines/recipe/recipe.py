"""A recipe: one YAML file with the text to tokenize, the model to train on it, its evaluation and its export.

Five sections decide the result and enter the fingerprints of the stages' artifacts; `runtime` does not. The
descriptions of the fields are the source of docs/recipes.md; a unit stands in brackets at their end.
"""

import re
import sys
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipelines.recipe.tokens_config import VOCAB_SIZES, TokensConfig
from trainer.config.amounts import sequences_per_step, tokens_before
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError, shown
from trainer.config.model_config import Section
from trainer.config.source import Source
from trainer.models.family import AnyModel

HF: Literal["hf"] = "hf"  # the format of every export; the others are made beside it
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")  # ChatML's, which tuning adds to the tokenizer
METHODS = ("sft", "dpo", "reward", "grpo", "rloo")  # of a step of tuning
REWARDED = ("grpo", "rloo")
REWARD = "reward"  # the method whose result gives rewards, and answers nothing
FIELD_OF_REWARD = {"format": "pattern", "length": "characters", "model": "step", "function": "function"}  # by kind
FIELDS_OF = {"beta": ("dpo", *REWARDED), "rewards": REWARDED, "held_out": ("sft", "dpo", *REWARDED)}  # by method
# Arguments of TRL that a step of tuning may set, by method. The others are fields, or decide what resumes exactly.
TRL_OPTIONS = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"), METHODS),
    **dict.fromkeys(("lr_scheduler_type", "warmup_steps", "gradient_accumulation_steps"), METHODS),
    "gradient_checkpointing": METHODS,
    "loss_type": ("sft", "dpo", "grpo"),
    "label_smoothing": ("dpo",),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), REWARDED),
    **dict.fromkeys(("epsilon", "epsilon_high", "mask_truncated_completions"), REWARDED),
    "scale_rewards": ("grpo",),
    "normalize_advantages": ("rloo",),
}
# Up to four epochs, repeated text is nearly as good as new text (Muennighoff et al. 2023).
GOOD_EPOCHS = 4
HELLASWAG_TOKENS = 10_042 * 400  # of all items: an item is four endings of about 100 tokens
# Computed of all prompts of CORE with their examples, for a synthetic bundle of the same lengths.
CORE_TOKENS = 190_000_000


class EvaluateConfig(Section):
    """The measures of the trained model."""

    val_tokens: int = Field(
        default=10_485_760, ge=1, description="Size of the validation, at most the held-out shards [tokens]"
    )
    hellaswag: str | None = Field(
        default=None, description="hf://datasets/Rowan/hellaswag, or with @COMMIT, or a jsonl file; null: skip it"
    )
    core: str | None = Field(
        default=None,
        description="CORE, DCLM's 22 tasks: the folder of a bundle, or hf://datasets/ORG/NAME@COMMIT; null: skip it",
    )
    lm_eval: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Tasks of EleutherAI's lm-evaluation-harness (piqa, …), of the extra `eval`; null: skip it",
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="Also evaluate while training, on HellaSwag, CORE and a few samples of text; null: only the "
        "trained model [optimizer steps]",
    )


class ExportConfig(Section):
    """The formats of the export."""

    formats: list[str] = Field(
        default=[HF],
        description="hf, the checkpoint for transformers and vLLM, is always made; beside it gguf for llama.cpp "
        "(f16 and q8_0; gpt2 and llama), for gpt2 llmc (llm.c's format), and those of packages by name",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Number format of hf's weights"
    )

    @property
    def other_formats(self) -> list[str]:
        """The formats beside hf, each once, in one order: equal sets have equal fingerprints."""
        return sorted({*self.formats} - {HF})


class RewardConfig(Section):
    """A reward of generated answers: 0 to 1, unless a model or a package gives it."""

    kind: str
    weight: float = 1.0
    pattern: str | None = Field(default=None, max_length=1000)
    characters: int | None = Field(default=None, ge=1)
    step: str | None = None
    function: str | None = Field(default=None, pattern=r"^[^:]+\.py:[A-Za-z_]\w*(@sha256:[0-9a-f]{64})?$")

    @property
    def reads_columns(self) -> bool:
        """Whether it gets the other columns of the data: ours do not."""
        return self.kind not in ("exact_match", "format", "length", "model")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        for kind, field in FIELD_OF_REWARD.items():
            if (self.kind == kind) != (getattr(self, field) is not None):
                raise ValueError(f"{field} belongs to kind {kind}, and {kind} needs it (kind is {self.kind})")
        try:
            re.compile(self.pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern {shown(self.pattern)} is not a regular expression: {error}") from error
        return self


class TuneConfig(Section):
    """A step of the list `tune`: the export, or the model of the step before it, is tuned on conversations, by TRL
    (extra `tune`)."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="Name of the step: up to 31 of a-z, 0-9 and '-'"
    )
    method: Literal["sft", "dpo", "reward", "grpo", "rloo"] = Field(
        description="sft: on the answers of `messages`; dpo: on pairs of `chosen` and `rejected`; reward: a reward "
        "model of such pairs, for a later step (gpt2 and llama); grpo, rloo: on answers that the model generates to "
        "`prompt`, by rewards. TRL has no PPO"
    )
    data: str = Field(
        min_length=1,
        max_length=1100,
        description="hf://datasets/ORG/NAME@COMMIT, or a path, glob or s3:// URL of .parquet or .jsonl files; "
        "addition: sums made on the fly; its content is recorded as @sha256:…",
    )
    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Highest learning rate")
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the data")
    batch: int = Field(default=32, ge=1, description="Conversations, pairs or generated answers of an optimizer step")
    max_length: int | None = Field(
        default=None, ge=8, description="Longer conversations are cropped; null: the model's block_size [tokens]"
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="dpo, grpo, rloo: strength of the pull to the model before the step; null: TRL's default",
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Train low-rank adapters of this rank by peft, with alpha twice as large, in all layers but "
        "embeddings and head; merged into the weights at the end of the step. null: all weights",
    )
    generations: int = Field(default=8, ge=2, description="grpo, rloo: answers to a prompt; must divide batch")
    max_answer: int = Field(
        default=64, ge=1, description="Longest generated answer, in grpo and rloo and for held-out rows [tokens]"
    )
    rewards: list[RewardConfig] = Field(
        default=[],
        max_length=20,
        description="grpo, rloo: a list of {kind, weight, …}, whose sum counts, each times its `weight`. exact_match: "
        "the final answer, what follows the last ####, is that of the row's `answer`; format: the whole answer matches "
        "the regular expression `pattern`; length: it has at most `characters`, and falls to 0 at twice as many; "
        "model: the score, without bounds, of the reward model that the earlier step `step` made; function: what "
        "`function`, FILE.py:NAME, returns in TRL's form, and whose file is recorded as @sha256:…; the name of "
        "a package's reward: what that gives",
    )
    held_out: int = Field(
        default=0,
        ge=0,
        description="Rows, the first of the data, that no step reads: the share of exact answers is measured on them, "
        "before and after [rows]",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the order of the data and of generation")
    options: dict[Literal[tuple(TRL_OPTIONS)], bool | int | float | str] = Field(  # type: ignore[valid-type]
        default={}, description="Further arguments of TRL by name: " + ", ".join(TRL_OPTIONS)
    )

    @property
    def at_once(self) -> int:
        """The part of the batch that all ranks together hold in memory."""
        return self.batch // int(self.options.get("gradient_accumulation_steps", 1))

    @model_validator(mode="after")
    def _fits_the_method(self) -> Self:
        rewarded, accumulated = self.method in REWARDED, self.options.get("gradient_accumulation_steps", 1)
        given = {name: FIELDS_OF[name] for name in self.model_dump(include=set(FIELDS_OF), exclude_defaults=True)}
        given |= {f"options.{name}": TRL_OPTIONS[name] for name in self.options}
        for name, methods in given.items():
            if self.method not in methods:
                raise ValueError(f"{self.name}: {name} belongs to {', '.join(methods)}, not to {self.method}")
        if rewarded and not self.rewards:
            raise ValueError(f"{self.name}: rewards: {self.method} needs at least one; name {{kind: exact_match}}")
        if rewarded and self.batch % self.generations:
            raise ValueError(f"{self.name}: batch {self.batch} is not divisible by generations {self.generations}")
        if type(accumulated) is not int or accumulated < 1 or self.batch % accumulated:
            raise ValueError(f"{self.name}: options.gradient_accumulation_steps must divide batch {self.batch}")
        return self


class Recipe(Section):
    """A whole run: data, model, training, evaluation, export and the way it is carried out."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the run and of its artifacts: up to 63 of a-z, 0-9, '.', '_' and '-'",
    )
    tokens: TokensConfig
    model: AnyModel
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    tune: list[TuneConfig] = Field(default=[], max_length=20, description="Steps after the export, one after the other")
    custom: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")], dict[str, Any]] = Field(
        default={}, description="Stages of other packages, by name, with their settings; they come last"
    )
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="before")
    @classmethod
    def _ids_of_tokenizer(cls, values: Any) -> Any:
        """Without model.vocab_size, the model has the ids of the tokenizer."""
        tokens, model = (values.get(name) if isinstance(values, dict) else None for name in ("tokens", "model"))
        if not isinstance(tokens, dict) or not isinstance(model, dict) or tokens.get("tokenizer") != "bytes":
            return values
        return values | {"model": {"vocab_size": VOCAB_SIZES["bytes"]} | model}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if isinstance(self.tokens.tokenizer, str):  # the ids of a file are counted where it is read
            self.check_vocab_size(VOCAB_SIZES[self.tokens.tokenizer])
        sequences_per_step(self.model, self.train)
        self._family_is_served()
        self._target_is_measured()
        self._steps_of_tuning_fit()
        self._splits_hold_a_sequence()
        return self

    @property
    def row_tokens(self) -> int | None:
        """The tokens of a packed row; None for a stream."""
        return self.model.block_size + 1 if self.tokens.packing == "documents" else None

    @property
    def packing_identity(self) -> dict[str, Any]:
        """The fields that decide the rows, for the fingerprint of the tokens; none for a stream."""
        return {"packing": self.tokens.packing, "row_tokens": self.row_tokens} if self.row_tokens else {}

    def check_vocab_size(self, needed: int) -> None:
        """UserError unless the model has a row for each of the tokenizer's ids."""
        if self.model.vocab_size < needed:
            raise UserError(
                f"model.vocab_size {self.model.vocab_size} is smaller than the {needed} ids of "
                f"tokens.tokenizer '{self.tokens.tokenizer}'; use {needed}"
            )

    def _family_is_served(self) -> None:
        precision = self.train.precision
        reason = None if self.runtime.engine == "sharded" else self.model.why_not_fused
        if reason and (precision.startswith("fp8") or self.runtime.engine == "fused"):
            field = "train.precision: fp8" if precision.startswith("fp8") else "runtime.engine: fused"
            raise ValueError(f"{field} needs the fused engine, and {reason}; use auto")

    def _target_is_measured(self) -> None:
        for name in ("hellaswag", "core"):
            if self.train.stop_at is None or getattr(self.train.stop_at, name) is None:
                continue
            if getattr(self.evaluate, name) is None:
                raise ValueError(f"train.stop_at.{name} needs evaluate.{name}, which is null; name its items there")
            if self.evaluate.every is None:
                raise ValueError(
                    f"train.stop_at.{name} needs an evaluation while training, and evaluate.every is null; "
                    f"set it to {self.train.val_every or 250}"
                )

    def _steps_of_tuning_fit(self) -> None:
        names = [step.name for step in self.tune]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tune: two steps have the name {twice}; rename one")
        if self.tune and "auto_map" in self.model.hf_config():
            raise ValueError("tune: the export of this model has remote code, which nothing here runs; remove tune")
        models = set[str]()
        for step in self.tune:
            if unknown := next((one.step for one in step.rewards if one.step and one.step not in models), None):
                raise ValueError(f"tune.{step.name}: rewards: {shown(unknown)} is not an earlier step of method reward")
            if step.method == REWARD:
                models.add(step.name)
                if self.model.family == "modern":
                    raise ValueError(f"tune.{step.name}: transformers has no reward model of family modern; remove it")
            if max(step.max_length or 0, step.max_answer * (step.method in REWARDED)) > self.model.block_size:
                raise ValueError(
                    f"tune.{step.name}: max_length and max_answer are at most block_size {self.model.block_size}"
                )

    def _splits_hold_a_sequence(self) -> None:
        for tokens in self.tokens.each():
            if not tokens.adopts:  # they have their own split
                total = tokens.max_tokens or sys.maxsize
                held_out = tokens.val_wanted or tokens.held_out(total)
                train, val = (max(0, min(count, tokens.shard_tokens)) for count in (total - held_out, held_out))
                tokens.check_splits(train, val, self.model.block_size)

    def repeated_text(self, train_tokens: int, share: float = 1.0, of: str = "the text") -> str | None:
        """A warning if training goes over a training split of so many tokens more than four times. `share` of its
        tokens are from that text."""
        epochs = share * self.train_tokens / max(1, train_tokens)
        if epochs <= GOOD_EPOCHS:
            return None
        read = int(share * self.train_tokens)
        return (
            f"training goes over {of} {epochs:,.1f} times: it reads {read:,} tokens, and the training "
            f"split has {train_tokens:,}; after {GOOD_EPOCHS} times a model begins to memorize: use more text or a "
            f"train.max_steps of about {max(1, int(self.train.max_steps * GOOD_EPOCHS / epochs)):,}"
        )

    @property
    def benchmark_tokens(self) -> int:
        """Tokens of the benchmarks of one evaluation, an estimate."""
        evaluate = self.evaluate
        return (HELLASWAG_TOKENS if evaluate.hellaswag else 0) + (CORE_TOKENS if evaluate.core else 0)

    def evaluations(self, steps: int) -> int:
        """The number of evaluations while the last `steps` steps train: one at the end."""
        return -(-steps // self.evaluate.every) if self.evaluate.every else 0

    @property
    def train_tokens(self) -> int:
        """The tokens that the run reads; a branch reads those after its first step."""
        return tokens_before(self.train.max_steps, self.train) - tokens_before(self.train.first_step, self.train)

    def with_vocabulary(self, size: int) -> Self:
        """The recipe of a model with other tokens: of a tuned one."""
        return self.model_copy(update={"model": self.model.model_copy(update={"vocab_size": size})})

    def model_before(self, step: TuneConfig | None = None) -> str:
        """The stage whose model a step of tuning begins with; without a step, that of the last model. A reward model
        answers nothing, so the chain passes it over."""
        steps = self.tune[: self.tune.index(step)] if step else self.tune
        return ["export", *(f"tune.{one.name}" for one in steps if one.method != REWARD)][-1]

    @property
    def first_weights(self) -> str | None:
        """What the training begins with, for people; None for weights drawn from the seed."""
        begins = self.train.branch_from or self.train.init_from
        if begins is None:
            return None
        source = Source.of(begins, "train")
        what = "the whole state of" if self.train.branch_from else "the weights of"
        return f"{what} {source.unpinned}" + (f" (sha256 {source.sha256[:12]})" if source.sha256 else "")

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole training."""
        return float(self.train_tokens * self.model.flops_per_token)
