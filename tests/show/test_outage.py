"""A store that does not answer is one line, with the time so far and the time left."""

import io
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.artifacts.outage import LOGGER
from pipelines.artifacts.store import S3Store
from pipelines.show import console, outage
from pipelines.show.console import CleanConsole
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

    def put_object(self, **_: Any) -> None:
        from botocore.exceptions import EndpointConnectionError

        if time.monotonic() < self.up:
            raise EndpointConnectionError(endpoint_url=self.meta.endpoint_url)


@pytest.fixture
def line() -> Iterator[OutageLine]:
    log = logging.getLogger(LOGGER)
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
    assert first == "put s3://bucket/runs/a: EndpointConnection; trying again (0 s so far, 30 s left)"
    assert last.startswith("put s3://bucket/runs/a: answered after ")
    client.up = float("inf")
    with pytest.raises(StoreUnavailable):
        S3Store("bucket", "runs", client=client, time_limit_s=0.5).put("b", b"x")
    (end,) = capsys.readouterr().err.splitlines()
    assert end.startswith("put s3://bucket/runs/b: given up after ") and not line.outages


def test_on_a_terminal_an_outage_is_one_line_that_updates_itself_and_goes(
    line: OutageLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    shown = CleanConsole(file=terminal, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr(console, "error_console", lambda: shown)
    client = Down()
    store = S3Store("bucket", "runs", client=client, time_limit_s=30)
    client.up = time.monotonic() + 2.5
    store.put("a", b"x")
    text = terminal.getvalue()
    seconds = [n for n in range(4) if f"trying again ({n} s so far, {30 - n} s left)" in text]
    assert len(seconds) >= 2  # also between two requests
    assert text.count("\n") == 1 and text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the line is gone
