"""From the YAMLs in sky/ to the managed job of one launch.

The files are the only description of a task. `managed_job` reads the files of the missing stages and adds the request:
where, on which machines, how many, with which image and variables. Secrets are no part of a task: SkyPilot gets them
separately, as from `--secret`, so no dump of a task can hold one.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import yaml

from pipelines.run.stage import STAGES, TUNE
from pipelines.user.cloud.catalog import MachineRequest, is_cluster
from pipelines.user.cloud.request import WORK_TREE, LaunchRequest, run_label
from trainer.base.install import ROOT, clone
from trainer.config.errors import UserError

STANDBY_CPUS, STANDBY_MEMORY = "2+", "8+"  # of the machine that polls for spot
MOST_MACHINES = 40  # of a task: their prices stay far below the 128 KiB that Linux allows one variable
PACKED = "pipelines/user/cloud/tree"  # in a wheel: files of the clone that are no code (pyproject.toml)
STAGE = "SKYTRAIN_STAGE"  # the last stage that a task makes
MASKED = "(from your environment, not shown)"


@dataclass(frozen=True)
class Task:
    """One stage of a managed job: a YAML document. The fields that a launch changes are typed."""

    name: str
    num_nodes: int
    machines: tuple[MachineRequest, ...]  # in the order in which SkyPilot tries them
    envs: Mapping[str, str | None]
    resources: Mapping[str, Any]  # without the machines
    document: Mapping[str, Any]  # all fields; those above replace its own

    @property
    def standbys(self) -> tuple[MachineRequest, ...]:
        """Machines that poll for spot, and do not train."""
        return tuple(machine for machine in self.machines if self.name == "train" and machine.accelerators is None)

    def to_yaml(self) -> dict[str, Any]:
        machines = [machine.to_yaml() for machine in self.machines]
        resources = {**self.resources, "ordered": machines}
        return {**self.document, "num_nodes": self.num_nodes, "resources": resources, "envs": dict(self.envs)}

    @classmethod
    def from_yaml(cls, document: Mapping[str, Any]) -> Self:
        resources = dict(document["resources"])
        machines = tuple(MachineRequest(**machine) for machine in resources.pop("any_of"))
        return cls(document["name"], document["num_nodes"], machines, document["envs"], resources, document)


@dataclass(frozen=True)
class ManagedJob:
    """A chain of tasks, one for each missing stage. SkyPilot's controller runs them one after another."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def stages(self) -> list[str]:
        return [task.name for task in self.tasks]

    @property
    def clouds(self) -> list[str]:
        """Every cloud that a task may run on."""
        return sorted({machine.cloud for task in self.tasks for machine in task.machines})

    def to_yaml(self, secrets: Iterable[str] = ()) -> str:
        """The documents as SkyPilot reads them. With the names of `secrets` in every task: for people."""
        masked = {"secrets": dict.fromkeys(secrets, MASKED)} if secrets else {}
        documents = [{"name": self.name}, *(task.to_yaml() | masked for task in self.tasks)]
        return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)


def work_tree() -> Path:
    """The folder that nodes get: the clone, or the one that `make_work_tree` makes of an installed package."""
    return clone() or Path.home() / ".cache" / "skytrain" / f"tree-{version('skytrain')}"


def make_work_tree() -> None:
    """Copy an installed package, and the files of a clone that its wheel has, to the work tree. A clone is one."""
    for code, target in () if clone() else (("pipelines", "pipelines"), ("trainer", "trainer"), (PACKED, "")):
        ignored = shutil.ignore_patterns("__pycache__", "tree")
        shutil.copytree(ROOT / code, work_tree() / target, ignore=ignored, dirs_exist_ok=True)


def managed_job(request: LaunchRequest, stages: Iterable[str], small: bool = False) -> ManagedJob:
    """The job of a request. A `small` training gets one GPU, unless the request names GPUs. Evaluate gets its file's
    machines, one GPU of train's, and train's machines, because few clouds sell all of them. It exports too: another
    machine would take five minutes to start. The steps of tune, and the evaluation after them, are one task, on one GPU
    of train's if it is sold.

    UserError for a request that can't be fulfilled.
    """
    missing = list(stages)
    steps, stages = [one for one in missing if one not in STAGES], [one for one in missing if one in STAGES]
    files = {stage: read_task(stage) for stage in STAGES}
    machines = {stage: requested_machines(file.machines, request, stage) for stage, file in files.items()}
    one_gpu = [replace(one, accelerators=f"{one.gpu}:1") for one in machines["train"]]
    # A private cluster seldom has other GPUs than those to train on.
    single = distinct([*(one for one in machines["evaluate"] if not is_cluster(one.infra)), *one_gpu])
    if small and not request.gpus:
        machines["train"] = single
    machines["evaluate"] = distinct([*single, *machines["train"]])
    if steps:
        stages.append(TUNE)
        files[TUNE] = continued(files["train"], TUNE, steps[-1])
        machines[TUNE] = distinct([*one_gpu, *machines["train"]])
    if {"evaluate", "export"} <= set(stages) and not request.deadline:  # whose evaluate has many GPUs
        stages.remove("export")
        files["evaluate"] = continued(files["evaluate"], "evaluate", "export")
    tasks = {stage: requested_task(replace(files[stage], machines=machines[stage]), request) for stage in stages}
    if request.deadline and (request.spot or request.until in ("tokenize", "train")):
        option = "--spot" if request.spot else f"--stage {request.until}"
        raise UserError(
            f"--deadline: can't be kept with {option}: the task evaluate, on demand, finishes the training in time"
        )
    job = ManagedJob(request.job_name, tuple(tasks.values()))
    if request.deadline and all(map(is_cluster, job.clouds)):
        raise UserError(f"--deadline: {request.infra} has no spot machines and no price list; leave it out")
    if request.deadline and request.spot is None and {"train", "evaluate"} <= set(tasks):
        tasks |= deadline_tasks(tasks["train"], tasks["evaluate"], request.deadline)
    return replace(job, tasks=tuple(tasks.values()))


def continued(task: Task, name: str, last: str) -> Task:
    """A task with a name that makes all stages up to `last`."""
    return replace(task, name=name, envs={**task.envs, STAGE: last}, document={**task.document, "name": name})


@cache
def read_task(stage: str) -> Task:
    """A stage's task. UserError for an installation without the files of sky/, such as an image's."""
    path = (clone() or ROOT / PACKED) / "sky" / f"{stage}.yaml"
    if not path.is_file():
        raise UserError("launch: this installation has no tasks of SkyPilot; install the wheel of skytrain")
    return Task.from_yaml(yaml.safe_load(path.read_text(encoding="utf8")))


def requested_task(task: Task, request: LaunchRequest) -> Task:
    """A task with the request's nodes, image and variables."""
    resources = {**task.resources, "labels": {**task.resources["labels"], "run": run_label(request.job_name)}}
    del resources["max_hourly_cost"]  # SkyPilot ignores it where the type is given; the plan shows the prices
    if all(is_cluster(machine.infra) for machine in task.machines):
        del resources["disk_size"], resources["autostop"]  # no disks and no machines to remove
    envs = dict(task.envs)
    document = {name: value for name, value in task.document.items() if name not in ("secrets", "workdir")}
    if request.image == WORK_TREE:
        document["workdir"] = str(work_tree())
    else:
        resources["image_id"] = f"docker:{request.image}"
        envs["SKYTRAIN_IMAGE"] = request.image
        if any(machine.cloud == "runpod" for machine in task.machines):
            envs["SKYPILOT_RUNPOD_DOCKER_USERNAME"] = "skytrain"  # the user of our image, as whom SkyPilot logs in
    envs |= {
        "SKYTRAIN_RECIPE": f"run:{request.run}",
        "SKYTRAIN_STORE": request.store,
        "SKYTRAIN_BUDGET": "" if request.budget is None else f"{request.budget:g}",
        "SKYTRAIN_TRACKING": "on" if "MLFLOW_TRACKING_URI" in request.variables else "off",
    }
    envs |= request.variables
    nodes = request.nodes if task.name == "train" else 1
    return replace(task, num_nodes=nodes, envs=envs, resources=resources, document=document)


def deadline_tasks(train: Task, evaluate: Task, deadline: float) -> dict[str, Task]:
    """Both tasks for a deadline (see deadline.py): train begins on spot and polls for it on a standby machine without
    GPUs; evaluate, as large and on demand, finishes the training if that is needed. The on-demand machines of train are
    for a deadline that leaves no time for spot."""
    spot = [machine for machine in train.machines if machine.use_spot]
    if not spot:
        return {}
    on_demand = distinct(replace(machine, use_spot=False) for machine in train.machines)
    standbys = distinct(
        MachineRequest(machine.infra, False, cpus=STANDBY_CPUS, memory=STANDBY_MEMORY) for machine in spot
    )
    envs = {**train.envs, "SKYTRAIN_DEADLINE": f"{deadline:.0f}"}
    return {
        "train": replace(train, envs=envs, machines=distinct([*spot, *on_demand, *standbys])),
        "evaluate": replace(evaluate, num_nodes=train.num_nodes, machines=on_demand, resources=train.resources),
    }


def in_trial_order(task: Task, rank: Callable[[MachineRequest], float]) -> Task:
    """A task with the MOST_MACHINES that SkyPilot is to try, in order: own, then rented ones and standbys, each by
    `rank`. With standbys it has no on-demand machines; without spot machines no standbys.

    SkyPilot's optimizer takes the cheapest of `any_of`. But the controller of managed jobs (0.14.1) makes a list of
    that set and tries it in arbitrary order.
    """
    standbys, on_spot = task.standbys, any(machine.use_spot for machine in task.machines)

    def stays(machine: MachineRequest) -> bool:
        return not standbys or is_cluster(machine.infra) or on_spot == (machine.use_spot or machine in standbys)

    found = sorted(filter(stays, task.machines), key=lambda m: (not is_cluster(m.infra), m in standbys, rank(m)))
    return replace(task, machines=tuple(found[:MOST_MACHINES]))


def requested_machines(
    known: Iterable[MachineRequest], request: LaunchRequest, stage: str
) -> tuple[MachineRequest, ...]:
    """The machines of a stage's file on the requested infrastructure, with the requested GPUs and market.

    Spot and GPUs are requests for train: the other stages cost cents.
    """
    known = list(known)
    if request.infra:
        known = [machine for infra in request.infra.split(",") for machine in machines_on(infra.strip(), known)]
    if stage == "train" and request.gpus:
        if not re.fullmatch(r"[A-Za-z0-9-]+:[1-9][0-9]*", request.gpus):
            raise UserError(f"--gpus {request.gpus}: write the GPU and their number on a node, as in H100:8")
        known = [replace(machine, accelerators=request.gpus) for machine in known]
    if request.spot is False or (request.spot and stage == "train"):
        known = [replace(machine, use_spot=request.spot) for machine in known]
    return distinct(known)


def machines_on(infra: str, known: list[MachineRequest]) -> list[MachineRequest]:
    """The file's machines of this cloud, moved to `infra`; else its first machine's size, on demand."""
    moved = [replace(machine, infra=infra) for machine in known]
    same = [to for machine, to in zip(known, moved, strict=True) if machine.cloud == to.cloud]
    return same or [replace(moved[0], use_spot=False)]


def distinct(machines: Iterable[MachineRequest]) -> tuple[MachineRequest, ...]:
    return tuple(dict.fromkeys(machines))


class _Readable(yaml.SafeDumper):
    """Scripts as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)
