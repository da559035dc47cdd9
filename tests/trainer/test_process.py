"""A rank ends with its peers, and by the clock of the boot."""

import subprocess
import sys

import pytest

from trainer.base.process import BOOTED, steady_time
from trainer.config.errors import UserError


@pytest.mark.parametrize("text", ["abc", "nan", "-1", "1e300"])
def test_an_impossible_time_of_the_boot_is_a_mistake_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(BOOTED, text)
    with pytest.raises(UserError, match=f"^SKYTRAIN_BOOTED={text}: must be the unix seconds of the boot; unset it"):
        steady_time()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_hangs_ends_soon_after_a_peer_has_crashed_unless_all_leave(leaves: bool) -> None:
    waiting = f"""
import os, threading, time
from trainer.base.parallel import leave_with_peers
closing = threading.Event()
threading.Thread(target=leave_with_peers, args=([os.getppid()], closing, "rank 1"), daemon=True).start()
print("watching", flush=True)
if {leaves}:
    closing.set()
time.sleep({3 if leaves else 60})
print("slept")
"""
    parent = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {waiting!r}])
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout
        assert peer.stdout.readline() == "watching\n"
        peer.kill()
        peer.wait()
        assert peer.stdout.read() == ("slept\n" if leaves else "rank 1: a rank on this node has crashed; exiting\n")
