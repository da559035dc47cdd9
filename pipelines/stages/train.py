"""train: torchrun over this node's GPUs (or CPU processes), resumed from the newest commit by itself.

`build` runs in the pipeline's process: it starts torchrun, follows rank 0's event file for progress,
tracking and heartbeats, passes on the wish to stop, and files the result. `main` is what every rank runs:
it assembles the trainer's parts and hands them over. On several nodes each has its own torchrun: the head's
is started here, the others' in pipelines/lend.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.kernel_cache import KernelCache
from pipelines.artifacts.manifest import ArtifactPlan, fetch, read_manifest
from pipelines.artifacts.store import open_store
from pipelines.nodes.head import (
    RERAISED,
    NodeAddress,
    NodeResult,
    interface_to,
    kind_and_message,
    processes_on_this_node,
    rendezvous,
)
from pipelines.recipe import Recipe
from pipelines.stage import Built, Work
from pipelines.tracking.ledger import (
    attempts,
    latest_number,
    prior_seconds_between_failures,
    process_started,
    seconds_between_failures,
)
from pipelines.tracking.records import ProcessId
from trainer.commits import committed_state, segments, series
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES, grad_accum_steps
from trainer.errors import FULL, Interrupted, StaleAttempt, UserError
from trainer.health import STUCK
from trainer.metrics import PhaseClock
from trainer.process import StopSignal, die_with_parent
from trainer.store import Store

if TYPE_CHECKING:
    from trainer.parallel import World

FULL_BYTES = 1 << 16  # less than any file that matters, more than a line of last words
DOOMED_SECONDS = 10.0  # for ranks to fail by themselves, and say with what, once another node's have
SIGNALS_SECONDS = 1.0  # Slurm ends the processes of a job one by one, and torchrun's turn may come before ours
LOG_LINES = 30  # of a failed run, shown to the user if no rank has left word
# A rank that fails leaves its last words in a file of its attempt's folder, because torchrun hands on none:
# <kind>-<rank>.txt. The first kind found of those that are raised again is the cause.


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    identity = {
        "stage": "train",
        "tokens": plans["tokenize"].fingerprint,
        "model": recipe.model.model_dump(),
        "train": recipe.train.model_dump(),
    }
    return ArtifactPlan("train", recipe.name, identity)


def build(work: Work) -> Built:
    from pipelines.cloud.deadline import (
        is_standby,
        leave_spot_in_time,
        poll_for_spot,
    )  # the ranks import this module, too

    if is_standby():
        poll_for_spot(work)
    leave_spot_in_time(work)
    recipe = work.recipe
    processes = processes_on_this_node(recipe.runtime)
    world_size = work.head.gathered(processes) if work.head else processes
    grad_accum_steps(recipe.model, recipe.train, recipe.runtime, world_size)
    tokens = work.inputs["tokenize"]
    work.tracker.dataset("train", tokens.prefix, tokens.fingerprint, f"{work.store.uri}/{tokens.prefix}")
    work.clock.enter("ranks")
    torchrun = start_ranks(work, processes)
    # As long as the ranks hold the GPUs, this attempt is there, whatever becomes of us.
    mine = work.attempt.latest.process
    child = ProcessId(mine.machine, torchrun.pid, process_started(torchrun.pid))
    work.attempt.update(process=replace(mine, children=(child,)))
    try:
        last = follow(work, torchrun)
    except BaseException:
        torchrun.terminate()
        torchrun.wait()
        raise
    work.clock.enter("upload")
    if last.get("step") != recipe.train.max_steps:
        raise work.stop.interruption()
    return file_result(work)


def start_ranks(work: Work, processes: int) -> subprocess.Popen[bytes]:
    """Start torchrun here, and let the other nodes start theirs."""
    earlier = [beat for beat in attempts(work.store, work.plan.prefix) if beat.attempt < work.attempt.number]
    reached = max((beat.progress.highest_step or 0 for beat in earlier), default=0)
    work.report(highest_step=reached)
    mine, prior = work.attempt.latest, PRIOR_SECONDS_BETWEEN_FAILURES
    if mine.machine.cloud:  # one's own is steady, too, but for whoever works on it
        prior = prior_seconds_between_failures(mine.machine, mine.nodes)
    spec = {
        "started": time.time(),  # the ranks' clock begins where ours enters the phase "ranks"
        "reached": reached,
        "recipe": work.recipe.model_dump(),
        "store": work.store.uri,
        "tokens": work.inputs["tokenize"].prefix,
        "prefix": work.plan.prefix,
        "attempt": work.attempt.number,
        "between_failures": seconds_between_failures((b for b in earlier if not b.progress.waiting), prior),
    }
    place, port = (work.head.place, work.head.begin(spec)) if work.head else (NodeAddress(), 0)
    return start_torchrun(spec, work.folder, work.home, processes, work.stop.grace_seconds, place, port)


def start_torchrun(
    spec: dict[str, Any], folder: Path, home: Path, processes: int, grace_seconds: int, place: NodeAddress, port: int
) -> subprocess.Popen[bytes]:
    """torchrun in a session of its own (Ctrl-C is ours to pass on), ended by the kernel if we die.

    Asked to stop, it kills ranks that are still saving after the seconds in TORCH_ELASTIC_SHUTDOWN_TIMEOUT; a
    torch that doesn't know the variable (nor the option --shutdown-timeout) always does so after 30.
    """
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps({**spec, "folder": str(folder), "cache": str(home / "cache")}))
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds), **os.environ}
    if place.count == 1:
        options = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        options = rendezvous(place, port)
        if interface := interface_to(place.head):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={processes}"]
    with (folder / "train.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "-m", "pipelines.stages.train", str(spec_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=before_torchrun,
        )


def before_torchrun() -> None:
    die_with_parent()
    # Slurm sends it to every process of a step. The ranks know what it means; torchrun would die and end them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def follow(work: Work, torchrun: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Follow the ranks until they end; the last row. Raises what ended them early."""
    max_steps = work.recipe.train.max_steps
    tracked = track_committed(work)
    last: dict[str, Any] = {}
    asked, abandoned = False, -1
    with work.screen.bar("train", max_steps) as bar:
        for event in events(work.folder / "events.jsonl", torchrun):
            if event.get("event") == "row":
                last |= {k: v for k, v in event.items() if k not in ("event", "phases", "phase")}
                track_row(work, event, {} if event["step"] <= abandoned else tracked, again=event["step"] <= abandoned)
                bar.update(last["step"], describe(last))
                work.ranks = event["phases"], event["phase"]
                count_step(work, event)
                work.report({k: v for k, v in last.items() if "/" in k}, step=last["step"], time=last["time"])
            elif event.get("event") == "phase":
                work.ranks = event["phases"], event["phase"]
            elif event:
                if event["event"] == "start":
                    last["step"] = event["step"]  # after the last commit no row comes any more
                elif event["event"] == "rollback":
                    last["step"] = event["to"]
                    abandoned = event["step"]
                note_event(work, event)
            if not asked and (work.stop.asked or work.attempt.lost):
                torchrun.send_signal(signal.SIGTERM)  # the ranks finish their step and commit
                if work.stop.reason:
                    work.report(notice=work.stop.reason)  # while this machine can still say so
                asked = True
            if work.head and work.head.failed():
                wait_or_kill(torchrun)
    if torchrun.returncode and not work.stop.asked:
        time.sleep(SIGNALS_SECONDS)
    work.attempt.check()
    if torchrun.returncode and shutil.disk_usage(work.folder).free < FULL_BYTES:  # ranks can't leave words there
        raise UserError(f"{work.folder}: {FULL}")
    parts = [part_of(0, work.folder, torchrun.returncode)]
    if work.head and torchrun.returncode:
        parts += work.head.parts()
    for kind, error in RERAISED.items():
        for part in (part for part in parts if part.kind == kind):
            raise error(part.words)
    if torchrun.returncode and work.head and (lost := work.head.lost()) and work.stop.ending is Interrupted:
        raise Interrupted(f"node {lost[0]} is gone")
    if torchrun.returncode and not work.stop.asked:
        for part in (part for part in parts if part.kind == "stuck"):
            raise Interrupted(part.words)
        why = "\n".join(part.words for part in parts if part.kind)
        raise RuntimeError(f"the training processes failed; their output is in {work.folder / 'train.log'}:\n{why}")
    if torchrun.returncode:
        raise work.stop.interruption()
    return last


def part_of(node: int, folder: Path, exit_code: int) -> NodeResult:
    """How torchrun's ranks on this node have ended, from what they left in their attempt's folder."""
    for kind in RERAISED:
        for words in last_words(folder, kind):
            return NodeResult(node, kind, words)
    if not exit_code:
        return NodeResult(node)
    log = (folder / "train.log").read_text(errors="replace").splitlines()
    for line in (line for line in log if STUCK in line):
        return NodeResult(node, "stuck", line)
    return NodeResult(node, "fault", [*last_words(folder, "fault"), "\n".join(log[-LOG_LINES:])][0])


def wait_or_kill(torchrun: subprocess.Popen[bytes]) -> None:
    """Let ranks end that can't go on without those of another node; NCCL doesn't always tell them."""
    try:
        torchrun.wait(DOOMED_SECONDS)
    except subprocess.TimeoutExpired:
        kill_ranks(torchrun)


def kill_ranks(torchrun: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks at once: what they wait for won't come."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(torchrun.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    torchrun.kill()
    torchrun.wait()


def last_words(folder: Path, kind: str) -> list[str]:
    """What failed ranks have left, in the order of their failing: the others only fail because one did."""
    paths = sorted(folder.glob(f"{kind}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return [path.read_text() for path in paths]


def events(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a file that is being written, until the process has ended; {} when there is no news."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.1)
        yield {}
    if not path.exists():
        return
    with path.open() as file:
        rest = ""
        while True:
            ended = process.poll() is not None
            rest += file.read()
            *lines, rest = rest.split("\n")
            yield from (json.loads(line) for line in lines)
            if ended:
                return
            if not lines:
                time.sleep(0.1)
                yield {}


def track_committed(work: Work) -> dict[str, int]:
    """Tell MLflow what earlier attempts have committed but did not live to tell; the last step told of each metric."""
    tracked = work.tracker.highest_steps("train")
    rows = (row for segment in segments(work.store, work.plan.prefix) for row in segment)
    # A step that was redone counts as the later attempt did it. Each row keeps its time: what MLflow has, it knows.
    for row in {(row["step"], "train/loss" in row): row for row in rows}.values():
        track_row(work, row, dict(tracked))  # in no order of steps
    return work.tracker.highest_steps("train")


def track_row(work: Work, event: dict[str, Any], tracked: dict[str, int], again: bool = False) -> None:
    """Pass on what MLflow hasn't been told yet: a step that is redone after a crash is no second point.

    After a rollback (`again`) it is one, and the one that counts: it read other data.
    """
    step = event["step"]
    values = {k: v for k, v in event.items() if "/" in k and k != "data/digest" and step > tracked.get(k, -1)}
    if values:
        work.tracker.metrics("train", step, event["time"], values, again)
        tracked.update(dict.fromkeys(values, step))


def count_step(work: Work, row: dict[str, Any]) -> None:
    """Keep count of the steps that this attempt has done, and of those that had been done before."""
    progress = work.attempt.latest.progress
    if "train/loss" in row:
        highest = progress.highest_step or 0
        work.report(
            steps_done=(progress.steps_done or 0) + 1,
            steps_redone=(progress.steps_redone or 0) + (row["step"] <= highest),
            highest_step=max(highest, row["step"]),
        )


def describe(row: dict[str, Any]) -> str:
    """A row in a few words."""
    words = [f"step {row['step']:,}"]
    if "train/loss" in row:
        words += [f"loss {row['train/loss']:.3f}", f"{row['perf/tokens_per_second']:,.0f} tok/s"]
    if "val/loss" in row:
        words.append(f"val {row['val/loss']:.3f}")
    return "  ".join(words)


def note_event(work: Work, event: dict[str, Any]) -> None:
    if event["event"] == "start":
        hardware = {k: event[k] for k in ("device", "precision", "world_size")}
        work.report(resumed_from=event["step"], lowest_step=event["step"], step=event["step"], **hardware)
        resumed = f", resumed from step {event['step']:,}" if event["step"] else ""
        work.screen.note(
            f"  {event['parameters']:,} parameters, {event['world_size']} x {event['device']}, "
            f"{event['precision']}, {event['micro_batch_why']}; {event['engine']}{resumed}"
        )
        work.tracker.tags("train", hardware | {"engine": event["engine"], "micro_batch": event["micro_batch_why"]})
    elif event["event"] == "damaged":
        work.screen.warn(f"{event['checkpoint']} is damaged ({event['reason']}); using the one before it")
    elif event["event"] == "checkpoint_failed":
        work.screen.warn(f"checkpoint of step {event['step']:,} failed ({event['reason']}); training goes on")
        work.report(checkpoint_failed=event["step"])
    elif event["event"] == "checkpoint":
        work.report(committed_step=event["step"], save_seconds=event["seconds"])
    elif event["event"] == "skipped":
        work.screen.warn(f"update {event['step']:,} skipped: {event['reason']}")
    elif event["event"] == "slow":
        work.screen.warn(f"slower than it could be: {event['reason']}")
    elif event["event"] == "rollback":
        turns = (work.attempt.latest.progress.rollbacks or 0) + 1
        text = f"from step {event['step']} to {event['to']}; of two points at a step the later one counts"
        work.tracker.tags("train", {f"skytrain.rollback.a{work.attempt.number:04d}.{turns}": text})
        work.report(rollbacks=turns)
        work.report(lowest_step=min(event["to"], work.attempt.latest.progress.lowest_step or 0))
        work.screen.warn(f"rolled back from step {event['step']:,} to {event['to']:,}: {event['reason']}")


def file_result(work: Work) -> Built:
    """Upload the final weights and the whole series."""
    rows = series(work.store, work.plan.prefix)
    state = committed_state(work.store, work.plan.prefix)
    assert state is not None and state.step == work.recipe.train.max_steps
    metrics = work.folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speeds = sorted(row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row)
    final = {k: v for row in rows for k, v in row.items()}
    facts = {
        "steps": work.recipe.train.max_steps,
        "tokens": state.tokens_seen,
        "parameters": work.recipe.model.parameters,
        "train/loss": final["train/loss"],
        "val/loss": final.get("val/loss"),
        "perf/tokens_per_second": speeds[len(speeds) // 2],  # median over steps
        "skipped_updates": state.health.skipped,
        "rollbacks": state.rollbacks,
    }
    return Built([work.upload(work.folder / "model.safetensors"), work.upload(metrics)], facts)


def main(spec_path: str) -> int:
    """One rank: assemble the parts, train, leave the final weights in the attempt's folder."""
    die_with_parent()
    stop = StopSignal()
    spec = json.loads(Path(spec_path).read_text())
    folder = Path(spec["folder"])
    try:
        return train_rank(spec, folder, stop)
    except Exception as error:
        kind, words = kind_and_message(error, folder)
        with suppress(OSError):  # a full disk: `follow` sees that for itself
            (folder / f"{kind}-{os.environ.get('RANK', '0')}.txt").write_text(words)
        raise


def train_rank(spec: dict[str, Any], folder: Path, stop: StopSignal) -> int:
    from trainer.rank import RankJob, run_rank
    from trainer.shards import Shard

    recipe = Recipe.model_validate(spec["recipe"])
    store, prefix, cache = open_store(spec["store"]), spec["prefix"], Path(spec["cache"])
    tokens = read_manifest(store, spec["tokens"])
    assert tokens is not None, spec["tokens"]
    clock = PhaseClock(started=spec["started"])

    def shards(split: str) -> list[Shard]:
        return [Shard(name, n) for name, n in tokens.facts["shards"].items() if name.startswith(split)]

    def begin(world: "World") -> int:
        bring_kernels(store, cache, recipe, world, clock)
        return spec["attempt"]

    job = RankJob(
        model=recipe.model,
        train=recipe.train,
        runtime=recipe.runtime,
        train_shards=shards("train"),
        val_shards=shards("val"),
        fetch=lambda name: fetch(store, tokens.prefix, tokens.file(name), cache),
        store=store,
        prefix=prefix,
        folder=folder,
        checkpoint_folder=folder / "checkpoint",
        begin=begin,
        superseded=lambda attempt: latest_number(store, prefix) > attempt,
        clock=clock,
        reached=spec["reached"],
        between_failures=spec["between_failures"],
    )
    try:
        run_rank(job, stop)
    except StaleAttempt as error:
        print(error, file=sys.stderr)
        return 1  # the pipeline's process finds by itself that the attempt is stale
    return 0


def bring_kernels(store: Store, cache: Path, recipe: Recipe, world: "World", clock: PhaseClock) -> None:
    """Have every node begin with the kernels that an earlier one has compiled, and keep ours for the next."""
    if kernels := KernelCache.here(store, cache, recipe, world.device):
        if world.local_rank == 0:
            kernels.fetch()
        world.gather(None)  # all have them
        if world.rank == 0:
            kernels.keep_from_the_first_step(lambda: clock.current)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
