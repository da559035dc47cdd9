"""A store that does not answer is one line, with the time so far and the time left."""

import io
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.artifacts.store import S3Store
from pipelines.show import console, outage
from pipelines.show.console import CleanConsole, TerminalScreen
from pipelines.show.outage import OutageLine, show_outages
from trainer.errors import StoreUnavailable


class Down:
    """A client whose server refuses every connection until `up`."""

    class exceptions:  # noqa: N801 - boto3's name
        ClientError = ZeroDivisionError

    class meta:  # noqa: N801 - boto3's name
        endpoint_url = "http://s3.example.invalid"

    def __init__(self) -> None:
        self.up = float("inf")

    def put_object(self, **_: Any) -> dict[str, Any]:
        from botocore.exceptions import EndpointConnectionError

        if time.monotonic() < self.up:
            raise EndpointConnectionError(endpoint_url=self.meta.endpoint_url)
        return {"ETag": '"0"'}


@pytest.fixture
def line() -> Iterator[OutageLine]:
    log = logging.getLogger("pipelines.artifacts.store")
    before = log.handlers[:], log.level, log.propagate
    show_outages()
    show_outages()
    (handler,) = (one for one in log.handlers if isinstance(one, OutageLine))
    yield handler
    log.handlers, log.level, log.propagate = before


def test_in_a_log_an_outage_takes_few_lines_and_says_how_long(
    line: OutageLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outage, "WORTH_A_LINE_SECONDS", 0.0)
    client = Down()
    store = S3Store("bucket", "runs", client=client, time_limit_s=30)
    client.up = time.monotonic() + 1.0
    store.put("a", b"x")
    first, last = capsys.readouterr().err.splitlines()
    assert first == "0 s without an answer, 30 s left: put s3://bucket/runs/a: EndpointConnection; trying again"
    assert last.startswith("put s3://bucket/runs/a: answered after ")
    client.up = float("inf")
    with pytest.raises(StoreUnavailable):
        S3Store("bucket", "runs", client=client, time_limit_s=0.5).put("b", b"x")
    (end,) = capsys.readouterr().err.splitlines()
    assert end.startswith("put s3://bucket/runs/b: given up after ") and not line.outages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_an_outage_is_one_line_that_updates_itself_and_goes(
    line: OutageLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DRAW_SECONDS", 0.1)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    client = Down()
    store = S3Store("bucket", "runs", client=client, time_limit_s=30)
    client.up = time.monotonic() + 1.6
    store.put("a", b"x")
    text = terminal.getvalue()
    assert all(f"{n} s without an answer, {30 - n} s left: put s3" in text for n in (0, 1))
    assert "\n" not in text and text.endswith(outage.ERASED)


def test_while_a_bar_stands_on_the_terminal_it_draws_the_outage(
    line: OutageLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DRAW_SECONDS", 0.1)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    client = Down()
    store = S3Store("bucket", "runs", client=client, time_limit_s=30)
    screen = TerminalScreen()
    screen.console = CleanConsole(file=terminal, force_terminal=True, width=90, _environ={"TERM": "xterm"})
    with screen.bar("train", 10) as bar:
        client.up = time.monotonic() + 1.0
        store.put("a", b"x")
        bar.update(3, "step 3")
    text = terminal.getvalue()
    assert "0 s without an answer, 30 s left: put s3" in text and "step 3" in text
    assert outage.ERASED + "0 s without" not in text  # the line has no other place
    assert console.standing.bars == 0
