"""The folders: ours shadow no package, trainer imports nothing of pipelines, and no file names a machine's paths."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("trainer", "pipelines", "docker", "sky", "infra", "tests", "benchmarks", "docs", ".ci", ".github")
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "LICENSE",
    ".gitignore",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The trainer has to work on a GPU node without any of these packages.
UNKNOWN_TO_TRAINER = {
    "pipelines",
    "sky",
    "mlflow",
    "boto3",
    "botocore",
    "docker",
    "datasets",
    "transformers",
    "typer",
    "rich",
}

# No pattern matches its own source. A path counts only at its start, so not inside a URL.
FOREIGN = {
    "a path of one machine": re.compile(
        r"(?:file://|(?<![\w.~/}$-]))/(?:(?:work|root)\b|(?:home|Users|tmp)/\w|opt/(?:wheels|pypi))"
    ),
    "the host of a package registry": re.compile(r"pypi\.(?:org|python)|python(?:hosted)|download\.(?:pytorch)"),
}


def sources_in(folder: str) -> list[Path]:
    """Every file below a folder of the project, without Python's caches."""
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def imports_of(source: Path) -> set[str]:
    """Top-level names of all absolute imports of a file, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text(), filename=str(source))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("folder", ["sky", "docker", "infra"])
def test_folders_with_the_name_of_a_package_hold_no_python(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert [path for path in sources_in(folder) if path.suffix in {".py", ".pyi", ".so"}] == []


def test_the_tests_mirror_the_rooms() -> None:
    """tests/ has a folder per room; its modules are no packages, and pytest imports them by path (importlib)."""
    packages = {path.parent.name for path in (ROOT / "tests").rglob("*.py") if path.name == "__init__.py"}
    assert packages == set()
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == {"conftest.py"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    rooms = {path.parent.relative_to(ROOT / "pipelines") for path in (ROOT / "pipelines").rglob("*.py")}
    others = ("repository", "benchmarks", "infra", "crash", "extend", "trainer")
    mirrored = {folder for folder in folders if folder.parts[0] not in others}
    assert mirrored <= rooms


def test_trainer_imports_nothing_of_pipelines_and_no_cloud() -> None:
    sources = [path for path in sources_in("trainer") if path.suffix == ".py"]
    assert sources
    wrong = {path.name: imports_of(path) & UNKNOWN_TO_TRAINER for path in sources}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_every_package_folder_is_installed() -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("trainer", "pipelines")
        for path in sources_in(top)
        if path.suffix == ".py"
    }
    settings = PROJECT["tool"]["setuptools"]
    assert folders == set(settings["packages"]) - set(settings["package-dir"])  # data alone


def test_every_declared_dependency_is_pinned() -> None:
    def canonical(requirement: str) -> str:
        name = re.match(r"[\w.-]+", requirement)
        assert name, requirement
        return re.sub(r"[-_.]+", "-", name[0]).lower()

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {canonical(each) for each in sum(extras.values(), PROJECT["project"]["dependencies"])}
    assert {"torch", "tiktoken", "datasets", "boto3", "skypilot", "mlflow", "tenacity"} <= declared
    assert declared - {canonical(pin) for pin in pins} == set()


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_of_the_project_names(what: str) -> None:
    paths = [ROOT / name for name in FILES] + [path for folder in FOLDERS for path in sources_in(folder)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FOREIGN[what].search(line)
    ]
    assert found == []
