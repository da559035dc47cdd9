"""What an answer of an S3 server means: the first one of each test is odd, and the request is repeated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from answers import Request, answering

from pipelines.store.s3_store import S3Store
from trainer.config.errors import UserError

BODY = b"the body of the object"
DATE = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
ITEM = f'<Contents><Key>key</Key>{DATE}<ETag>"1"</ETag><Size>3</Size></Contents>'
ENDS = "<IsTruncated>false</IsTruncated>"


Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers beside those of every answer


def listing(content: str, **headers: str) -> Answer:
    return 200, f"<ListBucketResult>{content}</ListBucketResult>".encode(), headers


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> Iterator[tuple[S3Store, list[str]]]:
    """A store behind a server that gives these answers, and the paths asked for so far."""
    left, asked = iter(answers), list[str]()

    def answer(request: Request) -> None:
        asked.append(request.path)
        status, body, headers = next(left)
        request.close_connection = True
        request.respond(status, body, **{"ETag": '"1"'} | headers)

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with answering(answer) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield S3Store("bucket", time_limit_s=20), asked


WHOLE: Answer = (200, BODY, {})
LOGIN_PAGE = b"<html><body>Log in to the guest network</body></html>"
ODD: dict[str, tuple[Callable[[S3Store], object], Answer, Answer, object]] = {
    "an error without a body": (lambda s: s.get("key"), (404, b"", {}), WHOLE, BODY),
    "a login page": (lambda s: s.get("key"), (400, LOGIN_PAGE[:-20], {}), WHOLE, BODY),
    "a login page in place of a listing": (lambda s: s.entries(""), (200, LOGIN_PAGE, {}), listing(ENDS), []),
    "an answer to a write without ETag": (
        lambda s: s.create("key", BODY),
        (200, LOGIN_PAGE, {"ETag": ""}),
        (200, b"", {}),
        True,
    ),
    "an end in the middle": (lambda s: s.get("key"), (503, b"cut", {"Content_Length": "9"}), WHOLE, BODY),
    **{
        f"a listing without {lacking}": (
            lambda s: [one.key for one in s.entries("")],
            listing(ITEM.replace(lacking, "") + ENDS),
            listing(ITEM + ENDS),
            ["key"],
        )
        for lacking in ("<Key>key</Key>", DATE, '<ETag>"1"</ETag>', "<Size>3</Size>")
    },
    "a date": (
        lambda s: [one.size for one in s.entries("")],
        listing(ITEM.replace("2026-01-01T00:00:00.000Z", "soon") + ENDS),
        listing(ITEM + ENDS),
        [3],
    ),
    "a page without the next": (
        lambda s: s.entries(""),
        listing("<IsTruncated>true</IsTruncated>"),
        listing(ENDS),
        [],
    ),
    "a clock": (
        lambda s: s.clock() > 0,
        listing(ENDS, Date="soon"),
        listing(ENDS),
        True,
    ),
    "a range": (
        lambda s: s.read_into("key", 0, memoryview(bytearray(22))),
        (206, BODY, {"Content_Range": "bytes 0-21/100000000000000"}),
        WHOLE,
        22,
    ),
}


@pytest.mark.parametrize(("operation", "odd", "right", "result"), ODD.values(), ids=ODD)
def test_an_odd_answer_is_a_reason_to_ask_again(
    operation: Callable[[S3Store], object], odd: Answer, right: Answer, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, odd, right) as (store, asked):
        assert operation(store) == result
    assert len(asked) == 2


def test_an_object_of_a_size_that_none_has_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(monkeypatch, (200, b"", {"Content_Length": str(10**14)}), WHOLE) as (store, asked):
        store.download("key", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY and len(asked) == 2


@pytest.mark.parametrize(
    ("code", "own", "named"),
    [
        ("SignatureDoesNotMatch", "", "correct AWS_SECRET_ACCESS_KEY or"),
        ("SignatureDoesNotMatch", "SECRET_ACCESS_KEY ACCESS_KEY_ID", "correct SKYTRAIN_S3_SECRET_ACCESS_KEY or"),
        (
            "InvalidAccessKeyId",
            "SECRET_ACCESS_KEY ACCESS_KEY_ID",
            "set SKYTRAIN_S3_ACCESS_KEY_ID or AWS_PROFILE .* AWS_E",
        ),
        ("InvalidToken", "SECRET_ACCESS_KEY ACCESS_KEY_ID", "correct SKYTRAIN_S3_SESSION_TOKEN or"),
    ],
)
def test_a_refusal_names_the_variables_that_were_used(
    code: str, own: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in own.split():
        monkeypatch.setenv(f"SKYTRAIN_S3_{name}", "us-east-1")
    refused: Answer = (403, f"<Error><Code>{code}</Code></Error>".encode(), {})
    with serving(monkeypatch, refused) as (store, _), pytest.raises(UserError, match=named):
        store.get("key")
