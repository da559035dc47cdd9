"""`skytrain launch`: what could go wrong is looked at first, then the missing stages go to SkyPilot as one managed job.

The job is told nothing but the run's name and store (`skytrain run run:NAME --store …`): what the run is stands in
`runs/<run>.json`, and how it was launched in `launches/<run>.json`, from which `resume` launches it again.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud.checks import Finding, api_server_is_up, clouds_allow, enabled_clouds, reach_api_server
from pipelines.cloud.preflight import preflight
from pipelines.cloud.prices import Offer, offers, prices_table
from pipelines.cloud.tasks import (
    CLUSTERS,
    PLAIN,
    SECRET,
    LaunchRequest,
    cloud_of,
    clouds_of,
    dag_of,
    documents,
    in_order,
    is_room,
    machines_of,
    shown,
)
from pipelines.recipe import Recipe
from pipelines.stage import missing
from pipelines.tracking.runs import find_run, record
from pipelines.tracking.stop_request import clear_stop_request
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from sky import Dag


@dataclass(frozen=True)
class Launched:
    """A launch on record."""

    wish: LaunchRequest
    stages: list[str]  # that were missing, and submitted
    jobs: list[int]  # SkyPilot's ids of managed jobs
    secrets: list[str]  # by name
    time: float  # unix seconds
    earlier: list[dict[str, Any]]  # this run's launches before: time, stages, jobs


def variables_here(extra: Iterable[str] = ()) -> dict[str, str]:
    """What a job takes over from this shell, and `NAME=VALUE` besides. UserError for a secret in the open."""
    from pipelines.cloud.image import SECRET_SETTING, SECRET_TEXT

    given = [f"{name}={os.environ[name]}" for name in PLAIN if os.environ.get(name)]
    taken = {}
    for text in (*given, *extra):
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UserError(f"--env {name}: not of the form NAME=VALUE")
        if name in SECRET or SECRET_SETTING.search(name):
            raise UserError(
                f"--env {name}: looks like a secret, which would be shown; export it and say --secret {name}"
            )
        if SECRET_TEXT.search(value):
            raise UserError(
                f"{name}: holds a secret, which would be shown; give MLflow's as MLFLOW_TRACKING_USERNAME/PASSWORD"
            )
        taken[name] = value
    return taken


def secrets_here(extra: Iterable[str] = ()) -> dict[str, str]:
    """The secrets that a job needs, from this shell; SkyPilot gets them, and no file of ours."""
    extra = list(extra)
    if absent := [name for name in extra if not os.environ.get(name)]:
        raise UserError(f"--secret {absent[0]}: it is not set here; export it first, without writing it down")
    return {name: os.environ[name] for name in (*SECRET, *extra) if os.environ.get(name)}


def launch(
    wish: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    secrets: Mapping[str, str],
    agreed: Callable[[str], bool],
    dry_run: bool = False,
) -> Launched | None:
    """Look, say what it found, ask (`agreed`), submit. None if nothing was: done already, a dry run, or a no.

    A dry run says what a launch would find, and prints the job that it would submit, or as asked for if something is
    refused; SkyPilot's API server is asked if it is up.

    UserError if a check fails, if no machine fits, or if the run has a job that is not over.
    """
    stages = missing(store, plans, wish.until)
    if not stages:
        print(f"{wish.run}: all of it is in {store.uri} already; nothing to launch")
        return None
    job = documents(wish, stages, recipe.tokens.parts)
    if dry_run:
        try:
            with redirect_stdout(sys.stderr):  # what is found is no part of the YAML
                job, _ = looked_over(job, wish, recipe, plans, store, secrets, may_start=False)
        finally:
            print(shown(job, secrets), end="", flush=True)
        return None
    _, dag = looked_over(job, wish, recipe, plans, store, secrets)
    if not agreed(f"Launch {wish.run}: {', '.join(stages)}?"):
        return None
    return submit(dag, wish, stages, secrets, recipe, plans, store)


# Looking first


def looked_over(
    job: list[dict[str, Any]],
    wish: LaunchRequest,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    secrets: Mapping[str, str],
    may_start: bool = True,
) -> tuple[list[dict[str, Any]], "Dag"]:
    """The job with its prices and without what is beyond the limits, and as SkyPilot takes it. UserError if something
    would keep it from running.

    Without `may_start` SkyPilot's API server is asked only if it is up.
    """
    report(preflight(job, wish, recipe, store, secrets))
    ask = may_start or api_server_is_up()
    if ask:
        reach_api_server()
        job, findings = cloud_access(job)
        report(findings)
        if running := running_jobs(wish.run):
            raise UserError(
                f"launch: {wish.run} has job {running[0]}, which is not over; `skytrain status {wish.run}` shows it"
            )
    else:
        print(Finding("SkyPilot's server", "not up, so not asked what is enabled and free", "note", "sky api start"))
    job = with_prices(within_limits(job, wish, recipe, plans, store), wish)
    dag = dag_of(job, secrets)
    if ask:
        ask_optimizer(dag, quiet=any(cloud not in CLUSTERS for cloud in clouds_of(job)))  # their plan was shown
    return job, dag


def report(findings: Iterable[Finding]) -> None:
    """Print what was found as it is found. UserError at the end if some of it is broken."""
    faults = 0
    for finding in findings:
        print(finding, flush=True)
        faults += finding.state == "broken"
    if faults:
        raise UserError(f"launch: {faults} of the things above would keep it from running; nothing was launched")


def cloud_access(job: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The job without the machines of clouds that SkyPilot may not use, and what was found about them."""
    enabled = enabled_clouds()
    findings, kept = [], [job[0]]
    for task in job[1:]:
        machines = task["resources"]["any_of"]
        finding = clouds_allow([cloud_of(m["infra"]) for m in machines], enabled)
        findings.append(replace(finding, what=f"clouds for {task['name']}"))
        usable = [m for m in machines if {"k8s": "kubernetes"}.get(cloud := cloud_of(m["infra"]), cloud) in enabled]
        kept.append(task | {"resources": task["resources"] | {"any_of": usable}})
    return kept, findings


def ask_optimizer(dag: "Dag", quiet: bool) -> None:
    """Let SkyPilot say what it would rent. UserError if there is no such machine."""
    from sky import exceptions
    from sky.client import sdk

    try:
        request = sdk.optimize(dag)
        sdk.get(request) if quiet else sdk.stream_and_get(request)
    except (exceptions.ResourcesUnavailableError, exceptions.NoCloudAccessError) as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("To fix:")[0]  # its own hints are about its own CLI
        reason = " ".join(plain.split()).rstrip(".")
        raise UserError(
            f"launch: no machine fits: {reason}; try another --infra or --gpus, or without --spot"
        ) from error


def running_jobs(run: str) -> list[int]:
    """Managed jobs of this run that are not over."""
    from sky import exceptions, jobs
    from sky.client import sdk

    try:
        found, *_ = sdk.get(
            jobs.queue_v2(refresh=False, skip_finished=True, name_match=run, fields=["job_id", "job_name"])
        )
    except exceptions.ClusterNotUpError:
        return []  # there never was a managed job
    return sorted({job.job_id for job in found if job.job_name == run})


# Money


def within_limits(
    job: list[dict[str, Any]], wish: LaunchRequest, recipe: Recipe, plans: dict[str, ArtifactPlan], store: Store
) -> list[dict[str, Any]]:
    """Print the plan for the machines that have a price list; with a deadline or budget keep the training machines that
    are expected to meet it. UserError if none is."""
    from pipelines.cloud import plan
    from pipelines.cloud.deadline import LEAST_SLACK_SECONDS

    already = 0.0 if wish.budget is None else spent(store, wish.run)
    if wish.budget is not None and wish.budget <= already:
        raise UserError(f"--budget {wish.budget:g}: ${already:,.2f} are spent already; a higher one goes on")
    hours = None if wish.deadline is None else (wish.deadline - time.time()) / 3600
    if hours is not None and hours <= 0:
        raise UserError(f"launch: the deadline of {wish.run} is over; launch it anew with another --deadline")
    limits = plan.Limits(hours, None if wish.budget is None else wish.budget - already)
    tasks = {task["name"]: task for task in job[1:]}
    market = {name: list(dict.fromkeys(o for m in rented(task) for o in places_of(m))) for name, task in tasks.items()}
    if hours is not None and "train" in tasks and not market["train"]:
        where = ", ".join(dict.fromkeys(m["infra"] for m in machines_of(tasks["train"])))
        raise UserError(f"--deadline: can't be kept where no price list has train's machines ({where}); leave it out")
    if not any(market.values()):
        return job  # one's own machines: SkyPilot's prices, if it was told any, stand in its own table
    work = plan.workload(recipe, store, plans)
    several = {name: task["num_nodes"] for name, task in tasks.items()}
    if not market.get("train"):
        plan.print_legs(legs := plan.legs_of(work, market, several))
        if not limits.met_by(*(needs := plan.sum_of(legs))):
            took = f"{needs[0]:.1f} h and ${needs[1]:,.2f}"
            raise UserError(f"launch: {', '.join(legs)}: expected to take {took}, which is not within {limits}")
        return job
    found = plan.compared(work, market, several, limits)
    plan.print_cloud_plan(found)
    if not str(limits):
        return job
    # A spot machine may be lost before anybody in the job has looked at the deadline.
    steady_hours = min((c.hours for c in found.candidates if not c.offer.spot), default=0.0)
    no_spot = hours is not None and wish.spot is None and hours - steady_hours < LEAST_SLACK_SECONDS / 3600
    met = (c.offer for c in found.candidates if limits.met_by(c.hours, c.usd))
    good = {offer for offer in met if not (offer.spot and no_spot)}
    beyond = [m for m in rented(tasks["train"]) if good.isdisjoint(places_of(m))]
    kept = [m for m in machines_of(tasks["train"]) if m not in beyond]
    if all(is_room(m, tasks["train"]) for m in kept):
        raise UserError(f"launch: {found.notes[-1] if found.notes else f'nothing is done within {limits}'}")
    train = tasks["train"] | {"resources": tasks["train"]["resources"] | {"any_of": kept}}
    return [job[0], *(train if task["name"] == "train" else task for task in job[1:])]


def rented(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What a task may get and work on that is not one's own."""
    return [m for m in machines_of(task) if cloud_of(m["infra"]) not in CLUSTERS and not is_room(m, task)]


def places_of(machine: dict[str, Any]) -> list[Offer]:
    """Where one of a task's machines is cheapest, by instance type; nowhere if nobody can know."""
    from pipelines.cloud.plan import best_places

    with suppress(UserError):  # with_prices says it
        return best_places(offers_of(machine))
    return []


def spent(store: Store, run: str) -> float:
    """The dollars that a run has cost so far."""
    found = find_run(store, run)
    return found.account.total.usd if found else 0.0


def with_prices(job: list[dict[str, Any]], wish: LaunchRequest) -> list[dict[str, Any]]:
    """The job with the price of every machine that it may end up on, in the order in which they are to be tried.
    UserError if a budget can't be kept without a price."""
    priced = [job[0]]
    for task in (in_order(task, cheapest_of) for task in job[1:]):
        rows, faults = [], []
        for machine in machines_of(task):
            try:
                rows += prices_of(machine)
            except UserError as error:
                faults.append(f"{task['name']} on {machine['infra']}: {error}")
        if faults and wish.budget is not None:
            raise UserError(f"--budget: can't be promised where a price is unknown: {faults[0]}")
        for fault in faults:
            print(Finding("price", fault, "note", "its hours will be kept apart in every sum"))
        table = json.dumps([row for i, row in enumerate(rows) if row not in rows[:i]], separators=(",", ":"))
        priced.append(task | {"envs": task["envs"] | {"SKYTRAIN_PRICES": table}})
    return priced


def cheapest_of(machine: dict[str, Any]) -> float:
    """Dollars an hour where it is cheapest; infinite if nobody can know."""
    with suppress(UserError):
        return min(float(row["usd_per_hour"]) for row in prices_of(machine))
    return math.inf


def prices_of(machine: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of SKYTRAIN_PRICES for one of a task's machines. UserError if its price can't be known."""
    cloud, _, region = machine["infra"].partition("/")
    if cloud.lower() in CLUSTERS:
        return [cluster_price(machine, cloud.lower(), region)]
    return prices_table(offers_of(machine))


def offers_of(machine: dict[str, Any]) -> list[Offer]:
    """What a cloud has for one of a task's machines. UserError if that can't be known, or is nothing."""
    cloud, region, zone = [*machine["infra"].split("/"), "", ""][:3]
    node = machine.get("accelerators") or f"cpus:{machine['cpus']},memory:{machine['memory']}".replace("+", "")
    found = [o for o in offers(cloud.lower(), node, region or None) if o.spot == machine["use_spot"]]
    found = [offer for offer in found if zone in ("", offer.zone or zone)]
    if not found:
        raise UserError(f"its price list has no {node}" + (" on spot" if machine["use_spot"] else ""))
    return found


def cluster_price(machine: dict[str, Any], cloud: str, region: str) -> dict[str, Any]:
    """What SkyPilot was told that a machine of one's own cluster costs (`pricing` in ~/.sky/config.yaml)."""
    from sky.catalog import common

    section, places = {"slurm": ("slurm", "cluster_configs")}.get(cloud, ("kubernetes", "context_configs"))
    pricing = common.resolve_pricing_config((section, "pricing"), (section, places, region, "pricing"))
    if not pricing:
        raise UserError(f"SkyPilot was told no {section}.pricing")
    gpu, _, count = machine.get("accelerators", "").partition(":")
    cpus, memory = (float(str(machine.get(name, 0)).rstrip("+")) for name in ("cpus", "memory"))
    usd = common.get_hourly_cost_from_pricing(pricing, cpus, memory, gpu or None, int(count or 0))
    known = {"cloud": cloud, "region": region or None, "zone": None, "instance": None, "spot": None}
    accelerators = machine.get("accelerators")
    return known | {"usd_per_hour": usd, "on_demand_usd_per_hour": usd, "accelerators": accelerators}


# Submitting


def submit(
    dag: "Dag",
    wish: LaunchRequest,
    stages: list[str],
    secrets: Iterable[str],
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
) -> Launched:
    """Put the run on record, hand the job to SkyPilot, and put that on record."""
    from sky import jobs
    from sky.client import sdk

    record(store, wish.run, recipe, plans, wish.until)
    clear_stop_request(store, wish.run)  # or the job would end at once
    before = last_launch(store, wish.run)
    earlier = [*before.earlier, {k: getattr(before, k) for k in ("time", "stages", "jobs")}] if before else []
    launched = Launched(wish, stages, [], sorted(secrets), time.time(), earlier)
    # Written first as well: were this machine to die now, `status` and `down` would still know what to look for.
    write(store, launched)
    ids, _ = sdk.stream_and_get(jobs.launch(dag, name=wish.run))
    launched = replace(launched, jobs=[ids] if isinstance(ids, int) else list(ids or []))
    write(store, launched)
    return launched


def write(store: Store, launched: Launched) -> None:
    store.put(f"launches/{launched.wish.run}.json", json.dumps(asdict(launched), indent=1).encode())


def last_launch(store: Store, run: str) -> Launched | None:
    """How a run was last launched; None if it never was."""
    body = store.get(f"launches/{run}.json")
    if body is None:
        return None
    values = json.loads(body)
    return Launched(**values | {"wish": LaunchRequest(**values["wish"])})
