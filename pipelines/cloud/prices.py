"""What machines cost: SkyPilot's catalog before a launch, this machine's own price inside a job.

`offers` reads the catalog, which needs no account. `launch` hands a job the offers that it may end up on as
a table (SKYTRAIN_PRICES); wherever the job is started or recovered, `billing_here` finds out which of them
this machine is. What can't be told is unknown, and never taken for 0.

SKYTRAIN_PRICES: a JSON list of {cloud, region, zone, instance, spot, usd_per_hour, on_demand_usd_per_hour,
accelerators}; one of the first five that is null or left out fits whatever the machine is.
"""

import io
import json
import logging
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipelines.cloud.notice import ENDPOINT, FAULTS, Azure, Ec2, Gce, Metadata, Source
from pipelines.tracking.records import Billing, Machine
from trainer.errors import UserError
from trainer.metrics import PEAK_FLOPS

CLOUDS = ("aws", "gcp", "lambda")  # what `plan --cloud` asks by default: those that the extra `cloud` installs
PLACE = ("cloud", "region", "zone", "instance", "spot")  # the fields of a table that say which machine is meant
METADATA: dict[str, Callable[[Metadata], Source]] = {"aws": Ec2, "gcp": Gce, "azure": Azure}
ASK_TIMES = 3  # the bill of a whole attempt hangs on the answer


@dataclass(frozen=True)
class Offer:
    """A machine that can be had somewhere at a price. Names as SkyPilot spells them, dollars of one node."""

    cloud: str
    region: str
    zone: str | None  # None: the price holds in all of the region
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
    """What `cloud` offers for a node such as "H100:8", or "cpus:16,memory:32" for so many or more: cheapest first.

    With a `region`, what it offers to whoever wants the node there.

    UserError if there is no SkyPilot, no such cloud, or no catalog to be had.
    """
    parsed_node(node)
    try:
        from sky import catalog
        from sky.skylet import constants
    except ImportError as error:
        raise UserError("prices are SkyPilot's; install it with: pip install 'skytrain[cloud]'") from error
    if cloud not in constants.ALL_CLOUDS:
        raise UserError(f"{cloud}: no cloud that SkyPilot knows; it is one of {', '.join(constants.ALL_CLOUDS)}")
    # The decorator: where no account tells its own zone names, the public ones will do.
    found = catalog.fallback_to_default_catalog(found_in)
    try:
        with silent_sky():
            return sorted(
                found(catalog, cloud, node, region), key=lambda o: (o.usd_per_hour, o.region, o.zone or "", o.instance)
            )
    except (OSError, ImportError) as error:
        raise UserError(
            f"{cloud}: there is no price list of it here and none can be fetched ({type(error).__name__}); "
            "SkyPilot needs the network once"
        ) from error


@contextmanager
def silent_sky() -> Iterator[None]:
    """SkyPilot marks its progress on stdout and explains its failures at length."""
    log = logging.getLogger("sky")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


def found_in(catalog: Any, cloud: str, node: str, region: str | None) -> list[Offer]:
    """All offers of `sky.catalog` for a node, on demand and spot."""
    name, count = parsed_node(node)
    if name == "cpus":
        memory = node.partition(",memory:")[2]
        gib = f"{memory}+" if memory else None  # without it SkyPilot looks for 4 GiB a CPU
        wanted = {"cpus": f"{count}+", "memory": gib, "region": region, "clouds": cloud}
        # SkyPilot takes the type that is cheapest on its market: on spot only under a price cap, which our tasks have.
        steady = catalog.get_default_instance_type(**wanted)
        spot = catalog.get_default_instance_type(**wanted, use_spot=True, max_hourly_cost=math.inf)
        on_demand, on_spot = (list(cpu_instances(catalog, cloud, one)) if one else [] for one in (steady, spot))
    else:
        on_demand = on_spot = list(gpu_instances(catalog, cloud, name, count))
    found = [*on_demand, *(offer for one in on_spot for offer in spot_offers(catalog, one))]
    return [offer for offer in found if region in (None, offer.region)]


def parsed_node(node: str) -> tuple[str, int]:
    """ "H100:8" -> ("H100", 8)."""
    found = re.fullmatch(r"([A-Za-z0-9-]+):([1-9][0-9]*)(?:,memory:[1-9][0-9]*)?", node)
    if not found:
        raise UserError(f"{node}: no node; write the GPU and how many, as in H100:8, or cpus:16,memory:32")
    return found[1], int(found[2])


def gpu_instances(catalog: Any, cloud: str, gpu: str, count: int) -> Iterator[Offer]:
    """On-demand offers of machines with exactly these GPUs, one a region and instance type."""
    # All of them, and chosen here: a filter that leaves nothing ends GCP's with a TypeError (SkyPilot 0.14.1).
    for name, infos in catalog.list_accelerators(clouds=cloud, all_regions=True).items():
        for info in infos:
            if name.lower() == gpu.lower() and info.accelerator_count == count and not math.isnan(info.price):
                usd, kind = float(info.price), f"{name}:{count}"
                yield Offer(cloud, info.region, None, info.instance_type, False, usd, usd, kind, float(info.cpu_count))


def cpu_instances(catalog: Any, cloud: str, instance: str) -> Iterator[Offer]:
    """On-demand offers of an instance type, one a region."""
    vcpus, _ = catalog.get_vcpus_mem_from_instance_type(instance, clouds=cloud)
    for region in catalog.get_region_zones_for_instance_type(instance, False, clouds=cloud):
        usd = float(catalog.get_hourly_cost(instance, False, region.name, None, clouds=cloud))
        yield Offer(cloud, region.name, None, instance, False, usd, usd, None, float(vcpus))


def spot_offers(catalog: Any, on_demand: Offer) -> Iterator[Offer]:
    """The same machine at its spot prices: every zone has its own."""
    cloud, instance = on_demand.cloud, on_demand.instance
    # GCP sells a machine's GPUs apart from the machine; everywhere else they are in its price.
    gpu, count = parsed_node(on_demand.accelerators) if on_demand.accelerators and cloud == "gcp" else ("", 0)
    places = (
        catalog.get_region_zones_for_accelerators(gpu, count, True, clouds=cloud)
        if gpu
        else catalog.get_region_zones_for_instance_type(instance, True, clouds=cloud)
    )
    for region in places:
        for zone in [zone.name for zone in region.zones or []] if region.name == on_demand.region else []:
            try:
                usd = catalog.get_hourly_cost(instance, True, region.name, zone, clouds=cloud)
            except ValueError:
                continue  # a zone with such GPUs but no such machine
            if gpu:
                usd += float(catalog.get_accelerator_hourly_cost(gpu, count, True, region.name, zone, clouds=cloud))
            rate = on_demand.on_demand_usd_per_hour
            yield Offer(cloud, region.name, zone, instance, True, usd, rate, on_demand.accelerators, on_demand.vcpus)


def prices_table(candidates: list[Offer]) -> list[dict[str, Any]]:
    """Offers as a job reads them from SKYTRAIN_PRICES."""
    return [{k: v for k, v in asdict(offer).items() if k != "vcpus"} for offer in candidates]


# --- inside a job


def billing_here(asked: float | None) -> Billing:
    """What this machine costs: as `--price-per-hour` says, or the table, or nothing if it is nobody's cloud."""
    table, machine = table_from_environment(), machine_from_skypilot()
    nodes = int(os.environ.get("SKYPILOT_NUM_NODES") or 1)
    if machine == Machine() and not table:
        price, source = (0.0, "own machine") if asked is None else (asked, "--price-per-hour")
        return Billing(price, source, nodes, Machine(accelerators=gpus_here()))
    rows = rows_of(table, machine)
    if "usd_per_hour" not in agreed(rows):
        machine = machine.updated(**machine_by_metadata(machine.cloud).to_json())
        rows = rows_of(table, machine)
    sure = agreed(rows)
    machine = replace(machine, accelerators=machine.accelerators or gpus_here())
    machine = machine.updated(**{name: sure.get(name) for name in (*PLACE, "accelerators")})
    machine = machine.updated(on_demand_per_hour=sure.get("on_demand_usd_per_hour"))
    if asked is not None:
        return Billing(asked, "--price-per-hour", nodes, machine)
    if "usd_per_hour" in sure:
        return Billing(sure["usd_per_hour"], f"catalog {place_of(machine)}", nodes, machine)
    return Billing(None, f"unknown: {why_unknown(table, rows, machine)}", nodes, machine)


def agreed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What all rows say alike: it holds for this machine, whichever of them it is."""
    first, *others = rows or [{}]
    return {k: v for k, v in first.items() if v is not None and all(row.get(k) == v for row in others)}


def why_unknown(table: list[dict[str, Any]], rows: list[dict[str, Any]], machine: Machine) -> str:
    if not table:
        return "neither SKYTRAIN_PRICES nor --price-per-hour is given"
    if not rows:
        return f"{place_of(machine)} is not in SKYTRAIN_PRICES"
    return f"{place_of(machine)} may be any of {len(rows)} rows of SKYTRAIN_PRICES"


def place_of(machine: Machine) -> str:
    """aws/us-east-1/p5.48xlarge/spot, as far as it is known."""
    market = {True: "spot", False: "on-demand", None: None}[machine.spot]
    where = [machine.zone if market == "spot" else None, machine.region]
    parts = (machine.cloud, next(filter(None, where), None), machine.instance, market)
    return "/".join(part for part in parts if part) or "this machine"


def rows_of(table: list[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    """The rows that this machine may be, by what is known of it."""

    gpus = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE")

    known = asdict(machine)

    def fits(row: dict[str, Any]) -> bool:
        if any(None not in (row.get(name), known[name]) and row[name] != known[name] for name in PLACE):
            return False
        return gpus is None or int(gpus) == gpus_of(row)

    return [row for row in table if fits(row)]


def gpus_of(row: dict[str, Any]) -> int:
    return parsed_node(row["accelerators"])[1] if row.get("accelerators") else 0


def table_from_environment() -> list[dict[str, Any]]:
    text = os.environ.get("SKYTRAIN_PRICES") or "[]"
    try:
        rows = json.loads(text)
        if not all(isinstance(row["usd_per_hour"], int | float) and row["usd_per_hour"] >= 0 for row in rows):
            raise ValueError
        return list(rows)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError("SKYTRAIN_PRICES: not a JSON list of objects that have usd_per_hour") from error


def machine_from_skypilot() -> Machine:
    """This node by SkyPilot's job environment; nothing is known without SkyPilot."""
    text = os.environ.get("SKYPILOT_CLUSTER_INFO")
    if not text:
        return Machine()
    info = json.loads(text)
    return Machine(
        cloud=str(info["cloud"]).lower(),
        region=info.get("region"),
        zone=info.get("zone"),
        cluster=info.get("cluster_name"),
    )


def machine_by_metadata(cloud: str | None) -> Machine:
    """This machine by its metadata service; nothing is known if none answers, or none may be asked."""
    if os.environ.get("SKYTRAIN_NOTICE") == "off":
        return Machine()
    metadata = Metadata(os.environ.get("SKYTRAIN_NOTICE_ENDPOINT") or ENDPOINT)
    for name, source in METADATA.items() if cloud is None else [(cloud, METADATA.get(cloud))]:
        if source is None:
            continue
        for _ in range(ASK_TIMES):
            with suppress(*FAULTS):
                here = source(metadata)
                here.greet()
                return replace(here.machine(), cloud=name)
    return Machine()


def gpus_here() -> str | None:
    """The GPUs of this node as SkyPilot writes them ("H100:8"); None without any. Speeds are compared by them."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    names = [name for name in listed if name.strip()]
    known = next((gpu for gpu in PEAK_FLOPS if names and gpu in names[0]), None)
    return f"{known}:{len(names)}" if known else None
