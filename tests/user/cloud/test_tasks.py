"""The tasks that a launch makes of the files in sky/."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.job.deadline import DEADLINE
from pipelines.job.machine import SET_UP
from pipelines.run.stage import STAGES
from pipelines.user.cloud.catalog import MachineRequest
from pipelines.user.cloud.request import LaunchRequest, run_label
from pipelines.user.cloud.tasks import Task, in_trial_order, managed_job
from trainer.base.process import since_boot
from trainer.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SKY = ROOT / "sky"


# What the files are


@pytest.mark.parametrize("stage", STAGES)
def test_a_task_notes_when_its_machine_is_set_up_and_runs_one_command(stage: str, tmp_path: Path) -> None:
    document = yaml.safe_load((SKY / f"{stage}.yaml").read_text())
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    program = tmp_path / ".local" / "bin" / "skytrain"
    program.write_text('#!/bin/sh\necho "$@" > ~/ran\nexit 75\n')
    program.chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-euc", document["setup"]], env=environment, cwd=tmp_path, check=True)
    assert abs(float((tmp_path / SET_UP).read_text().split()[0]) - since_boot()) < 60
    assert subprocess.run(["bash", "-c", document["run"]], env=environment).returncode == 75
    assert (tmp_path / "ran").read_text() == "job\n" and "\n" not in document["run"]
    assert document["envs"]["SKYTRAIN_STAGE"] == stage


# A launch's tasks


@pytest.mark.parametrize("run", ["a" * 62 + "--0123", "a-0123"])
def test_the_label_of_a_run_has_the_form_that_every_cloud_takes(run: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?", run_label(run))


def test_runpod_logs_into_our_image_as_its_user_by_skypilots_start_command() -> None:
    (target,) = re.findall(r"^FROM \S+ AS skypilot\n(.*?)\n\n\n", (ROOT / "docker/Dockerfile").read_text(), re.M | re.S)
    assert target.endswith("\nENTRYPOINT []")
    name = "SKYPILOT_RUNPOD_DOCKER_USERNAME"
    assert {task.envs.get(name) for task in tasks_with(infra="runpod").values()} == {"skytrain"}
    assert {task.envs.get(name) for task in tasks_with().values()} == {None}


# With a deadline


def tasks_with(**options: Any) -> dict[str, Task]:
    request = LaunchRequest("gpt2-124m-12345678", "s3://bucket/prefix", image="a/b@sha256:c", **options)
    return {task.name: task for task in managed_job(request, STAGES).tasks}


def test_a_launch_with_a_deadline_can_finish_training_on_demand_in_the_next_task() -> None:
    plain, timed = tasks_with(nodes=2), tasks_with(nodes=2, deadline=1.8e9)
    train, evaluate = timed["train"], timed["evaluate"]
    spot = [machine for machine in train.machines if machine.use_spot]
    on_demand = [m for m in train.machines if not m.use_spot and m not in train.standbys]
    assert spot and {machine.infra for machine in spot} <= {machine.infra for machine in on_demand}
    assert {machine.infra for machine in train.standbys} == {machine.infra for machine in spot}
    assert sorted(map(str, evaluate.machines)) == sorted(map(str, on_demand))
    assert evaluate.resources["disk_size"] == train.resources["disk_size"]
    assert evaluate.num_nodes == 2 and train.envs[DEADLINE] == "1800000000"
    assert DEADLINE not in evaluate.envs
    with pytest.raises(UserError, match="--deadline: can't be kept with --spot"):
        tasks_with(deadline=1.8e9, spot=True)
    with pytest.raises(UserError, match="--deadline: can't be kept with --stage train"):
        tasks_with(deadline=1.8e9, until="train")
    with pytest.raises(UserError, match="--deadline: slurm/here,k8s has no spot machines and no price list"):
        tasks_with(deadline=1.8e9, infra="slurm/here,k8s")
    assert tasks_with(deadline=1.8e9, infra="slurm/here,aws")["train"].envs[DEADLINE]
    assert all(machine.use_spot for machine in tasks_with(spot=True)["train"].machines)
    assert DEADLINE not in plain["train"].envs and plain["evaluate"].num_nodes == 1


def test_the_order_of_machines_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(machine: MachineRequest) -> float:
        return {"gcp": 1.0, "aws": 2.0, "lambda": 3.0, "slurm/here": 9.0}[machine.infra] / (
            2 if machine.use_spot else 1
        )

    def order(task: Task) -> list[str]:
        resources = in_trial_order(task, price).to_yaml()["resources"]
        assert "any_of" not in resources
        return [
            f"{m['infra']} {m.get('accelerators', 'standby')}" + " spot" * m["use_spot"] for m in resources["ordered"]
        ]

    spot, standbys = ["gcp H100:8 spot", "aws H100:8 spot"], ["gcp standby", "aws standby"]
    train = tasks_with(deadline=1.8e9)["train"]
    assert order(train) == spot + standbys
    mixed = tasks_with(deadline=1.8e9, infra="slurm/here,aws")["train"]
    assert order(mixed) == ["slurm/here H100:8", spot[1], standbys[1]]
    without_spot = tuple(machine for machine in train.machines if not machine.use_spot)
    late = replace(train, machines=without_spot)  # as if spot would miss the deadline
    on_demand = ["gcp H100:8", "aws H100:8", "lambda H100:8"]
    assert order(late) == order(tasks_with(deadline=1.8e9)["evaluate"]) == on_demand
    assert order(tasks_with()["train"]) == [*spot, "lambda H100:8"]
