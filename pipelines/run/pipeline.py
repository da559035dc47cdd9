"""One invocation of a run: it skips the artifacts that exist, and builds the others.

For each missing artifact it claims an attempt, waits for another process that builds the same artifact, calls the
stage's `build`, and commits. A crash is recorded here too, by the next command.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.extras.mlflow.child import MirrorProcess
from pipelines.recipe.recipe import Recipe
from pipelines.run.screen import Screen
from pipelines.run.stage import Built, Work, artifacts, missing, run_name, stage_named
from pipelines.run.text.tokenizer import keep_tokenizer
from pipelines.store.crashes import UNFIT, after_crash
from pipelines.store.ledger import SILENT_SECONDS, Attempt, attempts, claim, close_attempt, is_alive, newest_attempt
from pipelines.store.manifest import ArtifactPlan, DamagedArtifact, Manifest, find
from pipelines.store.provenance import provenance
from pipelines.store.records import Billing, Heartbeat
from pipelines.store.run_record import RunRecord, record
from pipelines.store.runs import SUMMARY_SECONDS, Run, read_run, store_summary
from trainer.base.process import StopSignal
from trainer.base.store import WAITING, Store, Waiting
from trainer.config.errors import (
    Crashed,
    Interrupted,
    ProcessKilled,
    StaleAttempt,
    Stopped,
    StoreUnavailable,
    UnfitMachine,
    UserError,
)

# On a rented machine: how long to wait, at full price, while another machine works on the same artifact.
RIVAL_SECONDS = 300.0
MOST_REFUSALS = 5  # of one number: the attempt that has it must be listed by then
ORPHAN_SECONDS = 150.0  # for the ranks of a killed command to commit: more than any cloud's grace


@dataclass
class Pipeline:
    """One invocation of a run: everything that its stages share."""

    recipe: Recipe
    store: Store
    home: Path
    billing: Billing
    mirror: MirrorProcess
    screen: Screen
    stop: StopSignal
    plans: dict[str, ArtifactPlan]
    # Called with every heartbeat, in its thread. A watch that returns a reason stops the whole run.
    watches: list[Callable[[Heartbeat], str | None]] = field(default_factory=list)
    before_ranks: Callable[[Work], None] | None = None  # called before train starts its ranks; may raise Interrupted
    began: float | None = None  # unix seconds, the start of the process, which the first attempt bills
    allow_code: bool = False  # see `Work`
    made: dict[str, Manifest] = field(default_factory=dict)
    skipped: dict[str, bool] = field(default_factory=dict)
    _recorded: RunRecord | None = None
    _before: Run | None = None  # the run before the attempt that works
    _summarized: float = -math.inf  # by the monotonic clock

    @property
    def run(self) -> str:
        return run_name(self.plans)

    def execute(self, until: str, found: Mapping[str, Manifest | None] | None = None) -> None:
        """Make the missing artifacts up to the stage `until`, and account for them. `found`: the artifacts of these
        stages, if the caller has decided something by them; the store may say something else now."""
        self._recorded = record(self.store, self.run, self.recipe, self.plans, until)
        keep_tokenizer(self.recipe, self.plans["tokenize"], self.store)
        found = found or artifacts(self.store, self.plans, until)
        mirrored = not all(found.values())
        if mirrored:
            self.mirror.start()
        try:
            self._make_all(found)
        finally:
            if not isinstance(sys.exception(), OSError):  # a store that does not answer would only wait as long again
                with suppress(Exception):  # tables read the records instead
                    store_summary(self.snapshot())
            if mirrored and (notice := self.mirror.close()):
                self.screen.warn(notice)

    def snapshot(self) -> Run:
        """The run as the store has it now."""
        return read_run(self.store, self.run) if self._recorded is None else Run(self.store, self._recorded)

    def _make_all(self, found: Mapping[str, Manifest | None]) -> None:
        for stage, manifest in found.items():
            self.stop.check()
            self.skipped[stage] = False
            self.made[stage] = self._existing(stage, manifest) or self._make(stage)

    def _existing(self, stage: str, manifest: Manifest | None = None) -> Manifest | None:
        manifest = manifest or find(self.store, self.plans[stage])
        if manifest:
            self.skipped[stage] = True
            self.screen.note(f"[green]✓[/] [bold]{stage}[/]  {manifest.prefix} exists: skipped")
        return manifest

    def _make(self, stage: str) -> Manifest:
        """Build an artifact, or wait for the process that is building it."""
        plan, refused = self.plans[stage], list[int]()  # numbers that another process was faster to claim
        while True:
            began = time.monotonic()
            rival = self._wait_for_rival(plan)
            waited = time.monotonic() - began
            if rival and (manifest := self._existing(stage)):
                return manifest
            number = rival.attempt + 1 if rival else 1
            self._before = self.snapshot()
            earlier = self._before.heartbeats
            attempt = claim(
                self.store,
                plan.prefix,
                self.run,
                stage,
                number,
                self.billing,
                self._watch,
                waited,
                [stored.beat for stored in earlier],
                lambda thread: self.stop.ask(f"the thread of the heartbeats crashed: {thread.error!r}"),
                self.began,
            )
            if attempt is None:  # another process was faster
                self.stop.check()
                refused.append(number)
                if refused.count(number) > MOST_REFUSALS:
                    raise UserError(
                        f"{self.store.uri}/{plan.prefix}/attempts/: the store refuses to create attempt {number}, "
                        "and lists none; remove what skytrain did not write there, or use another store"
                    )
                time.sleep(1)
                continue
            try:
                WAITING.check = Waiting.check  # from now on the run ends in order
                with attempt:
                    manifest = self._build(stage, attempt, [one.beat for one in earlier if one.prefix == plan.prefix])
            except StaleAttempt:
                self.screen.warn(f"{stage}: a newer attempt has taken over; waiting for it")
                continue
            except Crashed as crash:
                if not attempt.latest.progress.restarting:
                    raise
                self.screen.warn(f"{crash}; starting again on this machine")
                continue
            return manifest

    def _watch(self, beat: Heartbeat) -> None:
        """Runs with every heartbeat of an attempt, in its thread."""
        for watch in self.watches:
            if reason := watch(beat):
                self.stop.ask(reason, Stopped)
        self.mirror.start()
        if self._before and time.monotonic() - self._summarized > SUMMARY_SECONDS:
            self._summarized = time.monotonic()
            store_summary(self._before.with_attempt(self.plans[beat.stage].prefix, beat), beat.process)

    def _wait_for_rival(self, plan: ArtifactPlan) -> Heartbeat | None:
        """Wait until no attempt of another process is alive. Returns the newest attempt, None if there is none.

        A silence is one that this process has watched, by its own clock: no date decides. A rented machine does not
        wait for longer than RIVAL_SECONDS: it raises Stopped, or Interrupted if the other attempt is of the same job,
        which its controller then places anew.
        """
        last: Heartbeat | None = None
        began = silent_since = time.monotonic()
        while newest := newest_attempt(self.store, plan.prefix):
            alive = is_alive(newest)
            if newest != last:
                silent_since = time.monotonic()
            if alive is False or (alive is None and time.monotonic() - silent_since > SILENT_SECONDS):
                return newest
            if last is None:
                self.screen.note(
                    f"  {plan.stage}: attempt {newest.attempt} on {newest.process.host} is working; waiting for it "
                    f"(after {SILENT_SECONDS:.0f} s without a heartbeat, this process takes over)"
                )
            last = newest
            self.stop.check()
            cluster = self.billing.machine.cluster
            if cluster and time.monotonic() - began > RIVAL_SECONDS:
                works = f"attempt {newest.attempt} on {newest.process.host} works on {plan.stage}"
                reason = f"{works}, so this rented machine is released"
                self.stop.ask(reason, Interrupted if newest.machine.cluster == cluster else Stopped)
            time.sleep(1)
        return None

    def _build(self, stage: str, attempt: Attempt, earlier: list[Heartbeat]) -> Manifest:
        plan = self.plans[stage]
        work = Work(
            self.recipe,
            plan,
            self.made,
            self.store,
            self.home,
            attempt,
            self.screen,
            self.stop,
            before_ranks=self.before_ranks,
            earlier=earlier,
            allow_code=self.allow_code,
        )
        self.screen.note(f"[bold]{stage}[/]  → {plan.prefix}  (attempt {attempt.number})")
        shutil.rmtree(work.folder)  # left from a store that was deleted: a new store counts attempts from 1 again
        try:
            built = self._built(work)
            attempt.begin_to_finish()
            inputs = {stage: self.plans[stage].fingerprint for stage in self.made}
            manifest = built.commit(work, plan, inputs, provenance())
        except BaseException as error:
            # A newer attempt removes the folder and the scratch of this one.
            if isinstance(error, FileNotFoundError | DamagedArtifact) and attempt.superseded():
                raise StaleAttempt(f"attempt {attempt.number} of {plan.prefix} was superseded") from error
            interrupted = isinstance(error, Interrupted | StaleAttempt | StoreUnavailable | KeyboardInterrupt)
            if not isinstance(error, StaleAttempt):
                attempt.update(state=state_after(error))
            if isinstance(error, Crashed) and self.billing.machine.cluster and not self.stop.asked:
                attempt.report(restarting=True)  # a rented machine: SkyPilot would take a minute longer
            if interrupted and self.stop.reason:
                attempt.report(notice=self.stop.reason)
            raise
        attempt.update(state="done")
        # With the scratch of earlier attempts on this machine. A folder that stays must not fail a finished stage.
        shutil.rmtree(work.folder.parent, ignore_errors=True)
        return manifest

    def _built(self, work: Work) -> Built:
        """The stage's files. A machine with unfit GPUs and a killed process count as a crash."""
        try:
            return stage_named(work.plan.stage).build(work)
        except (UnfitMachine, ProcessKilled) as error:
            cause = f"{UNFIT}{error}" if isinstance(error, UnfitMachine) else str(error)
            work.report(killed=cause)
            raise after_crash(self.store, work.plan.prefix, work.attempt.number, cause) from error


def record_crash(store: Store, plans: dict[str, ArtifactPlan], until: str, billing: Billing, cause: str) -> Exception:
    """Record in the store that a signal ended `skytrain run` on this machine. Returns the exception that ends the run.

    Its ranks then commit and leave, because the kernel asks them to; this waits for them. A command that crashed before
    it claimed an attempt gets one now, so that a command that always crashes counts too.
    """
    stage = next(iter(missing(store, plans, until)), None)
    if stage is None:
        return Crashed(cause)  # the same command only reports the artifacts
    prefix, run = plans[stage].prefix, run_name(plans)
    beats = attempts(store, prefix)
    deadline = time.monotonic() + ORPHAN_SECONDS
    while beats and is_alive(beats[-1]) and time.monotonic() < deadline:
        time.sleep(0.5)
        beats = attempts(store, prefix)
    newest = beats[-1] if beats else None
    if newest and is_alive(newest) is not False:
        return Interrupted(cause)  # this command waited for an attempt of another machine
    if newest and newest.state == "running":
        ending = after_crash(store, prefix, newest.attempt, cause, Crashed)
        close_attempt(store, prefix, newest, state_after(ending), cause)
        return ending
    number = newest.attempt + 1 if newest else 1
    ending = after_crash(store, prefix, number, cause, Crashed)
    if attempt := claim(store, prefix, run, stage, number, billing, earlier=beats):
        with attempt:
            attempt.update(state=state_after(ending))
            attempt.report(killed=cause)
    return ending


def state_after(error: BaseException) -> str:
    """The state of an attempt that `error` ended."""
    if isinstance(error, Stopped):
        return "stopped"
    return "interrupted" if isinstance(error, Interrupted | StoreUnavailable | KeyboardInterrupt) else "failed"
