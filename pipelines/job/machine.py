"""What a job sets on its rented machine before it runs: the folder of its work, and the meter of its bill."""

import os
from pathlib import Path

from pipelines.store.ledger import Meter
from trainer.base.process import since_boot, steady_time

SET_UP = ".skytrain-setup"  # /proc/uptime when `setup` of sky/*.yaml began
FRESH_SECONDS = 1800.0  # a machine that was up for longer served another job before, or is a node of Kubernetes


def set_environment() -> None:
    """Name this machine's folder and meter in the environment. On Slurm, SkyPilot's runtime lies on the node's own
    disk, and HOME is shared by the nodes of the cluster."""
    os.environ["SKYTRAIN_METER"] = str(Path.home() / ".skytrain-meter")
    if not os.environ.get("SKYTRAIN_HOME"):
        os.environ["SKYTRAIN_HOME"] = str(Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home()) / "skytrain")


def begin_bill() -> None:
    """Begin the bill of this machine in its meter, unless an attempt has been billed here: at its boot, at `setup` if
    it was up long before, or on Slurm when SkyPilot got its nodes and touched ~/.hushlogin.

    A Slurm cluster that was recovered can find the meter of the one before it, whose bill is closed.
    """
    meter, allocated = Meter.here(), Path.home() / ".hushlogin"
    path, on_slurm = meter.path, bool(os.environ.get("SKY_RUNTIME_DIR")) and allocated.exists()
    assert path, "set_environment names it"
    if path.exists() and not (on_slurm and allocated.stat().st_mtime > path.stat().st_mtime):
        return
    if on_slurm:
        since = allocated.stat().st_mtime
    else:
        noted = Path.home() / SET_UP
        up = float(noted.read_text().split()[0]) if noted.exists() else since_boot()
        since = steady_time() - since_boot() + (up if up > FRESH_SECONDS else 0.0)
    meter.forward(since, "provision")
