"""Values in the terminal: durations, and text without control characters."""

import pytest

from pipelines.show.console import duration, printable


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (7.44, "7.4 s"), (59.9, "59.9 s"), (60, "1 min 00 s"), (192, "3 min 12 s"), (7500, "2 h 05 min")],
)
def test_durations_have_two_readable_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_generated_text_cannot_control_a_terminal() -> None:
    assert printable("a\tb\n\x1b[31m\x00é\u202e") == "a\tb\n·[31m·é·"
