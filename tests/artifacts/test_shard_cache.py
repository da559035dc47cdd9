"""The shard cache is a window over the data: bounded in bytes, files and maps, shared by the processes of a node."""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pytest
import torch
from servers import Fault, FaultyProxy, S3Account

from pipelines.artifacts.manifest import DamagedArtifact, File, Manifest
from pipelines.artifacts.shard_cache import SHARDS, ShardCache, shards_in
from pipelines.artifacts.store import S3Store
from trainer.commits import committed_folders, series, step_of
from trainer.config import RuntimeConfig, TrainConfig
from trainer.data import Prefetcher, TokenData
from trainer.errors import DiskFull
from trainer.families.gpt2 import Gpt2Config
from trainer.process import StopSignal
from trainer.rank import RankJob, run_rank
from trainer.shard_maps import MOST_MAPPED
from trainer.shards import Shard, read_shard, write_shard
from trainer.store import Arrived, LocalStore, Store

BLOCK, SEED, CPU = 8, 5, torch.device("cpu")


class Bucket:
    """The reading half of a store that is not local. It logs each download in a file that processes share."""

    def __init__(self, root: Path) -> None:
        self.stored, self.log = LocalStore(root), root / "downloads"
        self.before_download: Callable[[Path], None] = lambda path: None
        self.uri = "s3://bucket"

    def download(self, key: str, path: Path, arrived: Arrived | None = None) -> None:
        self.before_download(path)
        with self.log.open("a") as log:
            log.write(f"{key}\n")
        self.stored.download(key, path, arrived)

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
        return TokenData(self.shards, cache.fetch, BLOCK, SEED, budget_gb=cache.budget_gb)

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


def size(shard: Path | BinaryIO) -> int:
    assert not isinstance(shard, Path)
    return os.fstat(shard.fileno()).st_size


def settled(data: TokenData) -> None:
    """Wait for the prefetch of a step."""
    if data._maps._prefetching:
        data._maps._prefetching.join(30)


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def files_open_in(folder: Path) -> int:
    targets = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(target.startswith(f"{folder}/") for target in targets)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


# --- a bounded window


def test_files_bytes_and_maps_stay_within_the_budget_over_epochs_and_resumes(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=60, windows=20)
    for first in (0, 2 * text.per_epoch + 13):  # the second process resumes the run
        cache = text.cache(shards=6)
        data = text.data(cache)
        for step in range(130):  # more than two epochs, in steps that are no divisor of a shard
            text.read(data, first + 19 * step, 19)
            settled(data)
            held = cached(cache)
            assert len(held) <= 6 and sum(path.stat().st_size for path in held) <= 6 * text.shard_bytes
            assert maps_of(cache.folder) <= MOST_MAPPED and files_open_in(cache.folder) <= MOST_MAPPED
    assert len(list(cache.folder.iterdir())) <= 6 + 17  # the shards, and a fixed number of locks


def test_a_budget_with_room_for_everything_downloads_each_shard_once(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=20, windows=10)
    for first in (0, 777):
        data = text.data(text.cache(shards=20))
        for step in range(60):
            text.read(data, first + 11 * step, 11)
    settled(data)
    assert sorted(text.bucket.downloads()) == [text.key(shard) for shard in range(20)]


def test_one_epoch_downloads_each_shard_once_with_room_for_three(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=50, windows=10)
    data = text.data(text.cache(shards=3))
    for step in range(50):
        text.read(data, 10 * step, 10, upcoming=10 if step < 48 else 0)
    settled(data)
    assert sorted(set(text.bucket.downloads())) == [text.key(shard) for shard in range(50)]
    assert len(text.bucket.downloads()) <= 52  # perhaps the first two of the next epoch


def test_what_is_read_and_what_comes_next_stays_even_without_a_budget(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=10, windows=10)
    cache = text.cache(shards=0)
    data = text.data(cache)
    text.read(data, 0, 5)
    settled(data)
    now, then = (text.manifest.files[data.order[sequence][0]].sha256 for sequence in (0, 10))
    assert {path.stem for path in cached(cache)} == {now, then}
    text.read(data, 10, 5)
    settled(data)
    assert now not in {path.stem for path in cached(cache)}  # it is behind the read position


def test_the_tokens_of_two_large_shards_come_ahead_so_training_outlives_a_slow_server(
    tmp_path: Path,
    s3_server: S3Account,
    fresh_s3_store: Callable[[S3Account], S3Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Text(tmp_path, shards=4, windows=20, small=20)
    stored = fresh_s3_store(s3_server)
    for number, shard in enumerate(text.shards):
        stored.upload(text.bucket.stored.path_of(f"tokens/text-ffffffff/a0001/{shard.name}"), text.key(number))
    proxy = FaultyProxy(s3_server.endpoint)
    proxy.start()
    try:
        proxy.fail(*[Fault(silence_s=0.05, body_bytes=1 << 30)] * 24, method="GET")  # it is slow, and cuts nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        data = text.data(text.cache(store=S3Store(stored.bucket, "some/prefix", time_limit_s=1)))
        text.read(data, 0, 4)
        settled(data)
    finally:
        proxy.stop()
    coming = {data.order[sequence][0] for sequence in range(8 + 2 * 20 - 1)}
    read = sorted(path.rpartition("/")[2] for method, path in proxy.requests if method == "GET")
    assert read == sorted(text.shards[shard].name for shard in coming) and len(read) > 3  # by bytes, not by number
    for first in range(4, 44, 4):
        text.read(data, first, 4)


def test_a_step_of_many_small_shards_finds_them_on_the_disk(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=80, windows=2)
    cache = text.cache()
    text.read(data := text.data(cache), 0, 40, upcoming=40)
    settled(data)
    coming = {text.manifest.files[data.order[sequence][0]].sha256 for sequence in range(80)}
    assert coming <= {path.stem for path in cached(cache)} and len(coming) == 40


def test_a_small_budget_holds_back_what_would_come_ahead(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=10, windows=10)
    for shards, held in ((2, 2), (3, 3), (5, 3)):
        cache = text.cache(shards=shards, home=tmp_path / str(shards))
        text.read(data := text.data(cache), 4, 1, upcoming=1)
        settled(data)
        assert len(cached(cache)) == held


def test_thousands_of_shards_pass_through_a_disk_of_4_MB(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=2000, windows=1000)  # 17 KB each, 34 MB together
    cache = text.cache(home=disk)  # auto
    data = text.data(cache)
    for first in range(0, text.per_epoch, 1000):  # a few windows of each
        text.read(data, first, 8, upcoming=0)
        assert shutil.disk_usage(disk).free > 1e6
    settled(data)
    assert set(text.bucket.downloads()) == {text.key(shard) for shard in range(2000)}
    assert 10 * text.shard_bytes < sum(path.stat().st_size for path in cached(cache)) <= 2.2e6


def train_over_2000_shards(folder: Path) -> None:
    """100 steps over 2,000 shards with room for ten of them on the disk, from the newest commit of `folder` on."""
    text = Text(folder / f"text-{os.getpid()}", shards=2000, windows=4, ids=250)
    model = Gpt2Config(n_layer=1, n_head=1, n_embd=16, block_size=BLOCK, vocab_size=250)
    config = TrainConfig(batch_tokens=32 * BLOCK, max_steps=100, learning_rate=1e-2, val_every=None)
    runtime = RuntimeConfig(device="cpu", micro_batch_size=32, checkpoint_minutes=0.001)
    store = LocalStore(folder / "run")
    attempts = itertools.count(1)
    attempt = next(n for n in attempts if store.create(f"run/attempts/{n:04d}.json", str(n).encode()))
    fetch = text.cache(shards=10, home=folder / "home").fetch
    job = RankJob(
        *(model, config, runtime, text.shards, text.shards[:1], fetch, store, "run", folder, folder / "work"),
        begin=lambda world: attempt,
        superseded=lambda number: False,
    )
    run_rank(job, StopSignal())


@pytest.mark.slow  # 30 s
def test_a_run_over_2000_shards_with_a_cache_of_ten_that_is_killed_five_times_has_equal_losses(tmp_path: Path) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}; import test_shard_cache as here; from pathlib import Path; "
    code += "here.train_over_2000_shards(Path(sys.argv[1]))"

    def started(folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"})

    assert started(whole := tmp_path / "whole").wait(200) == 0
    for kill_at in (10, 25, 40, 55, 75):
        with started(killed := tmp_path / "killed") as process:
            deadline = time.monotonic() + 100
            while not any(step_of(one) >= kill_at for one in committed_folders(LocalStore(killed / "run"), "run")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
    assert started(killed).wait(200) == 0
    of_both = [
        [(row["step"], row["train/loss"], row["data/digest"]) for row in series(LocalStore(folder / "run"), "run")]
        for folder in (whole, killed)
    ]
    assert of_both[0] == of_both[1] and len(of_both[0]) == 100
    assert len(list((killed / "home" / "cache" / SHARDS).glob("*.bin"))) <= 10 + 2 * MOST_MAPPED


def test_a_hundred_thousand_shards_need_few_maps_and_files(tmp_path: Path) -> None:
    path = tmp_path / "shard.bin"
    write_shard(path, np.arange(BLOCK + 1, dtype=np.uint16))
    shards = [Shard(f"train_{i:06d}.bin", BLOCK + 1) for i in range(100_000)]
    data, most = TokenData(shards, lambda name: path, BLOCK, SEED), 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limit[1]))
    try:
        for first in range(0, 120_000, 12_000):
            for tokens, _ in data.micro_batches(range(first, first + 800), 400, CPU, range(first + 800, first + 1600)):
                assert (tokens.numpy() == np.arange(BLOCK)).all()
                most = max(most, Path("/proc/self/maps").read_text().count(str(path)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert 0 < most <= MOST_MAPPED + 1
    settled(data)
    assert len(data._maps._tried) < 2000 and not data._maps._fetching


def test_the_threads_that_feed_a_gpu_read_ahead_and_after_rollbacks_through_few_maps(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=40, windows=3)
    cache = text.cache(shards=0)
    data = text.data(cache)
    prefetcher = Prefetcher(data._windows)  # as the feed of a GPU uses it
    starts = [16 * step for step in (*range(30), 11, *range(12, 40), 3, 90, *range(90, 100))]
    for first, after in zip(starts, [*starts[1:], 0], strict=True):
        if after < first:
            after = first + 16  # a rollback comes unexpected
        coming = [range(at, at + 4) for at in range(after, after + 16, 4)]
        data._maps.keep(
            {*data.order.shards_of(range(first, first + 16)), *data.order.shards_of(range(after, after + 16))}
        )
        read = np.concatenate(
            list(prefetcher.results([range(at, at + 4) for at in range(first, first + 16, 4)], coming))
        )
        data._maps.prefetch(data.order.shards_of(range(after, after + 16)))
        expected = [
            31 * shard + window * BLOCK for shard, window in map(data.order.__getitem__, range(first, first + 16))
        ]
        assert (read == (np.array(expected)[:, None] + np.arange(BLOCK + 1)) % 50_000).all()
        assert maps_of(cache.folder) <= MOST_MAPPED + 4 and len(cached(cache)) <= MOST_MAPPED + 4  # 4 threads open one


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


def test_space_that_vanishes_during_a_download_costs_old_shards_not_the_run(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=10, windows=20_000)
    cache = text.cache(shards=1e6, home=disk)
    for shard in range(6):
        cache.fetch(text.shards[shard].name)

    def fill(path: Path) -> None:
        text.bucket.before_download = lambda path: None
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    text.bucket.before_download = fill
    assert size(cache.fetch(text.shards[9].name)) == text.shard_bytes
    assert 1 <= len(cached(cache)) < 7


def test_a_disk_that_is_too_small_is_named_in_one_line_and_nothing_is_left(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=1, windows=300_000)  # 4.8 MB
    cache = text.cache(home=disk)
    with pytest.raises(DiskFull) as refused:
        text.read(text.data(cache), 0, 4)
    message = str(refused.value)
    assert message.startswith(f"{disk}/cache/{SHARDS}: no space left for train_000000.bin (4.8 MB)")
    assert message.endswith("free some space, or set SKYTRAIN_HOME to a larger disk") and "\n" not in message
    assert not cached(cache) and not list(cache.folder.glob("*.arriving"))


def test_shards_of_this_process_make_room_for_the_one_that_it_needs(tmp_path: Path, disk: Path) -> None:
    text = Text(tmp_path, shards=3, windows=120_000)  # 1.9 MB: two fit on the disk, and all steps read two
    data = text.data(text.cache(home=disk))
    for first in range(120_000 - 4, 3 * 120_000 - 4, 120_000):
        text.read(data, first, 8)


# --- files that are not the cache's


def test_files_of_a_local_store_are_read_in_place_and_never_removed(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=12, windows=10)
    data = text.data(text.cache(shards=1, store=text.bucket.stored))
    for step in range(40):
        text.read(data, 10 * step, 10)
    settled(data)
    assert all(text.bucket.stored.path_of(text.key(shard)).exists() for shard in range(12))
    assert not text.home.exists() and not text.bucket.downloads()


def test_other_files_of_the_cache_stay(tmp_path: Path) -> None:
    text = Text(tmp_path, shards=3, windows=10)
    cache = text.cache(shards=0)
    weights = cache.cache / ("a" * 64) / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(100))
    for shard in text.shards:
        cache.fetch(shard.name)
    assert len(cached(cache)) == 1 and weights.exists()


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"train_000000.bin": 80}, "train_000000.bin has 80 tokens in its facts and 1186 bytes in its files"),
        ({"train_000000.bin": "81"}, "train_000000.bin has '81' tokens"),
        ({"train_000001.bin": 81}, "train_000001.bin has 81 tokens in its facts and no bytes in its files"),
        ({"../train.bin": 81}, r"\.\./train.bin has 81 tokens in its facts and no bytes"),
        (None, "shards has None tokens"),
        ([1], r"shards has \[1\] tokens"),
    ],
)
def test_shards_that_their_manifest_does_not_hold_are_refused_before_any_is_fetched(
    tmp_path: Path, facts: object, named: str
) -> None:
    text = Text(tmp_path, shards=1, windows=10)
    good = replace(text.manifest, facts={"shards": {"train_000000.bin": 81}})
    assert shards_in(good, "train") == text.shards and shards_in(good, "val") == []
    with pytest.raises(DamagedArtifact, match=f"tokens/text-ffffffff/MANIFEST.json: damaged: {named}"):
        shards_in(replace(good, facts={"shards": facts}), "train")


@pytest.mark.parametrize("damage", [None, b"", b"x"])
def test_a_damaged_shard_of_the_store_is_named_and_a_cut_one_of_the_cache_is_replaced(
    tmp_path: Path, damage: bytes | None
) -> None:
    text = Text(tmp_path, shards=2, windows=10)
    cache = text.cache(shards=2)
    cache.fetch(text.shards[0].name)
    (path,) = cached(cache)
    path.write_bytes(path.read_bytes()[:-2])
    assert size(cache.fetch(text.shards[0].name)) == text.shard_bytes
    stored = text.bucket.stored.path_of(text.key(1))
    stored.unlink() if damage is None else stored.write_bytes(damage)
    with pytest.raises(DamagedArtifact, match=f"s3://bucket/{text.key(1)}: damaged: it is ") as refused:
        cache.fetch(text.shards[1].name)
    assert ("missing" in str(refused.value)) == (damage is None)
