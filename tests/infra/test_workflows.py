"""The workflows keep GitHub's schema, and the one that launches gets its rights without keys."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def scripts_of(workflow: Path) -> dict[str, str]:
    """The shell scripts of a workflow, by the names of their steps."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if "run" in step]
    return {step.get("name", step["run"]): step["run"] for step in steps}


def test_workflows_and_compose_files_keep_their_schemas_and_scripts_parse() -> None:
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema (pip)")
    compose = [ROOT / folder / "compose.yaml" for folder in ("infra/mlflow", "docker")]
    for schema, files in (("github-workflows", WORKFLOWS), ("compose-spec", compose)):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
        done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for workflow in WORKFLOWS:
        for name, script in scripts_of(workflow).items():
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, f"{workflow.name}: {name}: {done.stderr}"
            assert "${{ inputs" not in script, f"{workflow.name}: {name}: an input in a script can be a command"


def test_every_action_is_pinned_by_its_commit_because_a_tag_can_be_moved() -> None:
    used = [line for workflow in WORKFLOWS for line in workflow.read_text().splitlines() if "uses:" in line]
    assert used and all(re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line) for line in used)


def test_the_workflow_that_launches_has_no_keys_and_a_budget() -> None:
    text = (ROOT / ".github" / "workflows" / "launch.yml").read_text()
    assert "AWS_ACCESS_KEY_ID" not in text and "AWS_SECRET_ACCESS_KEY" not in text
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["launch"]["environment"] == "skytrain"  # as CiRole of infra/aws asks for it
    assert '--budget "$BUDGET"' in scripts_of(ROOT / ".github" / "workflows" / "launch.yml")["launch"]


# In place of the command, whose answers about a job the script has to read: away, no job yet, two stages, the end.
ANSWERS = """
n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n
state() { echo "[{\\"state\\": \\"$1\\", \\"step\\": 5, \\"max_steps\\": 9, \\"usd\\": 0.2, \\"tasks\\": $2}]"; }
case $n in
0) exit 2 ;;
1) state waiting '[]' ;;
2) state running '[{"over": true}, {"over": false}]' ;;
*) state "$END" '[{"over": true}, {"over": true}]' ;;
esac
"""


@pytest.mark.parametrize(("end", "code"), [("done", 0), ("failed", 1)])
def test_the_workflow_waits_for_the_end_of_all_stages_and_fails_with_the_run(
    tmp_path: Path, end: str, code: int
) -> None:
    if not shutil.which("jq"):
        pytest.skip("needs jq (apt)")
    script = scripts_of(ROOT / ".github" / "workflows" / "launch.yml")["wait"]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("skytrain() { bash answers; }\n")
    (tmp_path / "answers").write_text(ANSWERS)
    (tmp_path / "renew-token").touch()
    env = os.environ | {"RUNNER_TEMP": str(tmp_path), "RUN": "tiny-1a2b", "WAIT_SECONDS": "0", "END": end}
    command = ["bash", "-e", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == f"waiting  5/9 $0.2\nrunning  5/9 $0.2\n{end}  5/9 $0.2\n"
