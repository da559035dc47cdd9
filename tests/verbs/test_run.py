"""`skytrain run` is on the bill before it does anything that takes long."""

import subprocess
import sys
from pathlib import Path

from pipeline_runs import Project

HEAVY = ("torch", "numpy", "boto3", "mlflow", "sky", "datasets", "pipelines.cloud.plan", "pipelines.bench.measurements")
AT_THE_FIRST_HEARTBEAT = f"""
import os, sys
from pipelines import cli
from pipelines.tracking.ledger import Attempt
def report(attempt):
    print(attempt.number, *(name for name in {HEAVY} if name in sys.modules), flush=True)
    os._exit(0)
Attempt._report = report
sys.argv[1:] = ["run", "tiny.yaml", "--unless-stopped"]
cli.main()
"""


def test_the_first_heartbeat_of_a_job_waits_for_no_heavy_import(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_FIRST_HEARTBEAT],
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["1"], done.stdout + done.stderr
