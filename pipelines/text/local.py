"""The local files of a path or a pattern: each real file once, in the order of names."""

import glob
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import UserError, cut

RECURSIVE = "**"


def local_paths(source: str, base: Path) -> list[str]:
    """The files that `source` names, below `base` if it is relative; none if nothing matches.

    A file that several links lead to counts once, under its first name: otherwise a text would be in training and in
    validation. UserError for a link to nothing, and for a folder link that `**` would follow for ever.
    """
    named = os.path.expanduser(source)
    path = os.path.join(base.absolute(), named)
    if os.path.isfile(path):
        return [path]
    # Brackets in the name of the base folder are not a pattern.
    pattern = os.path.join(glob.escape(str(base.absolute())), named)
    if RECURSIVE in named.split(os.sep):
        refuse_loops(source, folder_before_pattern(named, base))
    real: dict[str, str] = {}
    for name in sorted(glob.glob(pattern, recursive=True)):
        if os.path.islink(name) and not os.path.exists(name):
            raise UserError(f"tokens.source: '{name}' is a link to nothing; remove it or correct it")
        if os.path.isfile(name):
            real.setdefault(os.path.realpath(name), name)
    return list(real.values())


def folder_before_pattern(named: str, base: Path) -> str:
    """The folder from which the wildcards of a pattern start."""
    fixed = os.sep.join(itertools.takewhile(lambda part: not glob.has_magic(part), named.split(os.sep)))
    return os.path.join(base.absolute(), fixed or (os.sep if named.startswith(os.sep) else ""))


def refuse_loops(source: str, folder: str) -> None:
    """UserError if a link below the folder leads to a folder that contains it."""
    for link, target, above in linked_folders(folder, [os.path.realpath(folder)]):
        if target in above or above[0].startswith(os.path.join(target, "")):
            raise UserError(
                f"tokens.source: '{cut(source)}': '{cut(link)}' is a link to a folder that contains it; remove it, "
                "or name the folders without **"
            )


def linked_folders(folder: str, above: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Each link to a folder below `folder`, with its target and the real folders above it. As `**`, it skips .names."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"tokens.source: '{folder}' cannot be read ({error.strerror})") from error
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        target = os.path.realpath(entry.path)
        if entry.is_symlink():
            yield entry.path, target, above
        yield from linked_folders(entry.path, [*above, target])
