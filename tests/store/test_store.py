"""Promises of every store, tested on all three; then S3Store with a server that fails."""

import errno
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_proxy import Fault, FaultyProxy
from hypothesis import given
from hypothesis import strategies as st
from servers import S3Account, free_ports
from small_disk import small_disk

import trainer.base.store
from pipelines.store.manifest import File, verify
from pipelines.store.s3_store import S3Store, open_store
from trainer.base.store import PART_BYTES, WAITING, LocalStore, Store, checked_key, share_of_node, side_by_side
from trainer.config.errors import DiskFull, Interrupted, NotAFile, StoreUnavailable, UserError

BIG = 40 * 2**20 + 12_345  # three parts, the last one ragged
ODD_KEYS = ["a b/c d", "grün/日本語/🦆", "a+b&c=d?e#f%20", "quote'\"<>", ".hidden", "a/..b", "CON", "x" * 200]


@pytest.fixture(params=["local", "radosgw", "moto_fallback"])
def store(request: pytest.FixtureRequest, tmp_path: Path, fresh_s3_store: Callable[[S3Account], S3Store]) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "a store")
    server = "s3_server" if request.param == "radosgw" else "moto_server"
    return fresh_s3_store(request.getfixturevalue(server))


class TestEveryStore:
    def test_a_range_of_an_object_is_read_into_a_buffer(self, store: Store) -> None:
        def read(key: str, start: int, size: int) -> bytes:
            buffer = bytearray(size)
            return bytes(buffer[: store.read_into(key, start, memoryview(buffer))])

        store.put("a/b", b"one, two")
        store.put("a/empty", b"")
        assert [read("a/b", *range_) for range_ in ((0, 1), (0, 8), (5, 9), (8, 1))] == [b"o", b"one, two", b"two", b""]
        assert read("a/empty", 0, 4) == b""
        parts: list[tuple[int, bytes]] = []
        count = store.read_into("a/b", 1, memoryview(bytearray(3)), 7, lambda at, part: parts.append((at, bytes(part))))
        assert (count, parts) == (7, [(0, b"ne,"), (3, b" tw"), (6, b"o")])
        for absent in ("a/none", "a"):
            with pytest.raises(FileNotFoundError):
                read(absent, 0, 4)

    def test_an_absent_key_reads_as_none_and_can_be_deleted(self, store: Store, tmp_path: Path) -> None:
        assert store.get("not/there") is None
        store.delete("not/there")
        assert store.entries("not") == []
        target = tmp_path / "out" / "file"
        with pytest.raises(FileNotFoundError, match="not/there"):
            store.download("not/there", target)
        assert not target.exists()

    def test_create_never_replaces_and_put_does(self, store: Store) -> None:
        assert store.create("commit", b"first") is True
        assert store.create("commit", b"second") is False
        assert store.get("commit") == b"first"
        store.delete("commit")
        assert store.create("commit", b"third") is True
        for body in (b"put", b"put again, longer"):
            store.put("commit", body)
            assert store.get("commit") == body

    @pytest.mark.parametrize("store", ["local", "radosgw"], indirect=True)  # moto looks and writes in two steps
    def test_create_has_exactly_one_winner_among_racing_threads(self, store: Store) -> None:
        racers, rounds = 12, 5
        for number in range(rounds):
            start = threading.Barrier(racers)

            def race(racer: int, number: int = number, start: threading.Barrier = start) -> bool:
                start.wait()
                return store.create(f"race/{number}", b"racer %d" % racer)

            with ThreadPoolExecutor(racers) as pool:
                won = list(pool.map(race, range(racers)))
            assert won.count(True) == 1
            assert store.get(f"race/{number}") == b"racer %d" % won.index(True)

    def test_a_file_of_any_size_comes_back_with_the_same_bytes(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target, part = tmp_path / "source", tmp_path / "new" / "folder" / "target", 5 << 20  # the least of S3
        for module in ("trainer.base.store", "pipelines.store.s3_store"):
            monkeypatch.setattr(f"{module}.PART_BYTES", part)
        for size in (2 * part + 12_345, 0, 1, part - 1, part, part + 1):
            body = memoryview(os.urandom(size))
            chunks = [body[start : start + part] for start in range(0, size, part)]
            digests = store.write([body[:9], body[9:]], "memory", part)
            assert store.get("memory") == body and digests == [hashlib.sha256(chunk).hexdigest() for chunk in chunks]
            source.write_bytes(body)
            store.upload(source, f"shards/file-{size}")
            store.download(f"shards/file-{size}", target)  # the second one replaces a larger file
            assert target.read_bytes() == body, size
            assert (f"shards/file-{size}", size) in [(entry.key, entry.size) for entry in store.entries("")]
            assert os.listdir(target.parent) == ["target"]

    def test_a_check_ends_an_upload_and_no_object_is_there(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "large"
        source.write_bytes(bytes(40 << 20))  # three parts of a bucket
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise Interrupted("SIGTERM")

        with pytest.raises(Interrupted):
            store.upload(source, "key", check)
        assert store.get("key") is None and not list(store.entries(""))

    def test_entries_are_sorted_and_have_size_and_time(self, store: Store) -> None:
        before = time.time()
        for key in ["b", "a/2", "a/10", "a-b", "a/B", "ä"]:
            store.put(key, key.encode())
        found = store.entries("")
        assert [entry.key for entry in found] == sorted(["b", "a/2", "a/10", "a-b", "a/B", "ä"])
        assert all(entry.size == len(entry.key.encode()) for entry in found)
        # S3 has whole seconds.
        assert all(before - 2 <= entry.modified <= time.time() + 2 for entry in found)

    def test_a_prefix_is_text_and_hides_everything_else(self, store: Store) -> None:
        for key in ["train/a-1/x", "train/a-1/y/z", "train/a-12/x", "trainer", "evaluate/a-1/x"]:
            store.put(key, b"")

        def keys(prefix: str) -> list[str]:
            return [entry.key for entry in store.entries(prefix)]

        assert keys("train/a-1/") == ["train/a-1/x", "train/a-1/y/z"]
        assert keys("train/a-1") == ["train/a-1/x", "train/a-1/y/z", "train/a-12/x"]
        assert keys("train/") == ["train/a-1/x", "train/a-1/y/z", "train/a-12/x"]
        assert keys("train/a-1/x") == ["train/a-1/x"]
        assert keys("train/a-1/x/") == []
        assert keys("a-1") == []

    def test_odd_keys_are_keys_like_any_other(self, store: Store, tmp_path: Path) -> None:
        for key in ODD_KEYS:
            assert store.create(key, b"odd") is True, key
            assert store.create(key, b"other") is False, key
            assert store.get(key) == b"odd", key
            store.download(key, tmp_path / "out")
            assert (tmp_path / "out").read_bytes() == b"odd", key
            assert [entry.key for entry in store.entries(key[:2])] == [key]
            store.delete(key)
            assert store.entries("") == [], key
            (tmp_path / "out").unlink()

    def test_an_object_too_large_for_memory_is_named_instead_of_read(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trainer.base.store, "LARGEST", 8)
        store.put("a/small", b"12345678")
        store.put("a/huge", b"123456789")
        assert store.get("a/small") == b"12345678"
        assert store.read_into("a/huge", 6, memoryview(bytearray(9))) == 3
        with pytest.raises(NotAFile, match="a/huge: has 9 bytes, and no such object of ours has 8; remove it"):
            store.get("a/huge")

    def test_every_operation_refuses_an_invalid_key(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"x")
        operations: list[Callable[[str], object]] = [
            lambda key: store.create(key, b""),
            lambda key: store.put(key, b""),
            store.get,
            lambda key: store.upload(source, key),
            lambda key: store.download(key, tmp_path / "out"),
            store.delete,
        ]
        for key in ("", "/etc/passwd", "../out", "a/../../out", "a//b", "a/", "./a", "..", "a\nb", ".partial-1/x"):
            for operation in operations:
                with pytest.raises(ValueError, match="not a key"):
                    operation(key)
        assert store.entries("") == []

    def test_a_download_onto_a_full_disk_says_so_at_once(self, store: Store, tmp_path: Path) -> None:
        store.put("run/a", os.urandom(3 << 20))
        with small_disk(tmp_path / "disk", "2m") as disk:
            with pytest.raises(DiskFull, match="disk: no space left on the disk"):
                store.download("run/a", disk / "a")
            assert not os.listdir(disk)


class TestLocalStore:
    def test_files_still_being_written_are_no_objects(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.put("run/a", b"x")
        (tmp_path / "run" / ".partial-left-by-kill-9").write_bytes(b"half")
        assert [entry.key for entry in store.entries("")] == ["run/a"]

    def test_a_device_or_a_pipe_is_no_object_and_blocks_no_reader(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "device").symlink_to("/dev/zero")
        assert store.entries("") == []
        for key in ("pipe", "device"):
            reads: list[Callable[[str], object]] = [
                store.get,
                lambda key: store.read_into(key, 0, memoryview(bytearray(1))),
                lambda key: store.download(key, tmp_path / "copy"),
            ]
            for read in reads:
                with pytest.raises(NotAFile, match=f"{key}: not a regular file"):
                    read(key)

    @pytest.mark.parametrize("prefix", ["", "run/", "run/checkpoints/"])
    def test_a_listing_that_fails_is_no_empty_listing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
    ) -> None:
        store = LocalStore(tmp_path)
        store.put("run/checkpoints/step-1/COMMIT.json", b"x")
        scandir = os.scandir

        def fails(number: int) -> Callable[..., object]:
            def failing_scandir(path: str) -> object:
                if str(path).rstrip("/").endswith("checkpoints"):
                    raise OSError(number, os.strerror(number), str(path))
                return scandir(path)

            return failing_scandir

        monkeypatch.setattr(os, "scandir", fails(errno.EIO))
        with pytest.raises(StoreUnavailable, match=f"{tmp_path}/run/checkpoints/?: Input/output error"):
            store.entries(prefix)
        monkeypatch.setattr(os, "scandir", fails(errno.EACCES))
        with pytest.raises(UserError, match="run/checkpoints/?: Permission denied; correct its permissions"):
            store.entries(prefix)
        monkeypatch.setattr(os, "scandir", fails(errno.ENOENT))  # deleted between two looks
        assert store.entries(prefix) == []

    def test_a_disk_that_fails_is_an_outage_for_every_operation(self, tmp_path: Path) -> None:
        store, aside = LocalStore(tmp_path / "store"), tmp_path / "aside"
        store.put("run/a", b"x")
        store.root.rename(aside)
        store.root.symlink_to(store.root.name)  # a link to itself stands for a failing disk
        (tmp_path / "file").write_bytes(b"x")
        operations: list[Callable[[], object]] = [
            lambda: store.get("run/a"),
            lambda: store.entries("run/"),
            lambda: store.download("run/a", tmp_path / "b"),
            lambda: store.create("run/b", b"x"),
            lambda: store.put("run/a", b"x"),
            lambda: store.write([memoryview(b"x")], "run/a", 9),
            lambda: store.upload(tmp_path / "file", "run/a"),
            lambda: store.delete("run/a"),
            lambda: verify(store, "run/a", File("a", "a", 1, "0" * 64), store.path_of("run/a")),
        ]
        for operation in operations:
            with pytest.raises(StoreUnavailable, match=f"{tmp_path}/store/run"):
                operation()
        store.root.unlink()
        aside.rename(store.root)
        assert store.get("run/a") == b"x"

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LocalStore(tmp_path)
        store.put("run/a", b"old")

        def disk_full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", disk_full)
        for write in (lambda: store.put("run/a", b"new"), lambda: store.create("run/b", b"new")):
            with pytest.raises(UserError, match="run: no space left on the disk"):
                write()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
        assert store.get("run/a") == b"old"

    def test_killed_writers_leave_whole_objects_only(self, tmp_path: Path) -> None:
        code = (
            "import itertools, sys; from pathlib import Path; from trainer.base.store import LocalStore\n"
            "store = LocalStore(Path(sys.argv[1]))\n"
            "for n in itertools.count(): store.put(f'{n % 3}', b'%06d' % n * 50_000); print(n, flush=True)"
        )
        for _ in range(3):
            writer = subprocess.Popen(
                [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, env=_with_repository()
            )
            assert writer.stdout is not None
            for _ in range(7):
                writer.stdout.readline()
            writer.kill()
            writer.communicate()
            for entry in LocalStore(tmp_path).entries(""):
                body = LocalStore(tmp_path).get(entry.key)
                assert body is not None
                assert body == body[:6] * 50_000

    @given(key=st.text(max_size=40))
    def test_no_key_leads_out_of_the_root(self, tmp_path: Path, key: str) -> None:
        try:
            checked_key(key)
        except ValueError:
            return
        path = Path(os.path.normpath(LocalStore(tmp_path).path_of(key)))
        assert tmp_path in path.parents
        assert path.relative_to(tmp_path).as_posix() == key


class TestOpenStore:
    def test_paths_and_file_uris_are_local_and_shown_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        expected = f"file://{tmp_path}/my store"
        for uri in ["my store", "./my store/", "file://my store", expected, f"{tmp_path}/my store"]:
            assert open_store(uri).uri == expected

    @pytest.mark.parametrize("uri", ["", "gs://b/p", "s3://", "s3:/b", "file://", "https://host/x", "s3:b"])
    def test_any_other_uri_is_refused_with_valid_examples(self, uri: str) -> None:
        with pytest.raises(UserError, match=r"s3://BUCKET/PREFIX, file://PATH"):
            open_store(uri)

    def test_a_file_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(UserError, match="is a file"):
            open_store(str(tmp_path / "file"))
        with pytest.raises(UserError, match="file is a file"):
            open_store(str(tmp_path / "file" / "below"))


@pytest.fixture
def proxy(s3_server: S3Account) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(s3_store: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """The store of `s3_store`, reached through `proxy`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return S3Store(s3_store.bucket, "some/prefix", time_limit_s=30)


@pytest.fixture
def impatient(behind_proxy: S3Store) -> S3Store:
    return S3Store(behind_proxy.bucket, "p", time_limit_s=1)


CUT = Fault()
LOST_ANSWER = Fault(forward=True)
OVERLOADED = [
    Fault(503, "SlowDown"),
    Fault(500, "InternalError"),
    Fault(429, "TooManyRequests"),
    Fault(400, "RequestTimeout"),
    CUT,
]


class TestS3StoreAndAServerThatFails:
    def test_passing_failures_are_retried_and_take_few_lines(
        self, behind_proxy: S3Store, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        proxy.fail(*OVERLOADED)
        behind_proxy.put("a", b"x")
        assert len(proxy.requests) == len(OVERLOADED) + 1
        what = f"put {behind_proxy.uri}/a: "
        assert caplog.messages == [f"0 s without an answer, 30 s left: {what}SlowDown (HTTP 503); trying again"]
        proxy.fail(*OVERLOADED[:2])
        assert behind_proxy.get("a") == b"x"
        proxy.fail(*OVERLOADED[:2])
        assert [entry.key for entry in behind_proxy.entries("")] == ["a"]
        proxy.fail(*OVERLOADED[:2])
        behind_proxy.delete("a")
        assert behind_proxy.get("a") is None

    def test_a_create_whose_response_was_lost_recognizes_its_own_object(
        self, behind_proxy: S3Store, proxy: FaultyProxy
    ) -> None:
        proxy.fail(LOST_ANSWER, method="PUT")
        assert behind_proxy.create("a", b"ours") is True
        assert [method for method, _ in proxy.requests] == ["PUT", "PUT", "GET"]

    def test_big_files_survive_faults_in_every_request(
        self, behind_proxy: S3Store, proxy: FaultyProxy, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        source.write_bytes(os.urandom(BIG))
        # Begin, three parts, complete: each fails once, and the answer to the first completion is lost.
        proxy.fail(Fault(503), LOST_ANSWER, method="POST")
        proxy.fail(CUT, Fault(500), LOST_ANSWER, method="PUT")
        behind_proxy.upload(source, "big")
        proxy.fail(Fault(503), Fault(body_bytes=1_000_000), CUT, Fault(body_bytes=5), method="GET")
        behind_proxy.download("big", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == source.read_bytes()

    def test_a_failed_upload_leaves_no_billed_parts(
        self, s3_store: S3Store, impatient: S3Store, proxy: FaultyProxy, tmp_path: Path
    ) -> None:
        store, source = impatient, tmp_path / "source"
        source.write_bytes(b"\0" * BIG)
        proxy.fail(*[Fault(503, "SlowDown")] * 50, method="PUT")
        with pytest.raises(StoreUnavailable):
            store.upload(source, "big")
        assert store.entries("") == []
        assert "Uploads" not in s3_store._client.list_multipart_uploads(Bucket=s3_store.bucket)

    def test_a_download_that_fails_leaves_the_file_as_it_was(
        self, impatient: S3Store, proxy: FaultyProxy, tmp_path: Path
    ) -> None:
        store, target = impatient, tmp_path / "out"
        store.put("a", b"x" * 1000)
        target.write_bytes(b"before")
        proxy.fail(*[Fault(body_bytes=999)] * 50, method="GET")
        with pytest.raises(StoreUnavailable):
            store.download("a", target)
        assert target.read_bytes() == b"before"
        assert os.listdir(tmp_path) == ["out"]

    def test_a_silent_server_blocks_no_call_forever(self, impatient: S3Store, proxy: FaultyProxy) -> None:
        proxy.fail(*[Fault(silence_s=600)] * 50)
        with pytest.raises(StoreUnavailable, match=r"^http\S+ does not answer: no success within 1 s; last: Rea"):
            impatient.get("a")

    @pytest.mark.parametrize("what", ["get", "entries"])
    def test_a_server_that_drips_is_as_absent_as_a_silent_one(
        self, impatient: S3Store, proxy: FaultyProxy, what: str
    ) -> None:
        proxy.fail(*[Fault(endless_s=0.1)] * 50)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer: no success within 1 s; last: Rea"):
            getattr(impatient, what)("a")
        assert time.monotonic() - began < 15  # the whole answer would take 100 s

    def test_a_wait_for_a_server_ends_when_a_check_says_so_in_all_threads(
        self, behind_proxy: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check() -> None:
            if time.monotonic() > began + 1:
                raise Interrupted("SIGTERM")

        proxy.fail(*[Fault(endless_s=0.1), Fault(503)] * 50)
        began = time.monotonic()
        monkeypatch.setattr(WAITING, "check", check)
        with pytest.raises(Interrupted, match="SIGTERM"):
            side_by_side(behind_proxy.get, ["a", "b", "c", "d"])
        assert time.monotonic() - began < 15  # the limit of the store is 30 s

    def test_a_listing_that_repeats_its_token_is_an_outage(self, impatient: S3Store, proxy: FaultyProxy) -> None:
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
        proxy.change = lambda request, answer: (
            answer[0],
            answer[1].replace(b"<IsTruncated>false</IsTruncated>", more),
            answer[2],
        )
        impatient.put("a", b"x")
        with pytest.raises(StoreUnavailable, match="does not answer"):
            impatient.entries("")

    def test_a_body_damaged_on_the_way_is_read_again_though_it_is_still_json(
        self, behind_proxy: S3Store, proxy: FaultyProxy
    ) -> None:
        behind_proxy.put("a", b'{"usd": 12}')
        proxy.change = lambda request, answer: (answer[0], answer[1].replace(b"12", b"92", next(once, 0)), answer[2])
        once = iter([True])  # the first answer that this process gets
        assert behind_proxy.get("a") == b'{"usd": 12}'
        damaged = iter([True, True])
        proxy.change = lambda request, answer: (answer[0], answer[1].replace(b"12", b"92", next(damaged, 0)), answer[2])
        assert behind_proxy.get("a") == b'{"usd": 12}' and next(damaged, None) is None

    def test_a_create_that_is_refused_though_nothing_is_there_is_tried_again(
        self, behind_proxy: S3Store, proxy: FaultyProxy
    ) -> None:
        proxy.fail(Fault(412, "PreconditionFailed"), method="PUT")
        assert behind_proxy.create("a", b"ours") is True

    @pytest.mark.parametrize("size", [1000, PART_BYTES + 1])
    def test_uploads_damaged_on_the_way_are_never_stored(
        self, behind_proxy: S3Store, proxy: FaultyProxy, tmp_path: Path, size: int
    ) -> None:
        source = tmp_path / "source"
        source.write_bytes(os.urandom(size))
        proxy.fail(Fault(damage=True), method="PUT")
        behind_proxy.upload(source, "a")
        parts = 1 if size == 1000 else 2
        assert len([method for method, _ in proxy.requests if method == "PUT"]) > parts
        assert behind_proxy.get("a") == source.read_bytes()


class TestS3StoreAndTheUsersMistakes:
    def test_a_missing_bucket_is_named(self, s3_store: S3Store, tmp_path: Path) -> None:
        store = S3Store("no-such-bucket-here", "p")
        source = tmp_path / "source"
        source.write_bytes(b"\0" * (PART_BYTES + 1))
        for operation in (
            lambda: store.create("a", b""),
            lambda: store.get("a"),
            lambda: store.entries(""),
            lambda: store.download("a", tmp_path / "out"),
            lambda: store.upload(source, "a"),
            lambda: store.delete("a"),
        ):
            with pytest.raises(UserError, match=r"s3://no-such-bucket-here/p.*the bucket does not exist"):
                operation()

    def test_the_store_has_names_of_its_own_beside_the_credentials_of_aws(
        self, moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket, account = fresh_s3_store(moto_server).bucket, moto_server.environment
        for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"SKYTRAIN_S3_{name}", account[f"AWS_{name}"])
            monkeypatch.setenv(f"AWS_{name}", "http://127.0.0.1:1")  # of AWS, which a job would not reach
        store = S3Store(bucket, time_limit_s=5)
        store.put("a", b"of its own")
        assert store.get("a") == b"of its own" and store.endpoint == account["AWS_ENDPOINT_URL"]

    def test_a_wrong_secret_is_reported_without_its_value(
        self, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-and-more")
        with caplog.at_level(logging.INFO), pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY") as caught:
            S3Store(s3_store.bucket).put("a", b"")
        assert "hunter2" not in str(caught.value) + caplog.text
        assert len(str(caught.value).splitlines()) == 1

    def test_credentials_that_were_renewed_meanwhile_are_used(
        self, behind_proxy: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        right = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]

        def log_in(key: str, secret: str) -> None:
            lines = ["[default]", f"aws_access_key_id={key}", f"aws_secret_access_key={secret}"]
            (tmp_path / "credentials").write_text("\n".join(lines))

        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        log_in("rotated-away", right[1])
        store = S3Store(behind_proxy.bucket, "some/prefix")
        with pytest.raises(UserError, match="InvalidAccessKeyId"):
            store.put("a", b"x")
        log_in(*right)
        store = S3Store(behind_proxy.bucket, "some/prefix")
        store.put("a", b"x")
        log_in("rotated-away", right[1])
        store._connect()  # as a refused request does
        threading.Timer(1.0, log_in, right).start()
        assert store.create("b", b"y") is True
        proxy.fail(Fault(400, "ExpiredToken"))  # radosgw's own tokens last for 15 minutes at least
        with pytest.raises(UserError, match=r"have expired; log in again \(ExpiredToken\)"):
            store.get("b")

    def test_a_server_without_conditional_writes_is_refused(self, behind_proxy: S3Store, proxy: FaultyProxy) -> None:
        proxy.fail(Fault(501, "NotImplemented"))
        with pytest.raises(UserError, match="If-None-Match"):
            behind_proxy.create("a", b"")

    def test_a_password_in_the_endpoint_is_not_shown(self, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:hunter2@127.0.0.1:{free_ports(1)[0]}")
        with pytest.raises(StoreUnavailable) as caught:
            S3Store("bucket", time_limit_s=0.5).get("a")
        assert "hunter2" not in str(caught.value)


def test_a_refusal_after_the_store_was_accepted_is_an_outage(impatient: S3Store, proxy: FaultyProxy) -> None:
    store = impatient
    store.put("a", b"x")
    proxy.fail(Fault(403, "SignatureDoesNotMatch"))
    store.put("a", b"y")  # renewed meanwhile
    proxy.fail(*[Fault(403, "SignatureDoesNotMatch")] * 400)
    with pytest.raises(StoreUnavailable, match="SignatureDoesNotMatch"):
        store.put("a", b"z")


def test_a_right_that_was_never_there_is_a_mistake_at_once(impatient: S3Store, proxy: FaultyProxy) -> None:
    store = impatient
    assert store.get("a") is None
    proxy.fail(Fault(403, "AccessDenied"))
    with pytest.raises(UserError, match=r"the credentials may not do that.*\(AccessDenied\)"):
        store.put("a", b"x")


def test_objects_carry_the_content_types_of_their_names(impatient: S3Store) -> None:
    store = impatient
    store.create("a/MANIFEST.json", b"{}")
    store.put("a/README.md", b"#")
    store.write([memoryview(bytes(PART_BYTES + 1))], "a/rows.jsonl", PART_BYTES)
    store.put("a/train_000000.bin", b"")
    kinds = [store._client.head_object(**store._where(one.key))["ContentType"] for one in store.entries("a/")]
    assert kinds[:3] == ["application/json", "text/markdown; charset=utf-8", "application/x-ndjson"]
    assert "octet-stream" in kinds[3]


def test_a_listing_of_many_pages_is_complete(s3_store: S3Store) -> None:
    keys = [f"many/{number:04}" for number in range(1_100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: s3_store.put(key, b""), keys))
    assert [entry.key for entry in s3_store.entries("many/")] == keys


def test_the_ranks_of_a_node_share_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert share_of_node(64) == 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert share_of_node(64) == 8


@pytest.mark.slow
def test_big_files_need_little_memory(s3_store: S3Store, tmp_path: Path) -> None:
    """A child with two connections moves a 400 MB file both ways; its peak stays within 260 MB: Python, boto3,
    and parts."""
    source = tmp_path / "source"
    with open(source, "wb") as file:
        file.truncate(400_000_000)
    code = (
        "import re, sys; from pathlib import Path; from pipelines.store.s3_store import open_store\n"
        "store, source = open_store(sys.argv[1]), Path(sys.argv[2])\n"
        "store.upload(source, 'big'); store.download('big', source.with_name('back'))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, s3_store.uri, source],
        capture_output=True,
        timeout=300,
        env=_with_repository() | {"LOCAL_WORLD_SIZE": "64"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) * 1024 < 260_000_000
    assert (tmp_path / "back").stat().st_size == 400_000_000


def _with_repository() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
