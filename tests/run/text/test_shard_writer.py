"""The shards of a text depend on the text alone: not on processes, attempts, crashes or interruptions."""

import gzip
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import ODD_TEXTS, FourFiles, made, shards_in

from pipelines.run.text import files as text_files
from pipelines.run.text import machine, pool
from pipelines.run.text.encode import Encoder
from pipelines.run.text.machine import cores
from pipelines.run.text.pool import tokens_of
from pipelines.run.text.receipts import existing_receipts
from pipelines.run.text.shard_writer import make_shards
from pipelines.run.text.sources import first_documents, open_source
from pipelines.run.text.tokenizer import tokenizer
from trainer.base.store import LocalStore
from trainer.config.errors import Interrupted, UserError

TEXTS = [f"{number} größer 東京 " * (number % 50) + ODD_TEXTS[number % len(ODD_TEXTS)] for number in range(400)]


@pytest.fixture
def files(tmp_path: Path) -> FourFiles:
    return FourFiles(tmp_path)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", 20_000)


def write_texts(folder: Path, kind: str) -> FourFiles:
    """TEXTS in three files of a kind, some of them damaged UTF-8."""
    for number in range(3):
        rows, path = TEXTS[number * 100 : (number + 1) * 150], folder / f"{number}.{kind}"
        lines = "".join(json.dumps({"text": one}) + "\n\n" for one in rows).encode() + b'{"text": "\xff"}\n'
        if kind == "parquet":
            pq.write_table(pa.table({"text": rows}), path, row_group_size=10)
        else:
            path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return FourFiles(folder, f"*.{kind}", tokenizer="gpt2", shard_tokens=5000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("kind", "processes"), [("jsonl", 4), ("jsonl.gz", 2), ("parquet", 2)])
def test_any_number_of_processes_makes_the_same_shards_and_resumes_the_work_of_another(
    kind: str, processes: int, tmp_path: Path, shared_data: Path
) -> None:
    files = write_texts(tmp_path, kind)
    whole = made(files.job(tmp_path / "alone"))
    expected = shards_in(tmp_path / "alone")
    assert len(expected) > 5 and whole == (sum(map(len, expected.values())),) * 2
    with closing(make_shards(files.job(tmp_path / "store", 1, 1))) as steps:
        first = sum(one.tokens for one in list(itertools.islice(steps, 3))[-1])  # stopped after two shards
    last = made(files.job(tmp_path / "store", 2, processes))
    assert shards_in(tmp_path / "store") == expected
    assert 2 * 5000 <= first <= last[0] - last[1] < whole[0] == last[0]
    found = [existing_receipts(LocalStore(tmp_path / name), files.plan) for name in ("alone", "store")]
    places = [[(one.document, one.offset) for one in receipts] for receipts in found]
    assert places[0] == places[1]
    assert not list(tmp_path.glob("* scratch */*"))


@pytest.mark.usefixtures("small_pieces")
def test_a_process_that_is_killed_interrupts_and_the_next_attempt_makes_the_same_shards(tmp_path: Path) -> None:
    files = write_texts(tmp_path, "jsonl")
    files.config = files.config.model_copy(update={"tokenizer": "bytes"})
    steps = make_shards(files.job(tmp_path / "store", 1, 2))
    next(steps)
    next(steps)
    (child,) = (one for one in psutil.Process().children() if "pipelines.run.text.pool" in one.cmdline())
    child.children()[1].kill()
    with pytest.raises(Interrupted, match="a process of tokenize was killed; run again to resume"):
        list(steps)
    made(files.job(tmp_path / "store", 2, 2))
    made(files.job(tmp_path / "alone"))
    assert shards_in(tmp_path / "store") == shards_in(tmp_path / "alone")


@pytest.mark.usefixtures("small_pieces")
def test_cores_without_a_piece_of_their_own_encode_parts_of_the_long_documents(
    tmp_path: Path, shared_data: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(" ".join(TEXTS[number * 100 : number * 100 + 90]).replace("\0", ""))
    source = open_source(f"{tmp_path}/*.txt", None, "text")

    def tokens(processes: int, threads: int) -> list[int]:
        encoder = Encoder(tokenizer("gpt2"))
        encoder._part_bytes = 999
        with closing(tokens_of(source, encoder, 0, tmp_path / "scratch", processes=processes)) as stream:
            found = [batch.tokens.tolist() for batch in stream]
        assert encoder.threads == threads
        return list(itertools.chain(*found))

    alone = [[50_256, *tokenizer("gpt2").encode_ordinary(text)] for text in first_documents(source)]
    assert tokens(7, 2) == tokens(2, 1) == list(itertools.chain(*alone))


@pytest.mark.usefixtures("small_pieces")
def test_a_stated_number_of_batches_of_a_process_waits_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 70}) + "\n" for _ in range(100_000)))
    source, scratch = open_source(f"{tmp_path}/a.jsonl", None, "text"), tmp_path / "scratch"
    with closing(tokens_of(source, Encoder(tokenizer("bytes")), 0, scratch, processes=2)) as stream:
        first = next(stream)
        while len(list((scratch / "batches").iterdir())) < 2 * pool.BATCHES_AHEAD - 1:
            time.sleep(0.05)
        time.sleep(0.5)  # they would make more, and wait
        assert len(list((scratch / "batches").iterdir())) <= 2 * pool.BATCHES_AHEAD
        assert len(first.starts) + sum(len(batch.starts) for batch in stream) == 100_000
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_line_is_named_with_its_place_after_the_shards_before_it(tmp_path: Path, processes: int) -> None:
    files = write_texts(tmp_path, "jsonl")
    files.config = files.config.model_copy(update={"tokenizer": "bytes"})
    lines = (tmp_path / "1.jsonl").read_bytes().split(b"\n")
    lines[150] = b'{"text": "cut o'
    (tmp_path / "1.jsonl").write_bytes(b"\n".join(lines))
    files = FourFiles(tmp_path, "*.jsonl", tokenizer="bytes", shard_tokens=5000)
    with pytest.raises(UserError, match=r"line 151 of '.*1.jsonl' is not JSON"):
        list(make_shards(files.job(tmp_path / "store", 1, processes)))
    assert shards_in(tmp_path / "store")


def test_the_cores_are_those_of_the_process_and_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(machine, "CPU_MAX", tmp_path / "cpu.max")
    for content, number in (("max 100000", 8), ("350000 100000", 4), ("50000 100000", 1), ("9900000 100000", 8)):
        (tmp_path / "cpu.max").write_text(content)
        assert cores() == number
    monkeypatch.setenv("SKYPILOT_POD_CPU_CORE_LIMIT", "3")  # of Kubernetes
    assert cores() == 3


def test_the_shards_hold_max_tokens_with_the_first_ones_for_validation(files: FourFiles, tmp_path: Path) -> None:
    assert made(files.job(tmp_path / "store")) == (13_001, 13_001)
    shards = shards_in(tmp_path / "store")
    sizes = {f"{n:06d}.tokens": 1500 for n in range(2)}
    sizes |= {f"train_{n:06d}.bin": size for n, size in enumerate([1500] * 6 + [1001])}
    assert {name: len(tokens) for name, tokens in shards.items()} == sizes
    assert shards["000000.tokens"] + shards["000001.tokens"] == [256, *b"0 " * 2000][:3000]


@pytest.mark.parametrize("damage", [b"", lambda body: body.replace(b'"a0001/', b'"../../a0001/')])
def test_a_damaged_receipt_is_named_and_its_shards_are_made_again(
    files: FourFiles, tmp_path: Path, damage: bytes | Callable[[bytes], bytes]
) -> None:
    whole = made(files.job(tmp_path / "store"))
    (record,) = tmp_path.glob("store/tokens/*/shards/000001.json")
    record.write_bytes(damage if isinstance(damage, bytes) else damage(record.read_bytes()))
    notes: list[str] = []
    again = made(files.job(tmp_path / "store", 2, note=notes.append))
    (told,) = (note for note in notes if "damaged (" in note)
    assert told.startswith(f"  file://{record}: ") and again[0] == whole[0]
    assert made(files.job(tmp_path / "store", 3))[1] == 0  # the record is good again


def test_a_stop_ends_the_work_between_two_batches(files: FourFiles, tmp_path: Path) -> None:
    def check() -> None:
        raise Interrupted("preempted")

    with pytest.raises(Interrupted):
        list(make_shards(files.job(tmp_path / "store", check=check)))
    assert shards_in(tmp_path / "store") == {}


# A text that changes after its planning


def same_size(path: Path) -> None:
    path.write_text(path.read_text().replace("3", "8"))


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [same_size, gone])
def test_a_text_that_changes_while_it_is_read_is_named_and_its_return_gives_the_planned_shards(
    change: Callable[[Path], None], files: FourFiles, tmp_path: Path
) -> None:
    original = (tmp_path / "3.txt").read_text()
    whole = made(files.job(tmp_path / "undisturbed"))
    steps = make_shards(files.job(tmp_path / "store"))
    next(steps)
    assert [one.tokens for one in next(steps)] == [1500]
    change(tmp_path / "3.txt")
    with pytest.raises(UserError, match=r"'.*txt' changed after"):
        list(steps)
    stored = sum(map(len, shards_in(tmp_path / "store").values()))
    assert stored < whole[0]
    (tmp_path / "3.txt").write_text(original)
    assert made(files.job(tmp_path / "store", 2)) == (whole[0], whole[0] - stored)
    assert shards_in(tmp_path / "store") == shards_in(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_document_of_200_mb_gives_all_its_tokens_in_less_than_2_gib(shared_data: Path, tmp_path: Path) -> None:
    import sys

    from pipelines.run.text.tokenizer import token_bytes
    from trainer.data.shards import read_shard

    corpus = pq.read_table(shared_data / "corpus" / "000_00000.parquet")["text"].to_pylist()
    long = "".join(itertools.islice(itertools.cycle(corpus), 20 * len(corpus)))[:200_000_000]
    pq.write_table(pa.table({"text": ["before", long, "behind"]}), tmp_path / "a.parquet")
    code = (
        "import re, sys; from pathlib import Path; from texts import FourFiles\n"
        "from pipelines.run.text.shard_writer import make_shards\n"
        "files = FourFiles(Path(sys.argv[1]), '*.parquet', tokenizer='gpt2', shard_tokens=20_000_000)\n"
        "list(make_shards(files.job(Path(sys.argv[1]) / 'store')))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"  # ru_maxrss has the parent's
    )
    here = Path(__file__).parents[3]
    paths = {"PYTHONPATH": f"{here}:{here / 'tests' / 'support'}"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | paths, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 << 20  # KiB
    sizes = np.array(token_bytes(tokenizer("gpt2")))
    shards = [read_shard(path) for path in tmp_path.glob("store/tokens/*/a*/**/*.*")]
    assert sum(int(sizes[shard].sum()) for shard in shards) == len("before" + "behind") + len(long.encode())
