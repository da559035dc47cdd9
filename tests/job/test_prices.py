"""The price of a machine found inside a job, and the price of traffic."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from metadata_servers import Cloud, Ec2Cloud, GceCloud

from pipelines.extras.bench.gpus import peak_of
from pipelines.job import prices
from pipelines.job.prices import billing_here, prices_json
from pipelines.store.account import StoredHeartbeat, account, traffic_seconds
from pipelines.store.records import Heartbeat, Machine, Progress
from pipelines.store.traffic import GB
from pipelines.user.cloud.catalog import CloudRegion, usd_per_gb, with_traffic

GPUS_HERE = prices.gpus_here  # the tests below have no GPU


def row(cloud: str, region: str, instance: str, spot: bool, usd: float, gpus: str | None = "H100:8") -> Machine:
    return Machine(
        cloud, region, instance=instance, spot=spot, accelerators=gpus, usd_per_hour=usd, on_demand_per_hour=56.0
    )


EVERYWHERE = [
    row("aws", "us-east-1", "p5.48xlarge", False, 56.0),
    row("aws", "us-east-1", "p5.48xlarge", True, 20.0),
    row("aws", "us-east-1", "m6i.4xlarge", False, 0.8, None),
    row("gcp", "us-central1", "a3-highgpu-8g", False, 72.0),
    row("gcp", "us-central1", "a3-highgpu-8g", True, 26.0),
    row("lambda", "us-east-1", "gpu_8x_h100_sxm5", False, 31.92),
    row("lambda", "us-east-1", "gpu_1x_h100_pcie", False, 3.29, "H100:1"),
    row("lambda", "us-east-1", "gpu_1x_h100_sxm5", False, 4.29, "H100:1"),
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
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
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
    assert (peak_of(f"{name}:2") is None) == ("4090" in name)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The environment of a job that SkyPilot started."""

    def started(cloud: str, region: str, gpus: int = 8, table: Any = None) -> None:
        info = {"cluster_name": "sky-1", "cloud": cloud, "region": region, "zone": None}
        monkeypatch.setenv("SKYPILOT_CLUSTER_INFO", json.dumps(info))
        monkeypatch.setenv("SKYTRAIN_PRICES", prices_json(EVERYWHERE) if table is None else json.dumps(table))
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


def ec2(spot: bool, instance: str = "p5.48xlarge") -> Ec2Cloud:
    cloud = Ec2Cloud()
    cloud.items |= {"placement/region": "us-east-1", "placement/availability-zone-id": "use1-az2"}
    cloud.items |= {"instance-type": instance, "instance-life-cycle": "spot" if spot else "on-demand"}
    return cloud


def gce(spot: bool) -> GceCloud:
    cloud = GceCloud()
    cloud.items |= {"zone": "projects/7/zones/us-central1-a", "machine-type": "projects/7/machineTypes/a3-highgpu-8g"}
    cloud.items["scheduling/preemptible"] = "TRUE" if spot else "FALSE"
    return cloud


@pytest.mark.parametrize(
    ("where", "service", "usd", "source"),
    [
        (("AWS", "us-east-1"), lambda: ec2(True), 20.0, "aws/us-east-1/p5.48xlarge/spot"),
        (("AWS", "us-east-1"), lambda: ec2(False), 56.0, "aws/us-east-1/p5.48xlarge/on-demand"),
        (("GCP", "us-central1"), lambda: gce(True), 26.0, "gcp/us-central1/a3-highgpu-8g/spot"),
    ],
)
def test_a_machine_finds_its_price_wherever_it_is_recovered(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud], where: Any, service: Any, usd: float, source: str
) -> None:
    job(*where)
    metadata(service())
    billing = billing_here(None)
    assert (billing.price_per_hour, billing.price_source) == (usd, f"catalog {source}")
    machine = billing.machine
    assert (machine.spot, machine.on_demand_per_hour) == (source.endswith("/spot"), 56.0)
    assert (machine.cloud, machine.accelerators, machine.cluster) == (where[0].lower(), "H100:8", "sky-1")


@pytest.mark.parametrize(
    ("zone", "usd", "ending"),
    [("use1-az2", 24.0, ""), ("use1-az6", 20.0, ""), ("use1-az9", 24.0, ", the dearest of 2 that it may be")],
)
def test_a_spot_machine_has_the_price_of_its_zone_by_the_id_that_is_one_in_all_accounts(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud], zone: str, usd: float, ending: str
) -> None:
    sold = Machine(**vars(EVERYWHERE[1]) | {"usd_by_zone": {"use1-az6": 20.0, "use1-az2": 24.0}})
    job("AWS", "us-east-1", table=json.loads(prices_json([sold])))
    cloud = ec2(True)
    cloud.items["placement/availability-zone-id"] = zone
    metadata(cloud)
    billing = billing_here(None)
    expected = (usd, f"catalog aws/us-east-1/p5.48xlarge/spot{ending}", usd)
    assert (billing.price_per_hour, billing.price_source, billing.machine.usd_per_hour) == expected


def test_a_single_possible_price_needs_no_metadata_service_and_of_several_the_dearest_is_billed(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud]
) -> None:
    cloud = metadata(ec2(spot=True))
    job("Lambda", "us-east-1")  # no metadata service
    billing = billing_here(None)
    assert (billing.price_per_hour, billing.machine.instance) == (31.92, "gpu_8x_h100_sxm5")
    job("Lambda", "us-east-1", gpus=1)
    billing = billing_here(None)
    assert billing.price_per_hour == 4.29 and "the dearest of 2" in billing.price_source
    assert cloud.requests == []


# Traffic

EAST = CloudRegion("aws", "us-east-1")


@pytest.mark.parametrize(
    ("origin", "target", "usd"),
    [
        (EAST, EAST, 0.0),
        (EAST, CloudRegion("aws", "us-west-2"), 0.02),
        (EAST, CloudRegion("cloudflare"), 0.09),
        (EAST, CloudRegion("aws"), None),  # the same region, or another one
        (CloudRegion("gcp", "us-central1"), EAST, 0.12),
        (CloudRegion("lambda", "us-south-1"), EAST, 0.0),
        (CloudRegion("vast"), EAST, None),  # SkyPilot's 0 does not say that it is free
        (CloudRegion(), EAST, None),
    ],
)
def test_the_cloud_that_bytes_leave_charges_for_them(
    origin: CloudRegion, target: CloudRegion, usd: float | None
) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip)")
    assert usd_per_gb(origin, target) == usd
    priced = with_traffic(Machine(*target), origin)
    assert priced.usd_per_gb_received == usd
    assert priced.usd_per_1000_writes == {"aws": 0.005, "gcp": 0.005}.get(origin.cloud or "")


def test_traffic_is_a_part_of_the_bill_of_every_sum(
    job: Callable[..., None], metadata: Callable[[Cloud], Cloud]
) -> None:
    metadata(gce(True))
    sold = Machine("gcp", "us-central1", instance="a3-highgpu-8g", spot=True, accelerators="H100:8", usd_per_hour=8.0)
    priced = Machine(**vars(sold) | {"usd_per_gb_sent": 0.12, "usd_per_1000_writes": 0.005})
    job("GCP", "us-central1", table=[priced.to_json()])
    billing, now = billing_here(None), time.time()
    work = Progress(bytes_sent=100 * GB, bytes_received=GB, write_requests=200_000)
    beat = Heartbeat(
        *("run", "train", 1, "done", now - 3600, now, billing.price_per_hour),
        phases={"train": 3600.0},
        progress=work,
        machine=billing.machine,
    )
    assert Heartbeat.from_json(beat.to_json()) == beat
    bill = account([StoredHeartbeat("train/x", beat)])
    assert bill.total.usd == pytest.approx(8 + 12 + 1) and bill.total.hours == pytest.approx(1)
    assert (bill.traffic.usd, bill.traffic.unpriced_bytes) == (pytest.approx(12 + 1), GB)
    for sums in (bill.by_stage, bill.by_phase, bill.by_market):
        assert sum(cost.usd for cost in sums.values()) == pytest.approx(bill.total.usd)
    assert traffic_seconds(GB, beat) == pytest.approx(0.12 / 8 * 3600)
