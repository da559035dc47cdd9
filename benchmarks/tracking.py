"""Many runs that write to one MLflow server at once: does it keep up, and does every point arrive once?

    MLFLOW_TRACKING_URI=https://mlflow.example.org python -m benchmarks.tracking --runs 8 --seconds 90

Each run is a process with a tracker and its shipper, as `skytrain run` has them. It writes a point of each of ten
series at `--rate` steps a second, and a small file at its end. The benchmark prints the points that were written, those
that the server has, and how long after its last step the slowest run had delivered everything.
"""

import argparse
import os
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from pipelines.tracking.mlflow.tracker import Tracker

SERIES = tuple(f"train/series_{number}" for number in range(10))


@dataclass(frozen=True)
class Written:
    """What one run wrote, and how long its delivery took after its last step."""

    run: str
    points: int
    delivery_seconds: float
    left: str | None  # a line about records that did not arrive


def write_run(name: str, folder: Path, seconds: float, rate: float) -> Written:
    """One run of `seconds` with `rate` steps a second."""
    tracker = Tracker(folder / name, name, default_uri="")
    tracker.start()
    tracker.stage_started("train", {"rate": rate}, {"benchmark": "tracking"})
    began = time.time()
    steps = round(seconds * rate)
    for step in range(steps):
        time.sleep(max(0.0, began + step / rate - time.time()))
        tracker.metrics("train", step, time.time(), {name: step / (1 + number) for number, name in enumerate(SERIES)})
    tracker.text_file("train", "sample.txt", "a text of a run\n" * 100)
    tracker.stage_ended("train", "FINISHED")
    ended = time.monotonic()
    left = tracker.close()
    return Written(name, steps * len(SERIES), time.monotonic() - ended, left)


def write_runs(runs: int, seconds: float, rate: float) -> list[Written]:
    """`runs` runs at once, each in a process of its own."""
    names = [f"tracking-{uuid.uuid4().hex[:8]}" for _ in range(runs)]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(runs, get_context("spawn")) as pool:
        return list(pool.map(partial(write_run, folder=Path(folder), seconds=seconds, rate=rate), names))


def points_on_server(run: str) -> int:
    """The number of points that the server has of a run's series."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'skytrain'")
    found = client.search_runs([experiment.experiment_id], f"tags.`skytrain.run` = '{run}'")
    (stage,) = [one for one in found if one.data.tags.get("benchmark") == "tracking"]
    return sum(len(client.get_metric_history(stage.info.run_id, name)) for name in SERIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--rate", type=float, default=2, help="steps a second of each run")
    given = parser.parse_args()
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        parser.error("name a server in MLFLOW_TRACKING_URI")
    os.environ.setdefault("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "300")
    written = write_runs(given.runs, given.seconds, given.rate)
    arrived = sum(points_on_server(one.run) for one in written)
    asked = sum(one.points for one in written)
    slowest = max(one.delivery_seconds for one in written)
    print(f"{given.runs} runs, {given.seconds:g} s, {given.rate:g} steps/s each: {asked:,} points written")
    print(
        f"{arrived:,} on the server ({asked / given.seconds:,.0f}/s); the slowest delivery ended {slowest:.1f} s late"
    )
    for one in written:
        if one.left:
            print(f"{one.run}: {one.left}")


if __name__ == "__main__":
    main()
