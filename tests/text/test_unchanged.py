"""A text that changes after its planning never becomes an artifact of the planned text."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from texts import FourFiles

from pipelines.text.parts import PartsProgress, make_parts
from pipelines.text.sources import open_source
from pipelines.text.unchanged import UnchangedText
from trainer.errors import UserError
from trainer.shards import read_shard


def shards_in(store: Path) -> dict[str, list[int]]:
    return {path.name: read_shard(path).tolist() for path in sorted(store.glob("tokens/*/a*/*.bin"))}


def same_size(path: Path) -> None:
    path.write_text(path.read_text().replace("3", "8"))


def gone(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    (path.parent / "new").write_text("8 " * 2000)
    (path.parent / "new").rename(path)


@pytest.mark.parametrize("change", [same_size, replaced])
def test_a_text_that_changed_after_its_planning_is_named_and_leaves_no_shard(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    files = FourFiles(tmp_path)
    change(tmp_path / "3.txt")
    with pytest.raises(UserError, match=r"3.txt' of '.*' changed after its artifact was planned; run again"):
        list(make_parts(files.job(range(3), tmp_path / "store")))
    assert shards_in(tmp_path / "store") == {}


@pytest.mark.parametrize("change", [same_size, replaced, gone])
def test_a_text_that_changes_while_it_is_read_is_named_and_its_return_gives_the_planned_shards(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    files = FourFiles(tmp_path)
    original = (tmp_path / "3.txt").read_text()
    *_, whole = make_parts(files.job(range(3), tmp_path / "undisturbed"))
    steps = make_parts(files.job(range(3), tmp_path / "store"))
    next(steps)
    assert next(steps).new == 1500
    change(tmp_path / "3.txt")
    with pytest.raises(UserError, match=r"3.txt' of '.*' changed after"):
        list(steps)
    stored = sum(map(len, shards_in(tmp_path / "store").values()))
    assert stored == 2 * 1500  # which were read before

    (tmp_path / "3.txt").write_text(original)
    *_, last = make_parts(files.job(range(3), tmp_path / "store", 2))
    assert last == PartsProgress(whole.stored, whole.stored - stored)
    assert shards_in(tmp_path / "store") == shards_in(tmp_path / "undisturbed")


def test_a_change_that_is_taken_back_while_the_text_is_read_is_found(tmp_path: Path) -> None:
    FourFiles(tmp_path)
    source = open_source(f"{tmp_path}/*.txt", None, None, "text", None)
    text = UnchangedText(source, "*.txt", source.identity())
    text.check()
    path = tmp_path / "1.txt"
    times = path.stat()
    replaced(path)
    path.write_text("1 " * 2000)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert source.identity() == open_source(f"{tmp_path}/*.txt", None, None, "text", None).identity()
    with pytest.raises(UserError, match="1.txt' of"):
        text.check()
