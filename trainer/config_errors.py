"""One line for each error of a recipe: the field, what it holds, and what would be right."""

import difflib
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.errors import UserError, shown
from trainer.models.model_config import REMOVED_FIELDS

# pydantic's words, and ours.
WORDS = {"Input should be ": "must be ", "greater than or equal to ": "at least ", "less than or equal to ": "at most "}


def explain(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """pydantic's errors as one line each: `where: train.learning_rte: unknown field; did you mean …`."""
    lines: dict[str, list[str]] = {}  # a union reports one error for each member: join them into one line a field
    # Misspelt fields first: they are why others are missing.
    for e in sorted(error.errors(), key=lambda e: e["type"] == "missing"):
        path, message = _one_line(e, model)
        meant = {line.rpartition("'?")[0].rpartition("did you mean '")[2] for known in lines.values() for line in known}
        if e["type"] != "missing" or path.rpartition(".")[2] not in meant:
            if found := lines.setdefault(path, []):
                found[-1] = found[-1].removesuffix(f" (got {shown(e['input'])})")
                message = message.removeprefix("must be ")
            found.append(message)
    complaints = (": ".join(filter(None, (where, path, ", or ".join(m)))) for path, m in lines.items())
    return UserError("\n".join(complaints))


def _one_line(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """The path of the field, and its error."""
    path, sections = _place(model, [str(p) for p in error["loc"]])
    known = [name for section in sections for name in section.model_fields]
    if error["type"] == "extra_forbidden":
        if removed := REMOVED_FIELDS.get(".".join(path)):
            return ".".join(path), f"was {removed}"
        if near := difflib.get_close_matches(path[-1], known, 1):
            return ".".join(path), f"unknown field; did you mean '{near[0]}'?"
        return ".".join(path), f"unknown field; known fields: {', '.join(known)}"
    if error["type"] == "missing":
        return ".".join(path), "missing; a value is required"
    if error["type"] == "union_tag_invalid":
        families = re.findall("'([^']*)'", error["ctx"]["expected_tags"])
        near = difflib.get_close_matches(str(error["ctx"]["tag"]).lower(), families, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(families)}"
        return ".".join([*path, "family"]), f"unknown family {shown(error['ctx']['tag'])}; {hint}"
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


def _near_value(error: ErrorDetails) -> str:
    """A hint at the known value that a wrong one resembles."""
    if error["type"] != "literal_error":
        return ""
    known = re.findall("'([^']*)'", error["ctx"]["expected"])
    near = difflib.get_close_matches(str(error["input"]).lower(), known, 1, cutoff=0.7)
    return f"; did you mean '{near[0]}'?" if near else ""


def _place(model: type[BaseModel], loc: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path of a field as the user writes it, and the section that should hold it; none if that is not a section.
    Where a section is one of several families, pydantic puts its family into `loc`."""
    path: list[str] = []
    sections: list[type[BaseModel]] = [model]
    inside = sections
    for name in loc:
        if len(inside) > 1:
            inside = [one for one in inside if one.model_fields["family"].default == name]
            continue
        path.append(name)
        if not (inside and name.isdecimal()):  # the place in a list
            sections, field = inside, inside[0].model_fields.get(name) if inside else None
            inside = _sections(field.annotation) if field else []
    return path, sections


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: one, one a family, or several in a list."""
    members = [
        get_args(m)[0] if get_origin(m) in (Annotated, list) else m for m in get_args(annotation) or (annotation,)
    ]
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
