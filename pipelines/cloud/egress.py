"""The price of traffic between rented machines and the store, and of requests to it.

The cloud that the bytes leave charges for them: a machine's cloud for uploads, the bucket's for downloads. Inside a
region they are free. The price to the internet is SkyPilot's, of the first terabytes of a month; larger volumes are
cheaper. A price that is not known is None, and never counts as 0.
"""

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

from pipelines.artifacts.store import S3Store
from pipelines.cloud.catalog import silent_sky
from pipelines.tracking.records import Machine
from trainer.errors import StoreUnavailable, UserError
from trainer.store import Store

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
