"""The price of a machine, found inside a job."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from metadata_servers import Cloud, Ec2Cloud, GceCloud

from pipelines.cloud import prices
from pipelines.cloud.catalog import Offer
from pipelines.cloud.prices import PriceRow, billing_here, prices_json
from pipelines.cloud.throughput import peak_of
from pipelines.tracking.records import Machine
from trainer.errors import UserError

GPUS_HERE = prices.gpus_here  # the tests below have no GPU
EVERYWHERE = [
    PriceRow.of(offer)
    for offer in (
        Offer("aws", "us-east-1", None, "p5.48xlarge", False, 56.0, 56.0, "H100:8", 192),
        Offer("aws", "us-east-1", "us-east-1a", "p5.48xlarge", True, 24.0, 56.0, "H100:8", 192),
        Offer("aws", "us-east-1", "us-east-1b", "p5.48xlarge", True, 20.0, 56.0, "H100:8", 192),
        Offer("aws", "us-east-1", None, "m6i.4xlarge", False, 0.8, 0.8, None, 16),
        Offer("gcp", "us-central1", None, "a3-highgpu-8g", False, 72.0, 72.0, "H100:8", 208),
        Offer("gcp", "us-central1", "us-central1-a", "a3-highgpu-8g", True, 26.0, 72.0, "H100:8", 208),
        Offer("lambda", "us-east-1", None, "gpu_8x_h100_sxm5", False, 31.92, 31.92, "H100:8", 208),
        Offer("lambda", "us-east-1", None, "cpu_16x_general", False, 0.64, 0.64, None, 16),
    )
]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SkyPilot around, no GPU, and a metadata service that is never a real one."""
    for name in [*os.environ]:
        if name.startswith(("SKYPILOT_", "SKYTRAIN_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SKYTRAIN_NOTICE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(prices, "gpus_here", lambda: None)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A6000", "A6000"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GH200 480GB", "GH200 480GB"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
    ],
)
def test_every_gpu_of_the_plan_is_known_on_a_node_and_another_keeps_its_own_name(
    card: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text(f"#!/bin/sh\nprintf '{card}\\n{card}\\n'\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert GPUS_HERE() == f"{name}:2"
    assert (peak_of(f"{name}:2") is None) == ("GH200" in name or "4090" in name)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The environment of a job that SkyPilot started."""

    def started(cloud: str, region: str, zone: str | None = None, gpus: int | None = 8, table: Any = None) -> None:
        info = {"cluster_name": "sky-1", "cloud": cloud, "region": region, "zone": zone}
        monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", json.dumps(info))
        monkeypatch.setenv("SKYTRAIN_PRICES", prices_json(EVERYWHERE) if table is None else json.dumps(table))
        if gpus is not None:
            monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", str(gpus))

    return started


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Cloud], Cloud]]:
    clouds: list[Cloud] = []

    def serve(cloud: Cloud) -> Cloud:
        clouds.append(cloud)
        monkeypatch.setenv("SKYTRAIN_NOTICE_ENDPOINT", cloud.endpoint)
        return cloud

    yield serve
    for cloud in clouds:
        cloud.close()


def ec2(spot: bool, zone: str = "us-east-1b", instance: str = "p5.48xlarge") -> Ec2Cloud:
    cloud = Ec2Cloud()
    cloud.items |= {"placement/region": "us-east-1", "placement/availability-zone": zone, "instance-type": instance}
    cloud.items["instance-life-cycle"] = "spot" if spot else "on-demand"
    return cloud


def gce(spot: bool) -> GceCloud:
    cloud = GceCloud()
    cloud.items |= {"zone": "projects/7/zones/us-central1-a", "machine-type": "projects/7/machineTypes/a3-highgpu-8g"}
    cloud.items["scheduling/preemptible"] = "TRUE" if spot else "FALSE"
    return cloud


# --- this machine's own price


def test_an_own_machine_costs_nothing_without_a_given_price() -> None:
    assert (billing_here(None).price_per_hour, billing_here(None).price_source) == (0.0, "own machine")
    asked = billing_here(2.5)
    assert (asked.price_per_hour, asked.price_source, asked.nodes) == (2.5, "--price-per-hour", 1)


@pytest.mark.parametrize(
    ("where", "service", "usd", "source"),
    [
        (("AWS", "us-east-1", "us-east-1b"), lambda: ec2(spot=True), 20.0, "aws/us-east-1b/p5.48xlarge/spot"),
        (
            ("AWS", "us-east-1", None),
            lambda: ec2(spot=True, zone="us-east-1a"),
            24.0,
            "aws/us-east-1a/p5.48xlarge/spot",
        ),
        (("AWS", "us-east-1", "us-east-1b"), lambda: ec2(spot=False), 56.0, "aws/us-east-1/p5.48xlarge/on-demand"),
        (("GCP", "us-central1", "us-central1-a"), lambda: gce(True), 26.0, "gcp/us-central1-a/a3-highgpu-8g/spot"),
        (("GCP", "us-central1", "us-central1-a"), lambda: gce(False), 72.0, "gcp/us-central1/a3-highgpu-8g/on-demand"),
    ],
)
def test_a_machine_finds_its_price_wherever_it_is_recovered(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud], where: Any, service: Any, usd: float, source: str
) -> None:
    job(*where)
    metadata(service())
    billing = billing_here(None)
    assert (billing.price_per_hour, billing.price_source) == (usd, f"catalog {source}")
    assert billing.machine.spot is source.endswith("/spot")
    assert (billing.machine.on_demand_per_hour or 0) >= usd
    assert (billing.machine.cloud, billing.machine.accelerators) == (where[0].lower(), "H100:8")
    assert billing.machine.cluster == "sky-1"


def test_a_single_possible_price_needs_no_metadata_service(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud]
) -> None:
    cloud = metadata(ec2(spot=True))
    job("Lambda", "us-east-1")  # no metadata service; the GPUs distinguish the node from the CPU node
    assert billing_here(None).price_per_hour == 31.92
    job("Lambda", "us-east-1", gpus=0)
    billing = billing_here(None)
    assert (billing.price_per_hour, billing.machine.instance) == (0.64, "cpu_16x_general")
    assert billing.machine.accelerators is None
    assert cloud.requests == []


def test_a_price_that_cannot_be_determined_is_unknown_with_a_reason(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    def source() -> str:
        billing = billing_here(None)
        assert billing.price_per_hour is None
        return billing.price_source

    job("AWS", "us-east-1", "us-east-1a")  # spot or not: no service answers
    assert source() == "unknown: aws/us-east-1/p5.48xlarge may be any of 2 rows of SKYTRAIN_PRICES"
    metadata(ec2(spot=True, instance="p5en.48xlarge"))
    assert source() == "unknown: aws/us-east-1b/p5en.48xlarge/spot is not in SKYTRAIN_PRICES"
    job("AWS", "eu-north-1")
    monkeypatch.setenv("SKYTRAIN_NOTICE", "off")
    assert source() == "unknown: aws/eu-north-1 is not in SKYTRAIN_PRICES"
    job("Slurm", "local", table=[])
    assert source() == "unknown: neither SKYTRAIN_PRICES nor --price-per-hour is given"
    assert billing_here(3.0).price_per_hour == 3.0  # the user's value wins


def test_a_table_may_name_a_cloud_alone_and_every_node_is_billed(
    job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job("Slurm", "local", "debug", gpus=4, table=[{"cloud": "slurm", "usd_per_hour": 4.5, "accelerators": "H100:4"}])
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "3")
    billing = billing_here(None)
    assert (billing.price_per_hour, billing.nodes) == (4.5, 3)
    assert billing.machine == Machine(
        cloud="slurm", cluster="sky-1", region="local", zone="debug", accelerators="H100:4"
    )


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"cloud": "aws"}]', '[{"usd_per_hour": "20"}]', '[{"usd_per_hour": -1}]']
)
def test_an_invalid_table_is_a_user_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_PRICES", text)
    with pytest.raises(UserError, match="SKYTRAIN_PRICES: not a JSON list"):
        billing_here(None)
