"""From the YAMLs in sky/ to the managed job of one launch.

The files are the only description of a task. `documents` reads those of the missing stages and fills in what was
asked for: where, on what, how many, with which image and variables. Secrets are no part of a document: SkyPilot gets
them beside it, as from `--secret`, so no dump of a task can hold one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipelines.cloud.prices import parsed_node
from trainer.errors import UserError

if TYPE_CHECKING:
    from sky import Dag

WORK_TREE = "none"  # as an image: no container, the work tree is synced
CLUSTERS = ("slurm", "kubernetes", "k8s", "ssh")  # one's own machines: no spot market, no price list
CLUSTER_GPUS = "H100:8"  # as in train.yaml; such a cluster seldom has smaller ones beside for evaluate
ROOM = {"cpus": "2+", "memory": "8+"}  # to wait for spot in
# Taken into a job from the launching shell. The first are shown in a dry run and in the launch record.
PLAIN = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "MLFLOW_TRACKING_URI")
SECRET = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
    "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_SERVER",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchRequest:
    """What was asked of a launch: with the store, all that it takes to launch the run again."""

    run: str
    store: str
    until: str = "export"
    infra: str | None = None  # "slurm/local", "aws/us-east-1", "aws,gcp"; None: what the files name
    spot: bool | None = None  # None: what the files name
    nodes: int = 1  # of the stage train
    gpus: str | None = None  # "A100:8" instead of the files' GPUs
    image: str = WORK_TREE  # REGISTRY/NAME@sha256:…, or WORK_TREE
    budget: float | None = None  # dollars of the whole run
    deadline: float | None = None  # unix seconds
    variables: dict[str, str] = field(default_factory=dict)  # none of them secret


def source_folder() -> Path:
    """The clone that this code runs from. UserError where it was installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "sky" / "train.yaml").is_file():
        raise UserError("launch: there is no sky/ beside this code; run skytrain from its clone")
    return root


def documents(wish: LaunchRequest, stages: Iterable[str], parts: int = 1) -> list[dict[str, Any]]:
    """The YAML documents of the managed job: its header, then a task for every stage. Each of the `parts` of the
    recipe's tokens gets a node.

    UserError for a wish that no machine can fulfil.
    """
    folder = source_folder()
    tasks = [yaml.safe_load((folder / "sky" / f"{stage}.yaml").read_text(encoding="utf8")) for stage in stages]
    for task in tasks:
        fill(task, wish, folder, {"tokenize": parts, "train": wish.nodes}.get(task["name"], 1))
    if wish.deadline and (wish.spot or wish.until in ("tokenize", "train")):
        option = "--spot" if wish.spot else f"--stage {wish.until}"
        raise UserError(
            f"--deadline: can't be kept with {option}: the task evaluate, on demand, is what finishes in time"
        )
    job = [{"name": wish.run}, *tasks]
    if wish.deadline and set(clouds_of(job)) <= set(CLUSTERS):
        raise UserError(
            f"--deadline: {wish.infra} has no spot machines to leave and no price list to choose from; leave it out"
        )
    if wish.deadline and wish.spot is None:
        let_hand_over({task["name"]: task for task in tasks}, wish.deadline)
    return job


def fill(task: dict[str, Any], wish: LaunchRequest, folder: Path, nodes: int) -> None:
    """Put what was asked for into one of the files' tasks."""
    stage = task["name"]
    resources = task["resources"]
    task["num_nodes"] = nodes
    resources["labels"]["run"] = label_of(wish.run)
    resources["any_of"] = machines(resources["any_of"], wish, stage)
    if all(cloud_of(machine["infra"]) in CLUSTERS for machine in resources["any_of"]):
        for name in ("max_hourly_cost", "disk_size", "autostop"):  # no prices, no disks and no machines to remove
            del resources[name]
    if wish.image == WORK_TREE:
        del resources["image_id"]
        task["workdir"] = str(folder)
    else:
        resources["image_id"] = f"docker:{wish.image}"
        task["envs"]["SKYTRAIN_IMAGE"] = wish.image
    task["envs"] |= {
        "SKYTRAIN_RECIPE": f"run:{wish.run}",
        "SKYTRAIN_STORE": wish.store,
        "SKYTRAIN_BUDGET": "" if wish.budget is None else f"{wish.budget:g}",
        "SKYTRAIN_TRACKING": "on" if "MLFLOW_TRACKING_URI" in wish.variables else "off",
    }
    task["envs"] |= wish.variables
    del task["secrets"]


def let_hand_over(tasks: dict[str, dict[str, Any]], deadline: float) -> None:
    """Let train begin on spot, wait for it in a room without GPUs, and evaluate, as large and on demand, finish it if
    need be: see handover.py. What train may get on demand is for a deadline that leaves no time for spot."""
    if not {"train", "evaluate"} <= set(tasks):
        return
    train, evaluate = tasks["train"], tasks["evaluate"]
    found = train["resources"]["any_of"]
    spot = [machine for machine in found if machine["use_spot"]]
    if not spot:
        return
    steady = distinct(machine | {"use_spot": False} for machine in found)
    rooms = distinct({"infra": machine["infra"], **ROOM, "use_spot": False} for machine in spot)
    train["envs"]["SKYTRAIN_DEADLINE"] = f"{deadline:.0f}"
    evaluate["num_nodes"] = train["num_nodes"]
    for task, machines in ((train, distinct([*spot, *steady, *rooms])), (evaluate, steady)):
        task["resources"] = train["resources"] | {"any_of": machines}


def in_order(task: dict[str, Any], cheapest: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """A task as SkyPilot is to try its machines: one's own, the others, the `cheapest` first, and a room. Where there
    is spot to wait for in one, nothing on demand; where there is none, no room.

    Of `any_of` SkyPilot's optimizer takes the cheapest, but the controller of managed jobs (0.14.1) makes a list of
    that set and tries it in whatever order it comes.
    """
    machines = task["resources"]["any_of"]
    rooms = [machine for machine in machines if is_room(machine, task)]
    own = [machine for machine in machines if cloud_of(machine["infra"]) in CLUSTERS]
    rented = [machine for machine in machines if machine not in rooms and machine not in own]
    if rooms:
        spot = [machine for machine in rented if machine["use_spot"]]
        rented, rooms = (spot, rooms) if spot else (rented, [])
    rest = {name: value for name, value in task["resources"].items() if name != "any_of"}
    return task | {"resources": rest | {"ordered": [*own, *sorted(rented, key=cheapest), *sorted(rooms, key=cheapest)]}}


def is_room(machine: dict[str, Any], task: dict[str, Any]) -> bool:
    """Whether it is there to wait on."""
    return task["name"] == "train" and "accelerators" not in machine


def label_of(run: str) -> str:
    """A run's name as a label of its machines, in GCP's alphabet, the strictest."""
    return re.sub(r"[^a-z0-9_-]", "-", run)[:63]


def machines(known: list[dict[str, Any]], wish: LaunchRequest, stage: str) -> list[dict[str, Any]]:
    """The machines that a task may get, of those its file names or on the infrastructure that was asked for."""
    found = known
    if wish.infra:
        found = [machine for place in wish.infra.split(",") for machine in at(place.strip(), known)]
    if stage in ("train", "evaluate"):
        found = [machine | {"accelerators": gpus_of(machine, wish, stage)} for machine in found]
    if wish.spot is False:
        found = [machine | {"use_spot": False} for machine in found]
    elif wish.spot and any(machine["use_spot"] for machine in known):  # some tasks cost cents, and are not worth it
        found = [machine for machine in found if machine["use_spot"]]
    if not found:
        where = wish.infra or "these clouds"
        raise UserError(
            f"--spot: {where} sells no spot machines for {stage}; leave it out, or name aws or gcp in --infra"
        )
    return distinct(found)


def distinct(machines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    several = list(machines)
    return [machine for i, machine in enumerate(several) if machine not in several[:i]]


def gpus_of(machine: dict[str, Any], wish: LaunchRequest, stage: str) -> str:
    """The GPUs asked for, of which evaluate takes one; else those the file names."""
    if wish.gpus:
        parsed_node(wish.gpus)
    gpus = wish.gpus or (CLUSTER_GPUS if cloud_of(machine["infra"]) in CLUSTERS else machine["accelerators"])
    return gpus if stage == "train" else f"{gpus.partition(':')[0]}:1"


def at(place: str, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the file names on this place's cloud, moved to the place; else its first machine's size, on demand."""
    cloud = cloud_of(place)
    same = [machine | {"infra": place} for machine in known if cloud_of(machine["infra"]) == cloud]
    return same or [known[0] | {"infra": place, "use_spot": False}]


def cloud_of(infra: str) -> str:
    return infra.partition("/")[0].lower()


def clouds_of(job: list[dict[str, Any]]) -> list[str]:
    """Every cloud that a job's tasks may run on."""
    return sorted({cloud_of(m["infra"]) for task in job[1:] for m in machines_of(task)})


def machines_of(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What a task may get."""
    found: list[dict[str, Any]] = task["resources"].get("any_of") or task["resources"]["ordered"]
    return found


def as_yaml(job: list[dict[str, Any]]) -> str:
    """The documents as SkyPilot reads them."""
    return yaml.dump_all(job, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)


def shown(job: list[dict[str, Any]], secrets: Mapping[str, str]) -> str:
    """The documents for people, with the names of the secrets that go along."""
    masked = dict.fromkeys(secrets, "(from your environment, not shown)")
    return as_yaml([job[0], *(task | {"secrets": masked} if masked else task for task in job[1:])])


def dag_of(job: list[dict[str, Any]], secrets: Mapping[str, str]) -> "Dag":
    """The job as SkyPilot's chain of tasks, checked against its schema. UserError says what it objects to."""
    try:
        from sky.utils import dag_utils
    except ImportError as error:
        raise UserError("launch: SkyPilot is not installed: pip install '.[cloud]'") from error
    try:
        return dag_utils.load_chain_dag_from_yaml_str(as_yaml(job), secrets_overrides=list(secrets.items()))
    except ValueError as error:
        raise UserError(f"launch: SkyPilot refuses the job: {' '.join(str(error).split())}") from error


class _Readable(yaml.SafeDumper):
    """Scripts as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)
