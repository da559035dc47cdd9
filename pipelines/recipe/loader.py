"""Recipes from files and from records: the shipped ones, `section.field=value` changes, and the spellings of 0.2."""

import copy
import difflib
import os
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import VOCAB_SIZES
from trainer.base.strict_yaml import NotPlain, load_yaml, read_yaml
from trainer.config.config_errors import explain
from trainer.config.errors import UserError, cut, shown
from trainer.config.source import HUB, MODEL_OF_0_2

SHIPPED = (
    *("smoke", "laptop", "smoke-chat", "smoke-modern", "gpt2-124m", "gpt2-124m-chat", "llama-124m", "modern-124m"),
    *("gpt3-125m", "gpt2-350m", "gpt2-774m", "llama-1b", "modern-d24", "gpt2-1558m", "llama-8b"),
    *("gpt3-6.7b", "gpt3-13b", "gpt3-175b"),
)


def shipped() -> dict[str, Path]:
    """The recipes that come with skytrain, by name, smallest first."""
    return {name: Path(str(resources.files("pipelines"))) / "recipes" / f"{name}.yaml" for name in SHIPPED}


def load_recipe(name_or_path: str, changes: Iterable[str] = ()) -> Recipe:
    """A shipped recipe or a file, with `section.field=value` changes. UserError names the wrong field and file."""
    path = shipped().get(name_or_path) or Path(name_or_path)
    if not os.path.isfile(path):
        beside = [f"{name_or_path}{end}" for end in (".yaml", ".yml") if os.path.isfile(f"{name_or_path}{end}")]
        begun = [name for name in shipped() if name_or_path and name.startswith(name_or_path)]
        near = beside or begun or difflib.get_close_matches(name_or_path, shipped(), 1)
        hint = f"did you mean '{near[0]}'?" if near else f"shipped are {', '.join(shipped())}"
        raise UserError(f"{cut(name_or_path)}: neither a shipped recipe nor a file; {hint}")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe has sections (name, tokens, model, train, …); none found")
    return changed_recipe(values, changes, name_or_path)


def changed_recipe(values: dict[str, Any], changes: Iterable[str], where: str) -> Recipe:
    """The recipe with these values, after `section.field=value` changes, which change `values` too."""
    changes = list(changes)
    _forget_replaced(values, changes)
    for change in changes:
        _apply(values, change)
    for path, section, old, new, pin in _pins_of_0_2(values):
        if old in section:
            pinned = f"{section.get(new)}{pin}{section[old]}" if section[old] else section.get(new)
            raise UserError(f"{where}: {path}.{old}: belongs to the source now; write {path}.{new}: {cut(str(pinned))}")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise explain(error, Recipe, where) from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _forget_replaced(values: dict[str, Any], changes: Iterable[str]) -> None:
    """Remove the fields that belong to the source or to the tokenizer that a change replaces."""
    tokens = values.get("tokens")
    for change in changes:
        field, _, text = change.partition("=")
        if field == "tokens.source" and isinstance(tokens, dict) and tokens.get("source") != text:
            for name in ("sources", "subset"):
                tokens.pop(name, None)
        other = isinstance(tokens, dict) and text in VOCAB_SIZES and tokens.get("tokenizer", "gpt2") != text
        if field == "tokens.tokenizer" and other and isinstance(values.get("model"), dict):
            values["model"].pop("vocab_size", None)


def _apply(values: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    sections = path.split(".")
    if not equals or not 1 <= len(sections) <= 2 or not all(sections):
        raise UserError(f"--set {cut(change)}: not of the form section.field=value, such as train.max_steps=50")
    for section in sections[:-1]:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {cut(change)}: {section} has no fields")
    try:
        values[sections[-1]] = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        remedy = "; quote text twice, as 'tokens.source=\"*.txt\"'"
        why = f" of a recipe: {error.problem}" if isinstance(error, NotPlain) else remedy
        raise UserError(f"--set {cut(change)}: {shown(text)} is not a YAML value{why}") from error


# --- the spellings of 0.2


def recorded_recipe(values: dict[str, Any], where: str) -> Recipe:
    """The recipe in the record of a run, which 0.2 may have written. UserError if this version cannot read it."""
    values = copy.deepcopy(values)
    for _, section, old, new, pin in _pins_of_0_2(values):
        if (value := section.pop(old, None)) is not None:
            section[new] = f"{section[new]}{pin}{value}"
    train = values.get("train")
    if isinstance(train, dict) and MODEL_OF_0_2.fullmatch(str(train.get("init_from"))):
        train["init_from"] = f"{HUB}{train['init_from']}"
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        reason = explain(error, Recipe, where)
        raise UserError(f"{reason}; if a newer skytrain wrote it: upgrade skytrain") from error


def _pins_of_0_2(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, str, str]]:
    """The fields that held the commit or the content of a source: path and values of the section, the field, the field
    of the source, and what goes between the two."""
    for tokens in _sections([values.get("tokens")]):
        yield "tokens", tokens, "revision", "source", "@"
        for number, one in enumerate(_sections(tokens.get("sources"))):
            yield f"tokens.sources.{number}", one, "revision", "source", "@"
        for tokenizer in _sections([tokens.get("tokenizer")]):
            yield "tokens.tokenizer", tokenizer, "sha256", "file", "@sha256:"
    for number, step in enumerate(_sections(values.get("tune"))):
        yield f"tune.{number}", step, "revision", "data", "@"
        yield f"tune.{number}", step, "content", "data", "@sha256:"
        for place, reward in enumerate(_sections(step.get("rewards"))):
            yield f"tune.{number}.rewards.{place}", reward, "sha256", "function", "@sha256:"


def _sections(values: Any) -> list[dict[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []
