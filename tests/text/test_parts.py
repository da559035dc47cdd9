"""The parts of a text: the shards depend on the files alone, not on nodes, attempts or interruptions."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import FourFiles

from pipelines.text.parts import PartsProgress, finished_part, make_parts, parts_in_order, receipt_key
from pipelines.text.tokenizer import token_bytes, tokenizer
from trainer.errors import Interrupted, UserError
from trainer.shards import read_shard
from trainer.store import LocalStore


@pytest.fixture
def files(tmp_path: Path) -> FourFiles:
    return FourFiles(tmp_path)


def shards_in(store: Path) -> dict[str, list[int]]:
    return {path.name: read_shard(path).tolist() for path in sorted(store.glob("tokens/*/a*/*.bin"))}


def test_the_shards_of_a_part_are_those_of_its_files_alone_and_share_max_tokens(
    files: FourFiles, tmp_path: Path
) -> None:
    *_, progress = make_parts(files.job(range(3), tmp_path / "store"))
    assert progress == PartsProgress(12_336, 12_336)  # parts 1 and 2 have one file each, of 4,001 tokens
    shards = shards_in(tmp_path / "store")
    assert list(shards) == sorted(shards) and {name: len(tokens) for name, tokens in shards.items()} == {
        **{f"train_00_{n:06d}.bin": size for n, size in enumerate([1334])},
        **{f"train_{part:02d}_{n:06d}.bin": size for part in (1, 2) for n, size in enumerate([1500, 1500, 1001])},
        **{f"val_00_{n:06d}.bin": 1500 for n in range(2)},
    }
    first = shards["val_00_000000.bin"] + shards["val_00_000001.bin"] + shards["train_00_000000.bin"]
    assert first == [256, *b"0 " * 2000, 256, *b"3 " * 166]


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_shards_depend_neither_on_the_node_of_a_part_nor_on_interruptions(
    nodes: int, files: FourFiles, tmp_path: Path
) -> None:
    *_, whole = make_parts(files.job(range(3), tmp_path / "one"))
    new = []
    for attempt, most in ((1, 1), (2, 2), (3, 99)):  # each node makes so many shards
        for rank in range(nodes):
            mine = files.job(parts_in_order(rank, nodes, 3), tmp_path / "several", attempt)
            with closing(make_parts(mine)) as steps:
                *_, last = itertools.islice(steps, most + 1)
            new.append(last.new)
    assert sum(new) == whole.new  # no shard was made twice
    assert shards_in(tmp_path / "several") == shards_in(tmp_path / "one")
    again = files.job(range(3), tmp_path / "several", 4)
    assert list(make_parts(again)) == [PartsProgress(whole.stored, 0)]
    for path in tmp_path.glob("*.txt"):
        path.unlink()  # the file of a finished part is not opened
    assert list(make_parts(files.job(range(3), tmp_path / "several", 5))) == [PartsProgress(whole.stored, 0)]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[" * 100_000,
        b"\xff\x00",
        b"{}",
        b'"text"',
        b"[7]",
        lambda body: body.replace(b'"a0001/', b'"../../a0001/'),
        lambda body: body.replace(b'"a0001/', b'"shards/'),
        lambda body: body.replace(b'"tokens": 1', b'"tokens": 2'),
        lambda body: body.replace(b'"document": ', b'"document": -1'),
    ],
)
@pytest.mark.parametrize("record", ["shards/01_000001.json", "parts/01.json"])
def test_a_damaged_receipt_is_named_and_its_shards_are_made_again(
    files: FourFiles, tmp_path: Path, record: str, damage: bytes | Callable[[bytes], bytes]
) -> None:
    *_, whole = make_parts(files.job(range(3), tmp_path / "store"))
    (prefix,) = (path.parent.parent for path in tmp_path.glob("store/tokens/*/parts/01.json"))
    if record.startswith("shards"):
        (prefix / "parts/01.json").unlink()
    good = (prefix / record).read_bytes()
    (prefix / record).write_bytes(damage if isinstance(damage, bytes) else damage(good))
    assert (prefix / record).read_bytes() != good
    notes: list[str] = []
    *_, again = make_parts(replace(files.job(range(3), tmp_path / "store", 2), note=notes.append))
    (told,) = (note for note in notes if "damaged (" in note)
    assert told.startswith(f"  file://{prefix / record}: ") and again.stored == whole.stored
    parts = [finished_part(LocalStore(tmp_path / "store"), files.plan, part) or [] for part in range(3)]
    assert sum(receipt.tokens for part in parts for receipt in part) == whole.stored
    *_, last = make_parts(files.job(range(3), tmp_path / "store", 3))
    assert last.new == 0  # the record is good again


def test_documents_that_are_not_utf8_are_counted_once_however_often_the_work_is_interrupted(tmp_path: Path) -> None:
    FourFiles(tmp_path)
    for name in "02":
        (tmp_path / f"{name}.txt").write_bytes(b"\xff" + b"x" * 2000)
    files = FourFiles(tmp_path, "[0123].txt", tokenizer="bytes", shard_tokens=1500)
    counted: list[int] = []
    for attempt in range(1, 20):
        with closing(make_parts(files.job(range(1), tmp_path / "store", attempt))) as steps:
            list(itertools.islice(steps, 3))  # a shard, and what there was
        receipts = finished_part(LocalStore(tmp_path / "store"), files.plan, 0)
        if receipts is not None:
            counted = [receipt.invalid for receipt in receipts]
            break
    assert sum(counted) == 2 and counted[0] == 1 and len(counted) == 9


def test_a_full_disk_is_one_line_and_with_room_again_the_shards_are_those_of_a_run_without_it(
    files: FourFiles, tmp_path: Path
) -> None:
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        small = replace(files.job(range(3), tmp_path / "store"), folder=disk)
        (disk / "ballast").write_bytes(
            bytes(4096)
        )  # one page is left: a shard takes 4,024 bytes, and two are in scratch
        with pytest.raises(UserError, match=f"^{disk}: no space left on the disk"):
            list(make_parts(small))
        assert [path.name for path in disk.iterdir()] == ["ballast"]
        (disk / "ballast").unlink()
        list(make_parts(small))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    list(make_parts(files.job(range(3), tmp_path / "undisturbed")))
    assert shards_in(tmp_path / "store") == shards_in(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_document_of_200_mb_gives_all_its_tokens_in_less_than_2_gib(shared_data: Path, tmp_path: Path) -> None:
    corpus = pq.read_table(shared_data / "corpus" / "000_00000.parquet")["text"].to_pylist()
    text = "".join(itertools.islice(itertools.cycle(corpus), 20 * len(corpus)))[:200_000_000]
    pq.write_table(pa.table({"text": ["before", text, "behind"]}), tmp_path / "a.parquet")
    code = (
        "import re, sys; from pathlib import Path; from texts import FourFiles\n"
        "from pipelines.text.parts import make_parts\n"
        "files = FourFiles(Path(sys.argv[1]), '*.parquet', tokenizer='gpt2', shard_tokens=20_000_000)\n"
        "list(make_parts(files.job([0], Path(sys.argv[1]) / 'store')))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"  # ru_maxrss has the parent's
    )
    here = Path(__file__).parents[2]
    paths = {"PYTHONPATH": f"{here}:{here / 'tests' / 'support'}"}
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | paths, capture_output=True, text=True, check=True
    )
    assert int(made.stdout) < 2 << 20  # KiB
    sizes = np.array(token_bytes(tokenizer("gpt2")))
    shards = [read_shard(path) for path in tmp_path.glob("store/tokens/*/a*/*.bin")]
    assert sum(int(sizes[shard].sum()) for shard in shards) == len("before" + "behind") + len(text.encode())


def test_a_fifo_in_place_of_a_receipt_is_named_and_blocks_nothing(files: FourFiles, tmp_path: Path) -> None:
    job = files.job(range(3), tmp_path / "store")
    fifo = tmp_path / "store" / receipt_key(job.plan.prefix, job.config, 0, 0)
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    with pytest.raises(UserError, match=f"{fifo}: not a file; remove it"):
        list(make_parts(job))


def test_a_node_checks_for_a_stop_at_every_document(files: FourFiles, tmp_path: Path) -> None:
    def check() -> None:
        raise Interrupted("the head is gone")

    with pytest.raises(Interrupted):
        list(make_parts(files.job(range(3), tmp_path / "store", check=check)))
    assert shards_in(tmp_path / "store") == {}
