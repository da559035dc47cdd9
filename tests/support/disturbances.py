"""What disturbs a run: signals to its processes, faults of its store's answers, a full disk, a rival, and gc.

A `Host` is a machine that runs one command again and again. `DISTURBANCES` has every kind by its name. Each one draws
targets and lengths from the generator that it gets, so a seed gives the same ones again.
"""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from answers import Request
from faulty_proxy import Fault, FaultyProxy, Window
from pipeline_runs import SHIPPED_CLI, Project
from small_disk import Disk

from pipelines.run.nodes.launcher_process import LAUNCHER_MODULE

DAY = 86_400.0
AWAY_SECONDS = 30.0  # of a host whose work another one takes over after 20 s
LONG_SECONDS = 200.0  # more than a stop may take
COMMAND = ("run", "tiny.yaml", "--price-per-hour", "3600")  # a dollar a second
AS_ANOTHER_HOST = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


class Host:
    """A machine that runs COMMAND, with a folder and a meter. Under a `name`, it is another machine than this one."""

    def __init__(self, folder: Path, recipe: dict[str, Any], environment: dict[str, str], name: str = "") -> None:
        self.name = name or "main"
        self.project = Project(folder / self.name, recipe)
        self._as_host = (*AS_ANOTHER_HOST, name) if name else ()
        meter, self.metered = self.project.folder / "meter", time.time()  # its bill begins
        meter.write_text(f"{self.metered}")
        self.project.environment |= environment | {"SKYTRAIN_METER": str(meter)}
        self.starts = 0
        self.away_until = 0.0  # by time.monotonic: not before then does it start the command again
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.log = self.project.folder / f"command-{self.starts}.log"
        self.running, self.ended = True, 0.0
        self.code: int | None = None
        self.sent: set[int] = set()  # signals, to the command that runs
        self.asked = math.inf  # by time.monotonic, when it was asked to stop
        self.process = self.begin(*COMMAND, log=self.log)

    def begin(self, *arguments: str, log: Path) -> "subprocess.Popen[bytes]":
        """Start a command of skytrain, as a user does, with its output in a file."""
        command = [*self._as_host, sys.executable, "-P", "-c", SHIPPED_CLI, *arguments]
        folder, environment = self.project.folder, self.project.whole_environment()
        with log.open("wb") as output:
            return subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def exit_code(self) -> int | None:
        """The exit code of the command, once."""
        if not self.running or (code := self.process.poll()) is None:
            return None
        self.running, self.ended, self.code = False, time.time(), code
        return code

    def processes(self, part: str) -> list[psutil.Process]:
        """The command, its launcher, the launcher's ranks, or the group of them all; the command if there are none."""
        if part == "group":
            return self.project.alive()
        with suppress(psutil.Error):
            found = [command := psutil.Process(self.process.pid)]
            if part != "command":
                found = [one for one in command.children() if LAUNCHER_MODULE in one.cmdline()]
            if part == "rank":
                found = [rank for launcher in found for rank in launcher.children()]
            return found or [command]
        return []

    def send(self, number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
        for one in processes:
            if one.pid == self.process.pid:
                self.sent.add(number)
                self.asked = min(self.asked, time.monotonic() if number == signal.SIGTERM else math.inf)
            with suppress(psutil.Error):
                one.send_signal(number)

    def send_to_a(self, part: str, number: signal.Signals, chance: Random) -> list[psutil.Process]:
        """Send a signal to one process of a part, or to the whole group. Returns them."""
        found = self.processes(part)
        chosen = found if part == "group" or not found else [chance.choice(found)]
        self.send(number, chosen)
        return chosen

    def kill(self) -> None:
        while left := self.project.alive():
            self.send(signal.SIGKILL, left)
            self.process.poll()
            time.sleep(0.02)


@dataclass
class Scene:
    """What the disturbances of a run work on."""

    main: Host
    new_host: Callable[[], Host]
    training_host: Callable[[], Host]
    proxy: FaultyProxy
    disk: Disk | None
    kinds: list[str]
    rival: Host | None = None
    gc: "subprocess.Popen[bytes] | None" = None
    gc_log: Path = Path()
    _ends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # by time.monotonic

    @property
    def hosts(self) -> list[Host]:
        return [self.main, *([self.rival] if self.rival else [])]

    def after(self, seconds: float, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, end))

    def end(self, everything: bool = False) -> None:
        """End the disturbances whose time is over."""
        due = [one for one in self._ends if everything or one[0] <= time.monotonic()]
        self._ends = [one for one in self._ends if one not in due]
        for _, end in due:
            end()


Disturb = Callable[[Scene, Random], str]  # returns a description, for people


def kill(part: str, number: signal.Signals = signal.SIGKILL) -> Disturb:
    def disturb(scene: Scene, chance: Random) -> str:
        host, away = scene.training_host(), AWAY_SECONDS * (chance.random() < 0.3)
        if scene.rival and host is scene.main:
            host.away_until = time.monotonic() + away
        host.send_to_a(part, number, chance)
        return f"{number.name} to {part} of {host.name}"

    return disturb


def freeze(part: str) -> Disturb:
    def disturb(scene: Scene, chance: Random) -> str:
        host, seconds = scene.training_host(), chance.choice((chance.uniform(1, 8), chance.uniform(8, 30)))
        then = chance.choice((signal.SIGCONT, signal.SIGKILL))
        stop = part in ("rank", "launcher") and chance.random() < 0.3
        if stop:  # the command has to end without an answer of the frozen process
            seconds = LONG_SECONDS
        frozen = host.send_to_a(part, signal.SIGSTOP, chance)
        scene.after(seconds, lambda: host.send(then, frozen))
        if stop:
            host.send(signal.SIGTERM, host.processes("command"))
        return f"SIGSTOP to {part} of {host.name}; {then.name} after {seconds:.1f} s{', and a stop' if stop else ''}"

    return disturb


def of_object(request: Request) -> bool:
    return of_read(request) and "list-type=" not in request.path


def of_read(request: Request) -> bool:
    return request.command == "GET"


def of_create(request: Request) -> bool:
    return request.command == "PUT" and "If-None-Match" in request.headers


def of_weights(request: Request) -> bool:
    return request.command == "GET" and "/checkpoints/" in request.path and ".safetensors" in request.path


def of_any(request: Request) -> bool:
    return True


Matches = Callable[[Request], bool]


def answers(matches: tuple[Matches, ...], shortest: float, longest: float, *faults: Fault) -> Disturb:
    """One of the faults in all answers that match, from the first one on. Half of the times a kill comes before, so
    that the run reads its records and its commit meanwhile."""

    def disturb(scene: Scene, chance: Random) -> str:
        match, fault, seconds = chance.choice(matches), chance.choice(faults), chance.uniform(shortest, longest)
        what = match.__name__.replace("_", " ")
        did = f"in answers {what} for {seconds:.1f} s" + (f", by {fault.date_s:+.0f} s" if fault.date_s else "")
        scene.proxy.windows = [one for one in scene.proxy.windows if one.ends > time.monotonic()]
        scene.proxy.windows.append(Window(fault, match, seconds))
        part = chance.choice(("rank", "command", "group", None, None, None))
        return f"{did}, and {kill(part)(scene, chance)}" if part else did

    return disturb


def fill_disk(scene: Scene, chance: Random) -> str:
    assert (disk := scene.disk)
    seconds = chance.uniform(0.5, 10)
    disk.fill()
    scene.after(seconds, disk.empty)
    return f"of main, for {seconds:.1f} s"


def begin_rival(scene: Scene, chance: Random) -> str:
    """Let another host run the same command for a while. Half of the times it takes over: this one goes away."""
    if scene.rival:
        return kill("group")(scene, chance)
    seconds, number, away = chance.uniform(15, 60), chance.choice((signal.SIGTERM, signal.SIGKILL)), chance.random()
    scene.rival = rival = scene.new_host()
    rival.away_until = math.inf
    scene.after(seconds, lambda: rival.send(number, rival.processes("group")))
    did = f"{rival.name}; {number.name} after {seconds:.1f} s"
    if away < 0.5:
        scene.main.away_until = time.monotonic() + AWAY_SECONDS
        scene.main.send(signal.SIGKILL, scene.main.processes("group"))
        did += ", and SIGKILL to group of main"
    return did


def collect(scene: Scene, chance: Random) -> str:
    if scene.gc is None:
        scene.gc_log = scene.main.project.folder / "gc.log"
        scene.gc = scene.main.begin("gc", log=scene.gc_log)
    return "beside the run"


def wrong_date(scene: Scene, chance: Random) -> str:
    """A Date that is wrong by minutes, hours or days; often beside another host, or gc while no attempt works."""
    did, beside = answers((of_any,), 10, 40, *WRONG_DATES)(scene, chance), chance.choice(("gc", "rival", ""))
    if beside not in scene.kinds:
        return did
    if beside == "gc":
        scene.main.away_until = time.monotonic() + AWAY_SECONDS
        scene.main.send(signal.SIGKILL, scene.main.processes("group"))
    return f"{did}, and {beside}: {DISTURBANCES[beside](scene, chance)}"


PARTS = ("rank", "launcher", "command", "group")
WRONG_DATES = [Fault(date_s=sign * seconds) for sign in (1, -1) for seconds in (90.0, 2 * 3600.0, 9 * DAY)]
DISTURBANCES: dict[str, Disturb] = {
    **{f"kill-{part}": kill(part) for part in PARTS},
    "stop": kill("command", signal.SIGTERM),
    **{f"freeze-{part}": freeze(part) for part in PARTS},
    "flip": answers((of_object, of_weights), 0.3, 2.5, Fault(flip=True)),
    "short": answers((of_read, of_weights), 0.3, 4, Fault(body_bytes=7)),
    "drip": answers((of_read, of_weights), 0.3, 4, Fault(drip_s=3)),
    "absent": answers((of_object, of_weights), 0.3, 2.5, Fault(404, "NoSuchKey")),
    "refused": answers((of_create,), 0.3, 2.5, Fault(412, "PreconditionFailed")),
    "date": wrong_date,
    "disk": fill_disk,
    "rival": begin_rival,
    "gc": collect,
}


def possible_kinds() -> list[str]:
    """The kinds that this process has the right to: mounts and other host names are root's."""
    may = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode == 0
    return [kind for kind in DISTURBANCES if may or kind not in ("disk", "rival")]
