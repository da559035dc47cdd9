"""The price of traffic: who charges for it, what a plan counts, and what stands on the bill."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.artifacts.store import S3Store
from pipelines.artifacts.traffic import GB
from pipelines.cloud import estimates, pricing
from pipelines.cloud import plan as cloud_plans
from pipelines.cloud.catalog import Offer
from pipelines.cloud.egress import Place, place_of, traffic_price, usd_per_gb
from pipelines.cloud.lifetimes import Lived, Market, hours_between, lifetimes, lived
from pipelines.cloud.prices import PriceRow, billing_here, prices_json
from pipelines.cloud.pricing import best_places_first
from pipelines.cloud.tasks import MachineRequest
from pipelines.recipe import load_recipe
from pipelines.tracking.account import StoredHeartbeat, account
from pipelines.tracking.ledger import traffic_seconds
from pipelines.tracking.records import Heartbeat, Machine, Progress
from pipelines.tracking.runs import record
from trainer.store import LocalStore

EAST = Place("aws", "us-east-1")


@pytest.mark.parametrize(
    ("origin", "target", "usd"),
    [
        (EAST, EAST, 0.0),
        (EAST, Place("aws", "us-west-2"), 0.02),
        (EAST, Place("cloudflare"), 0.09),
        (EAST, Place("aws"), None),  # the same region, or another one
        (Place("gcp", "us-central1"), EAST, 0.12),
        (Place("gcp", "us-central1"), Place(), 0.12),
        (Place("lambda", "us-south-1"), EAST, 0.0),
        (Place("cloudflare"), EAST, 0.0),
        (Place("vast"), EAST, None),  # SkyPilot's 0 does not say that it is free
        (Place(), EAST, None),
    ],
)
def test_the_cloud_that_bytes_leave_charges_for_them(origin: Place, target: Place, usd: float | None) -> None:
    assert usd_per_gb(origin, target) == usd
    assert traffic_price(target, origin).received == usd
    assert traffic_price(origin, target).writes == {"aws": 0.005, "cloudflare": 0.0045}.get(target.cloud or "")


def store_at(url: str) -> S3Store:
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    return S3Store("bucket", client=boto3.client("s3", endpoint_url=url, **keys), time_limit_s=1)


def test_the_endpoint_names_the_place_of_a_bucket_shown_with_a_stubbed_answer(tmp_path: Path) -> None:
    assert place_of(store_at("https://account.r2.cloudflarestorage.com")) == Place("cloudflare")
    assert place_of(store_at("https://objects.example.com")) == Place()
    assert place_of(LocalStore(tmp_path)) is None
    aws = store_at("https://s3.us-east-1.amazonaws.com")
    with Stubber(aws._client) as server:
        server.add_response("head_bucket", {"BucketRegion": "eu-west-1"}, {"Bucket": "bucket"})
        assert place_of(aws) == Place("aws", "eu-west-1")
    refused = store_at("https://s3.us-east-1.amazonaws.com")
    with Stubber(refused._client) as server:
        server.add_client_error("head_bucket", "403", http_status_code=403)
        assert place_of(refused) == Place("aws")


def test_traffic_is_a_part_of_the_bill_of_every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    row = PriceRow(8.0, "gcp", "us-central1", instance="a3", spot=True, usd_per_gb_sent=0.12, usd_per_1000_writes=0.005)
    monkeypatch.setenv("SKYTRAIN_PRICES", prices_json([row]))
    monkeypatch.setenv("SKYTRAIN_NOTICE", "off")
    monkeypatch.setenv(
        "SKYPILOT_CLUSTER_INFO", '{"cloud": "GCP", "region": "us-central1", "zone": null, "cluster_name": "c"}'
    )
    billing = billing_here(None)
    assert (billing.machine.usd_per_gb_sent, billing.machine.usd_per_gb_received) == (0.12, None)

    now = time.time()
    beat = Heartbeat("run", "train", 1, "done", now - 3600, now, billing.price_per_hour, machine=billing.machine)
    beat = replace(
        beat,
        phases={"train": 3600.0},
        progress=Progress(bytes_sent=100 * GB, bytes_received=GB, write_requests=200_000),
    )
    read = Heartbeat.from_json(beat.to_json())
    assert read == beat
    bill = account("run", [StoredHeartbeat("train/x", read)])
    assert bill.total.usd == pytest.approx(8 + 12 + 1) and bill.total.hours == pytest.approx(1)
    assert (bill.traffic.usd, bill.traffic.unpriced_bytes) == (pytest.approx(12 + 1), GB)
    for sums in (bill.by_stage, bill.by_phase, bill.by_market):
        assert sum(cost.usd for cost in sums.values()) == pytest.approx(bill.total.usd)
    assert traffic_seconds(GB, beat) == pytest.approx(0.12 / 8 * 3600)
    assert traffic_seconds(GB, replace(beat, price_per_hour=None)) == 0


def offers(cloud: str, node: str, region: str | None = None) -> list[Offer]:
    if node.startswith("cpus"):
        return [Offer(cloud, "us-east-1", None, "small", False, 1.0, 1.0, None, 16)]
    regions = {"aws": {"us-east-1": 20.0, "us-west-2": 19.9}, "gcp": {"us-central1": 18.0}}[cloud]
    return [Offer(cloud, name, None, "big", True, usd, 60.0, node, 192) for name, usd in regions.items()]


def test_a_plan_and_a_launch_weigh_traffic_and_lifetimes_of_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cloud_plans, "offers", offers)
    monkeypatch.setattr(pricing, "offers", offers)
    recipe, clouds = load_recipe("gpt2-1558m"), ("aws", "gcp")

    def planned(place: Place | None) -> cloud_plans.CloudPlan:
        monkeypatch.setattr(estimates, "place_of", lambda store: place)
        return cloud_plans.cloud_plan(recipe, LocalStore(tmp_path), train_nodes=["H100:8"], clouds=clouds)

    assert planned(None).candidates[0].offer.cloud == "gcp"  # the cheapest machine
    plan = planned(EAST)
    by_region = {one.offer.region: one for one in plan.candidates}
    assert plan.candidates[0] is by_region["us-east-1"] and len(by_region) == 3
    traffic = {region: one.estimates["train"].traffic_usd for region, one in by_region.items()}
    assert traffic["us-east-1"] == 0 < 20 < traffic["us-west-2"] < traffic["us-central1"] / 2
    assert any("gcp/us-central1 to the bucket in aws/us-east-1" in note for note in plan.notes)

    whole = [MachineRequest(cloud, True, "H100:8") for cloud in clouds]
    near = MachineRequest("aws/us-east-1", True, "H100:8")

    def order(place: Place | None, known: dict[Market, Lived]) -> list[MachineRequest]:
        work = estimates.Workload(recipe, frozenset({"train"}), 32_000, place=place, lived=known)
        return list(best_places_first(whole, partial(estimates.usd_to_train, work, 1)))

    assert order(EAST, {}) == [near, *whole]
    assert order(None, {}) == whole[::-1]  # by price
    gcp, west = ("gcp", "us-central1", "H100:8"), ("aws", "us-west-2", "H100:8")
    short: dict[Market, Lived] = {gcp: Lived(2.0, 20), west: Lived(30.0, 20)}
    assert order(None, short) == [near, *whole]
    steady: dict[Market, Lived] = {gcp: Lived(500.0, 2)}
    assert order(None, steady) == whole[::-1]
    assert order(EAST, steady) == [whole[1], near, whole[0]]  # a machine that lasts needs few saves over the network


def test_lifetimes_come_from_spot_attempts_that_the_market_took_away() -> None:
    east = Machine("aws", "us-east-1", spot=True, accelerators="H100:8")

    def beat(number: int, state: str, where: Machine = east) -> StoredHeartbeat:
        one = Heartbeat("run", "train", number, state, 1e4 * number, 1e4 * number + 3600, 1.0, nodes=2, machine=where)
        return StoredHeartbeat("train/x", one)

    beats = [
        beat(1, "interrupted"),
        beat(2, "running"),  # superseded, so lost
        beat(3, "stopped"),
        beat(4, "interrupted", replace(east, spot=False)),
        beat(5, "interrupted", replace(east, region="us-west-2")),
        beat(6, "done"),
    ]
    found = lived(account("run", beats).attempts)
    assert found == {
        ("aws", "us-east-1", "H100:8"): Lived(8.0, 2),
        ("aws", "us-west-2", "H100:8"): Lived(2.0, 1),
    }
    (offer,) = [one for one in offers("aws", "H100:8") if one.region == "us-east-1"]
    assert hours_between(offer, 1, {}) == 2 and hours_between(offer, 2, found) == pytest.approx((2 + 8) / 3 / 2)
    assert hours_between(replace(offer, spot=False), 1, found) > 24


def test_lifetimes_are_read_from_the_launched_runs_of_a_store(tmp_path: Path) -> None:
    store, plan = LocalStore(tmp_path), ArtifactPlan("train", "tiny", {"stage": "train"})
    tokens = ArtifactPlan("tokenize", "tiny", {"stage": "tokenize"})
    spot = Machine("aws", "us-east-1", spot=True, accelerators="H100:8")
    for run in ("launched", "here", "damaged"):
        record(store, run, load_recipe("smoke"), {"tokenize": tokens, "train": plan}, "train")
    for number, run in enumerate(("launched", "here"), 1):
        beat = Heartbeat(run, "train", number, "interrupted", 1e9, 1e9 + 3600, 1.0, machine=spot)
        store.put(f"{plan.prefix}/attempts/{number:04d}/heartbeat.json", beat.to_json())
    store.put("runs/damaged.json", b"{")
    for run in ("launched", "damaged", "gone"):
        store.put(f"launches/{run}.json", b"")
    assert lifetimes(store) == {("aws", "us-east-1", "H100:8"): Lived(1.0, 1)}


def test_saves_are_rarer_where_their_traffic_costs(tmp_path: Path) -> None:
    recipe, (offer,) = load_recipe("gpt2-1558m"), offers("gcp", "H100:8")
    work = estimates.Workload(recipe, frozenset({"train"}), recipe.train.max_steps)
    places = (None, Place("gcp", "us-central1"), EAST)
    none, near, far = (estimates.train_work(replace(work, place=place), offer, 1).segment for place in places)
    assert none == near < far / 10
