"""The price of this machine inside a job.

`launch` gives a job the machines that it may get, with their prices: SKYTRAIN_PRICES, a JSON list of `Machine`s. Where
the job starts or recovers, `billing_here` finds the one that it got. A field that a row leaves out fits every machine.
A price that it can't find is unknown, and never counts as 0.
"""

import json
import math
import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

from pipelines.job.notice import SOURCES, Metadata
from pipelines.store.records import Billing, Machine
from trainer.base.record import DamagedRecord, NewerRecord, typed
from trainer.config.errors import UserError

TRIES = 3  # the cost of a whole attempt depends on the answer


def price_of(machine: Machine) -> float:
    """Dollars an hour of one node; infinite if it is unknown."""
    return math.inf if machine.usd_per_hour is None else machine.usd_per_hour


def prices_json(machines: Iterable[Machine]) -> str:
    """The value of SKYTRAIN_PRICES; no machine twice."""
    return json.dumps([machine.to_json() for machine in dict.fromkeys(machines)], separators=(",", ":"))


def prices_from_environment() -> list[Machine]:
    """The machines of SKYTRAIN_PRICES; none if it is not set. UserError for an invalid value."""
    try:
        rows = typed(list[Machine], json.loads(os.environ.get("SKYTRAIN_PRICES") or "[]"), "SKYTRAIN_PRICES")
    except (ValueError, DamagedRecord, NewerRecord) as error:
        raise UserError("SKYTRAIN_PRICES: not a JSON list of machines as `skytrain launch` writes it") from error
    if not all(0 <= price_of(row) < float("inf") for row in rows):
        raise UserError("SKYTRAIN_PRICES: a machine has no usd_per_hour; `skytrain launch` writes it")
    return rows


def billing_here(price_per_hour: float | None) -> Billing:
    """The price of this machine: from `--price-per-hour`, from SKYTRAIN_PRICES, or 0 outside of every cloud.

    Where several of the rows or their zones may be this machine, the dearest of them.
    """
    prices, machine = prices_from_environment(), machine_from_skypilot()
    nodes = int(os.environ.get("SKYPILOT_NUM_NODES") or 1)
    if machine == Machine() and not prices:
        price, source = (0.0, "own machine") if price_per_hour is None else (price_per_hour, "--price-per-hour")
        return Billing(price, source, nodes, Machine(accelerators=gpus_here()))
    if len(possible(prices, machine)) != 1:
        machine = machine.updated(**machine_from_metadata(machine.cloud).to_json())
    found = possible(prices, machine)
    usd, row = max(found, key=itemgetter(0), default=(None, Machine()))
    machine = replace(row, accelerators=row.accelerators or gpus_here(), usd_per_hour=usd, usd_by_zone=None).updated(
        **machine.to_json()
    )
    if price_per_hour is not None:
        return Billing(price_per_hour, "--price-per-hour", nodes, machine)
    name = description_of(machine)
    if usd is not None:
        several = f", the dearest of {len(found)} that it may be" if len(found) > 1 else ""
        return Billing(usd, f"catalog {name}{several}", nodes, machine)
    why = f"{name} is not in SKYTRAIN_PRICES" if prices else "neither SKYTRAIN_PRICES nor --price-per-hour is given"
    return Billing(None, f"unknown: {why}", nodes, machine)


def possible(prices: list[Machine], machine: Machine) -> list[tuple[float, Machine]]:
    """The rows that no known fact about this machine excludes, each with its dollars an hour in this machine's zone, or
    with each price that it has in a zone."""
    gpus = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE")

    def fits(row: Machine) -> bool:
        pairs = ((getattr(row, name), getattr(machine, name)) for name in ("cloud", "region", "instance", "spot"))
        count = (row.accelerators or ":0").partition(":")[2]
        return gpus in (None, count) and all(None in pair or pair[0] == pair[1] for pair in pairs)

    zone = machine.zone or ""
    found = [(row, row.usd_by_zone or {zone: price_of(row)}) for row in prices if fits(row)]
    return [(usd, row) for row, zones in found for usd in ({zones[zone]} if zone in zones else {*zones.values()})]


def description_of(machine: Machine) -> str:
    """aws/us-east-1/p5.48xlarge/spot, as far as it is known; without a type slurm/local/H100:8."""
    market = {True: "spot", False: "on-demand", None: None}[machine.spot]
    return (
        "/".join(filter(None, (machine.cloud, machine.region, machine.instance or machine.accelerators, market)))
        or "this machine"
    )


def machine_from_skypilot() -> Machine:
    """This node by SkyPilot's job environment; all fields are None without SkyPilot."""
    text = os.environ.get("SKYPILOT_CLUSTER_INFO")
    info = json.loads(text) if text else {"cloud": ""}
    cloud, cluster = str(info["cloud"]).lower() or None, info.get("cluster_name")
    return Machine(cloud, info.get("region"), info.get("zone"), cluster=cluster)


def machine_from_metadata(cloud: str | None) -> Machine:
    """This machine by its metadata service; all fields are None without an answer, or with SKYTRAIN_NOTICE=off."""
    if os.environ.get("SKYTRAIN_NOTICE") == "off":
        return Machine()
    metadata = Metadata()
    for source in SOURCES.values():
        for _ in range(TRIES if cloud in (None, source.cloud) else 0):
            with suppress(Exception):  # a service may answer anything
                here = source(metadata)
                here.probe()
                return replace(here.machine(), cloud=source.cloud)
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
    from pipelines.extras.bench.gpus import gpu_named

    names = [name for name in listed if name.strip()]
    return f"{gpu_named(names[0])}:{len(names)}" if names else None
