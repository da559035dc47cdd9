"""Checks of a job before a machine is rented."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version

from pipelines.cloud.catalog import parse_node
from pipelines.cloud.checks import (
    Finding,
    broken,
    image_exists,
    image_parts,
    is_loopback,
    is_private,
    mlflow_answers,
    store_commits,
)
from pipelines.cloud.request import WORK_TREE, LaunchRequest
from pipelines.cloud.skypilot import seconds_in_queue
from pipelines.cloud.tasks import CLUSTERS, ManagedJob, cloud_of
from pipelines.cloud.throughput import check_gpus
from pipelines.recipe import LLMC, Recipe, TokensConfig
from pipelines.stages.export import NEEDS
from pipelines.stages.harness import task_file, verify_tasks
from pipelines.stages.measures import read_source
from pipelines.text.adopted import is_remote, shards_found
from pipelines.text.core_bundle import verify_items
from pipelines.text.hub import HUB
from pipelines.text.library import STDLIB
from pipelines.text.sources import documents
from pipelines.weights import local_sources
from trainer.errors import StoreUnavailable, UserError
from trainer.store import LocalStore, Store

# AWS's quotas count the vCPUs of a family of machines, by their GPU; its spot quotas know more families.
AWS_FAMILIES = {
    **dict.fromkeys(("H100", "H200"), ("P5", "P")),
    **dict.fromkeys(("A100", "A100-80GB", "V100", "V100-32GB"), ("P4, P3 and P2", "P")),
    **dict.fromkeys(("L4", "L40S", "A10G", "T4"), ("G and VT", "G and VT")),
}
AWS_VCPUS = {
    **dict.fromkeys(("H100:8", "H200:8"), 192), "H100:1": 16,
    **dict.fromkeys(("A100:8", "A100-80GB:8"), 96), **dict.fromkeys(("L4:1", "A10G:1", "T4:1", "L40S:1"), 4),
}  # fmt: skip


def preflight(
    job: ManagedJob, request: LaunchRequest, recipe: Recipe, store: Store, secrets: Mapping[str, str]
) -> Iterator[Finding]:
    """All checks of a job, the cheapest first."""
    clouds, stages = job.clouds, job.stages
    remote = any(cloud not in CLUSTERS for cloud in clouds)
    yield skypilot_installed()
    yield from unfit_gpus(job, recipe)
    yield from texts_reachable(recipe, stages, remote)
    if recipe.evaluate.hellaswag and {"train", "evaluate"} & set(stages):
        yield hellaswag_readable(recipe.evaluate.hellaswag)
    yield from weights_reachable(recipe, stages, remote)
    if recipe.evaluate.core:
        yield core_bundle(recipe.evaluate.core, remote)
    if recipe.evaluate.lm_eval:
        yield harness_tasks(recipe.evaluate.lm_eval, remote, request.image)
    yield credentials(store, clouds, secrets)
    if isinstance(store, LocalStore) and remote:
        yield broken("store", f"{store.uri} is a folder of this machine", "--store s3://BUCKET/PREFIX")
    else:
        yield store_commits(store)
    yield from endpoints(request, remote)
    yield image(request, secrets)
    if "export" in stages and request.image != WORK_TREE:
        yield from formats_in_image(recipe)
    if uri := request.variables.get("MLFLOW_TRACKING_URI"):
        yield mlflow_answers(uri, request.variables | dict(secrets))
    else:
        yield Finding(
            "mlflow", "none", "note", "the store keeps all metrics; set MLFLOW_TRACKING_URI to mirror them to a server"
        )
    yield from queues(job)
    yield from quotas(job)


def skypilot_installed() -> Finding:
    """Whether SkyPilot 0.14 or newer is installed, at a path without a space."""
    try:
        found = version("skypilot")
    except PackageNotFoundError:
        return broken("skypilot", "not installed", "pip install '.[cloud]'")
    major, minor = (int(part) for part in found.split(".")[:2])
    if (major, minor) < (0, 14):
        return broken("skypilot", found, "pip install -U 'skypilot>=0.14'")
    if " " in sys.executable:
        seen = f"{found}: a jobs controller on this machine can't start {sys.executable}: its path has a space"
        return Finding("skypilot", seen, "note", "install skytrain in a folder without a space in its path")
    return Finding("skypilot", found)


def unfit_gpus(job: ManagedJob, recipe: Recipe) -> Iterator[Finding]:
    """The training machines whose GPUs can't train the recipe: the run would end as soon as it starts on one."""
    if not (train := job.task("train")):
        return
    for gpus in filter(None, dict.fromkeys(machine.accelerators for machine in train.machines)):  # a standby has none
        try:
            check_gpus(recipe.model, recipe.train, recipe.runtime, gpus, train.num_nodes)
        except UserError as error:
            seen = f"{train.num_nodes} x {gpus}: {error}"
            yield broken("GPUs", seen, "choose others with --gpus and --nodes, or change the recipe with --set")


def texts_reachable(recipe: Recipe, stages: Iterable[str], remote: bool) -> Iterator[Finding]:
    """Whether the nodes can read the recipe's texts. Every task plans all stages, so each needs evaluate's text."""
    texts: list[tuple[str, str | None, TokensConfig]] = [("tokenize", one.source, one) for one in recipe.tokens.each()]
    for stage, source, text in [*texts, ("evaluate", recipe.evaluate.hellaswag, recipe.tokens)]:
        if (stage == "tokenize" and stage not in stages) or source is None or source.startswith("hf://"):
            continue
        what = f"text for {stage}"
        if is_remote(source):
            yield shards_there(what, text) if text.adopts else first_document(what, text)
            continue
        if remote or not os.path.isabs(source):
            remedy = f"run that stage here, and launch the rest: skytrain run RECIPE --stage {stage} --store …"
            yield broken(what, f"{source} is on this machine", remedy)
        else:
            yield Finding(what, source, "note", "the nodes need it at this same path")


def weights_reachable(recipe: Recipe, stages: Iterable[str], remote: bool) -> Iterator[Finding]:
    """Whether the nodes can read weights at a path. The plan of the run has found those of the Hub and of runs."""
    for stage, field, path in local_sources(recipe):
        if stage not in stages:
            continue
        if remote:
            remedy = "name run:NAME of this store, or ORG/NAME@COMMIT of the Hub"
            yield broken(f"weights for {stage}", f"{field}: {path} is on this machine", remedy)
        else:
            yield Finding(f"weights for {stage}", f"{path}", "note", "the nodes need them at this same path")


def core_bundle(source: str, remote: bool) -> Finding:
    """Whether every item of CORE can be read here, and whether the nodes can have the bundle too."""
    try:
        found = f"22 tasks with {verify_items(source):,} items"
    except UserError as error:
        return broken("CORE", str(error), "correct evaluate.core, or set it to null")
    if source.startswith(HUB):
        return Finding("CORE", found)
    if remote or not os.path.isabs(source):
        remedy = f"upload the folder as a dataset and name {HUB}ORG/NAME@COMMIT, or set evaluate.core to null"
        return broken("CORE", f"{source} is on this machine", remedy)
    return Finding("CORE", found, "note", "the nodes need the folder at this same path")


def harness_tasks(tasks: list[str], remote: bool, image: str | None) -> Finding:
    """Whether lm-eval knows the tasks, and the nodes have it and those tasks that are files."""
    here = "or evaluate here: skytrain run RECIPE --stage evaluate --store …"
    if image != WORK_TREE:
        return broken("lm-eval", "the image does not have it", f"launch with --image none, {here}")
    try:
        verify_tasks(tasks)
    except UserError as error:
        return broken("lm-eval", str(error), "correct evaluate.lm_eval, or set it to null")
    if files := [task for task in tasks if task_file(task)]:
        if remote or not all(map(os.path.isabs, files)):
            return broken("lm-eval", f"{files[0]} is on this machine", f"name tasks of lm-eval itself, {here}")
        return Finding("lm-eval", f"{', '.join(tasks)}", "note", "the nodes need the files at these same paths")
    return Finding("lm-eval", ", ".join(tasks))


def hellaswag_readable(source: str) -> Finding:
    """Whether the items can be had, and are HellaSwag's. A run that could not score them would train in vain."""
    try:
        return Finding("HellaSwag", f"{read_source(source):,} items of {source} were read")
    except UserError as error:
        return broken("HellaSwag", str(error), "correct evaluate.hellaswag, or set it to null")


def text_is_only_here(recipe: Recipe, clouds: Iterable[str]) -> bool:
    """Whether a job on these clouds can't read the text to tokenize. Each version of Python has another library."""
    local = [one.source.removeprefix(LLMC) for one in recipe.tokens.each() if not is_remote(one.source)]
    elsewhere = any(cloud not in CLUSTERS for cloud in clouds)
    return any(source == STDLIB or not os.path.isabs(source) or elsewhere for source in local)


def shards_there(what: str, text: TokensConfig) -> Finding:
    """Whether shards in S3 can be listed, with the credentials that the nodes get."""
    try:
        return Finding(what, f"{len(shards_found(text)):,} shards in {text.source}")
    except (UserError, StoreUnavailable) as error:
        return broken(what, str(error), "correct tokens.source, or the AWS_* variables")


def first_document(what: str, text: TokensConfig) -> Finding:
    """Whether a text in S3 or on a server can be read, with the credentials that the nodes get."""
    try:
        with closing(documents(text.source, text.subset, text.revision, text.text_column)) as texts:
            next(texts)
    except (UserError, StoreUnavailable) as error:
        return broken(what, str(error), "correct tokens.source, or the AWS_* variables")
    return Finding(what, f"the first document of {text.source} was read")


def credentials(store: Store, clouds: Iterable[str], secrets: Mapping[str, str]) -> Finding:
    """Whether a job will have access to the bucket."""
    if isinstance(store, LocalStore):
        return Finding("credentials", "a folder needs none")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    given = [name for name in names if name in secrets]
    if len(given) == 1:
        return broken("credentials", f"only {given[0]} is set", f"export {' and '.join(names)}, or neither")
    if given and "AWS_SESSION_TOKEN" in secrets:
        return Finding(
            "credentials",
            "those of a session, which expires",
            "note",
            "the run ends when they expire; use a user's keys for long runs",
        )
    if given:
        return Finding("credentials", "the job gets AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY as secrets")
    others = sorted(set(clouds) - {"aws"})
    if others:
        return broken(
            "credentials",
            f"AWS_ACCESS_KEY_ID is not set, and machines of {', '.join(others)} have no role for {store.uri}",
            "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may use the bucket, or --infra aws",
        )
    return Finding("credentials", "none here: the nodes' own role needs access to the bucket", "note")


def endpoints(request: LaunchRequest, remote: bool) -> Iterator[Finding]:
    """Addresses that the nodes can't reach, or that mean another machine there."""
    for name, value in request.variables.items():
        if name == "MLFLOW_TRACKING_URI" and value.startswith(("sqlite:", "file:", "/")):
            yield broken("network", f"{name}={value} is on this machine", "name a server, or unset it")
        if remote and "://" in value and is_loopback(value):
            yield broken(
                "network", f"{name}={value} is this machine's address", "name an address that the nodes can reach"
            )
        elif remote and "://" in value and is_private(value):
            yield Finding("network", f"{name}={value}", "note", "a private address: the nodes must be in its network")


def queues(job: ManagedJob) -> Iterator[Finding]:
    """The Slurm clusters in whose queue a job that has other places, too, would wait for a day."""
    several = (infras for task in job.tasks if len(infras := {machine.infra for machine in task.machines}) > 1)
    clusters = {infra for infras in several for infra in infras if cloud_of(infra) == "slurm"}
    if full := sorted(one for one in clusters if seconds_in_queue(one) is None):
        seen = (
            f"while {' or '.join(full)} is full, the job waits there for 24 hours before SkyPilot tries another place"
        )
        yield Finding("queue", seen, "note", "slurm: {provision_timeout: 300} in ~/.sky/config.yaml, in seconds")


def quotas(job: ManagedJob) -> Iterator[Finding]:
    """The quotas that the job's GPUs need, by cloud. A new account has none."""
    needed: dict[str, list[str]] = {}
    for task in job.tasks:
        for machine in task.machines:
            if machine.accelerators and not machine.is_own:
                quota = quota_of(machine.cloud, machine.accelerators, machine.use_spot, task.num_nodes)
                needed.setdefault(machine.cloud, []).append(quota)
    for cloud, named in needed.items():
        verb = "has no quota, but often no free" if cloud == "lambda" else "needs"
        yield Finding("quota", f"{cloud} {verb} {'; '.join(dict.fromkeys(named))}", "note")


def quota_of(cloud: str, gpus: str, spot: bool, nodes: int) -> str:
    """The quota of `nodes` machines with these GPUs, as the cloud names it."""
    gpu, count = parse_node(gpus)
    if cloud == "aws":
        spot_family, family = AWS_FAMILIES.get(gpu, (f"{gpu}'s family", f"{gpu}'s family"))
        vcpus = AWS_VCPUS.get(gpus)
        size = f" ({nodes * vcpus} vCPUs)" if vcpus else ""
        name = f"All {spot_family} Spot Instance Requests" if spot else f"Running On-Demand {family} instances"
        return f"'{name}'{size}"
    if cloud == "gcp":
        kind = f"NVIDIA {gpu.replace('-', ' ')} GPUs"
        return f"'{'Preemptible ' if spot else ''}{kind}' and 'GPUs (all regions)' ({nodes * count})"
    return f"{nodes} x {gpus}"


def formats_in_image(recipe: Recipe) -> Iterator[Finding]:
    """The formats of the export whose packages the image lacks."""
    if lacking := [name for name in recipe.export.other_formats if name in NEEDS]:
        named = ",".join(name for name in recipe.export.other_formats if name not in NEEDS)
        yield broken(
            "export",
            f"the image has no packages for {' and '.join(lacking)}",
            f"launch with --set 'export.formats=[{named}]', then make the others here: skytrain run RECIPE --store …; "
            "or launch with --image none",
        )


def image(request: LaunchRequest, secrets: Mapping[str, str]) -> Finding:
    """Whether the nodes can pull the image. UserError for a malformed name."""
    if request.image == WORK_TREE:
        seen = "none (--image none): each node gets this work tree, and installs its packages first"
        return Finding("image", seen, "note", "`skytrain image push` once, and later launches take that image")
    image_parts(request.image)  # UserError for a malformed name
    found = image_exists(request.image, secrets)
    if found.state == "ok" and "@" not in request.image:
        return Finding("image", found.seen, "note", "a tag can move between two recoveries; name a digest")
    return found
