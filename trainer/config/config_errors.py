"""One line for each error of a recipe: the field, what it holds, and what would be right."""

import difflib
import re
from collections.abc import Iterator
from inspect import isabstract
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.errors import UserError, shown

# pydantic's words, and ours.
WORDS = {"Input should be ": "must be ", "greater than or equal to ": "at least ", "less than or equal to ": "at most "}
MOST_ERRORS = 20  # of a recipe, in one message
# Names in other tools, and ours.
ALIASES = {
    **dict.fromkeys(("data", "dataset", "path"), "source"),
    **dict.fromkeys(("context_length", "n_ctx", "seq_len"), "block_size"),
    **dict.fromkeys(("d_model", "hidden_size"), "n_embd"),
    **dict.fromkeys(("batch", "batch_size"), "batch_tokens"),
    **dict.fromkeys(("epochs", "num_train_epochs"), "max_steps"),
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
}


def explain(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """pydantic's errors as one line each: `where: train.learning_rte: unknown field; did you mean …`."""
    lines: dict[str, list[str]] = {}  # a union reports one error for each member: join them into one line a field
    # Misspelt fields first: they are why others are missing.
    for e in sorted(error.errors(), key=lambda e: e["type"] == "missing")[:MOST_ERRORS]:
        path, message = _one_line(e, model)
        meant = {line.rpartition("'?")[0].rpartition("did you mean '")[2] for known in lines.values() for line in known}
        if e["type"] != "missing" or not meant & {path, path.rpartition(".")[2]}:
            if found := lines.setdefault(path, []):
                found[-1] = found[-1].removesuffix(f" (got {shown(e['input'])})")
                message = message.removeprefix("must be ")
            found.append(message)
    complaints = [": ".join(filter(None, (where, path, ", or ".join(m)))) for path, m in lines.items()]
    if error.error_count() > MOST_ERRORS:
        complaints.append(f"{where}: and {error.error_count() - MOST_ERRORS:,} more errors")
    return UserError("\n".join(complaints))


def _one_line(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """The path of the field, and its error."""
    path, sections = _place(model, [str(p) for p in error["loc"]])
    known = [name for section in sections for name in section.model_fields]
    if error["type"] == "extra_forbidden":
        return ".".join(path), f"unknown field; {_nearest_field(path, known, model)}"
    if error["type"] == "missing":
        return ".".join(path), "missing; a value is required"
    # Unions put the name of their member ('int', 'literal[…]') at the end of loc: it does not help a user.
    if len(path) > 1 and path[-1] not in known:
        path = path[:-1]
    message = error["msg"].removeprefix("Value error, ")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    if error["type"] in ("model_type", "model_attributes_type"):
        message = "must be fields: {NAME: VALUE, …}"
    elif error["type"] == "string_pattern_mismatch":
        fields = [section.model_fields[path[-1]] for section in sections if path[-1] in section.model_fields]
        message = f"must be: {fields[0].description}" if fields else "has a wrong form"
    message = message[0].lower() + message[1:]
    got = "" if error["type"] == "value_error" else f" (got {shown(error['input'])})"
    return ".".join(path), f"{message}{got}{_near_value(error)}"


def _nearest_field(path: list[str], known: list[str], model: type[BaseModel]) -> str:
    """A hint at the field that an unknown one resembles: one of its section, else of another section."""
    name, unknown = path[-1], ".".join(path)  # another family may have a field of this path
    others = {other.rpartition(".")[2]: other for other in reversed([*_fields(model)]) if other != unknown}
    usual = ALIASES.get(name.lower(), name)
    if usual in known:
        return f"did you mean '{usual}'?"
    if name not in others and (near := difflib.get_close_matches(name, known, 1)):
        return f"did you mean '{near[0]}'?"
    if near := difflib.get_close_matches(usual, others, 1, cutoff=0.75):
        return f"did you mean '{others[near[0]]}'?"
    nearest = difflib.get_close_matches(name, known, 3, cutoff=0)
    return f"the nearest are {', '.join(nearest)}"


def _fields(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """The paths of all fields."""
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        for section in _sections(field.annotation):
            yield from _fields(section, f"{before}{name}.")


def _near_value(error: ErrorDetails) -> str:
    """A hint at the known value that a wrong one resembles."""
    if error["type"] != "literal_error":
        return ""
    known = re.findall("'([^']*)'", error["ctx"]["expected"])
    near = difflib.get_close_matches(str(error["input"]).lower(), known, 1, cutoff=0.7)
    return f"; did you mean '{near[0]}'?" if near else ""


def _place(model: type[BaseModel], loc: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path of a field as the user writes it, and the section that should hold it; none if that is not a section.
    Where a section is one of several families, the class of its family is in `loc`."""
    path: list[str] = []
    sections: list[type[BaseModel]] = [model]
    inside = sections
    for name in loc:
        if family := [one for one in inside if one.__name__ == name]:
            inside = family
            continue
        path.append(name)
        if not (inside and name.isdecimal()):  # the place in a list
            sections, field = inside, inside[0].model_fields.get(name) if inside else None
            inside = _sections(field.annotation) if field else []
    return path, sections


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: one, one for each family that is loaded, or several in a list."""
    members = [
        get_args(m)[0] if get_origin(m) in (Annotated, list) else m for m in get_args(annotation) or (annotation,)
    ]
    sections = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return [one for section in sections for one in ([section] if not isabstract(section) else _families(section))]


def _families(section: type[BaseModel]) -> list[type[BaseModel]]:
    """The classes below an abstract section."""
    below = [one for kind in section.__subclasses__() for one in (kind, *_families(kind))]
    return [one for one in below if not isabstract(one)]
