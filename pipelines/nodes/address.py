"""The address of this node among the nodes of a run, and the network between them.

The environment names the node. SkyPilot sets these variables; elsewhere set them by hand (under srun:
SKYPILOT_NODE_RANK=$SLURM_NODEID):
SKYPILOT_NUM_NODES: the number of nodes.
SKYPILOT_NODE_RANK: the number of this node, from 0.
SKYPILOT_NODE_IPS: the addresses of the nodes, one a line; only the first one, the head's, is used.
SKYTRAIN_PORT: the port on which the head listens, 29400 by default. The ranks use other, free ports.
GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network interface between the nodes. The default of the first is the
interface that leads to the head; NCCL finds its own (InfiniBand first, never loopback).
"""

import os
import socket
from dataclasses import dataclass

from trainer.config import RuntimeConfig
from trainer.errors import UserError

PORT = 29400
# From the start of the first node to the start of the last one: SkyPilot starts them within seconds, once all are set
# up.
JOIN_SECONDS = 300.0


@dataclass(frozen=True)
class NodeAddress:
    """This node among `count`, and where the head listens."""

    rank: int = 0
    count: int = 1
    head: str = "127.0.0.1"
    port: int = PORT


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
    return NodeAddress(rank, count, addresses[0], number_from("SKYTRAIN_PORT", PORT))


def number_from(name: str, default: int) -> int:
    """A whole number from an environment variable. UserError for another value."""
    text = os.environ.get(name) or str(default)
    if not (text.isdecimal() and len(text) <= 5):
        raise UserError(f"{name}: {text!r} is not a whole number of at most 5 digits")
    return int(text)


def processes_on_this_node(runtime: RuntimeConfig) -> int:
    """Number of ranks on this node: as configured, else one a GPU, else one on the CPU.

    UserError if the configured device is not there.
    """
    if runtime.processes != "auto":
        return runtime.processes
    import torch

    from trainer.parallel import device_kind

    return torch.cuda.device_count() if device_kind(runtime) == "cuda" else 1


def rendezvous_options(address: NodeAddress, port: int) -> list[str]:
    """torchrun's options for its process on this node.

    Static rendezvous, not c10d, keeps each rank on its node. So rank 0 runs on the head, which reads its event file,
    and a resumed run adds gradients in the same order.
    """
    return [
        f"--nnodes={address.count}",
        f"--node-rank={address.rank}",
        "--rdzv-backend=static",
        f"--master-addr={address.head}",
        f"--master-port={port}",
        f"--rdzv-conf=timeout={JOIN_SECONDS:.0f}",
    ]


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
            probe.connect((address, PORT))  # sends nothing
        except OSError:
            return None
        own_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in [one.address for one in addresses]:
            return name
    return None
