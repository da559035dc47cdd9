"""`skytrain launch`: what could go wrong is looked at first, then the missing stages go to SkyPilot as one managed job.

The job is told nothing but the run's name and store (`skytrain run run:NAME --store …`): what the run is stands in
`runs/<run>.json`, and how it was launched in `launches/<run>.json`, from which `resume` launches it again.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import Plan, find
from pipelines.cloud.checks import (
    Finding,
    broken,
    clouds_allow,
    enabled_clouds,
    image_exists,
    image_parts,
    is_loopback,
    mlflow_answers,
    store_commits,
)
from pipelines.cloud.tasks import (
    CLUSTERS,
    PLAIN,
    SECRET,
    WORK_TREE,
    Wish,
    cloud_of,
    clouds_of,
    dag_of,
    documents,
    shown,
)
from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from pipelines.text import STDLIB
from pipelines.tracking.report import record
from trainer.config import UserError
from trainer.store import LocalStore, Store

if TYPE_CHECKING:
    from sky import Dag

# Where one asks for more. GPUs are granted by the vCPU or by the piece, and a new account has none.
QUOTAS = {
    "aws": "needs the quota 'All P5 Spot Instance Requests' (192 vCPUs a node of 8 H100s), 'Running On-Demand P "
    "instances' without spot",
    "gcp": "needs the quotas 'Preemptible NVIDIA H100 GPUs' and 'GPUs (all regions)', 8 a node",
    "azure": "needs the quota of the NDv5 family, 96 vCPUs a node",
    "lambda": "has no quota, but often no free 8xH100; the job waits until there is one",
}


@dataclass(frozen=True)
class Launched:
    """A launch on record."""

    wish: Wish
    stages: list[str]  # that were missing, and submitted
    jobs: list[int]  # SkyPilot's ids of managed jobs
    secrets: list[str]  # by name
    time: float  # unix seconds
    earlier: list[dict[str, Any]]  # this run's launches before: time, stages, jobs


def variables_here(extra: Iterable[str] = ()) -> dict[str, str]:
    """What a job takes over from this shell, and `NAME=VALUE` besides. UserError for a secret in the open."""
    from pipelines.image import SECRET_SETTING

    taken = {name: os.environ[name] for name in PLAIN if os.environ.get(name)}
    for text in extra:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UserError(f"--env {name}: not of the form NAME=VALUE")
        if name in SECRET or SECRET_SETTING.search(name):
            raise UserError(
                f"--env {name}: looks like a secret, which would be shown; export it and say --secret {name}"
            )
        taken[name] = value
    return taken


def secrets_here(extra: Iterable[str] = ()) -> dict[str, str]:
    """The secrets that a job needs, from this shell; SkyPilot gets them, and no file of ours."""
    extra = list(extra)
    if absent := [name for name in extra if not os.environ.get(name)]:
        raise UserError(f"--secret {absent[0]}: it is not set here; export it first, without writing it down")
    return {name: os.environ[name] for name in (*SECRET, *extra) if os.environ.get(name)}


def missing(store: Store, plans: Mapping[str, Plan], until: str) -> list[str]:
    """The stages up to `until` whose artifact is not in the store."""
    return [stage for stage in STAGES[: STAGES.index(until) + 1] if not find(store, plans[stage])]


def launch(
    wish: Wish,
    recipe: Recipe,
    plans: dict[str, Plan],
    store: Store,
    secrets: Mapping[str, str],
    agreed: Callable[[str], bool],
    dry_run: bool = False,
) -> Launched | None:
    """Look, say what it found, ask (`agreed`), submit. None if nothing was: done already, a dry run, or a no.

    UserError if a check fails, if no machine fits, or if the run has a job that is not over.
    """
    stages = missing(store, plans, wish.until)
    if not stages:
        print(f"{wish.run}: all of it is in {store.uri} already; nothing to launch")
        return None
    job = documents(wish, stages)
    if dry_run:
        dag_of(job, secrets)
        print(shown(job, secrets), end="")
        return None
    report(preflight(job, wish, recipe, store, secrets))
    job, findings = cloud_access(job)
    report(findings)
    if running := running_jobs(wish.run):
        raise UserError(
            f"launch: {wish.run} has job {running[0]}, which is not over; `skytrain status {wish.run}` shows it"
        )
    dag = dag_of(job, secrets)
    candidates(dag)
    if not agreed(f"Launch {wish.run}: {', '.join(stages)}?"):
        return None
    return submit(dag, wish, stages, secrets, recipe, plans, store)


# Looking first


def report(findings: Iterable[Finding]) -> None:
    """Print what was found as it is found. UserError at the end if some of it is broken."""
    faults = 0
    for finding in findings:
        print(finding, flush=True)
        faults += finding.state == "broken"
    if faults:
        raise UserError(f"launch: {faults} of the things above would keep it from running; nothing was launched")


def preflight(
    job: list[dict[str, Any]], wish: Wish, recipe: Recipe, store: Store, secrets: Mapping[str, str]
) -> Iterator[Finding]:
    """All that could be known to fail before a machine is rented, cheapest question first."""
    clouds = clouds_of(job)
    afar = any(cloud not in CLUSTERS for cloud in clouds)
    yield skypilot_installed()
    stages = [task["name"] for task in job[1:]]
    yield from texts_reachable(recipe, stages, afar)
    yield credentials(store, clouds, secrets)
    if isinstance(store, LocalStore) and afar:
        yield broken("store", f"{store.uri} is a folder of this machine", "--store s3://BUCKET/PREFIX")
    else:
        yield store_commits(store)
    yield from endpoints(wish, afar)
    yield image(wish, secrets)
    if uri := wish.variables.get("MLFLOW_TRACKING_URI"):
        yield mlflow_answers(uri, wish.variables | dict(secrets))
    else:
        yield Finding("mlflow", "none", "note", "the ledger keeps all; MLFLOW_TRACKING_URI names a server to mirror to")
    for cloud in QUOTAS if "train" in stages else []:
        if cloud in clouds:
            yield Finding("quota", f"{cloud} {QUOTAS[cloud]}", "note")


def skypilot_installed() -> Finding:
    try:
        found = version("skypilot")
    except PackageNotFoundError:
        return broken("skypilot", "not installed", "pip install '.[cloud]'")
    major, minor = (int(part) for part in found.split(".")[:2])
    if (major, minor) < (0, 14):
        return broken("skypilot", found, "pip install -U 'skypilot>=0.14'")
    return Finding("skypilot", found)


def texts_reachable(recipe: Recipe, stages: Iterable[str], afar: bool) -> Iterator[Finding]:
    """Whether what is read besides artifacts can be read where the job runs."""
    sources = {"tokenize": recipe.tokens.source, "evaluate": recipe.evaluate.hellaswag}
    for stage, source in sources.items():
        if stage not in stages or source is None or "://" in source:
            continue
        what = f"text for {stage}"
        if source == STDLIB:
            yield Finding(what, STDLIB, "note", "the job's Python has to be this very one")
        elif afar or not os.path.isabs(source):
            remedy = f"do that stage here, and launch the rest: skytrain run RECIPE --stage {stage} --store …"
            yield broken(what, f"{source} lies on this machine", remedy)
        else:
            yield Finding(what, source, "note", "it has to be at this very path on the nodes")


def credentials(store: Store, clouds: Iterable[str], secrets: Mapping[str, str]) -> Finding:
    """Whether a job will be let into the bucket."""
    if isinstance(store, LocalStore):
        return Finding("credentials", "a folder needs none")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    given = [name for name in names if name in secrets]
    if len(given) == 1:
        return broken("credentials", f"only {given[0]} is set", f"export {' and '.join(names)}, or neither")
    if given and "AWS_SESSION_TOKEN" in secrets:
        return Finding(
            "credentials",
            "a session's, which expires",
            "note",
            "a run that outlives it ends; use a user's keys for long runs",
        )
    if given:
        return Finding("credentials", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go along as secrets")
    others = sorted(set(clouds) - {"aws"})
    if others:
        return broken(
            "credentials",
            f"AWS_ACCESS_KEY_ID is not set, and machines of {', '.join(others)} have no role that opens {store.uri}",
            "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may use the bucket, or --infra aws",
        )
    return Finding("credentials", "none here: the nodes' own role has to open the bucket", "note")


def endpoints(wish: Wish, afar: bool) -> Iterator[Finding]:
    """Addresses that mean another machine there than here."""
    for name, value in wish.variables.items():
        if afar and "://" in value and is_loopback(value):
            yield broken("network", f"{name}={value} is this machine", "name an address that the nodes can reach")


def image(wish: Wish, secrets: Mapping[str, str]) -> Finding:
    if wish.image == WORK_TREE:
        return Finding("image", "none: the work tree is synced, and makes its environment on the node")
    image_parts(wish.image)  # a name that is none is the user's mistake, not the registry's
    found = image_exists(wish.image, secrets)
    if found.state == "ok" and "@" not in wish.image:
        return Finding("image", found.seen, "note", "a tag can be moved between two recoveries; name a digest")
    return found


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


def candidates(dag: "Dag") -> None:
    """Let SkyPilot's optimizer print what it would rent. UserError if there is no such machine."""
    from sky import exceptions
    from sky.client import sdk

    try:
        sdk.stream_and_get(sdk.optimize(dag))
    except (exceptions.ResourcesUnavailableError, exceptions.NoCloudAccessError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"launch: no machine fits: {reason}; other --infra or --gpus may, or without --spot") from error


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


# Submitting


def submit(
    dag: "Dag",
    wish: Wish,
    stages: list[str],
    secrets: Iterable[str],
    recipe: Recipe,
    plans: dict[str, Plan],
    store: Store,
) -> Launched:
    """Put the run on record, hand the job to SkyPilot, and put that on record."""
    from sky import jobs
    from sky.client import sdk

    record(store, wish.run, recipe, plans, wish.until)
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
    return Launched(**values | {"wish": Wish(**values["wish"])})
