"""Promises of text and tokenizers: the same documents every time, the same ids as everyone else's."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import tiktoken
from answers import Hub, answering
from servers import free_ports
from texts import ODD_TEXTS

from pipelines.extras.tune.conversations import read_rows
from pipelines.recipe.tokens_config import VOCAB_SIZES
from pipelines.run.text import files
from pipelines.run.text.sources import first_documents, open_source
from pipelines.run.text.tokenizer import tokenizer, tokenizer_files
from trainer.config.errors import UserError

COMMIT = "0123456789" * 4


@pytest.fixture
def gpt2(shared_data: Path) -> tiktoken.Encoding:
    return tokenizer("gpt2")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three parquet files of 5 rows in a folder whose name has characters special to a shell or a glob."""
    folder = tmp_path / "da [x] ta*"
    folder.mkdir()
    for part in range(3):
        texts = [f"document {part}.{row}" for row in range(5)]
        table = pa.table({"id": list(range(5)), "text": texts, "url": texts})
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=2)
    return folder


def read(source: str | Path, column: str = "text") -> list[str]:
    """All documents."""
    files, found = open_source(str(source), None, None, column).resolved(), list[str]()
    for piece in files.pieces():
        documents = list(files.read(piece))
        assert files.count(piece) == len(documents)
        found += [one.decode() for one in documents]
    return found


def identity(source: str | Path, column: str = "text") -> dict[str, Any]:
    return open_source(str(source), None, None, column).identity()


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


# Tokenizers


def test_gpt2_ids_equal_openais(gpt2: tiktoken.Encoding) -> None:
    assert gpt2.n_vocab == VOCAB_SIZES["gpt2"] and gpt2.eot_token == 50_256
    assert gpt2.encode_ordinary("hello world") == [31373, 995]


def test_the_error_for_an_unavailable_vocabulary_names_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/vocab.bpe"
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: requests.get(url))
    with pytest.raises(
        UserError, match=r"'gpt2' could not be loaded \(ConnectionError: .*vocab.bpe.*\); .*TIKTOKEN_CACHE_DIR"
    ):
        tokenizer.__wrapped__("gpt2")


# Sources


def test_the_standard_library_is_read_sorted_and_without_tests_and_installed_packages() -> None:
    texts = read("python-stdlib")
    assert len(texts) > 300
    library = Path(sysconfig.get_path("stdlib"))
    first = min(path.name for path in library.glob("*.py"))
    assert texts[0] == (library / first).read_text()
    assert (library / "json" / "decoder.py").read_text() in texts
    assert not any(path.read_text() in texts for path in (library / "test").glob("test_z*.py"))
    assert Path(pytest.__file__).read_text() not in texts


def test_files_of_every_kind_are_read_in_the_order_of_their_names(rows: Path) -> None:
    lines = write_lines(rows / "l.jsonl", *({"text": str(n)} for n in range(12)))
    for n in range(4):
        (rows / f"{n}.txt").write_text(f"file {n}")
    everything = [read(str(rows / name).replace("da [x] ta*", "da [[]x] ta[*]")) for name in ("*.parquet", "*.txt")]
    assert everything == [
        [f"document {part}.{row}" for part in range(3) for row in range(5)], [f"file {n}" for n in range(4)]
    ]  # fmt: skip
    assert read(lines) == [str(n) for n in range(12)]


def test_bytes_that_are_not_utf8_become_the_replacement_character_and_a_null_is_an_empty_document(
    tmp_path: Path,
) -> None:
    damaged = [b"sound", b"\xff\xe2\x82 cut", None, b"caf\xc3\xa9", b"\xed\xa0\x80"]
    expected = ["sound", "\ufffd\ufffd cut", "", "café", "\ufffd\ufffd\ufffd"]
    strings = pa.array(damaged, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == expected
    pq.write_table(pa.table({"text": pa.array(["x", None, "x"]).dictionary_encode()}), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet") == ["x", "", "x"]
    lines = b"".join(b'{"text": null}\n' if one is None else b'{"text": "%s"}\n' % one for one in damaged)
    (tmp_path / "l.jsonl").write_bytes(lines + rb'{"text": "\ud800"}')
    assert read(tmp_path / "l.jsonl") == [*expected, "\ufffd"]


def test_a_parquet_file_is_read_by_no_thread_of_arrow_which_could_outlive_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[type]()

    class Watched(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            threads.add(type(threading.current_thread()))
            return super().readinto(buffer)

    pq.write_table(pa.table({"text": ["a text"] * 100}), tmp_path / "a.parquet", row_group_size=10)
    monkeypatch.setattr(files, "opened", lambda path: io.BufferedReader(Watched(path)))
    source = open_source(f"{tmp_path}/a.parquet", None, None, "text")
    assert next(first_documents(source)) == "a text" and next(read_rows(source.resolved())) == {"text": "a text"}
    assert threads and threading._DummyThread not in threads  # which is one that Python has not started


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two\r\n\r\nlines\xff")
    (tmp_path / "a.txt").write_bytes(b"one")
    assert read(tmp_path / "*.txt") == ["one", "two\r\n\r\nlines\ufffd"]
    (tmp_path / "b.txt").write_bytes(b"GIF89a\0\1")
    with pytest.raises(UserError, match=r"b.txt' is binary \(it contains NUL\); name files of text"):
        read(tmp_path / "*.txt")
    for name in ("b.txt", "c.jsonl"):
        (tmp_path / name).write_bytes('{"text": "déjà vu"}\n'.encode("latin-1") * 100)
        with pytest.raises(UserError, match=f"{name}' is not UTF-8 .*iconv -f latin1"):  # before a machine is rented
            open_source(f"{tmp_path}/{name}", None, None, "text").identity()
    with pytest.raises(UserError, match=r"b.txt' is not UTF-8 \(200 places of its first 2,000 bytes\)"):
        read(tmp_path / "*.txt")


def test_compressed_files_are_read_as_their_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "l.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "y"}\n'))
    assert read(tmp_path / "a.txt.gz") == ["packed"]
    (tmp_path / "zeros.txt.gz").write_bytes(2 * gzip.compress(b"packed") + bytes(600))  # as tapes and some servers pad
    assert read(tmp_path / "zeros.txt.gz") == ["packedpacked"]
    assert read(tmp_path / "l.jsonl.gz") == ["x", "y"]
    lines = pa.compress(b'{"text": "x"}\n{"text": "y"}\n', codec="zstd", asbytes=True)
    (tmp_path / "l.jsonl.zst").write_bytes(2 * lines)  # several frames, as `zstd -T0` writes
    assert read(tmp_path / "l.jsonl.zst") == ["x", "y", "x", "y"]


def test_the_identity_of_files_is_their_content_in_reading_order(rows: Path, tmp_path: Path) -> None:
    monday = identity(rows.rename(tmp_path / "monday") / "part-*.parquet")
    moved = (tmp_path / "monday").rename(tmp_path / "tuesday")
    assert identity(moved / "part-*.parquet") == monday
    assert len(monday["sha256"]) == 3
    assert identity(moved / "part-*.parquet", column="url") != monday
    (moved / "part-0.parquet").rename(moved / "part-9.parquet")  # read last now: other tokens
    reordered = identity(moved / "part-*.parquet")
    assert reordered != monday and sorted(reordered["sha256"]) == sorted(monday["sha256"])
    pq.write_table(pa.table({"text": ["changed"]}), moved / "part-9.parquet")
    assert identity(moved / "part-*.parquet") != reordered


def test_the_identity_of_text_on_the_hub_is_its_commit_and_needs_no_connection() -> None:
    hub = open_source("hf://datasets/org/name", "small", COMMIT, "text").identity()
    assert hub == {
        "source": "hf://datasets/org/name", "subset": "small", "revision": COMMIT, "text_column": "text"
    }  # fmt: skip
    pattern = open_source("hf://datasets/org/name/*.parquet", None, COMMIT, "text").identity()
    assert pattern["revision"] == COMMIT and pattern["files"] == "hf://datasets/org/name/*.parquet"


@pytest.mark.parametrize(
    ("source", "subset", "revision", "message"),
    [
        ("nowhere/*.parquet", None, None, r"no file matches 'nowhere/\*\.parquet'"),
        ("gs://bucket/a.parquet", None, None, r"unknown scheme 'gs'; use .*hf://datasets/ORG/NAME"),
        ("hf://datasets/org/name", None, None, r"tokens.revision: none is given.*40 hex digits.*git ls-remote"),
        ("hf://datasets/org/name", None, "main", r"tokens.revision: 'main' can move.*git ls-remote"),
        ("https://host.invalid/a.parquet", None, None, r"unknown scheme 'https'; use .*s3://"),
        ("s3://me:secret@bucket/a.txt", None, None, r"^s3://\*\*\*@bucket/: has a user or password in it"),
        ("python-stdlib", None, "3.11", r"tokens.revision: .*remove the revision"),
        ("python-stdlib", "small", None, r"tokens.subset: .*remove it"),
    ],
)
def test_an_invalid_source_is_refused_before_it_is_opened(
    source: str, subset: str | None, revision: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_source(source, subset, revision, "text")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt"])
def test_a_folder_is_refused_with_the_pattern_of_most_of_its_files(tmp_path: Path, kind: str) -> None:
    for name in (f"a.{kind}", f"b.{kind}", "c.parquet", "d.txt", "LICENSE"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path), None, None, "text")
    assert f"name its files: '{tmp_path}/*.{kind}', or llmc://{tmp_path} for token shards" in str(caught.value)


def test_csv_and_arrow_files_are_refused_with_the_line_that_converts_them_and_an_empty_folder_is_called_empty(
    tmp_path: Path,
) -> None:
    def refusal(source: str, revision: str | None = None) -> str:
        with pytest.raises(UserError) as caught:
            open_source(source, None, revision, "text").identity()
        return str(caught.value)

    (tmp_path / "texts").mkdir()
    assert refusal(f"{tmp_path}/texts").endswith("is an empty folder; put .parquet, .jsonl or .txt files there")
    assert "use .parquet, .jsonl or .txt files (in a folder: FOLDER/" in refusal("hf://datasets/o/n/texts", COMMIT)
    assert "load_dataset('csv', data_files='hf://datasets/o/n/a.csv'" in refusal("hf://datasets/o/n/a.csv", COMMIT)
    assert "load_dataset('arrow', data_files='hf://datasets/o/n/" in refusal("hf://datasets/o/n/a.arrow", COMMIT)
    (tmp_path / "texts" / "a.csv").write_text('id,text\n1,"two\nlines"\n2,x\n')
    for source in (f"{tmp_path}/texts", f"{tmp_path}/texts/a.csv"):
        _, convert = refusal(source).split("convert it: ")
        subprocess.run(convert, shell=True, check=True, cwd=tmp_path, env=os.environ | {"HF_HOME": f"{tmp_path}/home"})
        assert read(tmp_path / "text.parquet") == ["two\nlines", "x"]


@pytest.mark.parametrize("kind", ["nested", "repeated", "dictionary", "plain"])
def test_the_size_of_a_parquet_column_is_that_of_its_text(tmp_path: Path, kind: str) -> None:
    texts = (
        ["a text " * 100, "another one " * 50] * 2000 if kind == "dictionary" else [f"{n} " * 300 for n in range(4000)]
    )
    before = {"nested": [{"text": "a"}] * 4000, "repeated": [["x"] * 9] * 4000}.get(kind, list(range(4000)))
    pq.write_table(pa.table({"before": before, "text": texts}), tmp_path / "a.parquet", row_group_size=400)
    source = open_source(f"{tmp_path}/a.parquet", None, None, "text").resolved()
    assert source.text_bytes() == pytest.approx(sum(map(len, texts)), rel=0.02)
    assert [piece.documents for piece in source.pieces()] == [4000]


def test_of_two_columns_of_one_name_none_is_taken_for_the_text(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "two.parquet")
    for ask in (identity, read):
        with pytest.raises(UserError, match=r"'.*two.parquet' has 2 columns 'text'; rename all but the text"):
            ask(tmp_path / "two.parquet")


def test_a_wrong_column_is_refused_with_the_existing_ones(rows: Path, tmp_path: Path) -> None:
    parquet = rows / "part-0.parquet"
    lines = write_lines(tmp_path / "l.jsonl", {"text": "x", "id": 1}, {"body": "y"}, ["z"])
    for ask in (identity, read):
        with pytest.raises(UserError, match=r"no 'body' in '.*part-0.parquet'; it has: id, text, url"):
            ask(parquet, column="body")
        with pytest.raises(UserError, match=r"'id' in '.*part-0.parquet' holds int64, not strings"):
            ask(parquet, column="id")
        with pytest.raises(UserError, match=r"no 'body' in line 1 of '.*l.jsonl'; it has: text, id"):
            ask(lines, column="body")
        with pytest.raises(UserError, match=r"'id' of line 1 of '.*l.jsonl' is int, not a string"):
            ask(lines, column="id")
    with pytest.raises(UserError, match=r"no 'text' in line 2 of '.*l.jsonl'; it has: body"):
        read(lines)


def test_empty_and_damaged_files_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name in ("empty.parquet", "empty.jsonl"):
        with pytest.raises(UserError, match=rf"{name}' has no documents"):
            identity(tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": ')
    (tmp_path / "bad.txt.gz").write_bytes(gzip.compress(os.urandom(9_000))[:5_000])
    (tmp_path / "wrong.txt.gz").write_bytes(gzip.compress(b"x" * 9_000)[:20] + bytes(9))
    (tmp_path / "bad.txt.zst").write_bytes(pa.compress(os.urandom(9_000), codec="zstd", asbytes=True)[:5_000])
    pq.write_table(pa.table({"text": [os.urandom(900).hex() for _ in range(900)]}), tmp_path / "cut.parquet")
    with (tmp_path / "cut.parquet").open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(500_000))
    for name, message in {
        "bad.parquet": "cannot be read",
        "bad.jsonl": r"line 2 of '.*bad.jsonl' is not JSON \(Expecting value\)",
        "bad.txt.gz": "cannot be read",
        "wrong.txt.gz": "cannot be read",
        "bad.txt.zst": "cannot be read",
        "cut.parquet": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=rf"{name}.* {message}|{message}"):
            read(tmp_path / name)


# Remote sources, from a small server with the Hub's protocol


def read_apart(hubs: Sequence[Hub], home: Path, *calls: tuple[Any, ...]) -> list[list[Any]]:
    """The documents of each source, or a column of its rows, in a process of its own: the Hub's address is fixed on
    import."""
    code = (
        "import json, os, sys\n"
        "from pipelines.run.text.sources import first_documents, open_source\n"
        "from pipelines.extras.tune.conversations import read_rows\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    source = open_source(*call)\n"
        "    text = call[3] == 'text'\n"
        "    found = first_documents(source) if text else (row[call[3]] for row in read_rows(source.resolved()))\n"
        "    print(json.dumps(list(found)))\n"
        "sys.stdout.flush(); os._exit(0)"  # threads of pyarrow may abort an interpreter that ends
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with answering(lambda request: next(hub for hub in hubs if hub.name in request.path).answer(request)) as address:
        run = subprocess.run(
            [sys.executable, "-c", code, json.dumps(calls)],
            cwd=Path(__file__).parents[3],
            env=environment | {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_text_on_the_hub_is_read_by_subset_or_pattern_at_one_commit(rows: Path, tmp_path: Path) -> None:
    subset = {"config_name": "small", "data_files": [{"split": "train", "path": "part-[01].parquet"}]}
    card = {"README.md": f"---\nconfigs: {json.dumps([subset])}\n---\n".encode()}
    lines = {
        f"{name}.jsonl": "".join(f'{{"text": "line {name}.{n}"}}\n' for n in range(2)).encode() for name in range(3)
    }
    chats = [{"messages": [{"role": "user", "content": f"{n}+1"}], "source": "sums"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "chats.parquet")
    files_of = {
        "name": card | {path.name: path.read_bytes() for path in rows.iterdir()},
        "lines": {"README.md": b"", **lines},  # found as parquet is
        "chats": {"README.md": b"", "train-00000-of-00001.parquet": (tmp_path / "chats.parquet").read_bytes()},
    }
    hubs, source = [Hub("datasets", f"org/{n}", COMMIT, found) for n, found in files_of.items()], "hf://datasets/org"
    small, everything, of_lines, of_chats = read_apart(
        hubs,
        tmp_path / "home",
        (f"{source}/name", "small", COMMIT, "text"),
        (f"{source}/name/part-*.parquet", None, COMMIT, "text"),
        (f"{source}/lines", None, COMMIT, "text"),
        (f"{source}/chats", None, COMMIT, "messages"),
    )
    assert everything == [f"document {part}.{row}" for part in range(3) for row in range(5)]
    assert small == everything[:10] and of_lines == [f"line {name}.{n}" for name in range(3) for n in range(2)]
    assert of_chats == [chat["messages"] for chat in chats]


# Tokenizer files


def load_in_transformers(encoding: tiktoken.Encoding, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    for name, content in tokenizer_files(encoding, model_max_length=1024).items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_gives_the_ids_of_tiktoken(name: str, shared_data: Path, tmp_path: Path) -> None:
    encoding = tokenizer(name)
    loaded = load_in_transformers(encoding, tmp_path)
    texts = read(shared_data / "corpus" / "001_00000.parquet")[::35] + ODD_TEXTS
    texts += ["".join(map(chr, range(low, low + 4096))) for low in range(0, 0xD000, 4096)]
    around = [f"a{chr(code)} {chr(code)}{chr(code)}b\n {chr(code)}'s" for code in range(0x3100)]
    texts += ["".join(around[low : low + 64]) for low in range(0, len(around), 64)]
    for document in texts:
        assert loaded(document)["input_ids"] == encoding.encode_ordinary(document), document[:80]
    for odd in ODD_TEXTS:
        assert loaded.decode(encoding.encode_ordinary(odd)) == odd


LIMIT = "most = psutil.Process().memory_info().vms + (64 << 20); resource.setrlimit(resource.RLIMIT_AS, (most, most))"
FULL = "machine.free_memory = files.free_memory = lambda: 20 << 20"


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("long.jsonl.gz", LIMIT),
        ("long.txt.gz", FULL),
        ("long.parquet", LIMIT),
        ("long.parquet", FULL),
        ("words.parquet", FULL),
    ],
)
def test_a_document_beyond_the_memory_of_the_machine_is_named_instead_of_a_kill(
    tmp_path: Path, name: str, limit: str
) -> None:
    path, text = tmp_path / name, b"a word " * 4_000_000
    if name == "long.parquet":
        pq.write_table(pa.table({"text": pa.array(["short", text.decode()], pa.large_string())}), path)
    elif name == "words.parquet":  # 7 times the same value of 4 MB
        value, rows = pa.array([text[: 4 << 20].decode()]), pa.array([0] * 7, pa.int32())
        pq.write_table(pa.table({"text": pa.DictionaryArray.from_arrays(rows, value)}), path)
    else:
        begin, end = (b'{"text": "', b'"}\n') if "json" in name else (b"", b"")
        with gzip.open(path, "wb", 1) as file:
            file.write(begin + text + end)
    script = (
        "import psutil, resource, sys, pyarrow; from pipelines.run.text import files, machine; "
        "from pipelines.run.text.sources import open_source; "
        f"files.PIECE_BYTES = 4 << 20; source = open_source(sys.argv[1], None, None, 'text'); {limit}; "
        "[list(source.read(piece)) for piece in source.pieces()]"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    message = r"UserError: tokens.source: a document of '.*' (has [0-9]+ MB or more, and )?needs (4 times|more memory)"
    assert re.search(message, done.stderr.splitlines()[-1])
