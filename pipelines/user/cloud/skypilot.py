"""All requests to SkyPilot's API server, and its answers in our own types.

Importing SkyPilot takes about 4 s, so every function imports it itself.
"""

import getpass
import io
import logging
import platform
import re
import shlex
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from trainer.base.answers import answered_within
from trainer.base.install import how_to_install
from trainer.base.store import LocalStore
from trainer.config.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from sky import Dag
    from sky.schemas.api.responses import ManagedJobRecord, StatusResponse

PROJECT = "skytrain"  # the label `project` of every machine of ours
SERVER_FILE = "skytrain-server"  # in the folder of SkyPilot's state
JOB_FIELDS = (
    *("job_id", "task_id", "job_name", "task_name", "status", "recovery_count", "submitted_at"),
    *("current_cluster_name", "cluster_name_on_cloud", "failure_reason", "details"),
)
FETCH_SECONDS = 6.0  # for a price list, of at most 4 MB
ASK_SECONDS = 300.0  # for a question: 35 s were measured, through a controller on a machine of its own
WORK_SECONDS = 3600.0  # for a request that starts or removes machines


# The package


def skypilot_version() -> str | None:
    """None where SkyPilot is not installed. An import would not show it: in a clone, `sky` is the project's folder."""
    try:
        return version("skypilot")
    except PackageNotFoundError:
        return None


def require_skypilot() -> None:
    """UserError without SkyPilot, with the command that installs it."""
    if skypilot_version() is None:
        raise UserError(f"SkyPilot is not installed: {how_to_install('cloud')}")


@contextmanager
def skypilot_silent() -> Iterator[None]:
    """Without SkyPilot's log, from its import on, errors included: each of them also arrives as an exception."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# The server


def answer_to(ask: Callable[[], Any], seconds: float = ASK_SECONDS) -> Any:
    """The API server's answer to a request. UserError if it takes longer than `seconds` in all."""
    from sky.client import sdk

    try:
        return answered_within(seconds, lambda: sdk.get(ask()))
    except TimeoutError as error:
        raise UserError(f"SkyPilot's API server: no answer within {seconds:g} s; see `sky api status`") from error


def api_server_is_up() -> bool:
    """Whether SkyPilot's API server answers, on this machine or elsewhere."""
    if skypilot_version() is None:
        return False
    from sky.client import sdk

    try:
        answered_within(FETCH_SECONDS, sdk.api_info)
    except Exception:  # of any kind: there is no answer
        return False
    return True


def reach_api_server(note: Callable[[str], None]) -> bool:
    """Start SkyPilot's API server if it is to run on this machine and is not up; `note` reports the start. Returns
    whether it was started.

    UserError without SkyPilot.
    """
    require_skypilot()
    from sky.client import sdk
    from sky.server import common

    if not common.is_api_server_local() or api_server_is_up():
        return False
    note("starting SkyPilot's API server on this machine; `sky api stop` ends it")
    try:
        with skypilot_silent():
            answered_within(ASK_SECONDS, sdk.api_start)
    except (RuntimeError, TimeoutError) as error:
        raise UserError(f"SkyPilot's API server does not start: {' '.join(str(error).split())}") from error
    return True


def stop_api_server() -> None:
    """End the API server on this machine."""
    from sky.client import sdk

    with skypilot_silent():
        answered_within(ASK_SECONDS, sdk.api_stop)


def server_name() -> str:
    """The name of the API server that has the jobs of this shell: ids of jobs are unique within one server only.

    A server on this machine gets a random name, stored beside SkyPilot's own state: containers may have one host name.
    """
    from sky.server import common
    from sky.skylet import runtime_utils

    if common.is_api_server_local():
        state = LocalStore(Path(runtime_utils.get_runtime_dir_path(".sky")))
        if (name := state.get(SERVER_FILE)) is None:
            state.create(SERVER_FILE, f"{getpass.getuser()}@{platform.node()}-{uuid.uuid4().hex[:8]}".encode())
            name = state.get(SERVER_FILE) or b""
        return name.decode()
    parts = urlsplit(common.get_server_url())
    return parts.netloc.rpartition("@")[2] + parts.path  # without a user and password


def is_this_server(recorded: str) -> bool:
    """Whether a launch went to the API server of this shell, by the name in its record."""
    return recorded == server_name()


def enabled_clouds(seconds: float = ASK_SECONDS) -> list[str]:
    """The clouds that SkyPilot may use, in its server's spelling, lower case. Starts a local server if none is up."""
    from sky.client import sdk

    return sorted(cloud.lower() for cloud in answer_to(sdk.enabled_clouds, seconds))


def check_places(infra: str | None) -> None:
    """UserError for a cloud, region, cluster or context that SkyPilot does not know, with the names that it knows.

    Without SkyPilot, a cloud's packages or, for regions, a network to fetch its catalog, names pass here; `preflight`
    reports a missing SkyPilot.
    """
    if skypilot_version() is None:
        return
    import sky

    with skypilot_silent():
        for place in map(str.strip, infra.split(",") if infra else ()):
            try:
                answered_within(FETCH_SECONDS, sky.Resources(infra=place).validate)
            except (ImportError, OSError):
                continue
            except ValueError as error:
                raise UserError(f"--infra {place}: {' '.join(str(error).split())}") from error


# Launching


def dag_of(job: str, secrets: Mapping[str, str]) -> "Dag":
    """A job's YAML as SkyPilot's chain of tasks, checked against its schema. UserError with SkyPilot's objection,
    OSError without its price lists."""
    from sky.utils import dag_utils

    load = partial(dag_utils.load_chain_dag_from_yaml_str, job, secrets_overrides=list(secrets.items()))
    try:
        with skypilot_silent():
            return answered_within(FETCH_SECONDS, load)
    except ValueError as error:
        raise UserError(f"launch: SkyPilot refuses the job: {' '.join(str(error).split())}") from error


def ask_optimizer(dag: "Dag") -> None:
    """Let SkyPilot choose machines, without its tables: the plan was reported. UserError if no machine fits."""
    from sky import exceptions
    from sky.client import sdk

    try:
        answer_to(lambda: sdk.optimize(dag))
    except (exceptions.ResourcesUnavailableError, exceptions.NoCloudAccessError) as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("To fix:")[0]  # its hints are about its own CLI
        reason = " ".join(plain.split()).rstrip(".")
        raise UserError(
            f"launch: no machine fits: {reason}; try another --infra or --gpus, or without --spot"
        ) from error


def submit_job(dag: "Dag", name: str) -> list[int]:
    """Submit a job to SkyPilot, which prints its progress. Returns the ids of the managed jobs."""
    from sky import jobs
    from sky.client import sdk

    ids, _ = sdk.stream_and_get(jobs.launch(dag, name=name))  # without a bound: its user watches it
    return [ids] if isinstance(ids, int) else list(ids or [])


# Managed jobs


@dataclass(frozen=True)
class TaskStatus:
    """SkyPilot's report of one task of a managed job: a stage of a launched run."""

    job: int
    stage: str
    status: str  # PENDING, STARTING, RUNNING, RECOVERING, SUCCEEDED, FAILED, CANCELLED, …
    recoveries: int
    cluster: str | None
    why: str | None  # the reason of a failure, or of a wait
    over: bool
    name: str = ""  # of the job
    task: int = 0  # its index in the job
    submitted: float = 0.0  # unix seconds
    up: str | None = None  # the cloud's name of its cluster, while SkyPilot has that on record

    @property
    def works(self) -> bool:
        """Whether the task has a machine that is set up."""
        return not (self.over or self.status in ("PENDING", "STARTING", "RECOVERING"))

    @property
    def exit_code(self) -> int:
        """The exit code of the command of a task that is over, on the first node where it is not 0. A task that was
        cancelled can be resumed."""
        if self.status in ("SUCCEEDED", "CANCELLED"):
            return EXIT_DONE if self.status == "SUCCEEDED" else EXIT_INTERRUPTED
        code = re.search(r"exit codes? \[?(?:0, )*(\d+)", self.why or "")
        return int(code[1]) if code else EXIT_FAILED

    @property
    def clusters(self) -> set[str]:
        """The names of its cluster. SkyPilot leaves out the present one while it replaces it."""
        return {f"{self.stage}-{self.job}", *filter(None, [self.cluster])}

    @classmethod
    def of(cls, record: "ManagedJobRecord") -> "TaskStatus":
        assert record.job_id is not None and record.status is not None, record
        return cls(
            job=record.job_id,
            stage=record.task_name or "",
            status=record.status.value,
            recoveries=record.recovery_count or 0,
            cluster=record.current_cluster_name,
            why=record.failure_reason or record.details,
            over=record.status.is_terminal(),
            name=record.job_name or "",
            task=record.task_id or 0,
            submitted=record.submitted_at or 0.0,
            up=record.cluster_name_on_cloud,
        )


def managed_tasks(name: str | None = None, unfinished: bool = False) -> list[TaskStatus]:
    """The tasks of all users' managed jobs, or of those with this name; `unfinished`: without jobs that are over.

    Empty if SkyPilot's controller has a machine of its own that does not exist or is stopped. UserError without an
    answer: there may be jobs.
    """
    from sky import ClusterStatus, exceptions, jobs

    queue = partial(jobs.queue_v2, refresh=False, all_users=True, name_match=name, fields=JOB_FIELDS)
    try:
        found, *_ = answer_to(partial(queue, skip_finished=unfinished))
    except (exceptions.ClusterNotUpError, RuntimeError) as error:
        # A RuntimeError: SkyPilot takes the machine as up, and it does not answer.
        if getattr(error, "cluster_status", ClusterStatus.UP) in (None, ClusterStatus.STOPPED):
            return []
        raise UserError(f"SkyPilot can't tell of its managed jobs: {' '.join(str(error).split())}") from error
    return [TaskStatus.of(record) for record in found if name in (None, record.job_name)]


def stores_of(ids: Iterable[int]) -> dict[int, str]:
    """The stores of managed jobs, as the variables in their YAML name them."""
    from sky import jobs

    fields, stores = ["job_id", "user_yaml"], dict[int, str]()
    found, *_ = answer_to(lambda: jobs.queue_v2(refresh=False, all_users=True, job_ids=list(ids), fields=fields))
    for record in found:
        for document in yaml.safe_load_all(record.user_yaml or ""):
            if record.job_id is not None and (store := (document.get("envs") or {}).get("SKYTRAIN_STORE")):
                stores[record.job_id] = store
    return stores


def cancel_jobs(ids: Iterable[int]) -> None:
    from sky import jobs

    answer_to(lambda: jobs.cancel(job_ids=list(ids)))


def tail_logs(job: int, follow: bool, output: io.TextIOBase) -> bool:
    """Write a job's log to `output`, line by line. Returns whether the job goes on after the end of a followed log."""
    from sky import jobs
    from sky.exceptions import JobExitCode

    return jobs.tail_logs(job_id=job, follow=follow, output_stream=output) == JobExitCode.NOT_FINISHED


# Clusters


class Cluster(NamedTuple):
    """A cluster with our label, as far as SkyPilot knows."""

    name: str
    run: str | None  # its label, of the job's name
    since: float  # unix seconds, of its provisioning
    until: float | None = None  # of its removal; None: it is up
    controller: str | None = None  # the machine that has it on record; None: the API server


def clusters(note: Callable[[str], None] | None = None) -> list[Cluster]:
    """Every cluster on the API server's record with our label that is up, or was in the last 30 days.

    With `note` also those of a controller of managed jobs on a machine of its own, which alone has the clusters of its
    jobs on record: call `managed_tasks` before, which brings its state up to date. `note` gets a message if it can't be
    asked.
    """
    from sky.client import sdk
    from sky.utils import common

    reports = answer_to(sdk.cost_report)
    rows = [(one["name"], one["resources"].labels, one["usage_intervals"], None) for one in reports]
    for machine in answer_to(lambda: sdk.status(all_users=True)) if note else ():
        if note and machine.name.startswith(common.JOB_CONTROLLER_PREFIX):
            rows += [(*row, machine.name) for row in rows_on(machine, note)]
    return [
        Cluster(name, labels.get("run"), since, until, controller)
        for name, labels, intervals, controller in rows
        if labels and labels.get("project") == PROJECT
        for since, until in intervals or ()
    ]


# On a controller with a machine of its own: SkyPilot's command, and a program that prints the clusters on record, for
# which SkyPilot's client has no request.
SKY_THERE = "skypilot-runtime/bin/sky"
ON_RECORD = """
from sky import global_user_state
from sky.utils import message_utils
found = global_user_state.get_clusters_from_history(days=30)
rows = [(one["name"], one["resources"].labels, one["usage_intervals"]) for one in found if one["resources"]]
print(message_utils.encode_payload(rows))
"""


def rows_on(controller: "StatusResponse", note: Callable[[str], None]) -> list[list[Any]]:
    """Name, labels and intervals of use of each cluster that a controller has on record."""
    from sky import ClusterStatus
    from sky.backends import CloudVmRayBackend
    from sky.skylet import constants
    from sky.utils import message_utils

    unseen = f"the clusters of jobs that SkyPilot's controller {controller.name} has on record are not listed"
    if controller.status is ClusterStatus.STOPPED:
        note(f"{unseen}: it has stopped; `sky jobs queue --refresh` starts it")
        return []
    command = f"{constants.SKY_PYTHON_CMD} -u -c {shlex.quote(ON_RECORD)}"
    options = {"stream_logs": False, "require_outputs": True, "separate_stderr": True}
    try:
        run = partial(CloudVmRayBackend().run_on_head, controller.handle, command, **options)
        code, output, errors = answered_within(ASK_SECONDS, run)
        if code == 0:
            return message_utils.decode_payload(output)
    except Exception as error:  # of SSH, or of a machine whose keys another machine has
        errors = str(error)
    note(f"{unseen}: {' '.join(errors.split())}; `ssh {controller.name} {SKY_THERE} status` lists them")
    return []


def take_down(cluster: str) -> None:
    """Remove a cluster; one that a job's controller removes meanwhile is gone, too."""
    from sky.client import sdk
    from sky.exceptions import ClusterDoesNotExist

    with suppress(ClusterDoesNotExist):
        answer_to(lambda: sdk.down(cluster), WORK_SECONDS)
