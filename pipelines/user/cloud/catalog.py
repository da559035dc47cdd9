"""SkyPilot's prices: the machines of each cloud and region, and of private clusters. They need no account.

Without a network, or without SkyPilot, a plan takes the prices of `prices.yaml`, which ships with this package. A job
never gets those: its bill and its budget need the prices of the day.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from pipelines.job.prices import price_of
from pipelines.store.records import Machine, without_none
from pipelines.store.s3_store import S3Store
from pipelines.user.cloud.skypilot import FETCH_SECONDS, require_skypilot, skypilot_silent, skypilot_version
from trainer.base.answers import answered_within
from trainer.base.store import Store, side_by_side
from trainer.config.errors import StoreUnavailable, UserError

if TYPE_CHECKING:
    from sky import Resources

CLOUDS = ("aws", "gcp", "lambda")  # the default of `plan --cloud`: the clouds that the extra `cloud` installs
CLUSTERS = ("slurm", "kubernetes", "k8s", "ssh")  # private clusters: no spot market, no price list
MOST_PLACES = 10  # for a machine of a cloud: every trial takes its time
SHIPPED = Path(__file__).with_name("prices.yaml")


@dataclass(frozen=True)
class MachineRequest:
    """One kind of machine that a task may get: an entry of `any_of` or `ordered` in its YAML."""

    infra: str  # "aws", "aws/us-east-1", "slurm/local"
    use_spot: bool
    accelerators: str | None = None  # "H100:8"
    cpus: str | None = None  # "16+"
    memory: str | None = None  # GiB, "32+"
    instance_type: str | None = None  # None: the cloud's choice

    @property
    def cloud(self) -> str:
        return cloud_of(self.infra)

    @property
    def gpu(self) -> str:
        """ "H100:8" -> "H100"; "" without GPUs."""
        return (self.accelerators or "").partition(":")[0]

    def __str__(self) -> str:
        return f"{self.accelerators or f'{self.cpus} CPUs'}{' on spot' if self.use_spot else ''}"

    def to_yaml(self) -> dict[str, Any]:
        return without_none(vars(self))


def cloud_of(infra: str) -> str:
    """ "aws/us-east-1" -> "aws"."""
    return infra.partition("/")[0].lower()


def is_cluster(infra: str) -> bool:
    """Whether a place is a private cluster."""
    return cloud_of(infra) in CLUSTERS


@cache
def offers(wanted: MachineRequest, nodes: int = 1) -> dict[MachineRequest, Machine]:
    """The machines that SkyPilot would take for `nodes` of a request, by the request with type and region pinned: the
    MOST_PLACES cheapest, of each type and region one. Empty if the cloud does not sell them, or has no
    network between nodes.

    On spot it is the price in the region's cheapest zone, which SkyPilot tries first; `usd_by_zone` has all of them.
    UserError without SkyPilot, for an unknown cloud, or without a catalog.
    """
    require_skypilot()
    if is_cluster(wanted.infra):
        return {} if wanted.use_spot else {wanted: cluster_machine(wanted)}
    # SkyPilot asks EC2 for the account's regions as soon as there are keys. Prices need none, so keys that can't ask,
    # such as those of another S3 service, must not fail the plan.
    try:
        found = answered_within(FETCH_SECONDS, lambda: read(wanted, nodes))
    except (OSError, ImportError) as error:
        raise UserError(
            f"{wanted.cloud}: its price list cannot be fetched ({type(error).__name__}); "
            "connect this machine to the network once"
        ) from error
    except ValueError as error:
        raise UserError(f"{wanted.infra}: {' '.join(str(error).split())}") from error
    except Exception:  # of botocore, and of pandas where EC2's answer is a strange one
        if wanted.cloud != "aws":
            raise
        from sky.catalog import aws_catalog

        aws_catalog._user_df = aws_catalog._default_df  # SkyPilot has no other way to read it with unusable keys
        found = read(wanted, nodes)
    return cheapest_of(wanted, found)


def offers_of_all(
    requests: Iterable[tuple[MachineRequest, int]], shipped: bool
) -> tuple[dict[tuple[MachineRequest, int], dict[MachineRequest, Machine]], dict[str, str], list[str]]:
    """The offers of each request for a number of nodes; by cloud why its price list can't be read; notes for the user.

    All price lists are fetched at once. With `shipped`, a cloud without one has the shipped prices.
    """
    failed: dict[str, str] = {}

    def ask(request: tuple[MachineRequest, int]) -> dict[MachineRequest, Machine]:
        machine, nodes = request
        if machine.cloud not in failed:
            try:
                return offers(machine, nodes)
            except UserError as error:
                failed[machine.cloud] = str(error)
        return cheapest_of(machine, shipped_machines(machine)) if shipped else {}

    requests = list(requests)
    with skypilot_silent():
        side_by_side(ask, {machine.cloud: (machine, nodes) for machine, nodes in requests}.values())
        found = {request: ask(request) for request in requests}
    prices = shipped_prices()
    old = sorted(failed.keys() & {row["cloud"] for row in prices["machines"]}) if shipped else []
    notes = [failed[cloud] for cloud in failed if cloud not in old]
    if old:
        reason = failed[old[0]].removeprefix(f"{old[0]}: ")
        notes.append(f"prices of {prices['date']}, which ship with skytrain, for {', '.join(old)}: {reason}")
    return found, failed, notes


@cache
def shipped_prices() -> dict[str, Any]:
    return yaml.safe_load(SHIPPED.read_text(encoding="utf8"))


def shipped_machines(wanted: MachineRequest) -> list[Machine]:
    """The machines of `prices.yaml` that a request accepts."""
    region = wanted.infra.partition("/")[2].partition("/")[0]
    cpus, memory = (float((text or "0").rstrip("+")) for text in (wanted.cpus, wanted.memory))
    return [
        Machine(**row)
        for row in shipped_prices()["machines"]
        if (row["cloud"], row["spot"]) == (wanted.cloud, wanted.use_spot)
        and region in ("", row["region"])
        and row.get("accelerators", "").lower() == (wanted.accelerators or "").lower()
        and row["vcpus"] >= cpus
        and shipped_prices()["memory"][row["instance"]] >= memory
    ]


def cheapest_of(wanted: MachineRequest, found: Iterable[Machine]) -> dict[MachineRequest, Machine]:
    """The MOST_PLACES cheapest machines, one of each type and region, by the request that names both."""
    cheapest: dict[MachineRequest, Machine] = {}
    for one in sorted(found, key=lambda m: (price_of(m), m.region or "", m.instance or "")):
        infra = wanted.infra if "/" in wanted.infra else f"{one.cloud}/{one.region}"
        cheapest.setdefault(replace(wanted, infra=infra, instance_type=one.instance), one)
    return dict(list(cheapest.items())[:MOST_PLACES])


def cluster_machine(wanted: MachineRequest) -> Machine:
    """A machine of a private cluster. `pricing` in ~/.sky/config.yaml has the price of its GPUs, or of its CPUs and
    memory; without it the price is unknown, where SkyPilot counts 0."""
    from sky.catalog import common

    region = wanted.infra.partition("/")[2]
    section, clusters = {"slurm": ("slurm", "cluster_configs")}.get(wanted.cloud, ("kubernetes", "context_configs"))
    pricing = common.resolve_pricing_config((section, "pricing"), (section, clusters, region, "pricing"))
    gpu, count = wanted.gpu, (wanted.accelerators or ":0").partition(":")[2]
    cpus, memory = (float((text or "0").rstrip("+")) for text in (wanted.cpus, wanted.memory))
    usd = common.get_hourly_cost_from_pricing(pricing, cpus, memory, gpu, int(count))
    priced = map(str.lower, pricing.get("accelerators", ())) if gpu else pricing
    usd_per_hour = usd if (gpu.lower() or "cpu") in priced else None
    found = Machine(wanted.cloud, region or None, accelerators=wanted.accelerators, vcpus=cpus or None)
    return replace(found, usd_per_hour=usd_per_hour, on_demand_per_hour=usd_per_hour)


def read(wanted: MachineRequest, nodes: int) -> list[Machine]:
    """The machines that SkyPilot would take for `nodes` of a request, in each region."""
    from sky import Resources
    from sky.utils.resources_utils import make_launchables_for_valid_region_zones

    resources, found = Resources(**wanted.to_yaml()), []
    for kind in resources.cloud.get_feasible_launchable_resources(resources, nodes).resources_list:
        vcpus, _ = kind.cloud.get_vcpus_mem_from_instance_type(kind.instance_type)
        gpus = [f"{name}:{count:g}" for name, count in (kind.accelerators or {}).items()]
        by_region: dict[str, dict[str, float]] = {}  # dollars by zone
        for one in make_launchables_for_valid_region_zones(kind):
            by_region.setdefault(one.region, {})[one.zone or ""] = one.get_cost(3600)
        for region, zones in by_region.items():
            found.append(
                Machine(
                    wanted.cloud,
                    region,
                    instance=kind.instance_type,
                    spot=wanted.use_spot,
                    accelerators=gpus[0] if gpus else None,
                    usd_per_hour=min(zones.values()),
                    on_demand_per_hour=kind.copy(region=region, use_spot=False).get_cost(3600),
                    vcpus=vcpus,
                    usd_by_zone=spot_by_zone(kind, region, zones) if wanted.use_spot else None,
                )
            )
    return found


def spot_by_zone(kind: "Resources", region: str, zones: dict[str, float]) -> dict[str, float]:
    """`zones`, dollars by SkyPilot's names; AWS's by their ids, which its catalog has before an account's letters."""
    if str(kind.cloud) != "AWS":
        return zones
    from sky.catalog import aws_catalog

    rows = aws_catalog._default_df
    rows = rows[(rows["InstanceType"] == kind.instance_type) & (rows["Region"] == region)].dropna(subset=["SpotPrice"])
    return dict(zip(rows["AvailabilityZone"], rows["SpotPrice"], strict=True))


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


class CloudRegion(NamedTuple):
    """The place of a machine or a bucket. None: unknown."""

    cloud: str | None = None
    region: str | None = None


def place_of(store: Store) -> CloudRegion | None:
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
    return CloudRegion(cloud, region)


def with_traffic(machine: Machine, bucket: CloudRegion | None) -> Machine:
    """The machine with the prices of bytes from it to a bucket, of bytes back, and of requests."""
    if bucket is None:
        return machine
    here, (writes, reads) = CloudRegion(machine.cloud, machine.region), PER_1000.get(bucket.cloud or "", (None, None))
    machine = replace(machine, usd_per_1000_writes=writes, usd_per_1000_reads=reads)
    return replace(machine, usd_per_gb_sent=usd_per_gb(here, bucket), usd_per_gb_received=usd_per_gb(bucket, here))


def usd_per_gb(origin: CloudRegion, target: CloudRegion) -> float | None:
    """Dollars a GB that the cloud of `origin` charges for bytes to `target`; None: unknown."""
    if origin.cloud in FREE:
        return 0.0
    if origin.cloud is None or (origin.cloud == target.cloud and None in (origin.region, target.region)):
        return None
    if origin.cloud == target.cloud:
        return 0.0 if origin.region == target.region else BETWEEN_REGIONS.get(origin.cloud)
    if skypilot_version() is None:
        return None
    from sky.utils.registry import CLOUD_REGISTRY

    with suppress(ValueError):
        cloud = CLOUD_REGISTRY.from_str(origin.cloud)
        return round(float(cloud.get_egress_cost(101) - cloud.get_egress_cost(100)), 6) or None
    return None
