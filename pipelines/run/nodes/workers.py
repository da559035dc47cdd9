"""Node 0's view of the workers of an attempt. Nodes share only the store; their ranks meet by torch.distributed.

Node 0 writes the numbers of the ranks' task to `attempts/<n>/ranks.json`; all else of it a worker takes from its own
plan. Each worker starts its ranks (worker.py), and writes `attempts/<n>/node-<rank>.json` every few seconds: so node 0
learns of a worker that is gone, of a notice that it got, and of how its ranks ended.
"""

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Self

from pipelines.run.nodes.address import NodeAddress
from pipelines.run.nodes.ranks import RankNumbers, TrainTask
from pipelines.run.nodes.results import NodeResult
from pipelines.store.layout import node_key, ranks_key
from pipelines.store.ledger import SILENT_SECONDS, Attempt
from pipelines.store.records import HEARTBEAT_SECONDS
from pipelines.store.traffic import Traffic, traffic_here
from trainer.base.process import Background, StopSignal
from trainer.base.record import Count, StoredRecord, UnixSeconds, record_at
from trainer.base.store import Store
from trainer.config.errors import UserError

POLL_SECONDS = 2.0  # between two looks into the store


@dataclass(frozen=True)
class WorkerRecord(StoredRecord):
    """The last report of a worker in an attempt."""

    node: Count
    time: UnixSeconds
    traffic: Traffic = Traffic()  # with buckets, in this attempt
    stop: str | None = None  # why this node was asked to stop
    result: NodeResult | None = None  # of its ranks, once they have ended

    def write(self, store: Store, prefix: str, attempt: int) -> None:
        store.put(node_key(prefix, attempt, self.node), json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, store: Store, prefix: str, attempt: int, node: int) -> Self | None:
        """DamagedRecord, or NewerRecord."""
        return record_at(cls, store, node_key(prefix, attempt, node), polled=True)


def write_numbers(store: Store, task: TrainTask, address: NodeAddress) -> None:
    """Let the workers start their ranks."""
    known = vars(address) | vars(task)
    numbers = {name: known[name] for name in RankNumbers.__dataclass_fields__}
    store.put(ranks_key(task.prefix, task.attempt), json.dumps(numbers).encode())


def read_numbers(store: Store, prefix: str, attempt: int) -> RankNumbers | None:
    """Those of an attempt; None before node 0 has written them. DamagedRecord, or NewerRecord."""
    return record_at(RankNumbers, store, ranks_key(prefix, attempt), polled=True)


class Workers:
    """The workers of an attempt. A thread reads their records. Use as a context manager around the ranks of node 0."""

    def __init__(self, address: NodeAddress, attempt: Attempt, stop: StopSignal) -> None:
        self.address, self._attempt, self._stop = address, attempt, stop
        self.lost: list[int] = []  # the nodes that started their ranks and have been silent since
        self._records: dict[int, WorkerRecord] = {}  # by node
        self._changed: dict[int, float] = {}  # by node: the time of the last change of its record, by time.monotonic
        self._ended = threading.Event()

    def __enter__(self) -> "Workers":
        self._attempt.traffic = self.traffic
        Background("workers", self._poll, lambda thread: self._stop.ask(f"a thread crashed: {thread.error!r}")).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def absent(self) -> list[int]:
        """The nodes that have not started their ranks."""
        return [node for node in range(1, self.address.count) if node not in self._records]

    @property
    def have_failed(self) -> bool:
        """Whether the ranks of another node cannot continue."""
        return bool(self.lost) or any(result.kind for result in self.results())

    def results(self) -> list[NodeResult]:
        """How the ranks of other nodes have ended so far."""
        return [record.result for _, record in sorted(self._records.items()) if record.result]

    def wait_for_results(self) -> list[NodeResult]:
        """The results once every worker has reported one, is lost, or has not started."""
        deadline = time.monotonic() + SILENT_SECONDS + 2 * POLL_SECONDS
        while len(self.results()) + len(self.lost) < len(self._records) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.results()

    def traffic(self) -> Traffic:
        """The bytes that all nodes have exchanged with buckets, as far as they have reported."""
        return sum([record.traffic for record in list(self._records.values())], traffic_here())

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Read the records. A worker without a change for SILENT_SECONDS is lost, unless the store is away or slow:
        then workers cannot write either."""
        began, changed = time.monotonic(), set()
        try:
            for node in range(1, self.address.count):
                record = WorkerRecord.read(self._attempt.store, self._attempt.prefix, self._attempt.number, node)
                if record and record != self._records.get(node):
                    self._records[node] = record
                    changed.add(node)
                    if record.stop:
                        self._stop.ask(f"node {node}: {record.stop}")
            away = time.monotonic() - min(began, self._attempt.reported) > 2 * HEARTBEAT_SECONDS
        except (OSError, UserError):
            away = True
        now = time.monotonic()
        for node, record in self._records.items():
            if away or node in changed:
                self._changed[node] = now
            if now - self._changed[node] > SILENT_SECONDS and not record.result and node not in self.lost:
                self.lost.append(node)
