"""Checks of a job before a machine is rented."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from pipelines.extras.bench.gpus import gpu_of
from pipelines.extras.mlflow.settings import checked_uri
from pipelines.extras.tune.conversations import ADDITION, source_of
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import LLMC, TokensConfig
from pipelines.run.fetch import path_of
from pipelines.run.stage import TUNE
from pipelines.run.stages.hellaswag_core import fetch_inputs
from pipelines.run.text.hub import LOOK_SECONDS
from pipelines.run.text.llmc_shards import is_remote, shards_found
from pipelines.run.text.sources import STDLIB, first_documents, text_of
from pipelines.run.weight_sources import INIT
from pipelines.store.unread_store import UnreadStore
from pipelines.user.cloud.catalog import CLUSTERS, is_cluster
from pipelines.user.cloud.checks import Finding, broken, check_image_name, mlflow_answers, store_commits
from pipelines.user.cloud.request import WORK_TREE, LaunchRequest
from pipelines.user.cloud.skypilot import skypilot_version
from pipelines.user.cloud.tasks import ManagedJob
from trainer.base.install import how_to_install
from trainer.base.store import LocalStore, Store
from trainer.config.errors import StoreUnavailable, UserError
from trainer.config.source import FORMS, HUB, Source, unpinned

OWN_KEYS = ("SKYTRAIN_S3_ACCESS_KEY_ID", "SKYTRAIN_S3_SECRET_ACCESS_KEY")  # of a store that is not on AWS
NO_KERNELS = re.compile(
    r"(?i)K80|K520|M4|M40|M60|P4|P40|P100|V100|MI\d+\w*|Radeon|Gaudi\w*|tpu|Trainium\w*|Inferentia\w*"
)


def preflight(
    job: ManagedJob, request: LaunchRequest, recipe: Recipe, store: Store, secrets: Mapping[str, str]
) -> Iterator[Finding]:
    """All checks of a job, the cheapest first. UserError for a malformed name of an image or URI of MLflow."""
    remote = not all(map(is_cluster, job.clouds))
    if installed := skypilot_version():
        yield Finding("skypilot", installed)
        yield from controller(job)
    else:
        yield broken("skypilot", "not installed", how_to_install("cloud"))
    if "SKYTRAIN_VENV" not in request.variables:
        yield from gpus_without_kernels(job)
    yield from slow_cards([job])
    yield from texts_reachable(recipe, job.stages, remote)
    weights = Source.of(init, INIT) if (init := recipe.train.init_from) else None
    # The plan of the run has found the weights on the Hub and in runs.
    if weights and weights.kind == "path" and "train" in job.stages:
        remedy = f"{INIT}: name {FORMS['run']} of this store, or {FORMS['model']}"
        yield on_this_machine("weights for train", str(path_of(weights)), remote, remedy)
    yield from benchmarks_readable(recipe, job.stages, remote)
    yield from tuning(recipe, job.stages, remote, request.image)
    yield credentials(store, job.clouds, secrets)
    if isinstance(store, UnreadStore):
        yield broken("store", store.uri, store.why)
    elif isinstance(store, LocalStore) and remote:
        yield broken("store", f"{store.uri} is a folder of this machine", "--store s3://BUCKET/PREFIX")
    else:
        yield store_commits(store)
    yield from endpoints(request, remote)
    if request.image == WORK_TREE:
        yield Finding("image", "none: each node gets this work tree, and installs its packages first")
    else:
        check_image_name(request.image)
    if uri := request.variables.get("MLFLOW_TRACKING_URI"):
        found = mlflow_answers(uri, request.variables | dict(secrets))
        if found.state == "broken":  # here; the nodes may reach it
            later = f"a job runs without it; later, `skytrain report {request.run} --rebuild-mlflow` fills it"
            found = replace(found, state="note", remedy=f"{found.remedy}; {later}")
        yield found


def controller(job: ManagedJob) -> Iterator[Finding]:
    """Whether SkyPilot's controller of managed jobs can reach Slurm. SkyPilot 0.14.1 lets no Slurm node be the
    controller, and gives a controller elsewhere no file of Slurm's login nodes."""
    from sky import skypilot_config
    from sky.server import common

    mode = ("jobs", "controller", "consolidation_mode")
    if "slurm" in job.clouds and common.is_api_server_local() and not skypilot_config.get_nested(mode, False):
        seen = "a controller on a machine of its own can't use Slurm; this machine has to be it, and to stay up"
        remedy = "jobs: {controller: {consolidation_mode: true}} in ~/.sky/config.yaml, then sky api stop"
        yield broken("controller", seen, remedy)


def gpus_without_kernels(job: ManagedJob) -> Iterator[Finding]:
    """The GPUs that torch's wheels with CUDA 13, ours, can't use: older than Turing (sm_75), or not NVIDIA's."""
    for gpu in dict.fromkeys(machine.gpu for task in job.tasks for machine in task.machines):
        if NO_KERNELS.fullmatch(gpu_of(gpu)):
            seen = f"{gpu}: torch's wheels with CUDA 13 have no kernels for it"
            yield broken("GPUs", seen, "choose newer ones of NVIDIA with --gpus")


def slow_cards(jobs: Iterable[ManagedJob]) -> Iterator[Finding]:
    """RunPod's H100, if a job asks for it: it is slower than the card that a plan expects."""
    machines = (machine for job in jobs for task in job.tasks for machine in task.machines)
    if any(machine.cloud == "runpod" and machine.gpu == "H100" for machine in machines):
        seen = "RunPod's H100 is the PCIe card, with 0.76 of the planned computing power and no NVLink"
        yield Finding("GPUs", seen, "note", "--gpus H100-SXM:N")


def on_this_machine(what: str, path: str, remote: bool, remedy: str) -> Finding:
    """A path of this machine: no rented machine can read it, a node of a cluster may."""
    if remote or not os.path.isabs(path):
        return broken(what, f"{path} is on this machine", remedy)
    return Finding(what, path, "note", "the nodes need it at this same path")


def texts_reachable(recipe: Recipe, stages: Iterable[str], remote: bool) -> Iterator[Finding]:
    """Whether the nodes can read the texts to tokenize."""
    for text in recipe.tokens.each() if "tokenize" in stages else ():
        if is_remote(text.source):
            if not text.source.startswith(HUB):
                yield text_readable(text)
        else:
            remedy = "tokenize here, and launch the rest: skytrain run RECIPE --stage tokenize --store …"
            yield on_this_machine("text", text.source, remote, remedy)


def text_readable(text: TokensConfig) -> Finding:
    """Whether a text in S3 or on a server can be read, with the credentials that the nodes get."""
    try:
        if text.adopts:
            return Finding("text", f"{len(shards_found(text)):,} shards in {text.source}")
        with closing(first_documents(text_of(text))) as texts:
            next(texts)
    except (UserError, StoreUnavailable) as error:
        return broken("text", str(error), "correct tokens.source, or the AWS_* variables")
    return Finding("text", f"the first document of {text.source} was read")


def text_is_only_here(recipe: Recipe, places: Iterable[str]) -> bool:
    """Whether a job in these places can't read the text to tokenize. Each version of Python has another library."""
    local = [one.source.removeprefix(LLMC) for one in recipe.tokens.each() if not is_remote(one.source)]
    elsewhere = not all(map(is_cluster, places))
    return any(source == STDLIB or not os.path.isabs(source) or elsewhere for source in local)


def benchmarks_readable(recipe: Recipe, stages: Iterable[str], remote: bool) -> Iterator[Finding]:
    """Whether HellaSwag and CORE can be read. A run that could not score them would train in vain."""
    if not {"train", "evaluate", TUNE} & set(stages):
        return
    try:
        with TemporaryDirectory() as cache:
            fetch_inputs(recipe, Path(cache), LOOK_SECONDS)
    except UserError as error:
        yield broken("benchmarks", str(error), "correct the field, or set it to null")
        return
    for name in ("hellaswag", "core"):
        if source := getattr(recipe.evaluate, name):
            remedy = f"upload it to the Hub, or set evaluate.{name} to null"
            yield Finding(name, source) if is_remote(source) else on_this_machine(name, source, remote, remedy)


def tuning(recipe: Recipe, stages: Iterable[str], remote: bool, image: str) -> Iterator[Finding]:
    """Whether a job can tune: it needs data that the nodes can read, TRL, and no code of the recipe's author."""
    for step in recipe.tune if TUNE in stages else ():
        name, sources = f"{TUNE}.{step.name}", [unpinned(one.function) for one in step.rewards if one.function]
        data = source_of(step).unpinned
        if data != ADDITION and not is_remote(data):
            yield on_this_machine(f"data of {name}", data, remote, "upload it to S3 or the Hub")
        if sources:
            seen = f"no job runs a function of a recipe ({sources[0]})"
            yield broken(name, seen, "--stage export, then `skytrain run --allow-code` where you agree to it")
    if TUNE in stages and image != WORK_TREE:
        yield Finding("image", "tune needs the package trl, which the image does not have", "note", "--image none")


def credentials(store: Store, clouds: Iterable[str], secrets: Mapping[str, str]) -> Finding:
    """Whether a job will have access to the bucket."""
    if not store.uri.startswith("s3:"):
        return Finding("credentials", "a folder needs none")
    aws, own = (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), OWN_KEYS)
    names = own if any(name in secrets for name in own) else aws
    given = [name for name in names if name in secrets]
    if len(given) == 1:
        return broken("credentials", f"only {given[0]} is set", f"export {' and '.join(names)}, or neither")
    if given:
        session = any(name.endswith("SESSION_TOKEN") for name in secrets)
        expire = "; a session's credentials end the run when they expire" if session else ""
        seen = f"the job gets {' and '.join(names)} as secrets{expire}"
        if names == aws and "aws" in clouds and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
            reach = f"AWS_ENDPOINT_URL={endpoint} and these keys reach SkyPilot's requests to AWS, too"
            return Finding("credentials", f"{seen}; {reach}", "note", "name them SKYTRAIN_S3_… instead of AWS_…")
        return Finding("credentials", seen)
    if others := sorted(set(clouds) - {"aws", *CLUSTERS}):
        return broken(
            "credentials",
            f"AWS_ACCESS_KEY_ID is not set, and machines of {', '.join(others)} have no role for {store.uri}",
            f"export {' and '.join(own)} of a user who may use the bucket, or --infra aws",
        )
    seen = "none: the nodes' own role, or their file that --env AWS_SHARED_CREDENTIALS_FILE names, needs the bucket"
    return Finding("credentials", seen, "note")


def endpoints(request: LaunchRequest, remote: bool) -> Iterator[Finding]:
    """Addresses that the nodes can't reach, or that mean another machine there. UserError for a malformed one of
    MLflow."""
    for name, value in request.variables.items():
        if name == "MLFLOW_TRACKING_URI" and checked_uri(value).startswith("sqlite:"):
            yield broken("network", f"{name}={value} is on this machine", "name a server, or unset it")
        host = urlsplit(value).hostname or ""
        if remote and (host in ("localhost", "::1") or host.startswith("127.")):
            seen = f"{name}={value} is this machine's address"
            yield broken("network", seen, "name an address that the nodes can reach")
