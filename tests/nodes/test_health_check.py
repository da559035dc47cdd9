"""Before training, the machines are compared: wrong and slow ones are named, and left where that is possible."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.nodes.health_check import (
    FIRST_COUNTS,
    Findings,
    ask_gpus,
    compare_machines,
    first_counts,
    gpu_faults,
    slow_machines,
    throttled_gpus,
    wrong_machines,
)
from pipelines.nodes.results import PEER, kind_and_message
from trainer.errors import SuspectNetwork
from trainer.parallel import World
from trainer.probe import Probe, probe_device
from trainer.store import LocalStore

ALONE = World(0, 0, 1, torch.device("cpu"))


def found(host: str, rank: int, seconds: float, **more: Any) -> Findings:
    return Findings(host, rank, Probe("NVIDIA H100", seconds), **more)


def test_a_gpu_ten_percent_slower_than_the_median_is_named_with_its_node() -> None:
    times = {"a": (1.0, 1.02), "b": (1.0, 1.13), "c": (1.09, 0.98)}
    each = [found(host, 2 * n + i, t) for n, (host, two) in enumerate(times.items()) for i, t in enumerate(two)]
    assert slow_machines(each) == [("b", "rank 3: 12% slower than the median of all GPUs")]
    assert wrong_machines(each) == ([], None)


def test_a_store_or_disk_twice_as_slow_as_the_others_is_named() -> None:
    each = [found(host, n, 1.0, store_seconds=s) for n, (host, s) in enumerate((("a", 1.0), ("b", 1.1), ("c", 2.3)))]
    assert slow_machines(each) == [("c", "the store is 2.1 times as slow as the median of all nodes")]
    assert slow_machines(each[2:]) == []  # nothing to compare with


def answer_of_nvidia_smi(*errors: str) -> str:
    """A text as nvidia-smi writes it, with each GPU's count of uncorrectable errors; no GPU here has any."""
    return "".join(f"{i}, 00000000:{i}9:00.0, GPU-{i}4c1-90e, {n}, 0x0000000000000004\n" for i, n in enumerate(errors))


def test_a_recorded_answer_of_nvidia_smi_names_new_ecc_errors_and_throttling() -> None:
    answer = """0, 00000000:19:00.0, GPU-a, 2, 0x0000000000000004
1, 00000000:3B:00.0, GPU-b, 5, 0x0000000000000000
2, 00000000:4C:00.0, GPU-c, [N/A], 0x0000000000000048
3, 00000000:5D:00.0, GPU-d, [Unknown Error], [Unknown Error]
"""
    new = "GPU 1 (00000000:3B:00.0): 3 new uncorrectable ECC errors since the first run on this machine"
    assert (faults := gpu_faults(answer, {"GPU-a": 2, "GPU-b": 2})) == (new,)
    hot = tuple(f"GPU 2 (00000000:4C:00.0): {why}" for why in ("slowed down by its hardware", "too hot"))
    assert throttled_gpus(answer) == hot
    each = [found("a", 0, 1.0, gpus=faults, throttled=hot)]
    assert wrong_machines(each) == ([("a", new)], None) and slow_machines(each) == [("a", why) for why in hot]


def test_a_training_on_a_cpu_does_not_ask_for_gpus_here_a_script_in_place_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 00000000:19:00.0, GPU-a, 0, 0x0000000000000048'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert throttled_gpus(ask_gpus())
    compared, error = compare_machines(ALONE, LocalStore(tmp_path), "no/shard", tmp_path, tmp_path, leave_slow=True)
    assert compared.complaints == [] and error is None


def test_errors_of_an_earlier_tenant_in_recorded_answers_are_no_fault_and_later_ones_stay_one(tmp_path: Path) -> None:
    tenants = answer_of_nvidia_smi("0", "7", "[N/A]")
    assert gpu_faults(tenants, first_counts(tmp_path, tenants)) == ()
    more = answer_of_nvidia_smi("0", "9", "[N/A]")
    for _ in range(2):  # in this start, and in the next ones
        (complaint,) = gpu_faults(more, first_counts(tmp_path, more))
        assert "GPU 1 (00000000:19:00.0): 2 new uncorrectable" in complaint
    restarted = answer_of_nvidia_smi("0", "0", "[N/A]")  # the driver
    assert gpu_faults(restarted, first_counts(tmp_path, restarted)) == ()
    (complaint,) = gpu_faults(answer_of_nvidia_smi("0", "1"), first_counts(tmp_path, ""))
    assert "1 new" in complaint


@pytest.mark.parametrize("content", [b"[1]", b"{", b'{"GPU-04c1-90e": null}', b"\xff"])
def test_a_damaged_file_of_first_counts_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FIRST_COUNTS).write_bytes(content)
    assert first_counts(tmp_path, answer_of_nvidia_smi("3")) == {"GPU-04c1-90e": 3}
    assert first_counts(tmp_path, "") == {"GPU-04c1-90e": 3}


def test_a_device_that_multiplies_wrongly_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probe_device(ALONE).wrong is None
    multiply = torch.Tensor.__matmul__

    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        if b.dim() == 2:
            product[77, 3] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    compared, error = compare_machines(ALONE, LocalStore(tmp_path), "no/shard", tmp_path, tmp_path, leave_slow=False)
    assert "a product of 256 x 256 matrices is wrong" in compared.complaints[0]
    assert error and "is wrong" in str(error)


LINKS = ("b and c", "a, b, c")
RANK = """
import platform, sys
from pathlib import Path
import torch, torch.distributed as dist
from pipelines.nodes.health_check import compare_machines
from trainer.config import RuntimeConfig
from trainer.parallel import World
from trainer.store import LocalStore
world, folder = World.start(RuntimeConfig(device="cpu")), Path(sys.argv[1])
platform.node = lambda: "abc"[world.rank]
mean, add, transfer = World.mean_, torch.Tensor.__add__, dist.P2POp

def off(tensor):
    wrong = tensor.clone()
    wrong[5] -= 1
    return wrong

for fault in ("none", "adds wrongly", "sends wrongly", "sends wrongly to c", "sum"):
    if world.rank == 1 and fault != "none":
        World.mean_ = lambda self, tensor: (tensor[5].sub_(1), mean(self, tensor))
        torch.Tensor.__add__ = (lambda a, b: off(add(a, b))) if fault == "adds wrongly" else add
        targets = {"sends wrongly": (0, 2), "sends wrongly to c": (2,)}.get(fault, ())
        dist.P2POp = lambda op, tensor, peer: transfer(
            op, off(tensor) if op is dist.isend and peer in targets else tensor, peer
        )
    compared, error = compare_machines(world, LocalStore(folder), "none", folder, folder, False)
    print(compared.complaints, repr(error), sep="|")
world.gather(None)
world.close()
"""


def test_of_three_ranks_over_gloo_the_one_that_is_wrong_is_named_and_where_nothing_tells_the_network(
    tmp_path: Path,
) -> None:
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with socket.socket() as probe:
        probe.bind(("", 0))
        shared["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    adds = "rank 1: its own part of the sum of all ranks is wrong"
    sends = "it exchanges numbers wrongly with every other machine"
    one, all_of = (f"the network between {of} is suspect: the sum of all ranks' numbers is wrong" for of in LINKS)
    for rank, output in enumerate(outputs):
        errors = [f"FaultyMachine('{why} (b)')" if rank == 1 else "None" for why in (adds, sends)]
        network = [f'SuspectNetwork("{why}")' for why in (one, all_of)]
        told = [[], [f"b: {adds}"], [f"b: {sends}"], [one], [all_of]]
        lines = zip(told, ["None", *errors, *network], strict=True)
        assert output.splitlines() == [f"{complaints}|{error}" for complaints, error in lines]


def test_a_suspect_network_ends_the_ranks_as_lost_peers_do_and_marks_no_machine(tmp_path: Path) -> None:
    assert kind_and_message(SuspectNetwork("the network"), tmp_path) == (PEER, "the network")


@pytest.mark.parametrize(
    ("hosts", "wrong_from", "named"),
    [
        ("aab", {0: (1,)}, ["a"]),  # two ranks of one machine
        ("ab", {0: (1,), 1: (0,)}, []),
        ("aa", {}, ["a"]),  # there is no other machine
        ("abcd", {2: (0, 1, 3)}, ["c"]),
        ("abcd", {0: (1, 2, 3), 1: (2, 3)}, ["a", "b"]),
        ("abcd", {0: (1, 2)}, []),
        ("abc", {0: (1, 2), 1: (2,)}, []),
    ],
)
def test_a_machine_is_named_for_a_wrong_sum_only_if_the_pairs_tell_it(
    hosts: str, wrong_from: dict[int, tuple[int, ...]], named: list[str]
) -> None:
    each = [
        Findings(host, rank, Probe("cpu", 1.0, None, True, wrong_from.get(rank, ()))) for rank, host in enumerate(hosts)
    ]
    wrong, suspicion = wrong_machines(each)
    assert [host for host, _ in wrong] == named and bool(suspicion) == (not named)
