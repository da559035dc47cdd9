"""The output of checks, and notes of verbs that have no screen."""

from pipelines.user.cloud.checks import Finding
from pipelines.user.show.console import broken, say

MARKS = {"ok": "   ok", "note": "    .", "broken": "WRONG"}


def print_finding(finding: Finding) -> None:
    say(broken(f"{MARKS[finding.state]}  {finding.what}: {finding.seen}", " " * 7))
    if finding.remedy:
        say(broken(f"       -> {finding.remedy}", " " * 10))


def print_note_on_stderr(text: str) -> None:
    say(text, on_stderr=True)
