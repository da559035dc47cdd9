"""infra/mlflow: the files of a team's server hold no secret, and only its proxy can be reached."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "infra" / "mlflow"


def test_no_file_of_the_server_holds_a_secret_and_only_the_proxy_is_reachable() -> None:
    compose: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text())
    services = compose["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    secret = [name for name in ("SKYTRAIN_DB_PASSWORD", "SKYTRAIN_MLFLOW_PASSWORD", "SKYTRAIN_MLFLOW_KEY")]
    for service in services.values():
        words = " ".join(map(str, [*service.get("command", []), *service.get("entrypoint", [])]))
        assert not any(name in words for name in secret), "a command line is public on its machine"
    task = yaml.safe_load((FILES / "sky.yaml").read_text())
    assert {name: task["secrets"][name] for name in secret} == dict.fromkeys(secret)
    settings = (FILES / "example.env").read_text().splitlines()
    assert all(f"{name}=" in settings for name in secret)
