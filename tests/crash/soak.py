"""A run on S3 that is disturbed at seeded moments, against the same run left alone.

    python -m tests.crash.soak --minutes 60 --seed 7 --kinds kill-rank,flip

It starts `skytrain run` as a user does, again and again until the run is done, on radosgw (else moto) behind a proxy.
It prints a line for each disturbance. Runs follow each other, each with the next seed, until the time is up; the last
one goes on to its end. These are failures:

- losses, weights or scores that differ from those of the undisturbed run,
- a commit that is gone, and that no newer ones have replaced,
- attempts that lack a number or contradict each other, and a bill that differs from a stopwatch,
- no new commit or artifact for too long,
- a command that ends otherwise than with 0, with 75, by a signal that it got, or with 2 on a full disk.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from disturbances import COMMAND, DISTURBANCES, Host, Scene, possible_kinds
from faulty_proxy import FaultyProxy
from pipeline_runs import TINY, Project, series_of, sums
from servers import FOREIGN_AWS_VARIABLES, MotoServer, Radosgw, S3Account
from small_disk import Disk, small_disk

from pipelines.run.runs import read_runs
from pipelines.run.stage import STAGES
from pipelines.store.layout import manifest_key
from pipelines.store.ledger import GC, attempts, latest_number
from pipelines.store.manifest import read_manifest
from pipelines.store.s3_store import S3Store
from trainer.checkpoint.layout import attempt_of, step_of
from trainer.config.errors import FULL

STEPS = 600
KEEP_LAST = 2
POLL_SECONDS = 0.1
STORE_POLL_SECONDS = 0.5
LEAST_SECONDS = 20.0  # for a further run
EARLY_SECONDS = 8.0  # from a disturbance to an early one
ORPHAN_SECONDS = 2.0  # of ranks without a launcher
ARTIFACT_SECONDS = 45.0  # for a takeover, which waits for 20 s, and an artifact
# Generous: a machine may be busy with everything else.
HANG_SECONDS = 300.0  # without a new commit or artifact
STOP_SECONDS = 120.0  # from SIGTERM to the end of the command; the grace is 30 s
LEAVE_SECONDS = 30.0  # from the last heartbeat to the end of the command
METER_SECONDS = 1.0  # by which a bill may differ from the meter
RECIPE: dict[str, Any] = TINY | {
    "train": TINY["train"] | {"max_steps": STEPS, "val_every": 100},
    "runtime": TINY["runtime"]
    | {"processes": 2, "micro_batch_size": 16, "checkpoint_minutes": 0.01}
    | {"keep_last": KEEP_LAST, "watchdog_minutes": 0.3},
}
ROW = re.compile(rb'"step": (\d+), "time": ([\d.]+), "metrics": {[^}]*"train/loss"')
TAIL_BYTES = 8192  # of a file of events: some rows


@dataclass(frozen=True)
class LastRow:
    """The last row that a host has logged."""

    time: float = 0.0  # unix seconds
    step: int = 0
    events: Path | None = None
    host: Host | None = None

    @classmethod
    def of(cls, host: Host) -> "LastRow":
        files = {}
        with suppress(FileNotFoundError):  # a stage that ends removes its folders, also below a glob
            for path in host.project.home.glob("work/**/events.jsonl"):
                files[path] = path.stat().st_mtime
        for path in sorted(files, key=lambda one: -files[one]):
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                if rows := ROW.findall(file.read()):
                    return cls(float(rows[-1][1]), int(rows[-1][0]), path, host)
        return cls()


@dataclass
class Disturbance:
    """A disturbance, with the last row and the commits before it."""

    before: LastRow
    commits: int  # so far
    at: float = 0.0  # unix seconds

    def is_over(self, row: LastRow, commits: int) -> bool:
        """Whether the run has trained and committed since. Ranks without a launcher log their last step, too."""
        orphaned = ORPHAN_SECONDS if row.events == self.before.events else 0.0
        return row.time > self.at + orphaned and commits > self.commits


class Moment:
    """Of the next disturbance: some seconds after the last one, or after the run has trained and committed again. Of
    two in a row at least one waits for that, since a run may crash three times in a row without a commit."""

    def __init__(self, chance: Random, was_early: bool) -> None:
        self.early = not was_early and chance.random() < 0.25
        self.delay = chance.uniform(0.2, EARLY_SECONDS if self.early else 4)
        self.since = time.monotonic() if self.early else None

    def has_come(self, calm: bool) -> bool:
        if self.since is None and calm:
            self.since = time.monotonic()
        return self.since is not None and time.monotonic() > self.since + self.delay


class Failed(Exception):
    """The run cannot go on."""


class DisturbedRun:
    """A run in a store of its own. `failures` has what is wrong."""

    def __init__(self, seed: int, folder: Path, proxy: FaultyProxy, store: S3Store, undisturbed: Project) -> None:
        self.seed, self.folder, self.proxy, self.store, self.undisturbed = seed, folder, proxy, store, undisturbed
        self.prefix = undisturbed.artifact("train").prefix
        self.began = self.moved = time.monotonic()
        self.failures: list[str] = []
        self.disturbances: list[Disturbance] = []
        self.everyone: list[Host] = []
        self.row = LastRow()
        self.commits: dict[str, int] = {}  # all that were seen, with the newest attempt of that time
        self.gone: set[str] = set()
        self.records = 0  # of shards and artifacts
        self.trained = False
        self.looked = 0.0  # at the store

    def run(self, kinds: list[str], until: float) -> None:
        """Disturb the run until a moment (time.monotonic), let it end, and compare."""
        environment = {"AWS_ENDPOINT_URL": self.proxy.endpoint, "SKYTRAIN_STORE": self.store.uri}
        environment["SKYTRAIN_STORE_SECONDS"] = "20"

        def new_host() -> Host:
            name = f"rival-{len(self.everyone)}" if self.everyone else ""
            self.everyone.append(Host(self.folder, RECIPE, environment, name))
            return self.everyone[-1]

        with ExitStack() as stack:
            home = Project(self.folder / "main", RECIPE).home
            disk = Disk(stack.enter_context(small_disk(home, "64m"))) if "disk" in kinds else None
            self.scene = Scene(new_host(), new_host, self.training_host, self.proxy, disk, kinds)
            stack.callback(self.leave)
            try:
                self.disturb(kinds, until)
                self.check_result()
            except Failed as failure:
                self.fail(str(failure))

    def leave(self) -> None:
        self.end_disturbances()
        for host in self.everyone:
            host.kill()

    def disturb(self, kinds: list[str], until: float) -> None:
        main, moment = self.scene.main, None
        while main.code != 0:
            time.sleep(POLL_SECONDS)
            self.watch_rows()
            self.watch_store()
            for host in self.scene.hosts:
                self.watch_command(host)
            self.watch_gc()
            self.scene.end()
            chance = Random(f"{self.seed}/{len(self.disturbances)}")
            moment = moment or Moment(chance, was_early=False)
            if any(host.running and time.monotonic() > host.asked + EARLY_SECONDS for host in self.scene.hosts):
                continue  # nothing else may end a command that does not obey
            if time.monotonic() > until:
                self.end_disturbances()
            elif moment.has_come(self.calm):
                self.disturb_once(chance.choice(kinds), chance)
                moment = Moment(Random(f"{self.seed}/{len(self.disturbances)}/moment"), moment.early)

    def disturb_once(self, kind: str, chance: Random) -> None:
        began = Disturbance(self.row, len(self.commits))
        did = DISTURBANCES[kind](self.scene, chance)
        time.sleep(0.2)  # of a step that is being logged
        began.at = time.time()
        self.disturbances.append(began)
        self.say(f"{len(self.disturbances):>3}  {kind:<15} after step {self.row.step:>5}: {did}")

    def end_disturbances(self) -> None:
        self.scene.end(everything=True)
        self.proxy.windows.clear()
        self.scene.main.away_until = 0.0
        if self.scene.rival:
            self.scene.rival.kill()

    @property
    def calm(self) -> bool:
        """Whether the run has trained and committed since the last disturbance; once it is trained, whether it has had
        the time to take a dead attempt over and to make the next artifact."""
        last = self.disturbances[-1] if self.disturbances else None
        if last and self.trained:
            return time.time() > last.at + ARTIFACT_SECONDS
        return last is None or last.is_over(self.row, len(self.commits))

    def training_host(self) -> Host:
        host = self.row.host
        return host if host and host.running and host in self.scene.hosts else self.scene.main

    def say(self, text: str) -> None:
        print(f"seed {self.seed}  {time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def fail(self, why: str) -> None:
        self.failures.append(f"seed {self.seed}: {why}")
        self.say(f"FAILED: {why}")

    # --- while it runs

    def watch_rows(self) -> None:
        newest = max((LastRow.of(host) for host in self.scene.hosts), key=lambda row: row.time)
        if newest.time > self.row.time:
            self.row = newest

    def watch_store(self) -> None:
        """Look for lost commits, and for progress."""
        if time.monotonic() < self.looked + STORE_POLL_SECONDS:
            return
        self.looked = time.monotonic()
        keys = [entry.key for entry in self.store.entries("")]
        attempt = latest_number(self.store, self.prefix)
        of_commits = re.compile(rf"({re.escape(self.prefix)}/checkpoints/[^/]+)/COMMIT\.json")
        present = {found[1] for key in keys if (found := of_commits.fullmatch(key))}
        records = sum(key.endswith("/MANIFEST.json") or "/shards/" in key for key in keys)
        self.trained = self.trained or self.store.get(manifest_key(self.prefix)) is not None  # then commits may go
        top = max(map(step_of, self.commits), default=0)
        self.commits |= {commit: attempt for commit in present - self.commits.keys()}
        if records > self.records or max(map(step_of, self.commits), default=0) > top:
            self.records, self.moved = records, self.looked
        if self.looked > self.moved + HANG_SECONDS:
            raise Failed(f"no new commit or artifact for {HANG_SECONDS:.0f} s; {self.state()}")
        for commit in self.commits.keys() - present - self.gone:
            self.gone.add(commit)
            newer = [one for one in self.commits if step_of(one) > step_of(commit)]
            stale = self.commits[commit] > attempt_of(commit)  # its attempt takes it back
            if not self.trained and not stale and len(newer) < KEEP_LAST:
                self.fail(f"{commit} is gone, and only {newer} were newer")

    def watch_command(self, host: Host) -> None:
        """Judge the end of a command, and start it again."""
        if host.exit_code() is not None:
            self.judge(host.name, host.code or 0, host.log, host.sent)
        if host.running and time.monotonic() > host.asked + STOP_SECONDS:
            raise Failed(f"{host.name} has not ended {STOP_SECONDS:.0f} s after SIGTERM; {self.state()}")
        if not host.running and host is self.scene.rival:
            self.scene.rival = None
        elif not host.running and host.code != 0 and time.monotonic() > host.away_until:
            host.start()

    def watch_gc(self) -> None:
        gc = self.scene.gc
        if gc and gc.poll() is not None:
            # It refuses to judge the age of objects by a wrong clock.
            refused = 2 if "clock" in self.scene.gc_log.read_text() else 0
            self.judge("gc", gc.returncode - refused, self.scene.gc_log, {signal.SIGKILL})  # with its group
            self.scene.gc = None

    def judge(self, who: str, code: int, log: Path, sent: set[int]) -> None:
        output = log.read_text(errors="replace")
        full = code == 2 and FULL in (output.splitlines() or [""])[-1]
        if not (code in (0, 75) or -code in sent or full) or "Traceback" in output:
            self.fail(f"{who} ended with {code}; the end of {log}:\n{output[-2000:]}")

    def state(self) -> str:
        """The processes and their last lines, for people."""
        lines = ["the processes:"]
        for host in self.scene.hosts:
            for one in host.project.alive():
                with suppress(Exception):
                    lines.append(f"{host.name}: {one.pid} {one.status()} {' '.join(one.cmdline())[-80:]}")
            lines.append(f"the end of {host.log}:\n{host.log.read_text(errors='replace')[-1000:]}")
        return "\n".join(lines)

    # --- at its end

    def check_result(self) -> None:
        rows, others = series_of(self.store), self.undisturbed.series()
        if different := [row["step"] for row, other in zip(rows, others, strict=False) if row != other]:
            self.fail(f"{len(different)} rows differ, first that of step {different[0]}")
        if len(rows) != len(others):
            self.fail(f"{len(rows)} rows instead of {len(others)}")
        for stage in STAGES:
            expected = self.undisturbed.artifact(stage)
            made = read_manifest(self.store, expected.prefix)
            if made is None or (made.facts if stage == "evaluate" else sums(made)) != (
                expected.facts if stage == "evaluate" else sums(expected)
            ):
                self.fail(f"the artifact of {stage} differs")
            self.check_attempts(expected.prefix)
        self.check_bill()

    def check_attempts(self, prefix: str) -> None:
        beats = attempts(self.store, prefix)
        own = [beat for beat in beats if beat.run != GC]
        if [beat.attempt for beat in beats] != list(range(1, len(beats) + 1)):
            self.fail(f"{prefix} has the attempts {[beat.attempt for beat in beats]}")
        states = [beat.state for beat in own]
        if states[-1] != "done" or not set(states) <= {"done", "interrupted", "running", "stale", "failed"}:
            self.fail(f"the attempts of {prefix} are {states}")

    def check_bill(self) -> None:
        """Each host's attempts have all its time since the start of its meter, and the last one ends the run."""
        (run,) = read_runs(self.store)
        beats = [stored.beat for stored in run.heartbeats]
        here = [beat for beat in beats if not beat.process.host.startswith("rival-")]
        for host in self.everyone:
            own = here if host is self.scene.main else [beat for beat in beats if beat.process.host == host.name]
            billed = sum(beat.time - beat.started for beat in own)
            metered = max((beat.time for beat in own), default=host.metered) - host.metered
            if abs(billed - metered) > METER_SECONDS:
                self.fail(f"the bill of {host.name} is {billed:.1f} s, and its meter ran for {metered:.1f} s")
        last = max(beats, key=lambda beat: beat.time)
        if last in here and not -1 < (late := self.scene.main.ended - last.time) < LEAVE_SECONDS:
            self.fail(f"the last heartbeat came {late:.1f} s before the end")
        for one in run.account.attempts:
            if abs(sum(one.phases.values()) - (one.time - one.started)) > 0.01:
                self.fail(f"the phases of attempt {one.attempt} of {one.prefix} are not its time: {one.phases}")
        total, kept = run.account.total, sum(one.steps_kept for one in run.account.attempts)
        if abs(total.usd / 3600 - total.hours) > 1e-3 or kept != STEPS:
            self.fail(f"the bill has ${total.usd:.2f} for {total.hours:.4f} h, and {kept} steps")


def undisturbed_run(folder: Path) -> Project:
    """The run that nothing disturbs, in a local store."""
    project, began = Project(folder, RECIPE), time.monotonic()
    with project.started(*COMMAND) as process:
        _, err = process.communicate()
        assert process.returncode == 0, err
    print(f"an undisturbed run takes {time.monotonic() - began:.0f} s", flush=True)
    return project


def soak(seed: int, minutes: float, kinds: list[str], folder: Path, store: S3Store) -> list[str]:
    """Runs in the bucket of a store, until the time is up. Returns the failures."""
    undisturbed, runs = undisturbed_run(folder / "undisturbed"), list[DisturbedRun]()
    until = time.monotonic() + 60 * minutes
    with FaultyProxy(store.endpoint) as proxy:
        while not runs or time.monotonic() + LEAST_SECONDS < until:
            number = seed + len(runs)
            own = S3Store(store.bucket, f"soak/{number}")
            runs.append(DisturbedRun(number, folder / f"seed {number}", proxy, own, undisturbed))
            runs[-1].run(kinds, until)
    failures = [failure for run in runs for failure in run.failures]
    print(f"{len(runs)} runs, {sum(len(run.disturbances) for run in runs)} disturbances, {len(failures)} failures")
    return failures


def new_bucket(account: S3Account) -> S3Store:
    """A store in a new bucket; this process and its children use the account from now on."""
    for name in FOREIGN_AWS_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= account.environment
    store = S3Store(f"soak-{uuid.uuid4().hex[:16]}")
    store._client.create_bucket(Bucket=store.bucket)
    return store


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(possible_kinds()), help="of the disturbances, by default all")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(possible_kinds()):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: unknown, or needs the rights of root")
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        server = MotoServer(Path(folder)) if Radosgw.missing_programs() else Radosgw(Path(folder, "rgw"))
        server.start()
        try:
            failures = soak(options.seed, options.minutes, kinds, Path(folder), new_bucket(server.account))
        finally:
            server.stop()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
