"""SkyPilot's price catalog: the machines that each cloud offers, and their prices. It needs no account."""

import io
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError

CLOUDS = ("aws", "gcp", "lambda")  # the default of `plan --cloud`: the clouds that the extra `cloud` installs

# Why an account's zone names are unknown, by cloud. Its offers then have the public names of zones.
account_errors: dict[str, str] = {}


@dataclass(frozen=True)
class Offer:
    """A machine that a cloud offers somewhere at a price. Names as SkyPilot spells them, dollars of one node."""

    cloud: str
    region: str
    zone: str | None  # None: the price holds in the whole region
    instance: str
    spot: bool
    usd_per_hour: float
    on_demand_usd_per_hour: float
    accelerators: str | None  # "H100:8"; None: no GPU
    vcpus: float

    @property
    def market(self) -> str:
        return "spot" if self.spot else "on demand"


def offers(cloud: str, node: str, region: str | None = None) -> list[Offer]:
    """The offers of `cloud` for a node such as "H100:8", or "cpus:16,memory:32" for at least so many; cheapest first.

    With a `region`, only those there. UserError without SkyPilot, for an unknown cloud, or without a catalog.
    """
    parse_node(node)
    try:
        from sky import catalog
        from sky.skylet import constants
    except ImportError as error:
        raise UserError(
            "prices come from SkyPilot's catalog; install it with: pip install 'skytrain[cloud]'"
        ) from error
    if cloud not in constants.ALL_CLOUDS:
        raise UserError(f"{cloud}: SkyPilot knows no such cloud; it is one of {', '.join(constants.ALL_CLOUDS)}")
    try:
        with silent_sky():
            found = read_with_public_zones_if_needed(catalog, cloud, node, region)
            return sorted(found, key=lambda o: (o.usd_per_hour, o.region, o.zone or "", o.instance))
    except (OSError, ImportError) as error:
        raise UserError(
            f"{cloud}: there is no price list of it here and none can be fetched ({type(error).__name__}); "
            "SkyPilot needs the network once"
        ) from error


def read_with_public_zones_if_needed(catalog: Any, cloud: str, node: str, region: str | None) -> list[Offer]:
    """`read_offers` with the account's zones, or with the public ones.

    An AWS account has zone names of its own, which SkyPilot asks EC2 for as soon as there are keys. Prices need none,
    so keys that can't ask, such as those of another S3 service, must not fail the plan.
    """
    read = catalog.fallback_to_default_catalog(read_offers)
    try:
        return read(catalog, cloud, node, region)
    except (OSError, ImportError, UserError):
        raise
    except Exception as error:  # of botocore, and of pandas where EC2's answer is a strange one
        if cloud != "aws" or cloud in account_errors:
            raise
        from sky.catalog import aws_catalog

        reason = " ".join(str(error).split())[:120]
        account_errors[cloud] = (
            f"{cloud}: prices are by public zones; these keys can't ask EC2 for their own ({reason})"
        )
        aws_catalog._user_df = aws_catalog._default_df  # SkyPilot has no other way to read it with unusable keys
        return read(catalog, cloud, node, region)


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


def read_offers(catalog: Any, cloud: str, node: str, region: str | None) -> list[Offer]:
    """All offers of `sky.catalog` for a node, on demand and spot."""
    name, count = parse_node(node)
    if name == "cpus":
        memory = node.partition(",memory:")[2]
        gib = f"{memory}+" if memory else None  # None: SkyPilot takes 4 GiB a CPU
        wanted = {"cpus": f"{count}+", "memory": gib, "region": region, "clouds": cloud}
        # SkyPilot takes the cheapest type of its market; on spot only under a price cap, which our tasks have.
        plain = catalog.get_default_instance_type(**wanted)
        spot = catalog.get_default_instance_type(**wanted, use_spot=True, max_hourly_cost=math.inf)
        on_demand, on_spot = (list(cpu_instances(catalog, cloud, one)) if one else [] for one in (plain, spot))
    else:
        on_demand = on_spot = list(gpu_instances(catalog, cloud, name, count))
    found = [*on_demand, *(offer for one in on_spot for offer in spot_offers(catalog, one))]
    return [offer for offer in found if region in (None, offer.region)]


def parse_node(node: str) -> tuple[str, int]:
    """ "H100:8" -> ("H100", 8)."""
    found = re.fullmatch(r"([A-Za-z0-9-]+):([1-9][0-9]*)(?:,memory:[1-9][0-9]*)?", node)
    if not found:
        raise UserError(f"{node}: not a node; write the GPU and their number, as in H100:8, or cpus:16,memory:32")
    return found[1], int(found[2])


def gpu_instances(catalog: Any, cloud: str, gpu: str, count: int) -> Iterator[Offer]:
    """On-demand offers of machines with exactly these GPUs, one for each region and instance type."""
    # We filter the whole list here: with a filter that matches nothing, GCP's raises TypeError (SkyPilot 0.14.1).
    for name, infos in catalog.list_accelerators(clouds=cloud, all_regions=True).items():
        for info in infos:
            if name.lower() == gpu.lower() and info.accelerator_count == count and not math.isnan(info.price):
                usd, kind = float(info.price), f"{name}:{count}"
                yield Offer(cloud, info.region, None, info.instance_type, False, usd, usd, kind, float(info.cpu_count))


def cpu_instances(catalog: Any, cloud: str, instance: str) -> Iterator[Offer]:
    """On-demand offers of an instance type, one for each region."""
    vcpus, _ = catalog.get_vcpus_mem_from_instance_type(instance, clouds=cloud)
    for region in catalog.get_region_zones_for_instance_type(instance, False, clouds=cloud):
        usd = float(catalog.get_hourly_cost(instance, False, region.name, None, clouds=cloud))
        yield Offer(cloud, region.name, None, instance, False, usd, usd, None, float(vcpus))


def spot_offers(catalog: Any, on_demand: Offer) -> Iterator[Offer]:
    """The same machine at its spot prices: every zone has its own."""
    cloud, instance = on_demand.cloud, on_demand.instance
    # GCP sells GPUs separately from the machine; elsewhere the machine's price includes them.
    gpu, count = parse_node(on_demand.accelerators) if on_demand.accelerators and cloud == "gcp" else ("", 0)
    regions = (
        catalog.get_region_zones_for_accelerators(gpu, count, True, clouds=cloud)
        if gpu
        else catalog.get_region_zones_for_instance_type(instance, True, clouds=cloud)
    )
    for region in regions:
        for zone in [zone.name for zone in region.zones or []] if region.name == on_demand.region else []:
            try:
                usd = catalog.get_hourly_cost(instance, True, region.name, zone, clouds=cloud)
            except ValueError:
                continue  # a zone with such GPUs but no such machine
            if gpu:
                usd += float(catalog.get_accelerator_hourly_cost(gpu, count, True, region.name, zone, clouds=cloud))
            rate = on_demand.on_demand_usd_per_hour
            yield Offer(cloud, region.name, zone, instance, True, usd, rate, on_demand.accelerators, on_demand.vcpus)
