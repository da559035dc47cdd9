"""One invocation of a run: it skips the artifacts that exist, and builds the others.

For each missing artifact it claims an attempt, waits for another process that builds the same artifact, calls the
stage's `build`, and commits.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.recipe.recipe import Recipe
from pipelines.run.run_record import RunRecord, record
from pipelines.run.runs import Run, read_run
from pipelines.run.screen import Screen
from pipelines.run.stage import Built, Work, artifacts, run_name, stage_named
from pipelines.run.text.tokenizer import store_tokenizer
from pipelines.run.watch import Watch, watching
from pipelines.store.crashes import UNFIT, after_crash
from pipelines.store.layout import attempts_of
from pipelines.store.ledger import SILENT_SECONDS, Attempt, claim, is_alive, newest_attempt
from pipelines.store.manifest import ArtifactPlan, DamagedArtifact, Manifest, find
from pipelines.store.provenance import provenance
from pipelines.store.records import Billing, Heartbeat
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


@dataclass
class Pipeline:
    """One invocation of a run: everything that its stages share."""

    recipe: Recipe
    store: Store
    home: Path
    billing: Billing
    screen: Screen
    stop: StopSignal
    plans: dict[str, ArtifactPlan]
    watches: Sequence[Watch] = ()
    began: float | None = None  # unix seconds, the start of the process, which the first attempt bills
    allow_code: bool = False  # see `Work`
    made: dict[str, Manifest] = field(default_factory=dict)
    skipped: dict[str, bool] = field(default_factory=dict)
    _recorded: RunRecord | None = None

    @property
    def run(self) -> str:
        return run_name(self.plans)

    def execute(self, until: str, found: Mapping[str, Manifest | None] | None = None) -> None:
        """Make the missing artifacts up to the stage `until`, and account for them. `found`: the artifacts of these
        stages, if the caller has decided something by them; the store may say something else now."""
        self._recorded = record(self.store, self.run, self.recipe, self.plans, until)
        store_tokenizer(self.recipe, self.plans["tokenize"], self.store)
        found = found or artifacts(self.store, self.plans, until)
        with nullcontext() if all(found.values()) else watching(self.watches, self.screen):
            self._make_all(found)

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
            before = self.snapshot()
            attempt = claim(
                self.store,
                plan.prefix,
                self.run,
                stage,
                number,
                self.billing,
                self._heartbeat,
                waited,
                [stored.beat for stored in before.heartbeats],
                lambda thread: self.stop.ask(f"the thread of the heartbeats crashed: {thread.error!r}"),
                self.began,
            )
            if attempt is None:  # another process was faster
                self.stop.check()
                refused.append(number)
                if refused.count(number) > MOST_REFUSALS:
                    raise UserError(
                        f"{self.store.uri}/{attempts_of(plan.prefix)}: the store refuses to create attempt {number}, "
                        "and lists none; remove what skytrain did not write there, or use another store"
                    )
                time.sleep(1)
                continue
            try:
                WAITING.check = Waiting.check  # from now on the run ends in order
                with attempt:
                    manifest = self._build(stage, attempt, before)
            except StaleAttempt:
                self.screen.warn(f"{stage}: a newer attempt has taken over; waiting for it")
                continue
            except Crashed as crash:
                if not attempt.latest.progress.restarting:
                    raise
                self.screen.warn(f"{crash}; starting again on this machine")
                continue
            return manifest

    def _heartbeat(self, beat: Heartbeat) -> None:
        """Runs with every heartbeat of an attempt, in its thread: every watch sees it, whatever another one raises."""
        with ExitStack() as calls:
            for watch in reversed(self.watches):
                calls.callback(watch.heartbeat, beat)

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

    def _build(self, stage: str, attempt: Attempt, before: Run) -> Manifest:
        plan = self.plans[stage]
        shared = self.recipe, plan, self.made, self.store, self.home, attempt, self.screen, self.stop
        work = Work(*shared, before=before, allow_code=self.allow_code)
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
        for watch in self.watches:
            watch.commit(manifest)
        return manifest

    def _built(self, work: Work) -> Built:
        """The stage's files. A machine with unfit GPUs and a killed process count as a crash."""
        for watch in self.watches:
            watch.before_build(work)
        try:
            return stage_named(work.attempt.latest.stage).build(work)
        except (UnfitMachine, ProcessKilled) as error:
            cause = f"{UNFIT}{error}" if isinstance(error, UnfitMachine) else str(error)
            work.report(killed=cause)
            raise after_crash(self.store, work.plan.prefix, work.attempt.number, cause) from error


def state_after(error: BaseException) -> str:
    """The state of an attempt that `error` ended."""
    if isinstance(error, Stopped):
        return "stopped"
    return "interrupted" if isinstance(error, Interrupted | StoreUnavailable | KeyboardInterrupt) else "failed"
