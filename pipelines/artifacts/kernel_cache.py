"""Compiled GPU code outlives the machine, so that the next spot node does not compile it again.

Rank 0 packs what Triton has compiled once the first step is done, and creates it in the store as
`cache/triton/<key>/<sha256 of the pack>.tar`. The key names Triton's version, the GPU's architecture and what the
kernels are made from: our kernels' source or what torch.compile sees, and sizes. What is compiled later under the same
key (in fp8 after the warm-up, for a larger batch) follows in further packs. A node fetches all of them before its
first step. Nothing depends on it: whatever goes wrong costs a line in the log and the seconds of compiling.

A pack holds data only, GPU code (.cubin) and its description (.json), and an entry is used under the hash that Triton
gives to what it is about to compile, so that one for something else is never found. What Triton has built for the CPU
(.so) is left out. So is what torch.compile keeps beside its kernels, traced graphs and generated Python: these are
pickles and code, which are run when they are read, and nobody should run what lies in a bucket. They are made again.
"""

import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.process import log_line
from trainer.store import Store

if TYPE_CHECKING:
    import torch

    from pipelines.recipe import Recipe

FOLDER = "TRITON_CACHE_DIR"  # Triton's own variable
MOST_BYTES = 64 << 20  # of a pack unpacked, and of a key's packs together; ours are some MB
MOST_PACKS = 16  # of a key: each is a request to the store before the first step
NAME = re.compile(r"[A-Za-z0-9_=-]{1,128}/[A-Za-z0-9_.=-]{1,200}\.(json|cubin)")
GROUP = "__grp__"  # of the file that says where those that belong together lie; Triton writes it last
POLL_SECONDS = 0.5
AGAIN_SECONDS = 30.0  # until what was compiled meanwhile is kept: a spot node may end without a word
STEPPING = ("train", "redone")  # phases behind the first step


class KernelCache:
    """The packs of one kind of kernels in a store, and their own folder for Triton on this machine. What Triton knows
    by one hash is an entry, a folder in that folder: one half of it would be found and fail, so it is kept whole."""

    def __init__(self, store: Store, folder: Path, key: str) -> None:
        self.store, self.folder, self.prefix = store, folder, f"cache/triton/{key}/"
        self.known: set[str] = set()  # entries that are in a pack, or could not be kept

    @classmethod
    def here(cls, store: Store, cache: Path, recipe: "Recipe", device: "torch.device") -> "KernelCache | None":
        """For what a recipe runs on this GPU; None where Triton compiles nothing that we could keep. Has Triton use a
        folder for this key alone, in its own one or in `cache`. UserError for an engine that can't run here."""
        import torch

        from trainer.engine import choose_engine

        if device.type != "cuda" or torch.version.hip or not find_spec("triton"):  # ROCm's code is no .cubin
            return None
        engine, _ = choose_engine(recipe.model, recipe.train, recipe.runtime, device)
        if engine == "eager":
            return None
        import triton  # its distribution isn't always called that

        major, minor = torch.cuda.get_device_capability(device)
        key = f"{triton.__version__}-sm{major}{minor}-{sha256(sources(engine, recipe)).hexdigest()[:16]}"
        folder = Path(os.environ.get(FOLDER, cache / "triton")) / key
        os.environ[FOLDER] = str(folder)
        return cls(store, folder, key)

    def fetch(self) -> int:
        """Unpack what the store has and this machine has not; how many files that were. A pack that is none is removed:
        under its name it could not be kept again."""
        new = 0
        with told("fetching compiled kernels"):
            for entry in self.store.entries(self.prefix):
                body = self.store.get(entry.key) or b""
                try:
                    if entry.key != self.prefix + f"{sha256(body).hexdigest()}.tar":
                        raise ValueError("not what was kept under this name")
                    new += unpack(body, self.folder)
                    self.known |= {name.split("/")[0] for name, _ in checked(body) if GROUP in name}
                except ValueError as error:
                    log_line(
                        f"{self.store.uri}/{entry.key} is damaged and removed; its kernels are compiled again: {error}"
                    )
                    self.store.delete(entry.key)
        return new

    def keep(self) -> bool:
        """Put what Triton has compiled here and no pack has into the store, as one more; whether that was done."""
        with told("keeping compiled kernels"):
            if compiled(self.folder) <= self.known:
                return False
            self.fetch()  # other runs of this key may have kept the same
            new = compiled(self.folder) - self.known
            self.known |= new  # whatever becomes of it: what fails is told of once
            if not new:
                return False
            body, packs = pack(self.folder, new), self.store.entries(self.prefix)
            if len(packs) >= MOST_PACKS or sum(entry.size for entry in packs) + len(body) > MOST_BYTES:
                raise ValueError(f"{self.store.uri}/{self.prefix} is full; {len(new)} kernels are not kept")
            return self.store.create(f"{self.prefix}{sha256(body).hexdigest()}.tar", body)
        return False

    def keep_from_the_first_step(self, phase: Callable[[], str]) -> None:
        """Do so in the background, once `phase` tells that steps are being made, and again whenever there is more: a
        look at a folder of some hundred names, twice a minute."""

        def look() -> None:
            while True:
                stepping = phase() in STEPPING
                if stepping:
                    self.keep()
                time.sleep(AGAIN_SECONDS if stepping else POLL_SECONDS)

        threading.Thread(target=look, daemon=True).start()


def sources(engine: str, recipe: "Recipe") -> bytes:
    """What decides, beside Triton and the GPU, which kernels an engine needs; those of one key may still differ."""
    from trainer import config

    code = Path(config.__file__).parent / ("fused/kernels.py" if engine == "fused" else "model.py")
    seen = {"engine": engine, "torch": version("torch"), "precision": recipe.train.precision}
    seen |= recipe.runtime.model_dump(include={"micro_batch_size", "recompute"}) | recipe.model.model_dump()
    return code.read_bytes() + json.dumps(seen, sort_keys=True).encode()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what went wrong in a block, and go on: nothing stands on kernels that are compiled already."""
    try:
        yield
    except Exception as error:
        log_line(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def compiled(folder: Path) -> set[str]:
    """The entries of Triton's folder that are complete; what was built for the CPU is in none of them."""
    groups = (path.relative_to(folder).as_posix() for path in folder.glob(f"*/{GROUP}*"))
    return {name.split("/")[0] for name in groups if NAME.fullmatch(name)}


def pack(folder: Path, entries: Iterable[str]) -> bytes:
    """A tar of the GPU code in these entries of Triton's folder and what describes it. ValueError if it is more than
    ever was expected."""
    packed = io.BytesIO()
    names = [f"{entry}/{path.name}" for entry in sorted(entries) for path in sorted((folder / entry).iterdir())]
    paths = [folder / name for name in names if NAME.fullmatch(name)]
    if sum(path.stat().st_size for path in paths) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes of compiled kernels in {folder}")
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner, no time: equal kernels, equal pack
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()


def unpack(body: bytes, folder: Path) -> int:
    """Write the files of a pack below `folder`, where they are not there yet; how many. Before anything is written,
    ValueError for a pack with anything in it that `pack` would not put there."""
    files = {folder / name: content for name, content in checked(body)}
    groups = {path: relocated(body, path.parent) for path, body in files.items() if path.name.startswith(GROUP)}
    new = [path for path in files if not path.exists()]
    # What says which files belong together comes last: without it Triton sees nothing.
    for path in sorted(new, key=lambda path: path in groups):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(groups.get(path, files[path]))
        partial.replace(path)
    return len(new)


def checked(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a pack. ValueError for links, other folders, other kinds of files, too many bytes."""
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as tar:
            for entry in tar:
                total += entry.size
                if not entry.isreg() or not NAME.fullmatch(entry.name):
                    raise ValueError(f"a pack of kernels holds {entry.name!r}, which is none")
                if total > MOST_BYTES:
                    raise ValueError(f"a pack of kernels holds more than {MOST_BYTES:,} bytes")
                content = tar.extractfile(entry)
                assert content is not None
                yield entry.name, content.read()
    except tarfile.TarError as error:
        raise ValueError(f"a pack of kernels is no tar: {error}") from error


def relocated(group: bytes, folder: Path) -> bytes:
    """The same group of files in another folder: Triton writes down whole paths."""
    names = json.loads(group)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / Path(name).name) for name in names}}).encode()
