"""Extensions: what packages add to skytrain by name. They declare it as entry points, and so do we (pyproject.toml):

    [project.entry-points."skytrain.formats"]
    npz = "my_package.npz:Npz"

A name is found without an import, and its object is imported once it is needed. docs/extend.md has an example of each.
"""

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import UserError, cut, shown

ENGINES, FUSED_STEPS, FAMILIES = "skytrain.engines", "skytrain.fused_steps", "skytrain.families"
STAGES, FORMATS, EVALUATIONS = "skytrain.stages", "skytrain.formats", "skytrain.evaluations"
TRACKERS, REWARDS = "skytrain.trackers", "skytrain.rewards"
OURS = "skytrain"  # the name of our distribution
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # of a clone


class EntryPoint(NamedTuple):
    """A line of a group: NAME = "MODULE:OBJECT", of a package."""

    name: str
    reference: str
    package: str


def names(group: str) -> list[str]:
    """The names of a group, ours first."""
    return list(dict.fromkeys(point.name for point in entry_points(group)))


def check_installed(group: str, name: str, field: str = "") -> str:
    """The name, if a package declares it. UserError, which lists the known names, the nearest first; `field` of the
    recipe has the name."""
    if name not in (known := names(group)):
        near = sorted(known, key=lambda one: -difflib.SequenceMatcher(None, name.lower(), one).ratio())
        where = f"{field}: " if field else ""
        raise UserError(f"{where}unknown {kind_of(group)} {shown(name)}; installed are {', '.join(near) or 'none'}")
    return name


def extension(group: str, name: str, field: str = "") -> Any:
    """The object of a name, which `field` of the recipe has. UserError if no package declares it, if two packages do,
    or if it cannot be imported."""
    check_installed(group, name, field)
    what = f"{field}: {kind_of(group)} {name}" if field else f"{kind_of(group)} {name}"
    found = [point for point in entry_points(group) if point.name == name]
    if len(found) > 1:
        packages = " and ".join(sorted(point.package for point in found))
        raise UserError(f"{what}: {packages} both declare it; uninstall one of them")
    (point,) = found
    try:
        module, _, path = point.reference.partition(":")
        return attrgetter(path)(import_module(module)) if path else import_module(module)
    except UserError:
        raise
    except Exception as error:
        reason = cut(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{what}: {point.reference} of the package {point.package} cannot be imported ({reason}); "
            "correct the package, or uninstall it"
        ) from error


def kind_of(group: str) -> str:
    """ "fused step" for "skytrain.fused_steps"."""
    kind = group.rpartition(".")[2].replace("_", " ")
    return "family" if group == FAMILIES else kind.removesuffix("s")


def entry_points(group: str) -> list[EntryPoint]:
    """Those of a group in all packages that this process can import, ours first."""
    return [point for declared, point in _all(tuple(sys.path)) if declared == group]


@lru_cache(maxsize=4)
def _all(paths: tuple[str, ...]) -> list[tuple[str, EntryPoint]]:
    """The entry points of all of our groups, with their group.

    Reads what `importlib.metadata` does, in 10 ms instead of 90 for 250 packages: only the files that name a group of
    ours. Those of a clone come from its pyproject.toml: the metadata of an editable install is as old as the install.
    """
    found: dict[str, list[tuple[str, EntryPoint]]] = {}  # by package: the first one on the path counts
    if PROJECT.is_file():
        declared = tomllib.loads(PROJECT.read_text(encoding="utf8"))["project"]["entry-points"]
        found[OURS] = [
            (group, EntryPoint(name, reference, OURS))
            for group, points in declared.items()
            for name, reference in points.items()
        ]
    for path in paths:
        with suppress(OSError), os.scandir(path or ".") as entries:
            for folder in sorted(one.name for one in entries if one.name.endswith((".dist-info", ".egg-info"))):
                package = re.sub("[-_.]+", "-", folder.rpartition(".")[0].partition("-")[0]).lower()
                if package not in found:
                    found[package] = list(_declared(Path(path, folder, "entry_points.txt"), package))
    return [*found.pop(OURS, []), *(one for points in found.values() for one in points)]


def _declared(file: Path, package: str) -> Iterator[tuple[str, EntryPoint]]:
    """The entry points of a package in our groups, with their group."""
    try:
        text = file.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError):
        return
    group = ""
    for line in map(str.strip, text.splitlines() if f"[{OURS}." in text else ()):
        if line.startswith("["):
            group = line.strip("[]")
        elif group.startswith(f"{OURS}.") and "=" in line and not line.startswith(("#", ";")):
            name, _, reference = line.partition("=")
            yield group, EntryPoint(name.strip(), reference.strip(), package)
