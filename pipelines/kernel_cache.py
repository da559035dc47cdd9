"""Compiled GPU code outlives the machine, so that the next spot node does not compile it again.

Rank 0 packs what Triton has compiled once the first step is done, and creates it in the store as
`cache/triton/<key>/<sha256 of the pack>.tar`. The key names Triton's version, the GPU's architecture and what the
kernels are made from: our kernels' source or what torch.compile sees, and sizes. A node without them fetches the pack
before its first step. Nothing depends on it: whatever goes wrong costs a line in the log
and the seconds of compiling.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.process import say
from trainer.store import Store

if TYPE_CHECKING:
    import torch

    from pipelines.recipe import Recipe

FOLDER = "TRITON_CACHE_DIR"  # Triton's own variable
MOST_BYTES = 64 << 20  # unpacked; ours are some MB
NAME = re.compile(r"[A-Za-z0-9_=-]{1,128}/[A-Za-z0-9_.=-]{1,200}\.(json|cubin)")
GROUP = "__grp__"  # of the file that says where those that belong together lie
POLL_SECONDS = 0.5
STEPPING = ("train", "redone")  # phases behind the first step


class KernelCache:
    """The packs of one kind of kernels in a store, and Triton's folder on this machine."""

    def __init__(self, store: Store, folder: Path, key: str) -> None:
        self.store, self.folder, self.prefix = store, folder, f"cache/triton/{key}/"

    @classmethod
    def here(cls, store: Store, cache: Path, recipe: "Recipe", device: "torch.device") -> "KernelCache | None":
        """For what a recipe runs on this GPU; None where Triton compiles nothing. Has Triton use a folder in `cache` if
        it has none. UserError for an engine that can't run here."""
        import torch

        from trainer.engine import choose_engine

        if device.type != "cuda" or not find_spec("triton"):
            return None
        engine, _ = choose_engine(recipe.model, recipe.train, recipe.runtime, device)
        if engine == "eager":
            return None
        folder = Path(os.environ.setdefault(FOLDER, str(cache / "triton")))
        major, minor = torch.cuda.get_device_capability(device)
        made_from = sha256(sources(engine, recipe)).hexdigest()[:16]
        return cls(store, folder, f"{version('triton')}-sm{major}{minor}-{made_from}")

    def fetch(self) -> int:
        """Unpack what the store has into a machine that has nothing; how many files that were."""
        if any(self.folder.glob("*/*.cubin")):
            return 0
        with told("fetching compiled kernels"):
            for entry in self.store.entries(self.prefix):
                body = self.store.get(entry.key) or b""
                if entry.key != self.prefix + f"{sha256(body).hexdigest()}.tar":
                    say(f"{self.store.uri}/{entry.key} is damaged; kernels are compiled again if there is no other")
                    continue
                return unpack(body, self.folder)
        return 0

    def keep(self) -> bool:
        """Put what Triton has compiled here into the store, unless it has something; whether that was done."""
        with told("keeping compiled kernels"):
            if self.store.entries(self.prefix):
                return False
            body = pack(self.folder)
            return bool(body) and self.store.create(f"{self.prefix}{sha256(body).hexdigest()}.tar", body)
        return False

    def keep_after_the_first_step(self, phase: Callable[[], str]) -> None:
        """Do so in the background, once `phase` tells that steps are being made."""

        def wait_and_keep() -> None:
            while phase() not in STEPPING:
                time.sleep(POLL_SECONDS)
            self.keep()

        threading.Thread(target=wait_and_keep, daemon=True).start()


def sources(engine: str, recipe: "Recipe") -> bytes:
    """What decides which kernels an engine needs, beside Triton and the GPU."""
    from trainer import config

    code = Path(config.__file__).with_name("kernels.py" if engine == "fused" else "model.py")
    seen = {"engine": engine, "torch": version("torch"), "precision": recipe.train.precision}
    seen |= recipe.runtime.model_dump(include={"micro_batch_size", "recompute"}) | recipe.model.model_dump()
    return code.read_bytes() + json.dumps(seen, sort_keys=True).encode()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what went wrong in a block, and go on: nothing stands on kernels that are compiled already."""
    try:
        yield
    except Exception as error:
        say(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def pack(folder: Path) -> bytes:
    """A tar of the GPU code in Triton's folder and what describes it; nothing if there is none. ValueError if it is
    more than ever was expected."""
    packed = io.BytesIO()
    paths = [path for path in sorted(folder.glob("*/*")) if NAME.fullmatch(path.relative_to(folder).as_posix())]
    if sum(path.stat().st_size for path in paths) > MOST_BYTES:
        raise ValueError(f"{folder} holds more than {MOST_BYTES:,} bytes of compiled kernels")
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner, no time: equal kernels, equal pack
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue() if paths else b""


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
