"""SkyPilot's price catalog: the machines of each cloud and region, and their prices. It needs no account."""

import io
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pipelines.artifacts.store import S3Store
from pipelines.job.prices import price_of
from pipelines.tracking.records import Machine
from trainer.errors import StoreUnavailable, UserError
from trainer.store import Store

CLOUDS = ("aws", "gcp", "lambda")  # the default of `plan --cloud`: the clouds that the extra `cloud` installs


def offers(cloud: str, node: str, region: str | None = None) -> list[Machine]:
    """The machines of `cloud` for a node such as "H100:8", or "cpus:16,memory:32" for at least so many; cheapest first.

    On spot the price is that of the region's cheapest zone, which SkyPilot tries first. With a `region`, only those
    there. UserError without SkyPilot, for an unknown cloud, or without a catalog.
    """
    name, count = parse_node(node)
    try:
        from sky.skylet import constants
    except ImportError as error:
        raise UserError(
            "prices come from SkyPilot's catalog; install it with: pip install 'skytrain[cloud]'"
        ) from error
    if cloud not in constants.ALL_CLOUDS:
        raise UserError(f"{cloud}: SkyPilot does not know this cloud; choose one of {', '.join(constants.ALL_CLOUDS)}")
    try:
        with silent_sky():
            if name == "cpus":
                memory = node.partition(",memory:")[2]
                found = read(cpu_machines, cloud, f"{count}+", f"{memory}+" if memory else None)
            else:
                kind = f"{name}:{count}".lower()
                found = tuple(one for one in read(gpu_machines, cloud) if (one.accelerators or "").lower() == kind)
    except (OSError, ImportError) as error:
        raise UserError(
            f"{cloud}: its price list cannot be fetched ({type(error).__name__}); "
            "connect this machine to the network once"
        ) from error
    there = (machine for machine in found if region in (None, machine.region))
    return sorted(there, key=lambda m: (price_of(m), m.region or "", m.instance or ""))


def parse_node(node: str) -> tuple[str, int]:
    """ "H100:8" -> ("H100", 8)."""
    found = re.fullmatch(r"([A-Za-z0-9-]+):([1-9][0-9]*)(?:,memory:[1-9][0-9]*)?", node)
    if not found:
        raise UserError(f"{node}: not a node; write the GPU and their number, as in H100:8, or cpus:16,memory:32")
    return found[1], int(found[2])


def read(machines: Callable[..., tuple[Machine, ...]], cloud: str, *arguments: str | None) -> tuple[Machine, ...]:
    """Call `machines` with this account's regions, or with the public ones.

    SkyPilot asks EC2 for an account's as soon as there are keys. Prices need none, so keys that can't ask, such as
    those of another S3 service, must not fail the plan.
    """
    from sky import catalog

    reading = catalog.fallback_to_default_catalog(machines)
    try:
        found: tuple[Machine, ...] = reading(cloud, *arguments)
    except (OSError, ImportError):
        raise
    except Exception:  # of botocore, and of pandas where EC2's answer is a strange one
        if cloud != "aws":
            raise
        from sky.catalog import aws_catalog

        aws_catalog._user_df = aws_catalog._default_df  # SkyPilot has no other way to read it with unusable keys
        found = reading(cloud, *arguments)
    return found


@cache
def gpu_machines(cloud: str) -> tuple[Machine, ...]:
    """All machines of a cloud that have GPUs, on demand and on spot."""
    from sky import catalog

    # The whole list: with a filter that matches nothing, GCP's raises TypeError (SkyPilot 0.14.1).
    return tuple(
        Machine(
            cloud,
            info.region,
            instance=info.instance_type,
            spot=spot,
            accelerators=f"{name}:{info.accelerator_count:g}",
            usd_per_hour=float(usd),
            on_demand_per_hour=float(info.price),
            vcpus=float(info.cpu_count),
        )
        for name, infos in catalog.list_accelerators(clouds=cloud, all_regions=True).items()
        for info in infos
        for spot, usd in ((False, info.price), (True, info.spot_price))
        if not math.isnan(info.price) and not math.isnan(usd)
    )


def cpu_machines(cloud: str, cpus: str, memory: str | None) -> tuple[Machine, ...]:
    """The machines that SkyPilot takes for so many CPUs and GiB (None: 4 a CPU), in each market and region."""
    from sky import catalog

    found = []
    for spot in (False, True):
        # SkyPilot takes the cheapest type of its market; on spot only under a price cap, which our tasks have.
        cap: dict[str, Any] = {"use_spot": True, "max_hourly_cost": math.inf} if spot else {}
        instance = catalog.get_default_instance_type(cpus=cpus, memory=memory, clouds=cloud, **cap)
        if instance is None:
            continue
        vcpus, _ = catalog.get_vcpus_mem_from_instance_type(instance, clouds=cloud)
        for region in catalog.get_region_zones_for_instance_type(instance, spot, clouds=cloud):
            if region.zones or not spot:  # clouds without zones have no spot market
                usd, on_demand = (
                    float(catalog.get_hourly_cost(instance, market, region.name, None, clouds=cloud))
                    for market in (spot, False)
                )
                found.append(
                    Machine(
                        cloud,
                        region.name,
                        instance=instance,
                        spot=spot,
                        usd_per_hour=usd,
                        on_demand_per_hour=on_demand,
                        vcpus=float(vcpus),
                    )
                )
    return tuple(found)


@contextmanager
def silent_sky() -> Iterator[None]:
    """Hide SkyPilot's output: it prints progress and long explanations of failures."""
    log = logging.getLogger("sky")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


# Traffic
#
# The cloud that the bytes leave charges for them: a machine's cloud for uploads, the bucket's for downloads. Inside a
# region they are free. The price to the internet is SkyPilot's, of the first terabytes of a month; larger volumes are
# cheaper. A price that is not known is None, and never counts as 0.

# Dollars a GB to another region of the same cloud and continent; other continents cost up to four times as much.
# Sources, read on 2026-11-23: https://aws.amazon.com/ec2/pricing/on-demand/ (data transfer from US regions),
# https://cloud.google.com/vpc/network-pricing (inter-region, North America and Europe),
# https://azure.microsoft.com/pricing/details/bandwidth/ (within a continent).
BETWEEN_REGIONS = {"aws": 0.02, "gcp": 0.02, "azure": 0.02}
# Clouds that charge for no traffic. SkyPilot's 0 may also mean that it does not know the price.
# Sources, read on 2026-11-23: https://developers.cloudflare.com/r2/pricing/, https://lambda.ai/pricing,
# https://docs.runpod.io/pods/pricing.
FREE = ("cloudflare", "lambda", "runpod")
# Dollars for 1,000 requests that write or list, and for 1,000 that read; removals are free. Standard storage.
# Sources: https://aws.amazon.com/s3/pricing/ (us-east-1), https://cloud.google.com/storage/pricing (a single region),
# https://developers.cloudflare.com/r2/pricing/; the first two as other pages cited them on 2026-11-23.
PER_1000 = {"aws": (0.005, 0.0004), "gcp": (0.005, 0.0004), "cloudflare": (0.0045, 0.00036)}
HOSTS = {"amazonaws.com": "aws", "storage.googleapis.com": "gcp", "r2.cloudflarestorage.com": "cloudflare"}


class Place(NamedTuple):
    """The place of a machine or a bucket. None: unknown."""

    cloud: str | None = None
    region: str | None = None


def place_of(store: Store) -> Place | None:
    """The place of a bucket, by its endpoint; None for another store. Its region is None if the server does not tell
    it."""
    if not isinstance(store, S3Store):
        return None
    host = urlsplit(store.endpoint).hostname or ""
    cloud = next((name for suffix, name in HOSTS.items() if host == suffix or host.endswith(f".{suffix}")), None)
    region = None
    if cloud not in (None, *FREE):
        with suppress(UserError, StoreUnavailable):
            region = store.region()
    return Place(cloud, region)


def with_traffic(machine: Machine, bucket: Place | None) -> Machine:
    """The machine with the prices of bytes from it to a bucket, of bytes back, and of requests."""
    if bucket is None:
        return machine
    here, (writes, reads) = Place(machine.cloud, machine.region), PER_1000.get(bucket.cloud or "", (None, None))
    sent, received = usd_per_gb(here, bucket), usd_per_gb(bucket, here)
    return replace(
        machine,
        usd_per_gb_sent=sent,
        usd_per_gb_received=received,
        usd_per_1000_writes=writes,
        usd_per_1000_reads=reads,
    )


def usd_per_gb(origin: Place, target: Place) -> float | None:
    """Dollars a GB that the cloud of `origin` charges for bytes to `target`; None: unknown."""
    if origin.cloud in FREE:
        return 0.0
    if origin.cloud is None or (origin.cloud == target.cloud and None in (origin.region, target.region)):
        return None
    if origin.cloud == target.cloud:
        return 0.0 if origin.region == target.region else BETWEEN_REGIONS.get(origin.cloud)
    try:
        from sky.utils.registry import CLOUD_REGISTRY
    except ImportError:
        return None
    with silent_sky(), suppress(ValueError):
        cloud = CLOUD_REGISTRY.from_str(origin.cloud)
        return round(float(cloud.get_egress_cost(101) - cloud.get_egress_cost(100)), 6) or None
    return None
