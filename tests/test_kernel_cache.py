"""Kernels that one machine has compiled are found by the next; what is no kernel is neither packed nor unpacked."""

import io
import tarfile
import threading
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from pipelines.kernel_cache import FOLDER, MOST_BYTES, KernelCache, pack, sources, unpack
from pipelines.recipe import load_recipe
from trainer.store import LocalStore

KEY = "3.6.0-sm90-0123456789abcdef"
HASH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRST"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as Triton itself fills it."""
    cache = pytest.importorskip("triton.runtime.cache")
    folder = tmp_path / "compiled"
    monkeypatch.setenv(FOLDER, str(folder))
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


def test_the_next_machine_finds_what_the_first_has_compiled(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.cache import FileCacheManager

    store = LocalStore(tmp_path / "store")
    first, second = KernelCache(store, compiled, KEY), KernelCache(store, tmp_path / "other" / "cache", KEY)
    assert second.fetch() == 0 and first.keep()
    assert not first.keep()  # it is there
    assert KernelCache(store, tmp_path / "older", KEY.replace("3.6.0", "3.5.0")).fetch() == 0
    (entry,) = store.entries("cache/")
    assert entry.key == f"cache/triton/{KEY}/{sha256(pack(compiled)).hexdigest()}.tar"
    assert second.fetch() == 3 and second.fetch() == 0
    names = sorted(path.name for path in second.folder.glob("*/*"))
    assert names == ["__grp__k.json", "k.cubin", "k.json"]  # neither what the CPU runs nor what nobody needs
    # Triton finds them there, and looks nowhere else.
    monkeypatch.setenv(FOLDER, str(second.folder))
    group = FileCacheManager(HASH).get_group("k.json")
    assert group == {name: str(second.folder / HASH / name) for name in ("k.cubin", "k.json")}
    assert Path(group["k.cubin"]).read_bytes() == b"\x7fELF gpu"


def test_kernels_are_kept_once_steps_are_made(compiled: Path, tmp_path: Path) -> None:
    store, asked, phases = LocalStore(tmp_path / "store"), threading.Event(), ["compile"]

    def phase() -> str:
        asked.set()
        return phases[0]

    before = set(threading.enumerate())
    KernelCache(store, compiled, KEY).keep_after_the_first_step(phase)
    assert asked.wait(20) and not store.entries("cache/")
    phases[0] = "train"
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert store.entries("cache/")


def test_each_engine_has_packs_of_its_own_and_so_has_whatever_changes_its_kernels(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-124m")
    changes = ("model.n_embd=1536", "train.precision=fp8", "runtime.micro_batch_size=32", "runtime.recompute=true")
    seen = [sources(engine, recipe) for engine in ("fused", "compiled")]
    seen += [sources("compiled", load_recipe("gpt2-124m", [change])) for change in changes]
    assert len(set(seen)) == len(seen)
    assert sources("compiled", load_recipe("gpt2-124m", ["train.max_steps=9000"])) == seen[1]
    # Nothing is compiled for a CPU that another machine could use.
    assert KernelCache.here(LocalStore(tmp_path), tmp_path, recipe, torch.device("cpu")) is None


def test_a_damaged_pack_is_told_of_and_not_used(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    KernelCache(store, compiled, KEY).keep()
    (entry,) = store.entries("cache/")
    body = store.get(entry.key) or b""
    store.put(entry.key, body[:600] + b"x" + body[601:])
    other = KernelCache(store, tmp_path / "other", KEY)
    assert other.fetch() == 0 and not other.folder.exists()
    assert "is damaged; kernels are compiled again" in capsys.readouterr().out


def test_a_store_that_fails_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "cache").write_text("in the way")
    folder = tmp_path / "compiled"
    (folder / HASH).mkdir(parents=True)
    (folder / HASH / "k.cubin").write_bytes(b"gpu")
    kernels = KernelCache(LocalStore(tmp_path / "store"), folder, KEY)
    assert not kernels.keep()
    assert capsys.readouterr().out.startswith("keeping compiled kernels: ")


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
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": f"{HASH}/fine.json"},
        {"type": tarfile.CHRTYPE},
        {"type": tarfile.DIRTYPE},
    ],
)
def test_nothing_is_unpacked_that_could_be_anything_else_than_a_kernel(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert unpack(tar_of(), tmp_path / "fine") == 2
    with pytest.raises(ValueError, match="which is none"):
        unpack(tar_of(**changes), tmp_path / "bad")
    assert not (tmp_path / "bad").exists() and not (tmp_path / "k.cubin").exists()


def test_a_pack_has_a_limit_both_ways(tmp_path: Path) -> None:
    huge = tmp_path / "compiled" / HASH / "k.cubin"
    huge.parent.mkdir(parents=True)
    with huge.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match="more than"):
        pack(tmp_path / "compiled")
    entry = tarfile.TarInfo(f"{HASH}/k.cubin")
    entry.size = MOST_BYTES + 1
    with pytest.raises(ValueError, match="more than"):
        unpack(entry.tobuf(), tmp_path / "other")
    with pytest.raises(ValueError, match="is no tar"):
        unpack(b"no tar" * 200, tmp_path / "other")
