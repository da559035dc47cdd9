"""An imitation of SkyPilot's API server, at the functions of SkyPilot's own client: jobs, clusters, logs."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.user.cloud.skypilot import PROJECT, Cluster


def job_record(
    number: int,
    name: str,
    status: str,
    submitted: float = 1e9,
    cluster: str | None = None,
    up: bool = False,
    store: str = "",
    **more: Any,
) -> Any:
    """A managed job of one task, as SkyPilot answers. `store`: in its YAML. `up`: its cluster is on record as up."""
    over = status in ("SUCCEEDED", "FAILED", "FAILED_NO_RESOURCE", "CANCELLED")
    known = {"job_id": number, "task_id": 0, "job_name": name, "task_name": "train", "recovery_count": 0}
    known |= {"submitted_at": submitted, "failure_reason": None, "details": None, "current_cluster_name": cluster}
    known |= {"cluster_name_on_cloud": cluster if up else None, "user_yaml": f"envs: {{SKYTRAIN_STORE: '{store}'}}"}
    return SimpleNamespace(**known | more, status=SimpleNamespace(value=status, is_terminal=lambda: over))


def reported(cluster: Cluster) -> tuple[str, Any, list[tuple[float, float | None]]]:
    """Name, labels and intervals of use of a cluster, as SkyPilot has them on record."""
    labels = {"project": PROJECT} | ({"run": cluster.run} if cluster.run else {})
    return cluster.name, SimpleNamespace(labels=labels), [(cluster.since, cluster.until)]


class SkyServer:
    """The server that this process asks. A cancelled job takes its clusters with it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        sky = pytest.importorskip("sky", reason="needs skypilot (pip)")
        from sky.backends import CloudVmRayBackend
        from sky.client import sdk
        from sky.utils import message_utils

        self.jobs, self.clusters, self.removed = list[Any](), list[Cluster](), list[str]()
        self.on_queue, self.on_clusters = list[Callable[[], object]](), list[Callable[[], object]]()  # once each
        self.log: Callable[[Any, Any], int] = lambda job, output: 0  # writes a job's log; 101: the job goes on
        self.last = 7  # number of a job
        self._patch = patch
        self.name = "here"
        for of, name, answer in (
            (sky.jobs, "queue_v2", self._queue),
            (sky.jobs, "cancel", self._cancel),
            (sky.jobs, "launch", self._launch),
            (sky.jobs, "tail_logs", lambda job_id, follow, output_stream: self.log(job_id, output_stream)),
            (sdk, "cost_report", self._cost_report),
            (sdk, "status", self._controllers),
            (sdk, "down", self._down),
            (sdk, "get", lambda request: request),
            (sdk, "stream_and_get", lambda request: request),
        ):
            patch.setattr(of, name, answer)

        def rows_of_a_controller(*_: Any, **__: Any) -> tuple[int, str, str]:
            rows = [(name, of.labels, used) for name, of, used in self._reported(of_controllers=True)]
            return 0, message_utils.encode_payload(rows), ""

        patch.setattr(CloudVmRayBackend, "run_on_head", rows_of_a_controller)

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        """Ask a server of this name from now on."""
        from sky.server import common

        self._name = name
        self._patch.setenv("SKYPILOT_API_SERVER_ENDPOINT", f"http://{name}")
        common.get_server_url.cache_clear()
        common.is_api_server_local.cache_clear()

    def _queue(
        self, name_match: str | None = None, job_ids: Iterable[int] | None = None, skip_finished: bool = False, **_: Any
    ) -> tuple[list[Any], None]:
        if self.on_queue:
            self.on_queue.pop(0)()
        found = [job for job in self.jobs if name_match is None or job.job_name.startswith(name_match)]
        found = [job for job in found if job_ids is None or job.job_id in job_ids]
        return [job for job in found if not (skip_finished and job.status.is_terminal())], None

    def _cancel(self, job_ids: list[int]) -> None:
        self.removed.extend(f"job {number}" for number in job_ids)
        self.jobs[:] = [job for job in self.jobs if job.job_id not in job_ids]
        endings = tuple(f"-{number}" for number in job_ids)
        self.clusters[:] = [one for one in self.clusters if not one.name.endswith(endings)]

    def _launch(self, dag: Any, name: str) -> tuple[list[int], None]:
        self.last += 1
        self.jobs.append(job_record(self.last, name, "PENDING"))
        return [self.last], None

    def _down(self, name: str) -> None:
        self.removed.append(f"cluster {name}")
        self.clusters[:] = [one for one in self.clusters if one.name != name]

    def _reported(self, of_controllers: bool) -> list[tuple[str, Any, Any]]:
        return [reported(one) for one in self.clusters if bool(one.controller) is of_controllers]

    def _cost_report(self) -> list[dict[str, Any]]:
        if self.on_clusters:
            self.on_clusters.pop(0)()
        return [{"name": n, "resources": of, "usage_intervals": used} for n, of, used in self._reported(False)]

    def _controllers(self, all_users: bool) -> list[Any]:
        from sky import ClusterStatus

        names = {one.controller for one in self.clusters if one.controller}
        return [SimpleNamespace(name=name, status=ClusterStatus.UP, handle=None) for name in names]
