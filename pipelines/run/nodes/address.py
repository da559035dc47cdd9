"""The address of this node among the nodes of a run, and the network between them.

The environment names the node. SkyPilot sets these variables; elsewhere set them by hand (under srun:
SKYPILOT_NODE_RANK=$SLURM_NODEID):
SKYPILOT_NUM_NODES: the number of nodes.
SKYPILOT_NODE_RANK: the number of this node, from 0.
SKYPILOT_NODE_IPS: the addresses of the nodes, one a line, equal on all nodes; the ranks meet at the first, node 0.
SKYPILOT_TASK_ID: tells the job from others, if it is set.
GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network interface between the nodes. The default of the first is the
interface that leads to node 0; NCCL finds its own (InfiniBand first, never loopback).
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.config.config import RuntimeConfig
from trainer.config.errors import UserError

# From the start of the first node to the start of the last one: SkyPilot starts them within seconds, once all are set
# up.
JOIN_SECONDS = 300.0
OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/nvmap")  # of AMD, in WSL 2, on a Jetson: torch alone can count them
EXIT_SECONDS = 20.0  # for the workers to see the end of node 0, and to exit


@dataclass(frozen=True)
class NodeAddress:
    """This node among `count`, and the address of node 0."""

    rank: int = 0
    count: int = 1
    first: str = "127.0.0.1"
    cluster: str = ""  # equal on the nodes of a job, and on no others
    port: int = 0  # on node 0, where the ranks of several nodes meet


def this_node() -> NodeAddress:
    """The address from the environment. UserError for an impossible value."""
    count = number_from("SKYPILOT_NUM_NODES", 1)
    rank = number_from("SKYPILOT_NODE_RANK", 0)
    addresses = os.environ.get("SKYPILOT_NODE_IPS", "").split()
    if count <= 1:
        return NodeAddress()
    if rank >= count:
        raise UserError(f"SKYPILOT_NODE_RANK: {rank} of SKYPILOT_NUM_NODES={count}; the first node has rank 0")
    if not addresses:
        raise UserError("SKYPILOT_NODE_IPS: not set; its first line is the address of node 0")
    cluster = " ".join([os.environ.get("SKYPILOT_TASK_ID", ""), *addresses])
    return NodeAddress(rank, count, addresses[0], cluster)


def number_from(name: str, default: int) -> int:
    """A whole number from an environment variable. UserError for another value."""
    text = os.environ.get(name) or str(default)
    if not (text.isdecimal() and len(text) <= 5):
        raise UserError(f"{name}: {text!r} is not a whole number of at most 5 digits")
    return int(text)


def processes_on_this_node(runtime: RuntimeConfig) -> int:
    """Number of ranks on this node: as configured, else one a GPU, else one on the CPU.

    UserError if no GPU is there and the configuration needs one.
    """
    if runtime.processes != "auto":
        return runtime.processes
    if runtime.device in ("cpu", "mps"):
        return 1
    count = nvidia_gpus()
    if not count and (runtime.device == "cuda" or any(map(os.path.exists, OTHER_GPUS))):
        import torch

        from trainer.base.parallel import device_kind

        count = torch.cuda.device_count() if device_kind(runtime) == "cuda" else 1
    return count or 1


def nvidia_gpus() -> int:
    """The NVIDIA GPUs that this process may use, as CUDA counts them. An import of torch would take seconds."""
    count = sum(os.access(path, os.R_OK | os.W_OK) for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return count
    names = [name.strip() for name in visible.split(",")]
    known = [name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count) for name in names]
    return [*known, False].index(False)  # CUDA ignores what follows an unknown one


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_to(address: str) -> str | None:
    """The network interface that leads from here to `address`; None if it is unknown."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError:
            return None
        own_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in [one.address for one in addresses]:
            return name
    return None


def let_workers_exit_first(address: NodeAddress) -> None:
    """On node 0 of several in a Slurm job, wait before it exits with an error.

    srun kills the processes of the other nodes as soon as one exits with an error, and returns the highest code: 143,
    after which no managed job recovers, instead of 75.
    """
    if address.count > 1 and not address.rank and "SLURM_JOB_ID" in os.environ:
        time.sleep(EXIT_SECONDS)
