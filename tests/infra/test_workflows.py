"""The workflows keep GitHub's schema, and the one that launches gets its rights without keys."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from servers import S3Account

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TOKEN = "header.payload.signature"


def scripts_of(workflow: Path) -> dict[str, str]:
    """The shell scripts of a workflow, by the names of their steps."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if "run" in step]
    return {step.get("name", step["run"]): step["run"] for step in steps}


def test_the_workflows_keep_githubs_schema_and_their_scripts_parse() -> None:
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema (pip)")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *WORKFLOWS], capture_output=True, text=True, timeout=120, check=False)
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


@pytest.fixture
def token_server() -> Iterator[str]:
    """As GitHub's: it gives a token for an audience to a runner that shows its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == "bearer of the runner" and "audience=sts.amazonaws" in self.path
            body = json.dumps({"value": TOKEN}).encode() if allowed else b"{}"
            self.send_response(200 if allowed else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token?version=1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_token_of_the_runner_becomes_a_role_of_aws(
    token_server: str, moto_server: S3Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = scripts_of(ROOT / ".github" / "workflows" / "launch.yml")
    if missing := [name for name in ("curl", "jq") if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)} (apt)")
    token = tmp_path / "web-identity"
    ours = {
        "RUNNER_TEMP": str(tmp_path),
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "ACTIONS_ID_TOKEN_REQUEST_URL": token_server,
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of the runner",
        "NO_PROXY": "127.0.0.1",
    }
    renew = scripts["a script that renews the token"] + '\nbash "$RUNNER_TEMP/renew-token"\n'
    run = {"env": os.environ | ours, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", "-e", "-c", renew], **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert token.read_text() == TOKEN + "\n" and token.stat().st_mode & 0o077 == 0
    assert TOKEN not in done.stdout + done.stderr
    run["env"]["ACTIONS_ID_TOKEN_REQUEST_TOKEN"] = "of nobody"  # type: ignore[index]
    assert subprocess.run(["bash", "-e", "-c", renew], **run).returncode != 0  # type: ignore[call-overload]
    assert token.read_text() == TOKEN + "\n"  # a failure leaves the one before

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/skytrain-CiRole")
    me = boto3.session.Session(region_name="us-east-1").client("sts").get_caller_identity()
    assert ":assumed-role/skytrain-CiRole/" in me["Arn"]
