"""The shard cache is a window over the data: bounded in bytes, files and maps, shared by the processes of a node."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from small_disk import small_disk
from waiting import LONG_SECONDS

from pipelines.store import manifest
from pipelines.store.manifest import File, Manifest
from pipelines.store.shard_cache import SHARDS, ShardCache
from trainer.base.store import LocalStore, Store
from trainer.config.errors import DiskFull
from trainer.data.batches import TokenData
from trainer.data.shard_maps import MOST_MAPPED
from trainer.data.shards import Shard, read_shard, write_shard

BLOCK, SEED, CPU = 8, 5, torch.device("cpu")


class Bucket:
    """The reading half of a store that is not local. It logs each download in a file that processes share."""

    def __init__(self, root: Path) -> None:
        self.stored, self.log = LocalStore(root), root / "downloads"
        self.before_download: Callable[[Path], None] = lambda path: None
        self.uri = "s3://bucket"

    def download(self, key: str, path: Path) -> str:
        self.before_download(path)
        with self.log.open("a") as log:
            log.write(f"{key}\n")
        return self.stored.download(key, path)

    def other_connections(self) -> Iterator[None]:
        return iter(())

    def downloads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


class Text:
    """A text in a bucket: equally large shards, then `small` ones with a quarter as many windows; token number i of
    shard s is (31 s + i) mod `ids`."""

    def __init__(self, folder: Path, shards: int, windows: int, ids: int = 50_000, small: int = 0) -> None:
        self.bucket, self.home = Bucket(folder / "bucket"), folder / "home"
        self.per_epoch = shards * windows + small * (windows // 4)
        sizes = [windows * BLOCK + 1] * shards + [windows // 4 * BLOCK + 1] * small
        self.shards = [Shard(f"train_{i:06d}.bin", tokens) for i, tokens in enumerate(sizes)]
        self.shard_bytes = self.shards[0].size
        files = []
        for i, shard in enumerate(self.shards):
            path = self.bucket.stored.path_of(f"tokens/text-ffffffff/a0001/{shard.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_shard(path, ((31 * i + np.arange(shard.tokens)) % ids).astype(np.uint16))
            digest = sha256(path.read_bytes()).hexdigest()
            files.append(File(shard.name, f"a0001/{shard.name}", shard.size, digest))
        self.manifest = Manifest(
            "tokenize", "text", "f" * 64, {}, {}, tuple(files), {}, {}, run="text-ffffffff", attempt=1, created=1.0
        )

    def cache(self, shards: float | None = None, home: Path | None = None, store: Store | None = None) -> ShardCache:
        """A cache with room for this many shards."""
        remote, folder = cast(Store, self.bucket), (home or self.home) / "cache"
        return ShardCache(
            store or remote, self.manifest, folder, "auto" if shards is None else shards * self.shard_bytes / 1e9
        )

    def data(self, cache: ShardCache) -> TokenData:
        return TokenData(self.shards, cache.fetch, BLOCK, SEED)

    def read(self, data: TokenData, first: int, size: int, upcoming: int | None = None) -> None:
        """Read a step, and compare every token."""
        sequences = range(first, first + size)
        after = range(sequences.stop, sequences.stop + (size if upcoming is None else upcoming))
        read = [tokens for tokens, _ in data.micro_batches(sequences, 4, CPU, after)]
        starts = np.array([31 * shard + window * BLOCK for shard, window in (data.order[s] for s in sequences)])
        assert (torch.cat(read).numpy() == (starts[:, None] + np.arange(BLOCK)) % 50_000).all()

    def key(self, shard: int) -> str:
        return f"tokens/text-ffffffff/a0001/{self.shards[shard].name}"


def cached(cache: ShardCache) -> list[Path]:
    """The complete shards on the disk."""
    return sorted(cache.folder.glob("*.bin"))


def settled(data: TokenData) -> None:
    """Wait for the prefetch of a step."""
    if data._maps._prefetching:
        data._maps._prefetching.join(LONG_SECONDS)


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def files_open_in(folder: Path) -> int:
    targets = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(target.startswith(f"{folder}/") for target in targets)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    with small_disk(tmp_path / "disk", "4m") as root:
        yield root


# --- a bounded window


def test_files_bytes_and_maps_stay_within_the_budget_over_epochs_and_resumes(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=30, windows=20)
    for first in (0, 2 * text.per_epoch + 13):  # the second process resumes the run
        cache = text.cache(shards=6)
        data = text.data(cache)
        for step in range(66):  # more than two epochs, in steps that are no divisor of a shard
            text.read(data, first + 19 * step, 19)
            settled(data)
            held = cached(cache)
            assert len(held) <= 6 and sum(path.stat().st_size for path in held) <= 6 * text.shard_bytes
            assert maps_of(cache.folder) <= MOST_MAPPED and files_open_in(cache.folder) <= MOST_MAPPED
    assert len(list(cache.folder.iterdir())) <= 6 + 17  # the shards, and a fixed number of locks


# --- one cache a node


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_ranks_of_a_node_share_one_cache(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=40, windows=12)

    def rank(number: int) -> None:
        cache = text.cache(shards=8)
        for step in range(40):  # each rank reads its third of a step of 12 sequences
            data_step = 12 * step + 4 * number
            text.read(data, data_step, 4, upcoming=0)
            assert len(cached(cache)) <= 8
            (tmp_path / f"step-{step}-{number}").touch()
            while len(list(tmp_path.glob(f"step-{step}-*"))) < 3:  # the all-reduce
                time.sleep(0.001)

    data = text.data(text.cache(shards=8))
    assert [exit_code(pid) for pid in [child(lambda n=n: rank(n)) for n in range(3)]] == [0, 0, 0]  # type: ignore[misc]
    downloads = text.bucket.downloads()
    assert len(set(downloads)) == 40 and len(downloads) <= 44  # perhaps the first ones of the next epoch


def test_a_shard_that_another_process_reads_stays_until_that_process_is_killed(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=10, windows=10)
    cache = text.cache(shards=1)

    def read_for_ever() -> None:
        tokens = read_shard(text.cache(shards=1).fetch(text.shards[3].name))
        (tmp_path / "reading").touch()
        while tokens[0] == 93:
            time.sleep(0.01)

    reader = child(read_for_ever)
    while not (tmp_path / "reading").exists():
        time.sleep(0.01)
    read = cache.folder / f"{text.manifest.files[3].sha256}.bin"
    for shard in (0, 1, 2):
        cache.fetch(text.shards[shard].name)
    assert len(cached(cache)) == 2 and read.exists()
    os.kill(reader, signal.SIGKILL)
    assert exit_code(reader) == -signal.SIGKILL
    cache.fetch(text.shards[4].name)
    assert [path.stem for path in cached(cache)] == [text.manifest.files[4].sha256]


def test_a_download_whose_process_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=4, windows=10)
    cache = text.cache(shards=2)

    def killed_half_way() -> None:
        def die(path: Path) -> None:
            (path.parent / ".partial-0").write_bytes(bytes(100))
            os.kill(os.getpid(), signal.SIGKILL)

        text.bucket.before_download = die
        cache.fetch(text.shards[0].name)

    assert exit_code(child(killed_half_way)) == -signal.SIGKILL
    assert list(cache.folder.glob("*.arriving/*"))
    for shard in (1, 2, 0):
        assert len(read_shard(cache.fetch(text.shards[shard].name))) == text.shards[shard].tokens
    assert len(cached(cache)) == 2 and not list(cache.folder.glob("*.arriving"))


def test_a_shard_is_leased_from_its_fetch_on_and_until_its_map_is_gone(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=6, windows=10)
    cache = text.cache(shards=0)
    file = cache.fetch(text.shards[0].name)
    again = cache.fetch(text.shards[0].name)
    cache.fetch(text.shards[1].name)
    tokens = read_shard(file)
    cache.fetch(text.shards[2].name)
    assert text.manifest.files[0].sha256 in {path.stem for path in cached(cache)} and tokens[1] == 1
    del file, tokens
    cache.fetch(text.shards[3].name)
    assert text.manifest.files[0].sha256 in {path.stem for path in cached(cache)}  # another reader has it open
    del again
    cache.fetch(text.shards[4].name)
    assert [path.stem for path in cached(cache)] == [text.manifest.files[4].sha256]


# --- a full disk


def test_a_download_without_space_removes_old_shards_and_goes_on(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=30, windows=20_000)  # 0.3 MB each, 9.6 MB together
    cache = text.cache(shards=1e6, home=disk)  # a budget far beyond the disk
    data = text.data(cache)
    for first in range(0, text.per_epoch, 10_000):
        text.read(data, first, 8, upcoming=8)
    settled(data)
    assert set(text.bucket.downloads()) == {text.key(shard) for shard in range(30)}


def test_a_disk_that_is_too_small_is_named_in_one_line_and_nothing_is_left(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=1, windows=300_000)  # 4.8 MB
    cache = text.cache(home=disk)
    with pytest.raises(DiskFull) as refused:
        text.read(text.data(cache), 0, 4)
    message = str(refused.value)
    assert message.startswith(f"{disk}/cache/{SHARDS}: no space left for train_000000.bin (4.8 MB)")
    assert message.endswith("free some space, or set SKYTRAIN_HOME to a larger disk") and "\n" not in message
    assert not cached(cache) and not list(cache.folder.glob("*.arriving"))


# --- files that are not the cache's


def test_files_of_a_local_store_are_read_in_place_and_never_removed(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=12, windows=10)
    data = text.data(text.cache(shards=1, store=text.bucket.stored))
    for step in range(40):
        text.read(data, 10 * step, 10)
    settled(data)
    assert all(text.bucket.stored.path_of(text.key(shard)).exists() for shard in range(12))
    assert not text.home.exists() and not text.bucket.downloads()


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_cached_shard_that_was_cut_or_overwritten_is_replaced(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL", small)  # larger files are hashed when their date is not that of their seal
    text = Text(tmp_path, shards=1, windows=10)
    cache = text.cache(shards=2)
    cache.fetch(text.shards[0].name)
    (path,) = cached(cache)
    whole = path.read_bytes()
    for damage in (whole[:-2], b"\1" * len(whole)):
        path.write_bytes(damage)
        assert not isinstance(found := cache.fetch(text.shards[0].name), Path) and found.read() == whole
    assert len(text.bucket.downloads()) == 3
    if not small:
        monkeypatch.setattr(manifest, "sha256_of", None)
    cache.fetch(text.shards[0].name)
    assert len(text.bucket.downloads()) == 3
