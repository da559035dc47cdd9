"""`plan --cloud`: a closed form that agrees with simulation, and the choice of a machine."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sky_catalog import sky_environment, write_catalog

from pipelines.cloud import plan as cloud_plans
from pipelines.cloud import pricing
from pipelines.cloud.catalog import Offer
from pipelines.cloud.estimates import (
    StageEstimate,
    StageWork,
    Workload,
    evaluate_hours,
    expected_time,
    measurements_of_run,
    speed_of,
    tokens_of,
    training_tokens,
)
from pipelines.cloud.plan import Candidate, Limits, choose, parse_hours
from pipelines.cloud.request import LaunchRequest
from pipelines.cloud.start_up import WAIT_SECONDS
from pipelines.cloud.tasks import managed_job
from pipelines.cloud.throughput import Throughput, speed_on
from pipelines.recipe import load_recipe
from pipelines.show.cloud_plan import print_cloud_plan
from pipelines.stage import plans_of, run_name
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing, Machine
from pipelines.weight_sources import relative_size
from trainer.commits import Commit, TrainState
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES, RuntimeConfig
from trainer.errors import UserError
from trainer.store import LocalStore

ROOT = Path(__file__).resolve().parents[2]
SKY = ROOT / "sky"
SMALL, LARGE = load_recipe("gpt2-124m"), load_recipe("gpt2-1558m")
COMPILED = RuntimeConfig(micro_batch_size=64, engine="compiled")


def test_the_plan_counts_every_benchmark_the_harness_and_each_baseline_by_its_size() -> None:
    core, often = "evaluate.core=hf://datasets/a/core", "evaluate.every=1000"
    offer = Offer("aws", "here", None, "p5", False, 60.0, 60.0, "H100:8", 192)
    plain, scored = SMALL, load_recipe("gpt2-124m", [core])
    hours = [evaluate_hours(recipe, offer) for recipe in (plain, scored)]
    assert hours[1] / hours[0] == pytest.approx(1 + 55e6 / (10_485_760 + 4_016_800))
    compared = load_recipe("gpt2-124m", [core, f"evaluate.baselines=[a/b@{'0' * 40}, c/d@{'1' * 40}]"])
    assert evaluate_hours(compared, offer) == pytest.approx(3 * hours[1])
    sizes = [relative_size(f"openai-community/{name}@{'0' * 40}", LARGE) for name in ("gpt2-xl", "gpt2")]
    assert sizes[0] == pytest.approx(1, rel=0.001) and 0.08 < sizes[1] < 0.1  # of the size in its name, not ours
    large = load_recipe("gpt2-1558m", [f"evaluate.baselines=[openai-community/gpt2@{'0' * 40}]"])
    assert evaluate_hours(large, offer) == pytest.approx((1 + sizes[1]) * evaluate_hours(LARGE, offer))
    harness = load_recipe("gpt2-124m", ["evaluate.lm_eval=[hellaswag, a_task_of_mine]"])  # on one of the 8 GPUs
    assert evaluate_hours(harness, offer) / hours[0] == pytest.approx(1 + 8 * 4.3e6 / (10_485_760 + 4_016_800))
    steps, while_training = SMALL.train.max_steps, load_recipe("gpt2-124m", [core, often])
    more = [training_tokens(Workload(recipe, frozenset(), steps)) for recipe in (plain, while_training)]
    assert more[1] - more[0] == pytest.approx(-(-steps // 1000) * (55e6 + 4_016_800) / 3)


def test_the_plan_of_a_muon_run_says_that_its_speed_is_that_of_adamw() -> None:
    offer = Offer("aws", "here", None, "p5", False, 60.0, 60.0, "H100:8", 192)
    adamw, muon = (
        speed_of(Workload(load_recipe("gpt2-124m", [f"train.optimizer={name}"]), frozenset(), 1), offer, 1)
        for name in ("adamw", "muon")
    )
    assert (muon.tokens_per_second, muon.kind) == (adamw.tokens_per_second, "assumed")
    assert muon.source == f"{adamw.source}, with AdamW; Muon was measured on no GPU"


# --- the closed form


@pytest.mark.parametrize(
    ("job", "hours_between"),
    [
        (StageWork(work=6.0, segment=0.5, stall=0.02, start=0.1), 2.0),
        (StageWork(work=3.0, segment=0.01, stall=0.0001, start=0.05), 0.5),
        (StageWork(work=1.0, segment=1.0, start=0.05), 2.0),  # nothing is committed in between
    ],
)
def test_the_expected_time_and_cost_are_the_mean_of_many_simulations(job: StageWork, hours_between: float) -> None:
    chance = random.Random(1)
    billed = died = 0.0
    times = 3000
    for _ in range(times):
        left, lasts = job.work, chance.expovariate(1 / hours_between)
        up = job.start  # of this node's life
        billed += job.start
        while left > 1e-9:
            needs = min(job.segment, left) + job.stall
            if up + needs <= lasts:
                up, billed, left = up + needs, billed + needs, left - job.segment
                continue
            # It dies: the unbilled rest of its life is removed, and nodes start until one lives long enough to work.
            billed, died = billed + lasts - up, died + 1
            while (lasts := chance.expovariate(1 / hours_between)) <= job.start:
                billed, died = billed + lasts, died + 1
            up, billed = job.start, billed + job.start
    expected = expected_time(job, hours_between, wait=0.05)
    # The first start is taken to succeed, in the formula and here.
    assert expected.billed_hours == pytest.approx(billed / times, rel=0.03)
    assert expected.preemptions == pytest.approx(died / times, rel=0.06)
    assert expected.hours == pytest.approx(expected.billed_hours + 0.05 * (1 + expected.preemptions))


def test_without_preemptions_a_course_is_start_work_and_stalls() -> None:
    sure = expected_time(StageWork(work=10.0, segment=0.5, stall=0.01, start=0.1), 1e7, wait=0.05)
    assert sure.billed_hours == pytest.approx(0.1 + 10 + 20 * 0.01) and sure.preemptions < 1e-5
    assert sure.hours == pytest.approx(sure.billed_hours + 0.05)
    assert expected_time(StageWork(0.0, 0.0, start=0.1), 2.0).billed_hours == 0.1


@given(
    st.floats(0.1, 100), st.floats(0.001, 1), st.floats(0, 0.1), st.floats(0.01, 1), st.floats(0.5, 50), st.floats(1, 5)
)
def test_more_preemptions_never_make_a_course_shorter(
    work: float, segment: float, stall: float, start: float, hours: float, times: float
) -> None:
    job = StageWork(work, min(work, segment), stall, start)
    often, seldom, never = expected_time(job, hours), expected_time(job, hours * times), expected_time(job, 1e9)
    assert often.billed_hours >= seldom.billed_hours * (1 - 1e-9) >= never.billed_hours * (1 - 2e-9)
    assert often.preemptions >= seldom.preemptions * (1 - 1e-9)


def test_the_number_of_tokens_to_make_comes_from_the_recipe() -> None:
    assert (tokens_of(SMALL), tokens_of(LARGE)) == (10_000_000_000, 100_000_000_000)
    assert tokens_of(load_recipe("smoke")) == 8_000_000
    own = load_recipe("gpt2-124m", ["tokens.subset=default"])
    assert tokens_of(own) == own.train_tokens + 100_000_000


# --- the choice


def candidate(cloud: str, hours: float, usd: float) -> Candidate:
    offer = Offer(cloud, "here", None, f"{cloud}-8", False, usd / hours, usd / hours, "H100:8", 192)
    return Candidate(
        offer, 1, Throughput(1e6, "estimated", "a guess"), {"train": StageEstimate(offer, hours, usd)}, hours, usd
    )


THREE = [candidate("slow", 40, 100), candidate("middle", 20, 150), candidate("quick", 10, 300)]


@pytest.mark.parametrize(
    ("limits", "chosen", "marks"),
    [
        (Limits(), 0, ["cheapest", "", "fastest"]),
        (Limits(hours=20), 1, ["cheapest", "cheapest within 20 h", "fastest"]),
        (Limits(hours=50), 0, ["cheapest, cheapest within 50 h", "", "fastest"]),
        (Limits(usd=200), 0, ["cheapest, cheapest within $200", "fastest within $200", "fastest"]),
        (Limits(20, 150), 1, ["cheapest", "cheapest within 20 h and $150, fastest within 20 h and $150", "fastest"]),
    ],
)
def test_the_cheapest_that_meets_the_limits_is_chosen(limits: Limits, chosen: int, marks: list[str]) -> None:
    plan = choose(THREE, limits, [])
    assert plan.chosen == chosen
    assert [", ".join(c.marks) for c in plan.candidates] == marks


@pytest.mark.parametrize(
    ("limits", "nearest"),
    [
        (Limits(hours=9), "within 9 h; the nearest is quick quick-8 on demand: 10 h, $300.00"),
        (Limits(usd=90), "within $90; the nearest is slow slow-8 on demand: 40 h, $100.00"),
        (Limits(16, 120), "within 16 h and $120; the nearest is middle middle-8 on demand: 20 h, $150.00"),
    ],
)
def test_where_nothing_meets_the_limits_the_nearest_is_named(limits: Limits, nearest: str) -> None:
    plan = choose(THREE, limits, [])
    assert plan.chosen is None
    assert plan.notes == (f"no machine is {nearest}",)


@pytest.mark.parametrize(("text", "hours"), [("36h", 36), ("2d", 48), ("90m", 1.5), ("1d12h", 36), ("0.5h", 0.5)])
def test_a_deadline_can_be_a_duration_or_a_date(text: str, hours: float) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["", "36", "h", "-2h", "0h", "2w", "12h1d", "36 h"])
def test_an_invalid_deadline_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match="write 36h, 2d, 90m or 1d12h"):
        parse_hours(text)


def test_limits_are_shown_to_the_minute_and_the_cent() -> None:
    assert str(Limits(hours=35.9992)) == "36 h" and str(Limits(1.5, 200)) == "1 h 30 min and $200"
    assert str(Limits(hours=0.75, usd=12.3456)) == "45 min and $12.35"


# --- all of it, with stand-ins for the catalog


def stand_in(cloud: str, node: str) -> list[Offer]:
    if cloud == "dear":
        raise UserError("dear: there is no price list of it here")
    name, _, count = node.partition(",")[0].partition(":")
    if name == "cpus":
        whole = Offer(cloud, "r", None, f"c{count}", False, 0.1 * int(count), 0.1 * int(count), None, float(count))
        return [whole, replace(whole, spot=True, usd_per_hour=0.3 * whole.usd_per_hour)]
    if name in ("H100", "L4"):
        whole = Offer(cloud, "r", None, f"{name}x{count}", False, 4.0 * int(count), 4.0 * int(count), node, 24)
        zones = [("r1", 0.7), ("r2", 0.4)]
        return [
            whole,
            *(Offer(cloud, "r", z, whole.instance, True, s * 4 * int(count), 4.0, node, 24) for z, s in zones),
        ]
    return []


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_plans, "offers", stand_in)


def planned(tmp_path: Path, recipe: str = "gpt2-124m", **options: Any) -> cloud_plans.CloudPlan:
    return cloud_plans.cloud_plan(load_recipe(recipe), LocalStore(tmp_path), **options)


def test_with_a_stand_in_catalog_a_machine_is_shown_once_per_market_at_its_cheapest_region(
    market, tmp_path: Path
) -> None:
    plan = planned(tmp_path, clouds=("a", "dear"), train_nodes=("H100:8",))
    assert [(c.offer.zone, c.offer.usd_per_hour) for c in plan.candidates] == [("r2", 12.8), (None, 32.0)]
    assert plan.notes == ("dear: there is no price list of it here",)
    spot, whole = plan.candidates
    assert spot.estimates["train"].preemptions > 0.1 > 100 * whole.estimates["train"].preemptions > 0
    assert spot.hours > whole.hours
    for one in plan.candidates:
        assert list(one.estimates) == ["tokenize", "train", "evaluate", "export"]
        assert one.usd == pytest.approx(sum(estimate.usd for estimate in one.estimates.values()))
    with pytest.raises(UserError, match="dear: there is no price list"):
        planned(tmp_path, clouds=("dear",))


def test_with_a_stand_in_catalog_the_rest_of_a_run_is_planned_at_its_own_speed(market, tmp_path: Path) -> None:
    options: dict[str, Any] = {"clouds": ("a",), "train_nodes": ("H100:8", "H100:4")}
    whole = planned(tmp_path, **options).candidates
    store, plans = LocalStore(tmp_path), plans_of(SMALL)
    train = plans["train"].prefix
    claim(store, train, run_name(plans), "train", 1, Billing(1.0, machine=Machine(accelerators="H100:8")))
    rows = [{"step": i, "perf/tokens_per_second": 1e5 if i < 3 else 2e6 + i} for i in range(1, 8)]  # two compile
    store.put(f"{train}/metrics/step-00000007-a0001.jsonl", "\n".join(map(json.dumps, rows)).encode())
    halfway = Commit(9432, 1, 8, 0.0, TrainState(step=SMALL.train.max_steps // 2), "", ())
    store.put(f"{train}/checkpoints/step-00009432-a0001/COMMIT.json", halfway.encode())
    rest = planned(tmp_path, **options).candidates
    for before, now in zip(sorted(whole, key=by_machine), sorted(rest, key=by_machine), strict=True):
        assert now.speed.kind == ("measured" if now.offer.accelerators == "H100:8" else "estimated")
        slower = 2_000_005 / speed_on(SMALL.model, SMALL.runtime, "H100:8").tokens_per_second
        assert now.speed.tokens_per_second == pytest.approx(slower * before.speed.tokens_per_second)
        assert now.estimates["train"].hours == pytest.approx(before.estimates["train"].hours / 2 / slower, rel=0.15)


class Counting(LocalStore):
    """Counts the files of metrics that are read."""

    read = 0

    def get(self, key: str) -> bytes | None:
        self.read += "/metrics/" in key
        return super().get(key)


def test_a_plan_of_a_long_run_reads_its_newest_speeds_only(tmp_path: Path) -> None:
    store, plans = Counting(tmp_path), plans_of(SMALL)
    train = plans["train"].prefix
    claim(store, train, run_name(plans), "train", 1, Billing(1.0, machine=Machine(accelerators="H100:8")))
    for step in range(1, 200):
        row = {"step": step, "perf/tokens_per_second": 1e6 if step < 150 else 2e6}
        store.put(f"{train}/metrics/step-{step:08d}-a0001.jsonl", json.dumps(row).encode())
    store.put(f"{train}/metrics/notes.txt", b"not ours")
    (own,) = measurements_of_run(SMALL, store, train)
    assert own.tokens_per_second == 2e6 and store.read == 10


def by_machine(candidate: Candidate) -> tuple[str, bool]:
    return candidate.offer.instance, candidate.offer.spot


def test_with_a_stand_in_catalog_two_nodes_train_faster_and_both_are_paid(market, tmp_path: Path) -> None:
    one, two = (
        planned(tmp_path, "gpt2-1558m", clouds=("a",), train_nodes=("H100:8",), nodes=n).candidates[1] for n in (1, 2)
    )
    assert 0.5 * one.hours < two.hours < 0.6 * one.hours
    assert one.usd < two.usd < 1.1 * one.usd


def test_with_a_stand_in_catalog_an_unmeasured_network_is_marked_as_assumed(
    market, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes, is_assumed in ((1, False), (2, True)):
        plan = planned(tmp_path, "gpt2-1558m", clouds=("a",), train_nodes=("H100:8",), nodes=nodes)
        assert {c.speed.kind for c in plan.candidates} == {"estimated"}
        print_cloud_plan(plan)
        shown = " ".join(capsys.readouterr().out.split())
        assert ("assumed: nodes scale as well as" in shown) is is_assumed and "~" in shown


def test_with_a_stand_in_catalog_a_deadline_puts_evaluate_on_the_machine_that_may_finish_training(
    market, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"clouds": ("a",), "train_nodes": ("H100:8",), "nodes": 2, "limits": Limits(hours=50)}
    for one in planned(tmp_path, "gpt2-1558m", **options).candidates:
        evaluate = one.estimates["evaluate"]
        assert evaluate.offer and (evaluate.offer.accelerators, evaluate.offer.spot) == ("H100:8", False)
        assert evaluate.usd == pytest.approx(2 * 32.0 * (evaluate.hours - WAIT_SECONDS / 3600), rel=1e-3)
        assert one.usd == pytest.approx(sum(estimate.usd for estimate in one.estimates.values()))
    small = planned(tmp_path, "gpt2-1558m", **options | {"limits": Limits(usd=500)}).candidates[0].estimates["evaluate"]
    assert small.offer and (small.offer.accelerators, small.nodes) == ("L4:1", 1)


def test_with_a_stand_in_catalog_a_stage_is_on_spot_if_its_task_may_be(market, tmp_path: Path) -> None:
    legs = planned(tmp_path, clouds=("a",), train_nodes=("H100:8",)).candidates[0].estimates
    for stage, one in legs.items():
        task = yaml.safe_load((SKY / f"{stage}.yaml").read_text())
        assert one.offer and one.offer.spot == any(m["use_spot"] for m in task["resources"]["any_of"]), stage


def test_with_a_stand_in_catalog_gpus_that_cannot_share_a_step_are_no_candidates(market, tmp_path: Path) -> None:
    plan = planned(tmp_path, "smoke", clouds=("a",), train_nodes=("H100:8", "H100:1"), nodes=3)
    assert {c.offer.accelerators for c in plan.candidates} == {"H100:1"}
    assert "is 16 sequence(s) of 128 tokens, too few for 24 processes" in plan.notes[0]
    with pytest.raises(UserError, match="3 x H100:8: train.batch_tokens"):
        planned(tmp_path, "smoke", clouds=("a",), train_nodes=("H100:8",), nodes=3)
    with pytest.raises(UserError, match="none of a offers B200:8"):
        planned(tmp_path, clouds=("a",), train_nodes=("B200:8",))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_with_a_stand_in_catalog_the_plan_fits_the_terminal_and_every_column_has_a_head(
    market, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plan = planned(tmp_path, "gpt2-1558m", clouds=("a", "lambda"), limits=Limits(usd=5000))
    print_cloud_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    head, *rows = (re.split("  +", line.strip()) for line in lines[1 : 2 + len(plan.candidates)])
    assert head[0] == "cloud" and head[-2:] == ["all h", "all $"]
    for row, candidate in zip(rows, plan.candidates, strict=True):
        assert len(row) in (len(head), len(head) - 1)  # on demand nothing is preempted
        assert row[-2:] == [f"{candidate.hours:.2f}", f"{candidate.usd:,.2f}"]
    assert "tokens/s" in head and (width < 160 or {"zone", "machine", "preempted", "train h", "train $"} <= set(head))
    assert any(line.startswith("cheapest, cheapest within $5,000") for line in lines)


def test_with_a_stand_in_catalog_the_plan_says_what_it_assumes_and_which_memory_is_needed(
    market, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = load_recipe("gpt2-124m", ["runtime.micro_batch_size=auto"])
    options: dict[str, Any] = {"clouds": ("a",), "train_nodes": ("H100:8", "L4:1")}
    print_cloud_plan(cloud_plans.cloud_plan(small, LocalStore(tmp_path), **options))
    shown = " ".join(capsys.readouterr().out.split())
    assert "assumed: 52% MFU, as on H200; L4 was never measured" in shown and re.search(r"\?\d\d,\d\d\d", shown)
    assert re.search(r"memory with micro-batches of 64: H100 \d\d of 74 GiB", shown)
    assert re.search(r"memory with micro-batches of [45]\d: L4 \d\d of 21 GiB", shown)
    (unfit, *_) = planned(tmp_path, **options).notes
    assert unfit.startswith("1 x L4:1: runtime.micro_batch_size: 64 sequences need about 24 GiB")


def test_with_a_stand_in_catalog_nodes_without_an_image_pay_for_the_installation(market, tmp_path: Path) -> None:
    with_image, without = (planned(tmp_path, clouds=("a",), installs=installs) for installs in (False, True))
    longer = without.candidates[1].hours - with_image.candidates[1].hours
    assert longer == pytest.approx(4 * 180 / 3600, rel=0.05)  # of four stages
    assert any("no image" in line for line in without.assumed) and with_image.assumed == without.assumed[:-1]


def test_a_gpu_of_unknown_speed_can_be_launched_if_there_are_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Offer("aws", "r", "r1", "k80", True, 1.0, 1.0, "K80:1", 4)
    monkeypatch.setattr(pricing, "offers", lambda cloud, node, region: [offer] if node == "K80:1" else [])
    smoke = load_recipe("smoke")
    plans = plans_of(smoke)
    reported: list[Any] = []

    def priced(**limits: Any) -> None:
        request = LaunchRequest(run_name(plans), "s3://a/b", infra="aws", gpus="K80:1", **limits)
        job = managed_job(request, ["train"])
        pricing.within_limits(job, request, smoke, plans, LocalStore(tmp_path), reported.append)

    priced()
    (note,) = reported
    assert note.state == "note" and "K80:1: the speed of this GPU is unknown" in note.seen
    with pytest.raises(UserError, match="the speed of this GPU is unknown"):
        priced(budget=5.0)


def test_with_a_stand_in_catalog_users_without_quota_are_told_of_one_gpu(market, tmp_path: Path) -> None:
    *_, note = planned(tmp_path, clouds=("a", "lambda"), train_nodes=("H100:8",)).notes
    (alone,) = (
        c for c in planned(tmp_path, clouds=("lambda",), train_nodes=("H100:1",)).candidates if c.offer.zone is None
    )
    assert note.startswith("without a quota: one H100 at lambda, ") and "--gpus H100:1 --infra lambda" in note
    assert planned(tmp_path, clouds=("lambda",), train_nodes=("H100:1",)).notes == ()
    assert planned(tmp_path, clouds=("a",), train_nodes=("H100:8",)).notes == ()
    assert alone.hours > 4


def test_with_a_stand_in_catalog_a_small_training_is_planned_on_a_small_gpu(market, tmp_path: Path) -> None:
    plan = planned(tmp_path, "smoke", clouds=("a",))
    assert {c.offer.accelerators for c in plan.candidates} == {"L4:1"}
    assert list(plan.candidates[0].estimates) == ["train", "evaluate", "export"]  # the text is on this machine


def test_a_node_of_the_prior_lasts_as_long_as_in_the_traces(shared_data: Path) -> None:
    up = ends = 0.0
    for path in (shared_data / "spot-traces").glob("*.json"):
        trace = json.loads(path.read_text())
        ticks = trace["data"]
        up += sum(ticks) * trace["metadata"]["gap_seconds"] / 3600
        ends += sum(a == 1 and b == 0 for a, b in zip(ticks, ticks[1:], strict=False))
    assert up / ends == pytest.approx(PRIOR_SECONDS_BETWEEN_FAILURES / 3600, rel=0.1)


@pytest.mark.slow
def test_plan_cloud_compares_the_offers_of_skypilots_catalog_and_prints_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip)")
    write_catalog(tmp_path)
    environment = os.environ | sky_environment(tmp_path) | {"HTTPS_PROXY": "http://127.0.0.1:1"}
    environment["SKYTRAIN_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-m", "pipelines.cli", "plan", "gpt2-124m", "--cloud", "--deadline", "1h", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)["cloud"]
    first, *others = plan["candidates"]
    assert (first["offer"]["instance"], first["offer"]["zone"], first["marks"]) == (
        "p5.48xlarge",
        "us-east-1b",
        ["cheapest"],
    )
    assert {c["offer"]["cloud"] for c in others} == {"aws", "gcp", "lambda"}
    assert first["usd"] == min(c["usd"] for c in plan["candidates"])
    assert (plan["chosen"], plan["notes"][0].split(";")[0]) == (None, "no machine is within 1 h")
