"""The output of checks, and notes of verbs that have no screen."""

from pipelines.cloud.checks import Finding
from pipelines.show.console import broken, say

MARKS = {"ok": "   ok", "note": "    .", "broken": "WRONG"}


def finding_text(finding: Finding) -> str:
    lines = [f"{MARKS[finding.state]}  {finding.what}: {finding.seen}"]
    lines += [f"       -> {finding.remedy}"] if finding.remedy else []
    return "\n".join(broken(line, " " * (7 if i == 0 else 10)) for i, line in enumerate(lines))


def print_finding(finding: Finding) -> None:
    say(finding_text(finding))


def print_note_on_stderr(text: str) -> None:
    say(text, on_stderr=True)
