"""A store that does not answer takes few lines, with the time so far and the time left."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.artifacts.s3_store import S3Store
from pipelines.show import outage
from pipelines.show.outage import OutageLines, show_outages
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
def lines() -> Iterator[OutageLines]:
    log = logging.getLogger("pipelines.artifacts.s3_store")
    before = log.handlers[:], log.level, log.propagate
    show_outages()
    show_outages()
    (handler,) = (one for one in log.handlers if isinstance(one, OutageLines))
    yield handler
    log.handlers, log.level, log.propagate = before


def test_an_outage_takes_few_lines_and_says_how_long(
    lines: OutageLines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert end.startswith("put s3://bucket/runs/b: given up after ")
