"""Each mistake in a configuration is one line with the fault, the field and a valid value."""

import copy
import math
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.__main__ import TrainerConfig
from trainer.base.strict_yaml import load_yaml
from trainer.config.amounts import check_shares, val_share, val_tokens, validations
from trainer.config.config import TrainConfig
from trainer.config.config_errors import explain
from trainer.config.errors import UserError
from trainer.config.source import Source
from trainer.models.gpt2 import Gpt2Config

GOOD: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 257},
    "train": {"batch_tokens": 64, "max_steps": 10, "learning_rate": 0.001},
    "runtime": {"micro_batch_size": 2},
}


def configured(section: str, **changes: Any) -> TrainerConfig:
    """GOOD with changes; a mistake as its one line."""
    sections = copy.deepcopy(GOOD)
    sections[section] |= changes
    try:
        return TrainerConfig.model_validate(sections)
    except ValidationError as error:
        raise explain(error, TrainerConfig, "my.yaml") from error


def complaint(section: str, **changes: Any) -> str:
    with pytest.raises(UserError) as mistake:
        configured(section, **changes)
    return str(mistake.value)


# --- fields and types


@pytest.mark.parametrize(
    ("written", "meant"),
    [("6e-4", 6e-4), ("+1E-3", 1e-3), ("1", 1), ("0.25", 0.25), ("-2.e+4", -2e4), ("6e-4x", "6e-4x")],
)
def test_a_rate_without_a_dot_is_a_number_although_yaml_1_1_reads_a_text(written: str, meant: object) -> None:
    assert load_yaml(written) == meant


@pytest.mark.parametrize(
    ("section", "field", "value", "right"),
    [
        ("train", "learning_rate", 0, "greater than 0"),
        ("train", "learning_rate", math.nan, "finite number"),
        ("runtime", "data_cache_gb", math.inf, "must be a finite number, or 'auto' (got inf)"),
        ("train", "beta2", 1.0, "less than 1"),
        ("train", "val_tokens", 0, "must be greater than 0, or 'auto' (got 0)"),
        ("train", "schedule", "cosin", "'cosine', 'wsd', 'linear' or 'constant'"),
        ("runtime", "recompute", "yes", "valid boolean"),
        ("runtime", "processes", 0, "must be greater than 0, or 'auto' (got 0)"),
        ("runtime", "checkpoint_minutes", "often", "'auto'"),
    ],
)
def test_a_value_out_of_bounds_names_the_field_and_the_bounds(
    section: str, field: str, value: object, right: str
) -> None:
    message = complaint(section, **{field: value})
    assert message.startswith(f"my.yaml: {section}.{field}: ")
    assert right in message and "\n" not in message


# --- combinations


@pytest.mark.parametrize(
    ("field", "value"), [("muon_learning_rate", 0.03), ("embedding_learning_rate", 0.3), ("scale_rates", True)]
)
def test_a_field_of_muon_without_muon_is_refused_but_for_its_default(field: str, value: float) -> None:
    assert complaint("train", **{field: value}) == (
        f"my.yaml: train: {field} belongs to optimizer muon; set train.optimizer to muon, or remove it"
    )
    assert getattr(configured("train", optimizer="muon", **{field: value}).train, field) == value
    configured("train", muon_learning_rate=0.02, embedding_learning_rate=None)


def test_a_batch_with_fewer_sequences_than_processes_is_refused_with_numbers_that_work() -> None:
    config = configured("train", batch_tokens=12 * 16)
    with pytest.raises(UserError) as mistake:
        check_shares(config.model, config.train, 16)
    assert str(mistake.value) == (
        "train.batch_tokens: 192 is 12 sequence(s) of 16 tokens, too few for 16 processes; "
        "use at most 12 (on one node: --set runtime.processes=12), or --set train.batch_tokens=256"
    )
    check_shares(config.model, configured("train", batch_tokens=256).train, 16)


def test_a_ramp_begins_with_a_sequence_for_every_process() -> None:
    model = configured("train").model
    ramp = {"batch_tokens": 12 * 16, "batch_ramp_tokens": 1000}
    train = configured("train", batch_ramp_from=3 * 16, **ramp).train
    check_shares(model, train, 2)
    with pytest.raises(UserError, match=r"train\.batch_ramp_from: 48 .* or --set train\.batch_ramp_from=96$"):
        check_shares(model, train, 5)
    check_shares(model, configured("train", batch_ramp_from=96, **ramp).train, 5)


def test_validations_take_at_most_two_percent_of_the_training() -> None:
    model = Gpt2Config(n_layer=1, n_head=1, n_embd=8, block_size=1024)

    def train(**values: Any) -> TrainConfig:
        return TrainConfig.model_validate({"learning_rate": 0.1} | values)

    for config, tokens in (
        (train(batch_tokens=65_536, max_steps=2000), 873_472),  # before: 21% of the time
        (train(batch_tokens=524_288, max_steps=18_865), 7_706_624),
        (train(batch_tokens=524_288, max_steps=18_865, val_every=1000), 10_485_760),
        (train(batch_tokens=65_536, max_steps=100), 196_608),
        (train(batch_tokens=1_048_576, max_steps=999, batch_ramp_from=131_072, batch_ramp_tokens=10**8), 10_206_208),
    ):
        assert val_tokens(model, config) == tokens and tokens % model.block_size == 0
        assert val_share(model, config) <= 0.02
    assert val_tokens(model, train(batch_tokens=1024, max_steps=4)) == 1024  # one sequence at least
    configured = train(batch_tokens=65_536, max_steps=2000, val_tokens=10_485_760)
    assert val_tokens(model, configured) == 10_485_760 and 0.2 < val_share(model, configured) < 0.3
    assert [validations(train(batch_tokens=1024, max_steps=n, val_every=10)) for n in (5, 10, 19, 20)] == [2, 2, 3, 3]
    assert validations(train(batch_tokens=1024, max_steps=9, val_every=None)) == 0


@pytest.mark.parametrize(
    "text",
    [
        f"hf://org/name@{'a' * 40}",
        f"hf://org/name@{'a' * 40}@sha256:{'b' * 64}",
        f"hf://datasets/org/name/part-*.parquet@{'a' * 40}",
        "s3://bucket/texts/*.jsonl",
        "run:smoke-1a2b3c4d",
        f"run:smoke-1a2b3c4d@200@sha256:{'b' * 64}",
        "texts/a b@c.txt",
        f"mine.py:score@sha256:{'b' * 64}",
    ],
)
def test_a_source_is_written_as_it_was_read(text: str) -> None:
    found = Source.of(text, "field")
    assert str(found) == text and str(Source.of(found.unpinned, "field")) == text.partition("@sha256:")[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hf://org", "not a place on the Hub"),
        (f"hf://org/name/file@{'a' * 40}", "not a place on the Hub"),
        (f"hf://datasets/org/../x@{'a' * 40}", "not a place on the Hub"),
        ("hf://org/name", "lacks its commit; write hf://org/name@ and the 40 hex digits that `git ls-remote "),
        ("hf://org/name@main", "'main' can move; "),
        (f"org/name@{'a' * 40}", f"write hf://org/name@{'a' * 40}"),
        ("run:A@1", "not a run; write run:NAME or run:NAME@STEP"),
        ("ftp://host/a", "unknown scheme 'ftp'; use hf://ORG/NAME@COMMIT, "),
    ],
)
def test_a_text_that_names_no_source_is_refused_in_a_line_that_says_what_would(text: str, reason: str) -> None:
    with pytest.raises(UserError) as mistake:
        Source.of(text, "field")
    line = str(mistake.value)
    assert line.startswith("field: ") and reason in line and "\n" not in line
