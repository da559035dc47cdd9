"""A cache of compiled GPU kernels in the store: the next spot node does not compile them again.

After the first step, rank 0 packs the kernels that Triton has compiled and creates the pack in the store as
`cache/triton/<key>/<sha256 of the pack>.tar`. The key names Triton's version, the GPU's architecture and the sources
of the kernels: our kernels' source or the input of torch.compile, and sizes. Kernels that Triton compiles later under
the same key (in fp8 after the warm-up, for a larger batch) follow in further packs. A node fetches all packs before
its first step. The cache is optional: a failure costs a line in the log and the seconds of compiling.

A pack holds data only: GPU code (.cubin) and its description (.json). Triton finds an entry by the hash of its
input, so it never finds an entry for something else. Triton's CPU code (.so) stays out. So do the files that
torch.compile keeps beside its kernels, traced graphs and generated Python: they are pickles and code, which run when
they are read, and a bucket is no trusted source of code. torch.compile makes them again.
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
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commits import named
from trainer.model_config import identity_of_model
from trainer.process import log_line
from trainer.store import Store
from trainer.stored import Stored, record_in

if TYPE_CHECKING:
    import torch

    from pipelines.recipe import Recipe

CACHE_VARIABLE = "TRITON_CACHE_DIR"  # Triton's own environment variable
MAX_BYTES = 64 << 20  # of an unpacked pack, and of all packs of a key; usual packs have some MB
MAX_PACKS = 16  # of a key: each is a request to the store before the first step
PACK_NAME = r"[0-9a-f]{64}\.tar"
FILE_NAME = r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,199}"  # of a file in an entry: no path, and no hidden file
FILE_IN_PACK = re.compile(rf"[A-Za-z0-9_=-]{{1,128}}/{FILE_NAME}\.(json|cubin)")
GROUP_PREFIX = "__grp__"  # of the file that lists the files of one kernel; Triton writes it last
POLL_SECONDS = 0.5
SAVE_SECONDS = 30.0  # between two saves of new kernels: a spot node may vanish at any time
STEPPING_PHASES = ("train", "redone")  # phases after the first step


@dataclass(frozen=True)
class Group(Stored):
    """Triton's list of the files of one kernel."""

    child_paths: dict[str, str]  # the path of each file on the machine that compiled it, by the file's name


class KernelCache:
    """The packs of one key in a store, and Triton's folder for that key on this machine.

    An entry is a folder in Triton's folder, with all files of one hash. Triton would find half an entry and fail, so
    the cache keeps entries whole.
    """

    def __init__(self, store: Store, folder: Path, key: str) -> None:
        self.store, self.folder, self.prefix = store, folder, f"cache/triton/{key}/"
        self.known: set[str] = set()  # entries in a pack, and entries that could not be saved

    @classmethod
    def here(cls, store: Store, cache: Path, recipe: "Recipe", device: "torch.device") -> "KernelCache | None":
        """The cache for a recipe on this GPU; None if Triton compiles no kernels that a pack can hold.

        Triton then uses a folder for this key alone, in its own folder or in `cache`. UserError for an engine that
        cannot run on this machine.
        """
        import torch

        from trainer.engine import choose_engine

        if device.type != "cuda" or torch.version.hip or not find_spec("triton"):  # ROCm's code is no .cubin
            return None
        engine, _ = choose_engine(recipe.model, recipe.train, recipe.runtime, device)
        if engine == "eager":
            return None
        import triton  # its distribution may have another name

        major, minor = torch.cuda.get_device_capability(device)
        key = f"{triton.__version__}-sm{major}{minor}-{sha256(sources(engine, recipe)).hexdigest()[:16]}"
        folder = Path(os.environ.get(CACHE_VARIABLE, cache / "triton")) / key
        os.environ[CACHE_VARIABLE] = str(folder)
        return cls(store, folder, key)

    def fetch(self) -> int:
        """Unpack the kernels that this machine does not have; returns the number of new files.

        A damaged pack is removed: otherwise the same kernels could not be saved under its name again.
        """
        new = 0
        with failures_logged("fetching compiled kernels"):
            for entry in named(self.store, self.prefix, PACK_NAME):
                try:
                    if entry.size > 2 * MAX_BYTES:  # before it is read into memory; a tar adds 1 KiB a file at most
                        raise ValueError(f"it has {entry.size:,} bytes")
                    body = self.store.get(entry.key) or b""
                    if entry.key != self.prefix + f"{sha256(body).hexdigest()}.tar":
                        raise ValueError("its sha256 is not its name")
                    new += unpack(body, self.folder)
                    self.known |= {name.split("/")[0] for name, _ in checked(body) if GROUP_PREFIX in name}
                except ValueError as error:
                    log_line(
                        f"{self.store.uri}/{entry.key} is damaged and removed; its kernels are compiled again: {error}"
                    )
                    self.store.delete(entry.key)
        return new

    def save(self) -> bool:
        """Put the kernels that no pack has into the store, as a further pack; returns whether there was one."""
        with failures_logged("saving compiled kernels"):
            if compiled(self.folder) <= self.known:
                return False
            self.fetch()  # other runs of this key may have saved the same kernels
            new = compiled(self.folder) - self.known
            self.known |= new  # also if the save fails: one line in the log is enough
            if not new:
                return False
            body, packs = pack(self.folder, new), self.store.entries(self.prefix)
            if len(packs) >= MAX_PACKS or sum(entry.size for entry in packs) + len(body) > MAX_BYTES:
                raise ValueError(f"{self.store.uri}/{self.prefix} is full; {len(new)} kernels are not saved")
            return self.store.create(f"{self.prefix}{sha256(body).hexdigest()}.tar", body)
        return False

    def save_from_first_step(self, phase: Callable[[], str]) -> None:
        """Save in the background, once `phase` is one of training, and again for new kernels.

        This lists a folder of some hundred names twice a minute.
        """

        def save_repeatedly() -> None:
            while True:
                stepping = phase() in STEPPING_PHASES
                if stepping:
                    self.save()
                time.sleep(SAVE_SECONDS if stepping else POLL_SECONDS)

        threading.Thread(target=save_repeatedly, daemon=True).start()


def sources(engine: str, recipe: "Recipe") -> bytes:
    """The inputs, besides Triton and the GPU, of an engine's kernels; kernels of one key may still differ."""
    from trainer import config

    files = ("fused/triton_kernels.py", "fused/kernels.py") if engine == "fused" else ("model.py",)
    code = b"".join((Path(config.__file__).parent / name).read_bytes() for name in files)
    settings = {"engine": engine, "torch": version("torch"), "precision": recipe.train.precision}
    settings |= recipe.runtime.model_dump(include={"micro_batch_size", "recompute"}) | identity_of_model(recipe.model)
    return code + json.dumps(settings, sort_keys=True).encode()


@contextmanager
def failures_logged(action: str) -> Iterator[None]:
    """Log a failure of the block and continue: no step depends on the cache."""
    try:
        yield
    except Exception as error:
        log_line(f"{action}: {type(error).__name__}: {' '.join(str(error).split())}")


def compiled(folder: Path) -> set[str]:
    """The complete entries of Triton's folder; none of them holds CPU code."""
    groups = (path.relative_to(folder).as_posix() for path in folder.glob(f"*/{GROUP_PREFIX}*"))
    return {name.split("/")[0] for name in groups if FILE_IN_PACK.fullmatch(name)}


def pack(folder: Path, entries: Iterable[str]) -> bytes:
    """A tar of the GPU code in these entries of Triton's folder, and its description. ValueError above MAX_BYTES."""
    packed = io.BytesIO()
    names = [f"{entry}/{path.name}" for entry in sorted(entries) for path in sorted((folder / entry).iterdir())]
    paths = [folder / name for name in names if FILE_IN_PACK.fullmatch(name)]
    if sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes of compiled kernels in {folder}")
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner, no time: equal kernels, equal pack
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()


def unpack(body: bytes, folder: Path) -> int:
    """Write the new files of a pack below `folder`; returns their number.

    Before it writes anything: ValueError for a pack with an entry that `pack` would not write.
    """
    files = {folder / name: content for name, content in checked(body)}
    groups = {path: relocated(body, path.parent) for path, body in files.items() if path.name.startswith(GROUP_PREFIX)}
    new = [path for path in files if not path.exists()]
    # The list of a kernel's files comes last: without it Triton sees no kernel.
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
                if entry.type != tarfile.REGTYPE or entry.size < 0 or not FILE_IN_PACK.fullmatch(entry.name):
                    raise ValueError(f"a pack of kernels holds {entry.name!r}, which is no kernel file")
                if total > MAX_BYTES:
                    raise ValueError(f"a pack of kernels holds more than {MAX_BYTES:,} bytes")
                content = tar.extractfile(entry)
                assert content is not None
                yield entry.name, content.read()
    except (tarfile.TarError, RecursionError, OverflowError) as error:
        raise ValueError(f"a pack of kernels is no tar: {error}") from error


def relocated(group: bytes, folder: Path) -> bytes:
    """The list of a kernel's files, for another folder: Triton writes absolute paths. ValueError for a damaged list."""
    names = record_in(Group, group, "the list of a kernel's files").child_paths
    if wrong := [name for name in names if not re.fullmatch(FILE_NAME, name)]:
        raise ValueError(f"the list of a kernel's files names {wrong[0]!r}")
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()
