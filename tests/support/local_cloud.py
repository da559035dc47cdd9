"""Real SkyPilot without a cloud: API servers, and a Slurm cluster of two nodes with simulated GPUs on this machine.

SkyPilot takes the cluster for a region of the cloud Slurm.

Everything listens on loopback and lies in one folder. Outside the folder it adds the logins to /etc/passwd (roots with
other homes, because other users cannot read the files of the tests), the nodes to /etc/hosts and a file to
/etc/profile.d; `stop` removes them all. One local cloud can be up at a time: it holds a lock, and removes the lines
that a killed one left. Needs root.

Differences from a real cloud: a GPU is a copy of /dev/null; there are no containers and no spot market; `scancel` plays
the preemption; nodes do not install SkyPilot. Before SkyPilot accepts a preemption, it checks the network at two public
addresses; here it checks a server of ours.
"""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil
import yaml
from servers import LOOPBACK, Daemon, free_ports
from sky_catalog import sky_environment, write_catalog
from waiting import until

LOGIN = "skytrain-cloud"  # with the name of a cluster after it
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "curl": "curl",
}
PROFILE = Path("/etc/profile.d/skytrain-local-cloud.sh")
HOSTS, PASSWORDS = Path("/etc/hosts"), Path("/etc/passwd")
LOCK = Path("/run/skytrain-local-cloud.lock")
PRICE = 3.6  # dollars an hour and GPU: 8 of them cost 0.8 cents a second

# Nodes would download uv, a Python and SkyPilot. These shims give them this Python and its SkyPilot. Otherwise every
# cluster copies half a gigabyte of packages, which takes longer on two cores than the whole test.
SHIMS = {
    "curl": """for word in "$@"; do
  case $word in *uv/install.sh*) echo 'mkdir -p "$UV_INSTALL_DIR"; ln -sf {shims}/uv "$UV_INSTALL_DIR/uv"'; exit ;; esac
done
exec /usr/bin/curl "$@"
""",
    "uv": """case "$1 $2 $4" in
  "venv --seed --python") {python} -m venv --without-pip "$3"
    echo "import site; site.addsitedir('{packages}')" > "$(echo "$3"/lib/python3.*/site-packages)/beside.pth" ;;
  venv*) exit 1 ;;  # an environment for the user's commands; SkyPilot works without it
esac
""",
    "sudo": """while [[ $1 == -* ]]; do shift; done
exec "$@"
""",
}
SLURM_CONF = """ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
GresTypes=gpu
KillWait=2
SchedulerParameters=sched_interval=5,bf_interval=5
{nodes}
PartitionName=gpu Nodes={names} Default=YES MaxTime=12:00:00 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=262144 Gres=gpu:h100:8"
# Runs {changes} (statements, by module) at the end of modules of SkyPilot's API server and of its child processes.
SITECUSTOMIZE = """import importlib.abc, importlib.util, sys
CHANGES = {changes!r}
class Changer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        changes = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            exec(changes, vars(module))
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Changer())
"""


def what_is_missing() -> str | None:
    """The requirement of a local cloud that this machine does not meet; None if it meets all."""
    if os.geteuid() != 0:
        return "root"
    if packages := sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)}):
        return f"{' '.join(packages)} (apt)"
    return None


@dataclass(frozen=True)
class SlurmCluster:
    """A Slurm cluster: a region for SkyPilot. Its files lie in `folder`."""

    name: str
    nodes: tuple[str, ...]
    price: float  # dollars an hour and GPU
    folder: Path
    ports: list[int]  # of the controller, and of each node

    @property
    def login(self) -> str:
        return f"{LOGIN}-{self.name}"

    @property
    def home(self) -> Path:
        """Of its jobs, on all its nodes."""
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def write(self, munge: Path, gpus: Path) -> None:
        """Its files of configuration. `munge`: a socket; `gpus`: a folder of devices."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        port, *node_ports = self.ports
        nodes = [NODE.format(name=n, host=host, port=p) for n, p in zip(self.nodes, node_ports, strict=True)]
        names = ",".join(self.nodes)
        values = {"name": self.name, "names": names, "nodes": "\n".join(nodes), "host": host, "port": port}
        slurm_conf = SLURM_CONF.format(**values, folder=self.folder, munge=munge)
        (self.folder / "slurm.conf").write_text(slurm_conf)
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu Type=h100 File={gpus}/gpu[0-7]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


@dataclass(frozen=True)
class SkyClient:
    """A user's machine: SkyPilot's client, and an API server of its own."""

    home: Path
    port: int  # of the API server
    queue_port: int  # of its queue of requests: SkyPilot's own choice may be that of an outgoing connection
    # SkyPilot's id of the user: nodes keep folders in /tmp whose names end with it.
    user_hash: str = field(default_factory=lambda: os.urandom(4).hex())

    @property
    def python(self) -> Path:
        """This Python by a path without a space: SkyPilot does not quote it."""
        return self.home.with_name("venv") / "bin" / Path(sys.executable).name

    @property
    def environment(self) -> dict[str, str]:
        """With it, SkyPilot and `skytrain launch` use the API server."""
        return {
            **sky_environment(self.home),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{Path(__file__).resolve().parents[2]}:{self.home / 'site'}",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "6",  # limits the number of the API server's workers
        }


class LocalCloud:
    """Runs between `start` and `stop`. Its clients can use it; each starts its API server when it needs one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.probe_port, self.ssh_port, *ports = free_ports(9)
        self.local = SlurmCluster("local", ("st-n1", "st-n2"), PRICE, folder / "local", ports)
        self.client = SkyClient(folder / "client", ports.pop(), ports.pop())
        self.other = SkyClient(folder / "other", ports.pop(), ports.pop())
        self._stack = ExitStack()

    def start(self) -> "LocalCloud":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self._stack.close()

    def slurm(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | self.local.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def allocated_seconds(self) -> float:
        """Node seconds of all jobs that have ended, by Slurm's own record."""
        jobs = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in (self.local.folder / "jobs.txt").open()]
        ran = ((datetime.fromisoformat(job["EndTime"]) - datetime.fromisoformat(job["StartTime"]), job) for job in jobs)
        return sum(int(job["NodeCnt"]) * time.total_seconds() for time, job in ran)

    def _start(self) -> None:
        self._change_machine()
        self._start_munge()
        self._start_slurm(self.local)
        self._start_sshd()
        self._daemon([sys.executable, "-m", "http.server", str(self.probe_port), "--bind", LOOPBACK], "probe")
        for client in (self.client, self.other):
            self._write_client(client)

    def _daemon(self, command: list[str], name: str, env: dict[str, str] | None = None) -> Daemon:
        daemon = Daemon(command, self.folder / f"{name}.log", env=env)
        self._stack.callback(daemon.stop)
        return daemon

    def _end_jobs(self) -> None:
        """Ends the jobs first: Slurm's job processes outlive its daemons, and nothing identifies them then."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.slurm("scancel", "--partition=gpu")
            until(lambda: not self.slurm("squeue", "-h"), "the end of Slurm's jobs", 30, 0.25)

    def _end_processes(self) -> None:
        """Kills the processes that SkyPilot leaves: those with HOME or SLURM_CONF in our folder, those of sshd's
        connections, which show the name of a login instead of their environment, and all that these started: the
        workers of an API server hide their environment, too."""
        ours = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                at_home = [Path(environment.get(name, "/")) for name in ("HOME", "SLURM_CONF")]
                connection = "".join(process.cmdline()).startswith(f"sshd: {LOGIN}-")
                if connection or any(path.is_relative_to(self.folder) for path in at_home):
                    ours |= {process, *process.children(recursive=True)}
        for process in ours:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(ours), 10)
        for client in (self.client, self.other):
            for folder in Path("/tmp").glob(f"*[-_]{client.user_hash}"):
                shutil.rmtree(folder, ignore_errors=True)

    def _change_machine(self) -> None:
        lock = self._stack.enter_context(LOCK.open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AssertionError(f"{LOCK} is held: another local cloud is up") from None
        self._stack.callback(self._end_processes)
        self.local.home.mkdir(parents=True)
        self._add_lines(HOSTS, "".join(f"127.0.1.{i} {node}\n" for i, node in enumerate(self.local.nodes, start=1)))
        self._add_lines(PASSWORDS, f"{self.local.login}:*:0:0::{self.local.home}:/bin/bash\n")
        shims = self.folder / "shims"
        shims.mkdir()
        (self.folder / "venv").symlink_to(Path(sys.executable).parents[1])
        values = {"shims": shims, "python": self.client.python, "packages": sysconfig.get_path("purelib")}
        for name, text in SHIMS.items():
            path = shims / name
            path.write_text("#!/bin/bash\n" + text.format(**values))
            path.chmod(0o755)
        self._stack.callback(PROFILE.unlink, missing_ok=True)
        PROFILE.write_text(f"case $HOME/ in {self.folder}/*) export PATH={shims}:$PATH ;; esac\n")

    def _add_lines(self, file: Path, lines: str) -> None:
        self._stack.callback(remove_our_lines, file)
        remove_our_lines(file)
        file.write_text(f"{file.read_text().rstrip()}\n{lines}")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/socket"]
        munged += [f"--{name}-file={folder}/{name}" for name in ("pid", "log", "seed")]
        self._daemon(munged, "munge").wait_until((folder / "socket").exists)
        (self.folder / "gpus").mkdir()
        for i in range(8):
            os.mknod(self.folder / "gpus" / f"gpu{i}", 0o20666, os.makedev(1, 3))
        self._stack.callback(self._end_jobs)

    def _start_slurm(self, cluster: SlurmCluster) -> None:
        cluster.write(self.folder / "munge" / "socket", self.folder / "gpus")
        environment = os.environ | cluster.environment
        daemon = self._daemon(["slurmctld", "-D", "-c"], f"slurmctld-{cluster.name}", environment)
        for node in cluster.nodes:
            daemon = self._daemon(["slurmd", "-D", "-N", node], node, environment)
        daemon.wait_until(lambda: self._sinfo(environment).count("idle") == len(cluster.nodes))

    def _sinfo(self, environment: dict[str, str]) -> str:
        return subprocess.run(["sinfo", "-hN", "-o", "%T"], capture_output=True, text=True, env=environment).stdout

    def _start_sshd(self) -> None:
        for name in ("host", "client"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / f"{name}-key")
        Path("/run/sshd").mkdir(exist_ok=True)  # of sshd; the service of its package would make it
        options = {
            "Port": self.ssh_port,
            "ListenAddress": LOOPBACK,
            "HostKey": self.folder / "host-key",
            "AuthorizedKeysFile": self.folder / "client-key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
            "MaxStartups": "100",
            "MaxSessions": "100",
        }
        lines = [f"{name} {value}" for name, value in options.items()]
        # rsync runs without a login shell.
        lines += [f"Match User {self.local.login}", f"SetEnv SLURM_CONF={self.local.environment['SLURM_CONF']}"]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        sshd = [str(shutil.which("sshd")), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        daemon = self._daemon(sshd, "sshd")
        daemon.wait_until(lambda: listens(self.ssh_port))

    def _write_client(self, client: SkyClient) -> None:
        home = client.home
        for name in (".slurm", ".sky", "site"):
            (home / name).mkdir(parents=True)
        write_catalog(home)
        (home / ".sky" / "user_hash").write_text(client.user_hash)
        (home / "none").touch()  # AWS's files in sky_environment: on Slurm, SkyPilot opens them
        (home / ".slurm" / "config").write_text(
            f"Host {self.local.name}\n  HostName {LOOPBACK}\n  Port {self.ssh_port}\n  User {self.local.login}\n"
            f"  IdentityFile {self.folder}/client-key\n  IdentitiesOnly yes\n"
        )
        pricing = {self.local.name: {"pricing": {"cpu": 0.01, "accelerators": {"H100": self.local.price}}}}
        config = {
            "allowed_clouds": ["slurm"],
            "slurm": {"provision_timeout": 60, "cluster_configs": pricing},
            "jobs": {"controller": {"consolidation_mode": True}, "force_disable_cloud_bucket": True},
        }
        (home / ".sky" / "config.yaml").write_text(yaml.safe_dump(config))
        changes = {
            "sky.backends.backend_utils": f"_TEST_IP_LIST = ['http://{LOOPBACK}:{self.probe_port}']",
            "sky.server.requests.queues.mp_queue": f"get_queue_manager_port = lambda: {client.queue_port}",
            # SkyPilot polls every 15 and 5 s. Each stage is a cluster of its own, so that would add up to two minutes.
            "sky.jobs.utils": "JOB_STATUS_CHECK_GAP_SECONDS = 3; JOB_STARTED_STATUS_CHECK_GAP_SECONDS = 1",
            # A process of the server, 5 s of a core, each: all but the one that looks after the clusters.
            "sky.server.daemons": "del INTERNAL_REQUEST_DAEMONS[1:]",
        }
        (home / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE.format(changes=changes))


def remove_our_lines(file: Path) -> None:
    """Removes the lines of this local cloud, or of a killed one, from /etc/hosts or /etc/passwd."""
    kept = [line for line in file.read_text().splitlines(True) if not any(name in line for name in (LOGIN, " st-n"))]
    file.write_text("".join(kept))


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
