"""What keeps a job from running, as far as it can be known before a machine is rented."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipelines.cloud.checks import (
    Finding,
    api_server_is_up,
    broken,
    enabled_clouds,
    image_exists,
    image_parts,
    is_loopback,
    is_private,
    mlflow_answers,
    store_commits,
)
from pipelines.cloud.tasks import CLUSTERS, WORK_TREE, LaunchRequest, clouds_of
from pipelines.cloud.throughput import check_gpus
from pipelines.recipe import Recipe
from pipelines.text.library import STDLIB
from trainer.errors import UserError
from trainer.store import LocalStore, Store

# Where one asks for more. GPUs are granted by the vCPU or by the piece, and a new account has none.
QUOTAS = {
    "aws": "needs the quota 'All P5 Spot Instance Requests' (192 vCPUs a node of 8 H100s), 'Running On-Demand P "
    "instances' without spot",
    "gcp": "needs the quotas 'Preemptible NVIDIA H100 GPUs' and 'GPUs (all regions)', 8 a node",
    "azure": "needs the quota of the NDv5 family, 96 vCPUs a node",
    "lambda": "has no quota, but often no free 8xH100; the job waits until there is one",
}


def preflight(
    job: list[dict[str, Any]], wish: LaunchRequest, recipe: Recipe, store: Store, secrets: Mapping[str, str]
) -> Iterator[Finding]:
    """All that could be known to fail before a machine is rented, cheapest question first."""
    clouds = clouds_of(job)
    afar = any(cloud not in CLUSTERS for cloud in clouds)
    yield skypilot_installed()
    yield from unknown_clouds(clouds)
    yield from gpus_that_will_not_do(job[1:], recipe)
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
    if " " in sys.executable:
        seen = f"{found}: a jobs controller on this machine can't start {sys.executable}, for the space in its path"
        return Finding("skypilot", seen, "note", "install skytrain in a folder without one")
    return Finding("skypilot", found)


def unknown_clouds(clouds: Iterable[str]) -> Iterator[Finding]:
    """The places that SkyPilot has never heard of."""
    try:
        import sky  # noqa: F401 - enters its clouds into the registry
        from sky.utils import registry
    except ImportError:
        return  # said already
    known = {*registry.CLOUD_REGISTRY, "k8s"}
    for cloud in sorted(set(clouds) - known):
        if api_server_is_up():
            remedy = f"{', '.join(enabled_clouds()) or 'no cloud at all'} may be used from here"
        else:
            remedy = f"it is one of {', '.join(sorted(known))}; skytrain doctor says which may be used from here"
        yield broken("infra", f"{cloud}: SkyPilot knows no such cloud", remedy)


def gpus_that_will_not_do(tasks: Iterable[dict[str, Any]], recipe: Recipe) -> Iterator[Finding]:
    """The training machines that the run would end on as soon as its GPUs were counted."""
    for task in (task for task in tasks if task["name"] == "train"):
        kinds = (machine.get("accelerators") for machine in task["resources"]["any_of"])
        for gpus in filter(None, dict.fromkeys(kinds)):  # but for the room in which a job with a deadline waits
            try:
                check_gpus(recipe.model, recipe.train, recipe.runtime, gpus, task["num_nodes"])
            except UserError as error:
                seen = f"{task['num_nodes']} x {gpus}: {error}"
                yield broken("GPUs", seen, "choose others with --gpus and --nodes, or change the recipe with --set")


def texts_reachable(recipe: Recipe, stages: Iterable[str], afar: bool) -> Iterator[Finding]:
    """Whether what is read besides artifacts can be read where the job runs. Every task plans all stages, so what
    evaluate reads has to be there for each of them."""
    sources = {"tokenize": recipe.tokens.source, "evaluate": recipe.evaluate.hellaswag}
    for stage, source in sources.items():
        if (stage == "tokenize" and stage not in stages) or source is None or "://" in source:
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


def endpoints(wish: LaunchRequest, afar: bool) -> Iterator[Finding]:
    """Addresses that mean another machine there than here."""
    for name, value in wish.variables.items():
        if name == "MLFLOW_TRACKING_URI" and value.startswith(("sqlite:", "file:", "/")):
            yield broken("network", f"{name}={value} lies on this machine", "name a server, or unset it")
        if afar and "://" in value and is_loopback(value):
            yield broken("network", f"{name}={value} is this machine", "name an address that the nodes can reach")
        elif afar and "://" in value and is_private(value):
            yield Finding(
                "network", f"{name}={value}", "note", "a private address: the nodes have to be in its network"
            )


def image(wish: LaunchRequest, secrets: Mapping[str, str]) -> Finding:
    if wish.image == WORK_TREE:
        return Finding("image", "none: the work tree is synced, and makes its environment on the node")
    image_parts(wish.image)  # a name that is none is the user's mistake, not the registry's
    found = image_exists(wish.image, secrets)
    if found.state == "ok" and "@" not in wish.image:
        return Finding("image", found.seen, "note", "a tag can be moved between two recoveries; name a digest")
    return found
