"""A file system that is soon full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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
