"""The documents are current: links lead somewhere, generated parts are fresh, and nothing is left out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.documents import FILES, PARTS, renewed
from pipelines.cli import app
from pipelines.extras.bench.measurements import measurements
from pipelines.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / f for f in ("docker/README.md", "infra/README.md"))]
)
DOCUMENTS.append(ROOT / "sky" / "README.md")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# Prefixes of variables that belong to an interface; others, such as HOME, are the system's.
FAMILIES = r"(?:SKYTRAIN|SKYPILOT|MLFLOW|AWS|HF|TIKTOKEN|TRITON|TORCH|NCCL|GLOO)"
VARIABLE = re.compile(FAMILIES + r"(?:_[A-Z0-9]+)+")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    text = CODE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    dead = []
    for link in LINK.findall(CODE.sub("", document.read_text())):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert dead_links(document) == []


@pytest.mark.parametrize("name", FILES)
def test_the_generated_parts_are_current(name: str) -> None:
    text = (ROOT / name).read_text()
    assert renewed(text) == text, f"{name} is stale; run `make docs`"


def test_every_generated_part_is_in_a_document_once() -> None:
    text = "".join((ROOT / name).read_text() for name in FILES)
    assert sorted(re.findall(r"<!-- generated: ([\w-]+) -->", text)) == sorted(PARTS)
    assert text.count("<!-- end -->") == len(PARTS)


def test_every_command_is_in_the_guide() -> None:
    names = set(get_command(app).commands)  # type: ignore[attr-defined]
    text = (DOCS / "guide.md").read_text()
    assert {name for name in names if f"| `skytrain {name}" not in text} == set()


def test_every_environment_variable_of_the_code_is_in_the_guide() -> None:
    read = {
        node.value: path.name
        for path in sources("trainer", "pipelines")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    }
    text = (DOCS / "guide.md").read_text()
    assert "SKYTRAIN_STORE" in read
    assert {name: where for name, where in read.items() if f"`{name}`" not in text} == {}


def test_every_field_of_a_recipe_is_described() -> None:
    bare = [
        f"{section}.{name}"
        for section, info in Recipe.model_fields.items()
        if hasattr(info.annotation, "model_fields")
        for name, field in info.annotation.model_fields.items()  # type: ignore[union-attr]
        if not field.description
    ]
    assert bare == []


def test_every_measured_figure_names_its_circumstances() -> None:
    known = measurements()
    for figure in (*known.speeds, *known.figures.values()):
        assert re.fullmatch(r"\d{4}-\d{2}", figure.date)
        assert figure.machine and figure.command and figure.source
    for speed in known.speeds:
        assert speed.size in known.sizes
        assert speed.mfu is not None or not speed.plan
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    named = {
        m[1]
        for f in known.figures.values()
        if (m := re.match(r"python -m benchmarks\.(\w+)(?!.*last in commit)", f.command))
    }
    assert named and named <= benchmarks


NAMED_TEST = r"\[`(test_\w+)`\]\((?:\.\./)?(tests/[\w/]+\.py)\)"


@cache
def functions_of(path: Path) -> set[str]:
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions}


def missing_tests(text: str) -> list[str]:
    """The tests that a document names with their files, and that do not exist."""
    named = re.findall(NAMED_TEST, text)
    assert len(named) > 40 and len(named) == len(re.findall(r"`test_\w+`", text))  # none is named without its file
    return [f"{path}::{name}" for name, path in named if name not in functions_of(ROOT / path)]


def test_every_promise_of_the_architecture_has_a_test() -> None:
    promises = (DOCS / "architecture.md").read_text().partition("## Promises")[2].partition("\n## ")[0]
    assert missing_tests(promises) == []
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert all(re.search(NAMED_TEST, row) for row in rows)


# The possible attackers of a run: a heading of SECURITY.md begins with each.
PARTIES = (
    *("A writer of the bucket", "A reader of the bucket", "The server of the bucket", "The MLflow server"),
    *("The author of a recipe", "The author of a text", "Other users of the node", "The cloud account", "The Hub"),
    "A web page in your browser",
)


def test_every_party_of_the_threat_model_has_its_powers_and_its_limits_with_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert missing_tests(text) == []
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", text, re.DOTALL | re.MULTILINE))
    for party in PARTIES:
        (section,) = [text for heading, text in sections.items() if heading.startswith(party)]
        assert section.strip().startswith("Can ")
        rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith("| cannot |")]
        assert rows and all(re.search(NAMED_TEST, row) for row in rows), party
