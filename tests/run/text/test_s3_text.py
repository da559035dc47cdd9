"""Text in S3 is read with the store's credentials, and its identity is that of its objects."""

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import S3Account

from pipelines.recipe.loader import load_recipe
from pipelines.run.text import files
from pipelines.run.text.encode import Encoder
from pipelines.run.text.objects import store_of
from pipelines.run.text.pool import tokens_of
from pipelines.run.text.sources import first_documents, open_source
from pipelines.run.text.tokenizer import tokenizer
from pipelines.store.s3_store import S3Store
from pipelines.store.traffic import counted_together, traffic_here
from pipelines.user.cloud.preflight import texts_reachable
from trainer.config.errors import UserError

TEXTS = [f"row {n} größer 東京\nsecond line\r\n" for n in range(2500)]


@pytest.fixture(params=["moto_server", pytest.param("radosgw", marks=pytest.mark.slow)])
def bucket(request: pytest.FixtureRequest, fresh_s3_store: Callable[[S3Account], S3Store]) -> S3Store:
    """The whole of a new bucket, with texts in it."""
    server = request.getfixturevalue(request.param)
    store = S3Store(fresh_s3_store(getattr(server, "account", server)).bucket)
    store_of.cache_clear()
    return store


def put_texts(bucket: S3Store, folder: Path) -> None:
    """All texts as parquet (two files), jsonl, packed jsonl and txt."""
    for number, rows in enumerate((TEXTS[:2000], TEXTS[2000:])):
        pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), folder / "rows.parquet", row_group_size=100)
        bucket.upload(folder / "rows.parquet", f"some texts/part={number}/rows [{number}].parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    bucket.put("lines.jsonl", lines)
    bucket.put("packed/lines.jsonl.gz", gzip.compress(lines))
    bucket.put("txt/0.txt", TEXTS[0].encode())
    bucket.put("txt/1.txt", TEXTS[1].encode())
    bucket._client.put_object(Bucket=bucket.bucket, Key="txt/")  # a folder marker of a web console


def read(source: str, start: int = 0) -> list[str]:
    return list(itertools.islice(first_documents(open_source(source, None, "text")), start, None))


def identity(source: str) -> dict[str, Any]:
    return open_source(source, None, "text").identity()


def test_every_kind_of_file_in_s3_gives_the_documents_of_a_local_file(bucket: S3Store, tmp_path: Path) -> None:
    put_texts(bucket, tmp_path)
    uri = f"s3://{bucket.bucket}"
    assert read(f"{uri}/some texts/**/*.parquet") == TEXTS
    assert read(f"{uri}/some texts/part=?/rows*.parquet", start=1999) == TEXTS[1999:]
    assert store_of.cache_info().misses == 1, "a client of boto3 for each thread is slow"
    assert read(f"{uri}/lines.jsonl") == TEXTS == read(f"{uri}/packed/*.jsonl.gz")
    assert read(f"{uri}/txt/*.txt") == TEXTS[:2]


def test_the_identity_of_text_in_s3_is_its_contents_and_needs_no_revision(bucket: S3Store, tmp_path: Path) -> None:
    put_texts(bucket, tmp_path)
    uri = f"s3://{bucket.bucket}"
    before = identity(f"{uri}/txt/*.txt")
    bucket.put("txt/1.txt", TEXTS[1].encode())
    assert identity(f"{uri}/txt/*.txt") == before and len(before["etag"]) == 2
    bucket.put("moved/0.txt", TEXTS[0].encode())
    bucket.put("moved/1.txt", TEXTS[1].encode())
    assert identity(f"{uri}/moved/*.txt") == before
    bucket.put("txt/1.txt", b"other text")
    assert identity(f"{uri}/txt/*.txt") != before


def test_an_object_that_is_replaced_while_it_is_read_is_named(bucket: S3Store, tmp_path: Path) -> None:
    lines = [json.dumps({"text": str(n) + "x" * 1000}) + "\n" for n in range(40_000)]  # 40 MB: several ranges
    (tmp_path / "a.jsonl").write_text("".join(lines))
    bucket.upload(tmp_path / "a.jsonl", "a.jsonl")
    texts = first_documents(open_source(f"s3://{bucket.bucket}/a.jsonl", None, "text"))
    assert next(texts) == "0" + "x" * 1000
    bucket.put("a.jsonl", b"{}")
    with pytest.raises(UserError, match=r"a.jsonl: changed while it was read; run again"):
        list(texts)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_the_processes_of_tokenize_read_is_in_the_traffic(
    bucket: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    put_texts(bucket, tmp_path)
    monkeypatch.setattr(files, "PIECE_BYTES", 20_000)
    text, size = (
        open_source(f"s3://{bucket.bucket}/lines.jsonl", None, "text"),
        len(bucket.get("lines.jsonl") or b""),
    )
    with counted_together():
        documents = sum(
            len(b.starts) for b in tokens_of(text, Encoder(tokenizer("bytes")), 0, tmp_path, processes=processes)
        )
        asked = traffic_here()
    assert documents == len(TEXTS) and asked.received >= size and asked.reads >= 1


def test_a_dry_run_opens_the_first_file_of_a_text_elsewhere(bucket: S3Store, tmp_path: Path) -> None:
    put_texts(bucket, tmp_path)

    def seen(source: str) -> tuple[str, str]:
        recipe = load_recipe("smoke", [f"tokens.source={source}"])
        (finding,) = texts_reachable(recipe, ["tokenize"], remote=True)
        return finding.state, finding.seen

    uri = f"s3://{bucket.bucket}"
    assert seen(f"{uri}/lines.jsonl") == ("ok", f"the first document of {uri}/lines.jsonl was read")
    for source, why in (
        (f"{uri}/none*.jsonl", "no object matches"),
        (f"{uri}-other/lines.jsonl", "the bucket does not exist"),
    ):
        state, text = seen(source)
        assert state == "broken" and why in text and "\n" not in text
