"""SECURITY.md names a test for each thing that a party cannot do, and each of these tests exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = re.compile(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)")
# The possible attackers of a run: a heading of SECURITY.md begins with each.
PARTIES = (
    *("A writer of the bucket", "A reader of the bucket", "The server of the bucket", "The MLflow server"),
    *("The author of a recipe", "The author of a text", "Other users of the node", "The cloud account", "The Hub"),
    "A web page in your browser",
)


def functions_of(path: Path) -> set[str]:
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions}


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 40
    assert [(name, path) for name, path in named if name not in functions_of(ROOT / path)] == []
    assert len(named) == len(re.findall(r"`test_\w+`", TEXT))  # none is named without its file


def test_every_party_of_the_threat_model_has_its_powers_and_its_limits_with_tests() -> None:
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", TEXT, re.DOTALL | re.MULTILINE))
    for party in PARTIES:
        (section,) = [text for heading, text in sections.items() if heading.startswith(party)]
        assert section.strip().startswith("Can ")
        rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith("| cannot |")]
        assert rows and all(NAMED.search(row) for row in rows), party
