"""YAML of recipes: plain values, each written once.

PyYAML reads YAML 1.1, where 020 is 16, 1:30 is 90, the second of two equal keys wins, and ten lines of aliases are a
terabyte. Here they are errors, as are numbers beyond 64 bits and files that are larger or deeper than a recipe is.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from trainer.errors import UserError, cut

MOST_CHARACTERS = 200_000
DEEPEST = 20  # sections in sections; a recipe has two
INTEGER_LIMIT = 1 << 63
OLD_NOTATION = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # octal, and sexagesimal


def load_yaml(text: str) -> Any:
    """The value of a YAML text. yaml.YAMLError or ValueError for anything else than plain values."""
    if len(text) > MOST_CHARACTERS:
        raise NotPlain(None, None, f"a recipe has at most {MOST_CHARACTERS:,} characters")
    return yaml.load(text, StrictLoader)  # a SafeLoader


def read_yaml(path: Path) -> Any:
    """The plain values in a YAML file. UserError if it cannot be read, or has anything else."""
    try:
        with path.open(encoding="utf8") as file:
            return load_yaml(file.read(MOST_CHARACTERS + 1))
    except (yaml.YAMLError, ValueError) as error:  # PyYAML passes errors of int() and date() on
        what = "" if isinstance(error, NotPlain) else "not a YAML file: "
        raise UserError(f"{path}: {what}{' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


class NotPlain(ConstructorError):
    """A value that YAML allows and a recipe does not."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without its surprises."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise NotPlain(None, None, "a recipe has no aliases; write the value again", event.start_mark)
        self.depth += 1
        if self.depth > DEEPEST:
            event = self.peek_event()
            raise NotPlain(None, None, f"more than {DEEPEST} levels of values in values", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise NotPlain(None, None, "a key must be a name", key.start_mark)
            if key.value in names:
                raise NotPlain(None, None, f"'{cut(key.value)}' is here twice; keep one", key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if OLD_NOTATION.fullmatch(text):
            problem = f"{cut(text)} is another number in YAML than it seems; write it without a 0 in front, or quote it"
            raise NotPlain(None, None, problem, node.start_mark)
        if len(text) > 100 or abs(value := int(self.construct_yaml_int(node))) >= INTEGER_LIMIT:
            raise NotPlain(None, None, f"{cut(text)} has more than 64 bits", node.start_mark)
        return value


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)
