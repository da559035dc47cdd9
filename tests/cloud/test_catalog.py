"""The offers of SkyPilot's catalog."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sky_catalog import sky_environment, write_catalog

from pipelines.cloud.catalog import parse_node
from trainer.errors import UserError


@pytest.mark.parametrize("node", ["H100", "H100:x", "H100:0", ":8", "H 100:8", "cpus:4,32", "cpus:4,memory:"])
def test_a_node_is_a_gpu_and_how_many(node: str) -> None:
    with pytest.raises(UserError, match="not a node; write"):
        parse_node(node)


ASK = """
import json, sys
from dataclasses import asdict
from pipelines.cloud.catalog import offers
from trainer.errors import UserError
found = {}
for cloud, node in json.loads(sys.argv[1]):
    try:
        found[f"{cloud} {node}"] = [asdict(offer) for offer in offers(cloud, node)]
    except UserError as error:
        found[f"{cloud} {node}"] = str(error)
print(json.dumps(found))
"""


def test_offers_are_the_catalogs_prices_by_region(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip)")
    write_catalog(tmp_path)
    nodes = [("aws", "h100:8"), ("gcp", "H100:8"), ("lambda", "H100:8"), ("lambda", "cpus:16"), ("gcp", "H200:8")]
    nodes += [("aws", "cpus:16"), ("aws", "cpus:16,memory:32"), ("azure", "H100:8"), ("nocloud", "H100:8")]
    # A proxy that refuses: SkyPilot can download nothing, even on a machine with a network.
    environment = os.environ | sky_environment(tmp_path) | {"HTTPS_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(nodes)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # and no other output of SkyPilot

    def offers_of(name: str) -> list[tuple[Any, ...]]:
        return [(o["region"], o["instance"], o["spot"], o["usd_per_hour"]) for o in found[name]]

    assert offers_of("aws h100:8") == [
        ("us-east-1", "p5.48xlarge", True, 20.0),  # of its cheapest zone
        ("us-west-2", "p5.48xlarge", True, 22.0),
        ("us-east-1", "p5.48xlarge", False, 56.0),
        ("us-west-2", "p5.48xlarge", False, 60.0),
    ]
    assert {o["accelerators"] for o in found["aws h100:8"]} == {"H100:8"}
    assert {o["on_demand_per_hour"] for o in found["aws h100:8"] if o["region"] == "us-west-2"} == {60.0}
    # GCP sells machine and GPUs apart.
    gcp, big = ("us-central1", "a3-highgpu-8g"), ("us-east-1", "gpu_8x_h100_sxm5")
    assert offers_of("gcp H100:8") == [(*gcp, True, 26.0), (*gcp, False, 72.0)]
    assert offers_of("lambda H100:8") == [(*big, False, 31.92)]
    assert offers_of("lambda cpus:16") == [("us-east-1", "cpu_16x_general", False, 0.64)]
    assert offers_of("aws cpus:16")[0] == ("us-east-1", "m6i.4xlarge", True, 0.3)
    assert {(o["vcpus"], o["accelerators"]) for o in found["aws cpus:16"]} == {(16.0, None)}
    assert found["aws cpus:16,memory:32"][0]["instance"] == "c6i.4xlarge"
    assert found["gcp H200:8"] == []
    assert found["azure H100:8"].startswith("azure: its price list cannot be fetched")
    assert found["nocloud H100:8"].startswith("nocloud: SkyPilot does not know this cloud")


WHO = """<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>
<Arn>arn:aws:iam::123456789012:user/bucket</Arn><UserId>AIDA</UserId><Account>123456789012</Account>
</GetCallerIdentityResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></GetCallerIdentityResponse>"""


class OnlyAnIdentity(BaseHTTPRequestHandler):
    """An S3 service other than Amazon's, as AWS_ENDPOINT_URL names it: it has no EC2."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        known = "GetCallerIdentity" in asked
        body = (WHO if known else "<html>not found</html>").encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_keys_without_ec2_in_reach_still_get_a_plan_and_nothing_else_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip)")
    write_catalog(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), OnlyAnIdentity)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | sky_environment(tmp_path) | {"SKYTRAIN_HOME": str(tmp_path / "home")}
    environment |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "HTTPS_PROXY": "http://127.0.0.1:1"}
    environment |= {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key", "AWS_DEFAULT_REGION": "us-east-1"}
    command = [sys.executable, "-m", "pipelines.cli", "plan", "gpt2-124m", "--cloud", "--deadline", "1h", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    server.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)["cloud"]
    first = plan["candidates"][0]
    assert (first["machine"]["instance"], first["machine"]["usd_per_hour"]) == ("p5.48xlarge", 20.0)
    assert {c["machine"]["cloud"] for c in plan["candidates"]} == {"aws", "gcp", "lambda"}
    assert first["usd"] == min(c["usd"] for c in plan["candidates"])
