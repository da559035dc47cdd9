"""YAML of recipes: plain values, each written once.

PyYAML reads YAML 1.1, where 020 is 16, 1:30 is 90, the second of two equal keys wins, and ten lines of aliases are a
terabyte. Here they are errors, as are numbers beyond 64 bits. 6e-4 is a text there, and a number here, as in YAML 1.2.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from trainer.errors import UserError, cut

INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")  # neither octal nor sexagesimal, and below 64 bits
FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def load_yaml(text: str) -> Any:
    """The value of a YAML text. yaml.YAMLError or ValueError for anything else than plain values."""
    try:
        return yaml.load(text, StrictLoader)  # a SafeLoader
    except RecursionError as error:
        raise NotPlain(None, None, "too many levels of values in values") from error


def read_yaml(path: Path) -> Any:
    """The plain values in a YAML file. UserError if it cannot be read, or has anything else."""
    try:
        return load_yaml(path.read_text(encoding="utf8"))
    except (yaml.YAMLError, ValueError) as error:  # PyYAML passes errors of int() and date() on
        what = "" if isinstance(error, NotPlain) else "not a YAML file: "
        raise UserError(f"{path}: {what}{' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


class NotPlain(ConstructorError):
    """A value that YAML allows and a recipe does not."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without its surprises."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise NotPlain(None, None, "a recipe has no aliases; write the value again", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise NotPlain(None, None, f"'{cut(str(key.value))}' is here twice; keep one", key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        if not INTEGER.fullmatch(text := str(self.construct_scalar(node))):
            problem = f"{cut(text)} is not a plain decimal integer of at most 18 digits; write it as one, or quote it"
            raise NotPlain(None, None, problem, node.start_mark)
        return int(text)


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
