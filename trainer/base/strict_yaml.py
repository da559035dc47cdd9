"""YAML of recipes: plain values, each written once, in a file of a bounded size.

PyYAML reads YAML 1.1, where 020 is 16, 1:30 is 90, the second of two equal keys wins, and ten lines of aliases are a
terabyte. Here they are errors, as are numbers beyond 64 bits. 6e-4 is a text there, and a number here, as in YAML 1.2.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from trainer.base.store import open_regular
from trainer.config.errors import NotAFile, UserError, cut

# A mixture of 100 sources has 110,000. PyYAML reads 40,000 bytes a second of the shortest values.
MOST_BYTES = 128 << 10
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")  # neither octal nor sexagesimal, and below 64 bits
FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def load_yaml(text: str | bytes) -> Any:
    """The value of a YAML text. yaml.YAMLError or ValueError for anything else than plain values."""
    if len(text) > MOST_BYTES:
        raise NotPlain(None, None, f"larger than a recipe of {MOST_BYTES:,} bytes; remove what is no recipe")
    try:
        return yaml.load(text if isinstance(text, str) else text.decode(), StrictLoader)  # a SafeLoader
    except RecursionError as error:
        raise NotPlain(None, None, "too many levels of values in values") from error


def read_yaml(path: Path) -> Any:
    """The plain values in a YAML file. UserError if it cannot be read, or has anything else."""
    try:
        with open_regular(path) as file:
            return load_yaml(file.read(MOST_BYTES + 1))
    except NotAFile:
        raise
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
        names = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise NotPlain(None, None, "a name is a plain text", key.start_mark)
            if key.value in names:
                raise NotPlain(None, None, f"'{cut(key.value)}' is here twice; keep one", key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        if not INTEGER.fullmatch(text := str(self.construct_scalar(node))):
            problem = f"{cut(text)} is not a plain decimal integer of at most 18 digits; write it as one, or quote it"
            raise NotPlain(None, None, problem, node.start_mark)
        return int(text)


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
