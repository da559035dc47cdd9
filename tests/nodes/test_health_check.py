"""Before training, the machines are compared: wrong and slow ones are named, and left where that is possible."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.nodes.health_check import Findings, compare_machines, gpu_complaints, slow_machines, wrong_machines
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
    assert wrong_machines(each) == []


def test_a_store_or_disk_twice_as_slow_as_the_others_is_named() -> None:
    each = [found(host, n, 1.0, store_seconds=s) for n, (host, s) in enumerate((("a", 1.0), ("b", 1.1), ("c", 2.3)))]
    assert slow_machines(each) == [("c", "the store is 2.1 times as slow as the median of all nodes")]
    assert slow_machines(each[2:]) == []  # nothing to compare with


def test_the_answer_of_nvidia_smi_names_ecc_errors_and_throttling() -> None:
    answer = """0, 00000000:19:00.0, 0, 0x0000000000000004
1, 00000000:3B:00.0, 3, 0x0000000000000000
2, 00000000:4C:00.0, [N/A], 0x0000000000000048
3, 00000000:5D:00.0, [Unknown Error], [Unknown Error]
"""
    assert gpu_complaints(answer) == (
        "GPU 1 (00000000:3B:00.0): 3 uncorrectable ECC errors since its driver started",
        "GPU 2 (00000000:4C:00.0): slowed down by its hardware",
        "GPU 2 (00000000:4C:00.0): too hot",
    )


def test_a_device_that_multiplies_wrongly_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probe_device(ALONE).wrong is None
    multiply = torch.Tensor.__matmul__

    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        if b.dim() == 2:
            product[77, 3] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    compared, error = compare_machines(ALONE, LocalStore(tmp_path), "no/shard", tmp_path, leave_slow=False)
    assert "a product of 256 x 256 matrices is wrong" in compared.complaints[0]
    assert error and "is wrong" in str(error)


RANK = """
import sys
from pathlib import Path
import torch
from pipelines.nodes.health_check import compare_machines
from trainer.config import RuntimeConfig
from trainer.parallel import World
from trainer.store import LocalStore
world = World.start(RuntimeConfig(device="cpu"))
for attempt in range(2):
    if attempt and world.rank == 1:
        mean = World.mean_
        World.mean_ = lambda self, tensor: (tensor[5].add_(1), mean(self, tensor))
    compared, error = compare_machines(world, LocalStore(Path(sys.argv[1])), "none", Path(sys.argv[1]), False)
    print(compared.complaints, repr(error))
world.gather(None)
world.close()
"""


def test_two_ranks_compare_their_sums_over_a_real_exchange(tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as probe:
        probe.bind(("", 0))
        shared["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for output in outputs:
        sound, wrong = output.splitlines()
        assert sound == "[] None" and "the sum of all ranks' numbers is wrong" in wrong
