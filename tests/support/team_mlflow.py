"""The MLflow server of infra/mlflow, from its own files but without containers, on loopback."""

import os
import pwd
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from servers import LOOPBACK, Daemon, S3Account, free_ports, http_answers

FILES = Path(__file__).resolve().parents[2] / "infra" / "mlflow"
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
VALUE = re.compile(r"\$\{(\w+)(?::[?-][^}]*)?\}")


class TeamMlflow:
    """`start` and `stop` bring everything up and down; `lose_database` is a new and empty disk."""

    PROGRAMS = ("caddy", "openssl", "psql", "bash")

    def __init__(self, folder: Path, s3: S3Account, store: str) -> None:
        self.store = store
        self.folder, self._port, self._database_port, https, http = folder, *free_ports(4)
        self.address = f"{LOOPBACK}:{self._port}"
        self.uri = f"https://localhost:{https}"
        self.certificate = folder / "certificate.pem"
        self.password = "the administrator's password"
        secrets = {"SKYTRAIN_DB_PASSWORD": "the database's", "SKYTRAIN_MLFLOW_KEY": "the key of the forms"}
        self._values = (
            s3.environment
            | secrets
            | {
                "SKYTRAIN_MLFLOW_PASSWORD": self.password,
                "SKYTRAIN_MLFLOW_HOST": f"localhost:{https}",
                "SKYTRAIN_MLFLOW_STORE": store,
                "SKYTRAIN_MLFLOW_TLS": f"tls {self.certificate} {folder}/key.pem",
                "SKYTRAIN_MLFLOW_UPSTREAM": self.address,
                "SKYTRAIN_HTTP_PORT": str(http),
                "SKYTRAIN_HTTPS_PORT": str(https),
            }
        )
        self._services: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
        self._daemons: dict[str, Daemon] = {}
        self._data: Path | None = None

    @classmethod
    def missing_programs(cls) -> list[str]:
        return [name for name in cls.PROGRAMS if not shutil.which(name)] + ([] if POSTGRES else ["postgresql"])

    def start(self) -> None:
        try:
            self._make_aws()
            self._make_certificate()
            self.start_database()
            self.start_mlflow()
            self._start_proxy()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        while self._daemons:
            self._daemons.popitem()[1].stop()
        self._remove_data()

    def stop_mlflow(self) -> None:
        self._daemons.pop("mlflow").stop()

    def lose_database(self) -> None:
        self._daemons.pop("database").stop()
        self._remove_data()
        self.start_database()

    def client_environment(self, user: str = "admin", password: str = "") -> dict[str, str]:
        return {
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_TRACKING_USERNAME": user,
            "MLFLOW_TRACKING_PASSWORD": password or self.password,
            "MLFLOW_TRACKING_SERVER_CERT_PATH": str(self.certificate),
        }

    def backup(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["bash", str(FILES / "backup.sh"), *arguments]
        env = self._environment("backup")
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    def aws(self, *arguments: str, text: str = "") -> None:
        command = [sys.executable, "-m", "awscli", "--endpoint-url", self._values["AWS_ENDPOINT_URL"], "s3", *arguments]
        subprocess.run(command, env=self._environment("backup"), input=text, text=True, check=True, timeout=120)

    def _environment(self, service: str) -> dict[str, str]:
        """The variables that compose.yaml gives a service, on this machine."""
        named = self._services[service].get("environment", {})
        values = {name: self._filled(text) if text else self._values.get(name, "") for name, text in named.items()}
        here = {"PGHOST": LOOPBACK, "PGPORT": str(self._database_port), "HOME": str(self.folder)}
        system = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
        system["PATH"] = f"{self.folder / 'bin'}:{system['PATH']}"
        shared = {name: self._values[name] for name in self._values if name.startswith("AWS_")}
        return system | shared | {name: text for name, text in values.items() if text} | here

    def _filled(self, text: str) -> str:
        return VALUE.sub(lambda match: self._values.get(match[1], ""), text)

    def _make_aws(self) -> None:
        """`aws` as backup.sh calls it. The one of a virtual environment does not start where its path has a space."""
        program = self.folder / "bin" / "aws"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m awscli "$@"\n')
        program.chmod(0o755)

    def _make_certificate(self) -> None:
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        out = ["-keyout", str(self.folder / "key.pem"), "-out", str(self.certificate)]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *out]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def start_database(self) -> None:
        """A new and empty PostgreSQL with the databases that the container makes."""
        self._data = Path(tempfile.mkdtemp(prefix="postgres-"))
        as_postgres: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            user = pwd.getpwnam("postgres")
            os.chown(self._data, user.pw_uid, user.pw_gid)
            as_postgres = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        env = self._environment("backup")
        secret = self._data.with_suffix(".password")
        secret.write_text(env["PGPASSWORD"])
        secret.chmod(0o644)
        programs, data = POSTGRES[-1], str(self._data / "data")
        make = [str(programs / "initdb"), "-D", data, "--username=mlflow", "--auth=scram-sha-256", f"--pwfile={secret}"]
        subprocess.run([*as_postgres, *make], check=True, capture_output=True, cwd=self._data, timeout=120)
        secret.unlink()
        listen = ["-p", str(self._database_port), "-h", LOOPBACK, "-k", str(self._data), "-c", "fsync=off"]
        daemon = Daemon([*as_postgres, programs / "postgres", "-D", data, *listen], self.folder / "postgres.log")
        self._daemons["database"] = daemon
        ready = [str(programs / "pg_isready"), "-q"]
        daemon.wait_until(lambda: not subprocess.run(ready, env=env, timeout=60, check=False).returncode)
        for command in (["-c", "CREATE DATABASE mlflow"], ["-f", str(FILES / "accounts.sql")]):
            subprocess.run(["psql", "-q", "postgres", *command], env=env, check=True, timeout=60)

    def start_mlflow(self) -> None:
        own = {"--host": LOOPBACK, "--port": str(self._port), "--workers": "1"}
        command = [self._filled(word) for word in self._services["mlflow"]["command"]]
        command = [f"{name}={own[name]}" if (name := word.partition("=")[0]) in own else word for word in command]
        command = [word.replace("127.0.0.1:5000", self.address) for word in command]
        env = self._environment("mlflow") | {"MLFLOW_AUTH_CONFIG_PATH": str(FILES / "auth.ini")}
        daemon = Daemon([sys.executable, "-m", "mlflow", *command], self.folder / "mlflow.log", env)
        self._daemons["mlflow"] = daemon
        daemon.wait_until(lambda: http_answers(f"http://{self.address}/health"), 180)

    def _start_proxy(self) -> None:
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(FILES / "Caddyfile")]
        env = self._values | {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        self._daemons["proxy"] = daemon = Daemon(command, self.folder / "caddy.log", env)
        trust = ssl.create_default_context(cafile=self.certificate)

        def answers() -> bool:
            try:
                return urllib.request.urlopen(f"{self.uri}/health", timeout=2, context=trust).status == 200
            except OSError:
                return False

        daemon.wait_until(answers)

    def _remove_data(self) -> None:
        if self._data:
            shutil.rmtree(self._data, ignore_errors=True)
