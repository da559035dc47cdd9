"""`plan --cloud`: hours and dollars by one formula that agrees with simulation, and the choice of a machine."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import committed
from sky_catalog import ROWS

from pipelines.extras.bench.throughput import speed_on
from pipelines.recipe.loader import load_recipe, shipped
from pipelines.run.stage import STAGES, plans_of, run_name
from pipelines.store.records import Heartbeat, Machine, Progress
from pipelines.user.cloud import catalog
from pipelines.user.cloud.catalog import CloudRegion, MachineRequest, is_cluster, with_traffic
from pipelines.user.cloud.planner import (
    Candidate,
    CloudPlan,
    Limits,
    Workload,
    billed_per_useful_hour,
    cloud_plan,
    estimate_stage,
    evaluate_hours,
    priced_job,
    workload,
)
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import managed_job
from pipelines.user.show.cloud_plan import print_cloud_plan
from trainer.base.store import LocalStore
from trainer.config.errors import UserError

SKY = Path(__file__).resolve().parents[3] / "sky"
SMALL, LARGE = load_recipe("gpt2-124m"), load_recipe("gpt2-1558m")


@pytest.mark.parametrize(
    ("work", "segment", "stall", "start", "between"),
    [(6.0, 0.5, 0.02, 0.1, 2.0), (3.0, 0.01, 0.0001, 0.05, 0.5), (1.0, 1.0, 0.0, 0.05, 2.0)],
)
def test_the_expected_time_is_the_mean_of_many_simulations(
    work: float, segment: float, stall: float, start: float, between: float
) -> None:
    chance, billed, times = random.Random(1), 0.0, 3000
    for _ in range(times):
        left, lasts, up = work, chance.expovariate(1 / between), start
        while left > 1e-9:
            needs = min(segment, left) + stall
            if up + needs <= lasts:
                up, billed, left = up + needs, billed + needs, left - segment
                continue
            billed += lasts - up  # lost: nodes start until one lives long enough to work
            while (lasts := chance.expovariate(1 / between)) <= start:
                billed += lasts
            up, billed = start, billed + start
    assert work * billed_per_useful_hour(between, segment, start, stall) == pytest.approx(billed / times, rel=0.03)
    assert billed_per_useful_hour(1e7, segment, start, stall) == pytest.approx(1 + stall / segment)


# All of it, with stand-ins for the catalog


def stand_in(wanted: MachineRequest, nodes: int) -> dict[MachineRequest, Machine]:
    """The machines of the tests' catalog: spot at its region's lowest price."""
    if wanted.cloud == "dear":
        raise UserError("dear: its price list cannot be fetched")
    if is_cluster(wanted.infra):
        return {} if wanted.use_spot else {wanted: Machine(wanted.cloud, accelerators=wanted.accelerators)}
    found: dict[MachineRequest, Machine] = {}
    for row in ROWS:
        cpus = float((wanted.cpus or "0").rstrip("+"))
        fits = row.gpus == wanted.accelerators if not cpus else (not row.gpus and row.vcpus >= cpus)
        usd = row.spot_usd if wanted.use_spot else row.usd
        if fits and row.cloud == wanted.cloud and usd is not None:
            one = Machine(row.cloud, row.region, None, row.instance, wanted.use_spot, row.gpus or None, row.usd)
            pinned = replace(wanted, infra=f"{row.cloud}/{row.region}", instance_type=row.instance)
            if pinned not in found or usd < (found[pinned].usd_per_hour or 0.0):
                found[pinned] = replace(one, usd_per_hour=usd, vcpus=row.vcpus)
    return found


@pytest.fixture(autouse=True)
def market(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "offers", stand_in)


def planned(tmp_path: Path, recipe: str = "gpt2-124m", **options: Any) -> CloudPlan:
    return cloud_plan(load_recipe(recipe), LocalStore(tmp_path), **options)


# Hours and dollars of the cheapest candidate, with the tests' catalog.
EXPECTED = {
    "smoke": (0.165, 0.025),
    "laptop": (0.165, 0.025),
    "smoke-chat": (0.165, 0.025),  # without tune
    "smoke-modern": (0.165, 0.025),
    "gpt2-124m": (1.05, 13.17),
    "gpt2-124m-chat": (0.27, 0.04),  # without tune
    "llama-124m": (1.07, 13.55),
    "modern-124m": (0.46, 3.19),
    "gpt3-125m": (26.55, 428.88),
    "gpt2-350m": (7.19, 109.94),
    "gpt2-774m": (60.82, 1093.60),
    "modern-d24": (3.27, 52.79),
    "gpt2-1558m": (26.31, 475.37),
    "llama-1b": (14.06, 239.42),
    "llama-8b": (738.57, 14320.81),
    "gpt3-6.7b": (919.63, 17853.86),
    "gpt3-13b": (1667.21, 51897.10),
    "gpt3-175b": (119_060, 30_470_000),  # over TCP
}


def test_the_plans_of_the_shipped_recipes_stay_as_they_are(tmp_path: Path) -> None:
    assert set(EXPECTED) == set(shipped())
    for name, (hours, usd) in EXPECTED.items():
        first = planned(tmp_path, name).candidates[0]
        assert (first.hours, first.usd) == (pytest.approx(hours, rel=0.1), pytest.approx(usd, rel=0.1)), name


def test_a_plan_takes_the_fewest_nodes_and_the_engine_that_the_memory_allows(tmp_path: Path) -> None:
    for name, nodes, memory in (
        ("gpt2-1558m", 1, "fused, about 18 of 80 GB"),
        ("llama-8b", 1, "sharded, about 49 of 80 GB"),
        ("gpt3-175b", 8, "sharded, about 72 of 80 GB"),
    ):
        plan = planned(tmp_path, name, train_nodes=("H100:8",))
        first = plan.candidates[0]
        assert first.stages["train"].nodes == nodes and (first.memory or "").startswith(memory)
    assert plan.notes == ["evaluate is left out: no GPU here holds all weights in float32"]
    with pytest.raises(UserError, match=r"take about \d+ GB on each GPU \(engine sharded\), and H100 has 80; use more"):
        planned(tmp_path, name, train_nodes=("H100:8",), nodes=4)


def test_every_place_is_a_candidate_and_the_cheapest_comes_first(tmp_path: Path) -> None:
    plan = planned(tmp_path, places=("aws", "dear"), train_nodes=("H100:8",))
    places = [(c.machine.region, c.machine.spot, c.machine.usd_per_hour) for c in plan.candidates if c.machine]
    assert places[0] == ("us-east-1", True, 20.0) and places[-1] == ("us-west-2", False, 60.0)
    assert plan.notes == ["dear: its price list cannot be fetched"]
    spot, on_demand = plan.candidates[0], plan.candidates[-1]
    assert spot.stages["train"].preemptions > 0.1 > 100 * on_demand.stages["train"].preemptions > 0
    assert spot.hours > on_demand.hours
    for one in plan.candidates:
        assert list(one.stages) == ["tokenize", "train", "evaluate", "export"]
    export = spot.stages["export"]  # on evaluate's machine, which is up
    assert export.machine == spot.stages["evaluate"].machine and export.hours < 0.05
    for stage, estimate in list(spot.stages.items())[:-1]:  # on spot as its task may be
        task = yaml.safe_load((SKY / f"{stage}.yaml").read_text())
        assert estimate.machine and estimate.machine.spot == any(m["use_spot"] for m in task["resources"]["any_of"]), (
            stage
        )
    (note,) = planned(tmp_path, places=("aws", "runpod"), train_nodes=("H100:8",)).notes
    assert note.startswith("RunPod's H100 is the PCIe card, ") and note.endswith("H100-SXM:N")
    with pytest.raises(UserError, match="dear: its price list"):
        planned(tmp_path, places=("dear",))
    with pytest.raises(UserError, match="no machine for train: aws sells no B200:8"):
        planned(tmp_path, places=("aws",), train_nodes=("B200:8",))


def test_the_cheapest_within_the_limits_is_chosen_or_the_nearest_named(tmp_path: Path) -> None:
    def chosen(*limits: float) -> Candidate | str:
        plan = planned(tmp_path, limits=Limits(*limits), train_nodes=["H100:8"])
        return plan.notes[-1] if plan.chosen is None else plan.candidates[plan.chosen]

    spot = chosen(50)
    assert isinstance(spot, Candidate) and spot.machine and spot.machine.spot
    sooner = chosen(0.99 * spot.hours)
    assert isinstance(sooner, Candidate) and sooner.machine and sooner.machine.cloud == "lambda"
    assert sooner.usd > spot.usd and chosen(0.99 * spot.hours, sooner.usd) == sooner
    assert str(chosen(0.3, 5)).startswith(
        "no machine is within the limits (0.30 h until the deadline, 5.00 dollars of "
    )


def test_the_rest_of_a_run_is_planned_at_its_own_speed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"places": ("aws",), "train_nodes": ("H100:8",)}
    whole = planned(tmp_path, **options).candidates[0]
    store, plans = LocalStore(tmp_path), plans_of(SMALL)
    train = plans["train"].prefix
    speed, machine = Progress(metrics={"perf/tokens_per_second": 2e6}), Machine(accelerators="H100:8")
    beat = Heartbeat(run_name(plans), "train", 1, "interrupted", 1e9, 1e9 + 60, 1.0, progress=speed, machine=machine)
    store.put(f"{train}/attempts/0001/heartbeat.json", beat.to_json())
    committed(store, SMALL.train.max_steps // 2, prefix=train)
    rest = planned(tmp_path, **options).candidates[0]
    assert rest.speed and (rest.speed.kind, rest.speed.tokens_per_second) == ("measured", 2e6)
    assert planned(tmp_path, nodes=2, **options).candidates[0].speed == speed_on(SMALL, "H100:8", 2)
    slower = 2e6 / speed_on(SMALL, "H100:8").tokens_per_second
    assert rest.stages["train"].hours == pytest.approx(whole.stages["train"].hours / 2 / slower, rel=0.15)


def test_gpus_that_cannot_share_a_step_are_no_candidates_and_a_small_training_gets_a_small_gpu(tmp_path: Path) -> None:
    plan = planned(tmp_path, "smoke", places=("lambda",), train_nodes=("H100:8", "H100:1"), nodes=3)
    assert {c.machine.accelerators for c in plan.candidates if c.machine} == {"H100:1"}
    assert "is 16 sequence(s) of 128 tokens, too few for 24 processes" in plan.notes[0]
    with pytest.raises(UserError, match="3 x H100:8: train.batch_tokens"):
        planned(tmp_path, "smoke", places=("lambda",), train_nodes=("H100:8",), nodes=3)
    plan = planned(tmp_path, "smoke", places=("aws",))
    assert {c.machine.accelerators for c in plan.candidates if c.machine} == {"L4:1"}
    assert list(plan.candidates[0].stages) == ["train", "evaluate", "export"]  # the text is on this machine


def test_the_prices_of_a_task_with_many_places_fit_one_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everywhere(wanted: MachineRequest, nodes: int) -> dict[MachineRequest, Machine]:
        regions = [f"northamerica-northeast{i}" for i in range(10)]
        one = Machine(wanted.cloud, None, "", "gpu-h100-sxm_8gpu-128vcpu-1600gb", True, "H100:8", 31.92)
        zones = {f"nane{i}-az1": 19.123456 + i for i in range(4)}
        found = [replace(one, region=region, usd_by_zone=zones) for region in regions]
        return {replace(wanted, infra=f"{wanted.cloud}/{m.region}"): replace(m, usd_per_hour=19.123456) for m in found}

    monkeypatch.setattr(catalog, "offers", everywhere)
    store, request = LocalStore(tmp_path), LaunchRequest("a-12345678", "s3://bucket")
    work = replace(workload(SMALL, store, plans_of(SMALL), [*STAGES]), place=CloudRegion("aws", "us-east-1"))
    job, _ = priced_job(managed_job(request, STAGES), request, Limits(), work, lambda _: None)
    assert max(len(task.envs["SKYTRAIN_PRICES"] or "") for task in job.tasks) < 16_384
    assert max(len(task.machines) for task in job.tasks) == 40


def test_traffic_and_rarer_saves_are_part_of_the_plan(tmp_path: Path) -> None:
    gcp = Machine("gcp", "us-central1", spot=True, accelerators="H100:8", usd_per_hour=18.0)
    places = (None, CloudRegion("gcp", "us-central1"), CloudRegion("aws", "us-east-1"))
    steps = LARGE.train.max_steps
    work = [Workload(LARGE, ["train"], steps, place=place) for place in places]
    speed = speed_on(LARGE, "H100:8")
    none, near, far = (estimate_stage("train", one, with_traffic(gcp, one.place), 1, speed=speed) for one in work)
    assert (none.hours, none.usd) == (near.hours, near.usd) and near.traffic_usd == 0
    checkpoint_usd = 18.7 * 0.12
    assert 10 < far.traffic_usd < 0.1 * far.hours * 3600 / 38 * checkpoint_usd  # saves every 38 s would cost this much
    assert far.usd == pytest.approx(near.usd + far.traffic_usd, rel=0.2)


def test_an_evaluation_reads_no_more_than_the_text_that_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a word " * 3000)
    own = [f"tokens.source={tmp_path}/*.txt", "tokens.val_tokens=3772", "tokens.val_shards=null"]
    recipe = load_recipe("smoke", [*own, "evaluate.val_tokens=10_485_760", "tokens.max_tokens=null"])
    work = workload(recipe, LocalStore(tmp_path / "store"), plans_of(recipe), [*STAGES])
    machine = Machine(usd_per_hour=1.0)
    assert evaluate_hours(work, machine) < 0.001 < evaluate_hours(replace(work, held_out=sys.maxsize), machine)


def test_the_plan_fits_the_terminal_and_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = planned(tmp_path, "gpt2-1558m", limits=Limits(usd=5000))
    print_cloud_plan(plan)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    shown, first = " ".join(output.split()), plan.candidates[0]
    assert "~" in shown and "tokens/s assumed: " in shown and "MFU, from 1558M on H200:1" in shown
    assert f"{first.hours:.2f} {first.usd:,.2f}" in shown and "assumed: a spot node lasts 2 h" in shown
    assert "chosen: aws/us-east-1/p5.48xlarge/spot" in shown
    fast = planned(tmp_path, "gpt3-175b", network=3200)
    assert fast.candidates[0].hours < EXPECTED["gpt3-175b"][0] / 5 and "as far as 3200 Gbit/s" in fast.assumed[-1]
    print_cloud_plan(planned(tmp_path, places=("slurm/here",)))
    shown = " ".join(capsys.readouterr().out.split())
    assert "slurm H100:8 ? " in shown and " ? slurm/H100:1" in shown
    (unknown,) = planned(tmp_path, places=("slurm/here",), train_nodes=["RTX4090:1"]).to_json()["candidates"]
    assert (unknown["hours"], unknown["usd"], unknown["speed"]) == (None, None, None)  # it can be launched all the same
