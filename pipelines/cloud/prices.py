"""The price of this machine inside a job.

`launch` gives a job the prices of all machines that it may get (SKYTRAIN_PRICES). Wherever the job starts or recovers,
`billing_here` finds the rows that fit this machine. A price that it can't find is unknown, and never counts as 0.

SKYTRAIN_PRICES: a JSON list of {cloud, region, zone, instance, spot, usd_per_hour, on_demand_usd_per_hour,
accelerators, usd_per_gb_sent, usd_per_gb_received, usd_per_1000_writes, usd_per_1000_reads}. Null or no value in one of
the first five fits every machine.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from pipelines.cloud.catalog import Offer, parse_node
from pipelines.cloud.notice import ENDPOINT, Ec2, Gce, Metadata, NoticeSource
from pipelines.tracking.records import Billing, Machine
from trainer.errors import UserError

IDENTITY = ("cloud", "region", "zone", "instance", "spot")  # the fields of a row that identify a machine
TRAFFIC = ("usd_per_gb_sent", "usd_per_gb_received", "usd_per_1000_writes", "usd_per_1000_reads")
METADATA: dict[str, Callable[[Metadata], NoticeSource]] = {"aws": Ec2, "gcp": Gce}
TRIES = 3  # the cost of a whole attempt depends on the answer


@dataclass(frozen=True)
class PriceRow:
    """The price of a machine that a job may get. Dollars of one node; None in IDENTITY: any."""

    usd_per_hour: float
    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    instance: str | None = None
    spot: bool | None = None
    on_demand_usd_per_hour: float | None = None
    accelerators: str | None = None  # "H100:8"; None: no GPU
    usd_per_gb_sent: float | None = None  # dollars of traffic to the store; None: unknown
    usd_per_gb_received: float | None = None
    usd_per_1000_writes: float | None = None  # dollars of requests to the store
    usd_per_1000_reads: float | None = None

    @property
    def gpus(self) -> int:
        return parse_node(self.accelerators)[1] if self.accelerators else 0

    def to_json(self) -> dict[str, Any]:
        names = (*IDENTITY, "usd_per_hour", "on_demand_usd_per_hour", "accelerators")
        traffic = {name: usd for name in TRAFFIC if (usd := getattr(self, name)) is not None}
        return {name: getattr(self, name) for name in names} | traffic

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """KeyError, TypeError or ValueError for values that are no row."""
        usd: Any = values["usd_per_hour"]
        if not isinstance(usd, int | float) or usd < 0:
            raise ValueError(f"usd_per_hour: {usd}")
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**known)

    @classmethod
    def of(cls, offer: Offer) -> Self:
        return cls.from_json(asdict(offer))


def prices_json(rows: Iterable[PriceRow]) -> str:
    """The value of SKYTRAIN_PRICES; no row twice."""
    return json.dumps([row.to_json() for row in dict.fromkeys(rows)], separators=(",", ":"))


def prices_from_environment() -> list[PriceRow]:
    """The rows of SKYTRAIN_PRICES; none if it is not set. UserError for an invalid value."""
    text = os.environ.get("SKYTRAIN_PRICES") or "[]"
    try:
        return [PriceRow.from_json(values) for values in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError("SKYTRAIN_PRICES: not a JSON list of objects that have usd_per_hour") from error


def billing_here(price_per_hour: float | None) -> Billing:
    """The price of this machine: that of `--price-per-hour`, that of SKYTRAIN_PRICES, or 0 outside of every cloud."""
    prices, machine = prices_from_environment(), machine_from_skypilot()
    nodes = int(os.environ.get("SKYPILOT_NUM_NODES") or 1)
    if machine == Machine() and not prices:
        price, source = (0.0, "own machine") if price_per_hour is None else (price_per_hour, "--price-per-hour")
        return Billing(price, source, nodes, Machine(accelerators=gpus_here()))
    rows = matching_rows(prices, machine)
    if "usd_per_hour" not in shared_values(rows):
        machine = machine.updated(**machine_from_metadata(machine.cloud).to_json())
        rows = matching_rows(prices, machine)
    shared = shared_values(rows)
    machine = replace(machine, accelerators=machine.accelerators or gpus_here())
    machine = machine.updated(**{name: shared.get(name) for name in (*IDENTITY, "accelerators")})
    machine = machine.updated(on_demand_per_hour=shared.get("on_demand_usd_per_hour"))
    machine = machine.updated(**{name: shared.get(name) for name in TRAFFIC})
    if price_per_hour is not None:
        return Billing(price_per_hour, "--price-per-hour", nodes, machine)
    if "usd_per_hour" in shared:
        return Billing(shared["usd_per_hour"], f"catalog {description_of(machine)}", nodes, machine)
    return Billing(None, f"unknown: {why_unknown(prices, rows, machine)}", nodes, machine)


def shared_values(rows: list[PriceRow]) -> dict[str, Any]:
    """The values other than None that all rows share. They hold for this machine, even if its own row is unknown."""
    if not rows:
        return {}
    first, *others = map(asdict, rows)
    return {name: value for name, value in first.items() if value is not None and all(o[name] == value for o in others)}


def why_unknown(prices: list[PriceRow], rows: list[PriceRow], machine: Machine) -> str:
    """The reason why the price of this machine is unknown."""
    if not prices:
        return "neither SKYTRAIN_PRICES nor --price-per-hour is given"
    if not rows:
        return f"{description_of(machine)} is not in SKYTRAIN_PRICES"
    return f"{description_of(machine)} may be any of {len(rows)} rows of SKYTRAIN_PRICES"


def description_of(machine: Machine) -> str:
    """aws/us-east-1/p5.48xlarge/spot, as far as it is known."""
    market = {True: "spot", False: "on-demand", None: None}[machine.spot]
    where = (machine.zone if market == "spot" else None) or machine.region
    parts = (machine.cloud, where, machine.instance, market)
    return "/".join(part for part in parts if part) or "this machine"


def matching_rows(prices: list[PriceRow], machine: Machine) -> list[PriceRow]:
    """The rows that no known fact about this machine excludes."""
    gpus = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE")

    def fits(row: PriceRow) -> bool:
        pairs = [(getattr(row, name), getattr(machine, name)) for name in IDENTITY]
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return False
        return gpus is None or int(gpus) == row.gpus

    return [row for row in prices if fits(row)]


def machine_from_skypilot() -> Machine:
    """This node by SkyPilot's job environment; all fields are None without SkyPilot."""
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


def machine_from_metadata(cloud: str | None) -> Machine:
    """This machine by its metadata service; all fields are None without an answer, or with SKYTRAIN_NOTICE=off."""
    if os.environ.get("SKYTRAIN_NOTICE") == "off":
        return Machine()
    metadata = Metadata(os.environ.get("SKYTRAIN_NOTICE_ENDPOINT") or ENDPOINT)
    for name, source in METADATA.items() if cloud is None else [(cloud, METADATA.get(cloud))]:
        if source is None:
            continue
        for _ in range(TRIES):
            with suppress(Exception):  # a service may answer anything
                here = source(metadata)
                here.probe()
                return replace(here.machine(), cloud=name)
    return Machine()


def gpus_here() -> str | None:
    """The GPUs of this node as SkyPilot writes them ("H100:8"); None without any. Speeds are compared by them.

    A GPU that the plan does not know keeps its own name ("GeForce RTX 4090:1").
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    from pipelines.cloud.throughput import gpu_named  # reads the measured figures

    names = [name for name in listed if name.strip()]
    return f"{gpu_named(names[0])}:{len(names)}" if names else None
