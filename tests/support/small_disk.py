"""A file system that is soon full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small file system at `root`, which can be filled up."""

    def __init__(self, root: Path) -> None:
        self.root, self._ballast = root, root / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.strerror == "No space left on device"

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(root: Path, size: str) -> Iterator[Path]:
    """A file system of `size` ("8m") at a new folder `root`."""
    root.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
