"""Where this code runs from, a clone or an installed package, and so how a user installs what is missing."""

import importlib.util
from pathlib import Path

from trainer.config.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def clone() -> Path | None:
    """The clone that this code runs from; None if it was installed from a wheel."""
    return ROOT if (ROOT / "pyproject.toml").is_file() else None


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package."""
    return f"make install, or pip install -e '.[{extra}]'" if clone() else f"pip install 'skytrain[{extra}]'"


def check_package(module: str, extra: str, field: str, otherwise: str = "then run again") -> None:
    """UserError if a package of an extra is not installed, which `field` of the recipe needs; `otherwise`: what else
    helps."""
    if not importlib.util.find_spec(module):
        package = module.replace("_", "-")
        raise UserError(f"{field} needs the package {package}: {how_to_install(extra)}, {otherwise}")
