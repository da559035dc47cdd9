"""Real servers for the tests, on free loopback ports. A server is stopped by the process id of its start.

Each server is a class: `start` returns when the server answers, `stop` when its processes have ended.
"""

import contextlib
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from once import once
from waiting import LONG_SECONDS, until

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Free ports, all different: each one stays bound until the last one is found.

    They lie below those that Linux gives to outgoing connections: none of these takes a port before its server starts.
    """
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            probe, port = held.enter_context(socket.socket()), random.SystemRandom().randrange(10_000, 32_768)
            with contextlib.suppress(OSError):  # somebody has it
                probe.bind((LOOPBACK, port))
                found.append(port)
        return found


def http_answers(url: str) -> bool:
    """True if a server speaks HTTP at the URL; an error status counts."""
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


class Daemon:
    """A process in a session of its own, with its output in a file. Stopping it stops its children too."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        self._name = Path(command[0]).name
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, answers: Callable[[], bool], limit_s: float = LONG_SECONDS) -> None:
        """Like `until`; fails at once, with the end of the output, if the process has died."""
        try:
            until(lambda: self._process.poll() is not None or answers(), f"{self._name} answers", limit_s, 0.25)
            assert self._process.poll() is None, f"{self._name} ended with status {self._process.returncode}"
        except AssertionError as error:
            error.add_note(self.log.read_text(errors="replace")[-2000:])
            raise

    def stop(self, grace_s: float = 10) -> None:
        """SIGTERM to the session; after `grace_s` seconds, SIGKILL to its remaining processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)


class Server:
    """A server of daemons in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[Daemon] = []

    def start_daemons(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        try:
            self.start_daemons()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        while self.daemons:  # the last one first: without its cluster, a gateway would wait before it ends
            self.daemons.pop().stop()


AnyServer = TypeVar("AnyServer", bound=Server)


def started_once(folder: Path, name: str, make: Callable[[Path], AnyServer]) -> AnyServer:
    """The server `name` of all processes of a test session, which the first of them starts. `stop_all` stops it."""

    def start(place: Path) -> None:
        server = make(place)
        server.start()
        (folder / f"{name}.pids").write_text(" ".join(str(daemon.pid) for daemon in server.daemons))
        server.daemons = []
        (place / "server").write_bytes(pickle.dumps(server))

    return pickle.loads((once(folder / name, start) / "server").read_bytes())


def stop_all(folder: Path) -> None:
    """Kill the daemons of all servers that `started_once` started for this folder."""
    for pids in folder.glob("*.pids"):
        for pid in pids.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
        pids.unlink()


@dataclass(frozen=True)
class S3Account:
    """An S3 server's address, and the keys of a user."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables of AWS tools; they hide the machine's own AWS configuration."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": f"{LOOPBACK},localhost",
            "no_proxy": f"{LOOPBACK},localhost",
        }


# Variables that would override those above.
FOREIGN_AWS_VARIABLES = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_CA_BUNDLE",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
)


class Radosgw(Server):
    """A one-node Ceph cluster (one monitor, one disk) behind its S3 gateway. Starts in ~15 s.

    It is a real object store with real concurrency. It enforces If-None-Match, signatures and Content-MD5.
    """

    PROGRAMS = ("ceph-authtool", "monmaptool", "ceph-mon", "ceph", "ceph-osd", "radosgw", "radosgw-admin")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        monitor_v2, monitor_v1, self._port = free_ports(3)
        self._monitor = f"[v2:{LOOPBACK}:{monitor_v2},v1:{LOOPBACK}:{monitor_v1}]"
        self._fsid = str(uuid.uuid4())
        self.account = S3Account(f"http://{LOOPBACK}:{self._port}", "skytrain-test", uuid.uuid4().hex)

    @classmethod
    def missing_programs(cls) -> list[str]:
        return [name for name in cls.PROGRAMS if not shutil.which(name)]

    def start_daemons(self) -> None:
        self._write_configuration()
        self._start_monitor()
        self._start_disk()
        self._start_gateway()

    @property
    def _conf(self) -> Path:
        return self.folder / "ceph.conf"

    @property
    def _keyring(self) -> Path:
        return self.folder / "keyring"

    def _run(self, *command: str | Path) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"CEPH_CONF": str(self._conf)},
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def _daemon(self, name: str, *command: str | Path) -> Daemon:
        daemon = Daemon(
            [*command, "-c", self._conf, "-f"],
            self.folder / f"{name}.out",
            os.environ | {"CEPH_CONF": str(self._conf)},
        )
        self.daemons.append(daemon)
        return daemon

    def _write_configuration(self) -> None:
        here = self.folder
        for name in ("mon", "osd", "mgr", "rgw", "run"):
            (here / name).mkdir(parents=True, exist_ok=True)
        self._conf.write_text(f"""[global]
fsid = {self._fsid}
mon_initial_members = a
mon_host = {self._monitor}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {self._keyring}
public_network = 127.0.0.0/8
public_addr = {LOOPBACK}
cluster_addr = {LOOPBACK}
log_file = {here}/$name.log
admin_socket =
pid_file = {here}/run/$name.pid
run_dir = {here}/run
crash_dir = {here}/run
mon_data = {here}/mon
osd_data = {here}/osd
mgr_data = {here}/mgr
rgw_data = {here}/rgw
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_data_avail_crit = 1
mon_data_avail_warn = 2
mon_max_pg_per_osd = 1000
osd_objectstore = bluestore
osd_memory_target = 939524096
# A sparse file: only stored data takes space.
bluestore_block_size = 17179869184
[client.rgw.a]
rgw_frontends = beast endpoint={LOOPBACK}:{self._port} tcp_nodelay=1
rgw_thread_pool_size = 32
rgw_enable_usage_log = false
rgw_enable_ops_log = false
""")
        everything = {part: "allow *" for part in ("mon", "osd", "mgr")}
        for number, (name, rights) in enumerate(
            {
                "mon.": {"mon": "allow *"},
                "client.admin": everything,
                "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
                "client.rgw.a": {"mon": "allow rwx", "osd": "allow rwx", "mgr": "allow rwx"},
            }.items()
        ):
            caps = [word for part, right in rights.items() for word in ("--cap", part, right)]
            create = ["--create-keyring"] if number == 0 else []
            self._run("ceph-authtool", self._keyring, *create, "--gen-key", "-n", name, *caps)

    def _start_monitor(self) -> None:
        monmap = self.folder / "monmap"
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._monitor, monmap)
        (self.folder / "mon").rmdir()
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", self._keyring, "-c", self._conf)
        monitor = self._daemon("mon", "ceph-mon", "-i", "a")
        monitor.wait_until(lambda: "quorum" in self._ceph("mon", "stat"))

    def _start_disk(self) -> None:
        disk = str(uuid.uuid4())
        self._ceph("osd", "new", disk, "0")
        self._run("ceph-osd", "-i", "0", "-c", self._conf, "--mkfs", "--osd-uuid", disk)
        daemon = self._daemon("osd", "ceph-osd", "-i", "0")
        daemon.wait_until(lambda: "1 up" in self._ceph("osd", "stat"))

    def _start_gateway(self) -> None:
        gateway = self._daemon("rgw", "radosgw", "-n", "client.rgw.a")
        gateway.wait_until(lambda: http_answers(self.account.endpoint))
        self._create_user(self.account, "--caps", "user-policy=*")

    def add_user(self, name: str) -> S3Account:
        """Add a user without rights or buckets. The name is also the access key."""
        account = S3Account(self.account.endpoint, name, uuid.uuid4().hex)
        self._create_user(account)
        return account

    def _create_user(self, account: S3Account, *options: str) -> None:
        user = ("--uid", account.access_key, "--display-name", account.access_key)
        keys = ("--access-key", account.access_key, "--secret", account.secret_key)
        self._run("radosgw-admin", "-c", self._conf, "user", "create", *user, *keys, *options)

    def _ceph(self, *words: str) -> str:
        return self._run("ceph", "-c", self._conf, "--connect-timeout", "30", *words)


class MotoServer(Server):
    """moto's imitation of S3, in memory. It starts in a second, but it proves nothing about concurrent requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self._port,) = free_ports(1)
        self.account = S3Account(f"http://{LOOPBACK}:{self._port}", "moto", "moto-secret")

    def start_daemons(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(self._port)]
        self.daemons.append(Daemon(command, self.folder / "moto.out"))
        self.daemons[0].wait_until(lambda: http_answers(self.account.endpoint))


class MlflowServer(Server):
    """A real tracking server on SQLite. Its data survives a stop and a new start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self._port,) = free_ports(1)
        self.uri = f"http://{LOOPBACK}:{self._port}"

    def start_daemons(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(self._port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--allowed-hosts", "localhost:*,127.0.0.1:*"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        # Without its job workers, a server has 2 processes instead of 13.
        environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self.daemons.append(Daemon(command, self.folder / "server.log", environment))
        self.daemons[0].wait_until(lambda: http_answers(f"{self.uri}/health"))
