"""The next machine finds the kernels that one machine compiled; other files are neither packed nor unpacked."""

import io
import os
import tarfile
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.artifacts import kernel_cache
from pipelines.artifacts.kernel_cache import CACHE_VARIABLE, MAX_BYTES, MAX_PACKS, KernelCache, pack, sources, unpack
from pipelines.recipe import load_recipe
from trainer.store import LocalStore

KEY = "3.6.0-sm90-0123456789abcdef"
HASH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRST"


def compile_one(folder: Path, entry: str, body: bytes = b"gpu") -> None:
    """A made-up kernel in the form that Triton writes."""
    (folder / entry).mkdir(parents=True)
    (folder / entry / "k.cubin").write_bytes(body)
    group = f'{{"child_paths": {{"k.cubin": "{folder / entry / "k.cubin"}"}}}}'
    (folder / entry / "__grp__k.json").write_text(group)


def entries_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/*.cubin")}


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Triton's own code filled."""
    cache = pytest.importorskip("triton.runtime.cache")
    folder = tmp_path / "compiled"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    files = cache.FileCacheManager(HASH)
    group = {
        name: files.put(body, name)
        for name, body in (("k.cubin", b"\x7fELF gpu"), ("k.json", b'{"name": "k"}'), ("k.ttir", b"module {}"))
    }
    files.put_group("k.json", group)
    files.put(b"\x7fELF cpu", "launcher.cpython-311-x86_64-linux-gnu.so")
    (folder / HASH / "lock").touch()
    (folder / "loose.json").write_text("{}")
    return folder


def test_the_next_machine_finds_the_kernels_of_the_first(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.cache import FileCacheManager

    store = LocalStore(tmp_path / "store")
    first, second = KernelCache(store, compiled, KEY), KernelCache(store, tmp_path / "other" / "cache", KEY)
    assert second.fetch() == 0 and first.save()
    assert not first.save()  # it exists
    assert KernelCache(store, tmp_path / "older", KEY.replace("3.6.0", "3.5.0")).fetch() == 0
    (entry,) = store.entries("cache/")
    assert entry.key == f"cache/triton/{KEY}/{sha256(pack(compiled, [HASH])).hexdigest()}.tar"
    assert second.fetch() == 3 and second.fetch() == 0
    names = sorted(path.name for path in second.folder.glob("*/*"))
    assert names == ["__grp__k.json", "k.cubin", "k.json"]  # neither CPU code nor intermediate files
    # Triton reads this folder only.
    monkeypatch.setenv(CACHE_VARIABLE, str(second.folder))
    group = FileCacheManager(HASH).get_group("k.json")
    assert group == {name: str(second.folder / HASH / name) for name in ("k.cubin", "k.json")}
    assert Path(group["k.cubin"]).read_bytes() == b"\x7fELF gpu"


def test_kernels_compiled_later_in_a_run_are_kept_in_another_pack(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    first, second, third = (KernelCache(store, tmp_path / name, KEY) for name in ("1", "2", "3"))
    compile_one(first.folder, "BF16")
    assert first.save() and not first.save()
    second.fetch()
    assert not second.save()  # the store has the fetched kernels already
    compile_one(second.folder, "FP8")
    (second.folder / "FP8" / "__grp__k.json").rename(tmp_path / "group")
    assert not second.save()  # an incomplete kernel would be loaded, and fail
    (tmp_path / "group").rename(second.folder / "FP8" / "__grp__k.json")
    assert second.save()
    third.fetch()
    assert entries_in(third.folder) == {"BF16", "FP8"} and len(store.entries("cache/")) == 2
    compile_one(first.folder, "FP8")
    assert not first.save()  # another run saved it


def test_packs_of_a_key_have_a_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = KernelCache(LocalStore(tmp_path / "store"), tmp_path / "compiled", KEY)
    for number in range(MAX_PACKS):
        compile_one(kernels.folder, f"K{number}")
        assert kernels.save()
    compile_one(kernels.folder, "MORE")
    assert not kernels.save() and "is full" in capsys.readouterr().out
    assert not kernels.save() and not capsys.readouterr().out  # reported once
    monkeypatch.setattr(kernel_cache, "MAX_BYTES", 40_000)
    smaller = KernelCache(LocalStore(tmp_path / "other"), tmp_path / "smaller", KEY)
    compile_one(smaller.folder, "A", bytes(15_000))
    assert smaller.save()
    compile_one(smaller.folder, "B", bytes(25_000))
    assert not smaller.save() and "is full" in capsys.readouterr().out


def test_kernels_are_kept_after_the_first_steps_and_after_later_compilations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "POLL_SECONDS", 0)
    monkeypatch.setattr(kernel_cache, "SAVE_SECONDS", 0)
    store, folder, kept, seen = LocalStore(tmp_path / "store"), tmp_path / "compiled", [], threading.Event()
    compile_one(folder, "BF16")

    def phases() -> Iterator[str]:
        yield "compile"
        kept.append(len(store.entries("cache/")))
        yield "train"
        kept.append(len(store.entries("cache/")))
        compile_one(folder, "FP8")
        yield "train"
        kept.append(len(store.entries("cache/")))
        seen.set()
        threading.Event().wait()  # the thread never ends by itself

    run = phases()
    KernelCache(store, folder, KEY).save_from_first_step(lambda: next(run))
    assert seen.wait(20) and kept == [0, 1, 2]


def test_each_key_has_a_folder_of_its_own_for_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("trainer.engine.choose_engine", lambda *_: ("fused", ""))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    store, gpu, folders = LocalStore(tmp_path / "store"), torch.device("cuda"), []
    for precision in ("bf16", "fp8"):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))  # with kernels of other projects, perhaps
        recipe = load_recipe("gpt2-124m", [f"train.precision={precision}"])
        kernels = KernelCache.here(store, tmp_path / "cache", recipe, gpu)
        assert kernels and kernels.folder == Path(os.environ[CACHE_VARIABLE])
        assert kernels.prefix == f"cache/triton/{kernels.folder.name}/"
        folders.append(kernels.folder)
    assert len(set(folders)) == 2 and {folder.parent for folder in folders} == {tmp_path / "mine"}
    monkeypatch.delenv(CACHE_VARIABLE)
    kernels = KernelCache.here(store, tmp_path / "cache", recipe, gpu)
    assert kernels and kernels.folder == tmp_path / "cache" / "triton" / folders[1].name
    monkeypatch.setattr("torch.version.hip", "6.4")  # other files, and often another distribution than "triton"
    assert KernelCache.here(store, tmp_path, recipe, gpu) is None


def test_packs_differ_by_engine_and_by_every_setting_that_changes_its_kernels(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-124m")
    changes = ("model.n_embd=1536", "train.precision=fp8", "runtime.micro_batch_size=32", "runtime.recompute=true")
    seen = [sources(engine, recipe) for engine in ("fused", "compiled")]
    seen += [sources("compiled", load_recipe("gpt2-124m", [change])) for change in changes]
    assert len(set(seen)) == len(seen)
    assert sources("compiled", load_recipe("gpt2-124m", ["train.max_steps=9000"])) == seen[1]
    # Nothing is compiled for a CPU that another machine could use.
    assert KernelCache.here(LocalStore(tmp_path), tmp_path, recipe, torch.device("cpu")) is None


def test_a_damaged_pack_is_reported_not_used_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    first, second = (KernelCache(store, tmp_path / name, KEY) for name in ("1", "2"))
    for name in ("A", "B"):
        compile_one(first.folder, name)
        first.save()
    for entry in store.entries("cache/"):
        body = store.get(entry.key) or b""
        if b"A/k.cubin" in body:
            store.put(entry.key, body[:600] + b"x" + body[601:])
    second.fetch()
    assert entries_in(second.folder) == {"B"}  # the other pack is still valid
    assert "is damaged and removed; its kernels are compiled again" in capsys.readouterr().out
    assert KernelCache(store, first.folder, KEY).save()  # under the same name
    assert second.fetch() and entries_in(second.folder) == {"A", "B"} and not capsys.readouterr().out


def test_a_pack_of_other_files_does_not_block_the_sound_ones(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    first, second = (KernelCache(store, tmp_path / name, KEY) for name in ("1", "2"))
    compile_one(first.folder, "A")
    first.save()
    (sound,) = store.entries("cache/")
    number, bad = 0, tar_of(name="../k.cubin")
    while (name := f"cache/triton/{KEY}/{sha256(bad).hexdigest()}.tar") > sound.key:  # to be read first
        number += 1
        bad = tar_of(name="../k.cubin", mtime=number)
    store.put(name, bad)
    second.fetch()
    assert entries_in(second.folder) == {"A"} and store.entries("cache/") == [sound]


def test_a_store_that_fails_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "cache").write_text("in the way")
    compile_one(tmp_path / "compiled", HASH)
    kernels = KernelCache(LocalStore(tmp_path / "store"), tmp_path / "compiled", KEY)
    assert not kernels.save()
    assert "saving compiled kernels: " in capsys.readouterr().out


def tar_of(**changes: object) -> bytes:
    """A pack with one file, and with some fields of its entry changed."""
    entry, body = tarfile.TarInfo(f"{HASH}/k.cubin"), b"gpu"
    for name, value in changes.items():
        setattr(entry, name, value)
    entry.size = len(body) if entry.isreg() else 0
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(f"{HASH}/fine.json"), io.BytesIO())
        tar.addfile(entry, io.BytesIO(body))
    return packed.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../k.cubin"},
        {"name": f"{HASH}/../../k.cubin"},
        {"name": "/k.cubin"},
        {"name": f"/{HASH}/k.cubin"},
        {"name": f"{HASH}/deeper/k.cubin"},
        {"name": "k.cubin"},
        {"name": f"{HASH}/launcher.so"},
        {"name": f"{HASH}/kernels.py"},
        {"name": f"{HASH}/k.cubin\n"},
        {"name": f"{HASH}/..cubin"},
        {"name": f"{HASH}/.hidden.json"},
        {"type": tarfile.CONTTYPE},
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": f"{HASH}/fine.json"},
        {"type": tarfile.CHRTYPE},
        {"type": tarfile.DIRTYPE},
    ],
)
def test_only_kernels_are_unpacked(tmp_path: Path, changes: dict[str, object]) -> None:
    assert unpack(tar_of(), tmp_path / "fine") == 2
    with pytest.raises(ValueError, match="which is no kernel file"):
        unpack(tar_of(**changes), tmp_path / "bad")
    assert not (tmp_path / "bad").exists() and not (tmp_path / "k.cubin").exists()


def test_a_pack_has_a_limit_both_ways(tmp_path: Path) -> None:
    huge = tmp_path / "compiled" / HASH / "k.cubin"
    huge.parent.mkdir(parents=True)
    with huge.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than"):
        pack(tmp_path / "compiled", [HASH])
    entry = tarfile.TarInfo(f"{HASH}/k.cubin")
    entry.size = MAX_BYTES + 1
    with pytest.raises(ValueError, match="more than"):
        unpack(entry.tobuf(), tmp_path / "other")
    with pytest.raises(ValueError, match="is no tar"):
        unpack(b"no tar" * 200, tmp_path / "other")


def header(kind: bytes, size: int) -> bytes:
    """The header of a tar's entry that lies about its size."""
    entry = tarfile.TarInfo(f"{HASH}/k.cubin")
    entry.type = kind
    block = bytearray(entry.tobuf(format=tarfile.GNU_FORMAT))
    encode: Any = tarfile.itn  # type: ignore[attr-defined]
    block[124:136] = encode(size, 12, tarfile.GNU_FORMAT)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


def test_a_pack_that_lies_about_sizes_ends_as_damaged(tmp_path: Path) -> None:
    for kind in (b"0", b"x", b"g", b"L", b"K", b"S"):
        for size in (-(1 << 62), -1024, -512, -1, 1 << 62):
            with pytest.raises(ValueError, match="a pack of kernels"):
                unpack(header(kind, size) + b"\0" * 2048, tmp_path / "bad")
    with pytest.raises(ValueError, match="a pack of kernels"):
        unpack(header(b"x", 0) * 3000, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    "group",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"child_paths": ["k.cubin"]}',
        b'{"child_paths": {"../../k.cubin": "/x"}}',
        b'{"child_paths": {"..": "/x"}}',
        b'{"child_paths": {"/etc/passwd": "/x"}}',
        b'{"child_paths": {"k.cubin": 7}}',
    ],
)
def test_a_list_of_kernels_that_names_other_files_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: bytes
) -> None:
    entry = tmp_path / "hostile" / HASH
    entry.mkdir(parents=True)
    (entry / "k.cubin").write_bytes(b"gpu")
    (entry / "__grp__k.json").write_bytes(group)
    store, body = LocalStore(tmp_path / "store"), pack(tmp_path / "hostile", [HASH])
    store.put(f"cache/triton/{KEY}/{sha256(body).hexdigest()}.tar", body)
    store.put(f"cache/triton/{KEY}/notes.txt", b"mine")
    kernels = KernelCache(store, tmp_path / "here", KEY)
    assert kernels.fetch() == 0
    assert not (tmp_path / "here").exists()
    assert [one.key for one in store.entries(kernels.prefix)] == [f"{kernels.prefix}notes.txt"]
    assert "is damaged and removed" in capsys.readouterr().out


def test_a_pack_larger_than_any_of_ours_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "store")
    path = store.path_of(f"cache/triton/{KEY}/{'0' * 64}.tar")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(3 * MAX_BYTES)
    monkeypatch.setattr(store, "get", lambda key: pytest.fail("it was read"))
    assert KernelCache(store, tmp_path / "here", KEY).fetch() == 0 and not path.exists()
