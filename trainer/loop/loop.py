"""The training loop, from the newest commit to the last step.

`Training.run` starts, `repeat` goes on: measure, save, step. Whenever the process dies, the same call resumes from the
last commit with the same data and, at the same world size, the same losses bit for bit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch

from trainer.base.events import EventLog, Started, Warned
from trainer.base.metrics import mfu, peak_flops
from trainer.base.parallel import Agreement, World
from trainer.base.process import StopSignal, log_line
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.health import diagnosis
from trainer.checkpoint.save_clock import SaveClock
from trainer.checkpoint.weights import Origin, open_weights
from trainer.config.amounts import batch_tokens_at, check_shares, micro_batch_count, val_tokens
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import Diverged, Interrupted, UserError
from trainer.config.model_config import ModelConfig
from trainer.data.batches import PendingNumbers, TokenData
from trainer.data.shards import sequences_of
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine
from trainer.engines.micro_batch import choose_micro_batch, devices_of, memory_settings
from trainer.eval.evaluation import Evaluation, validation_loss
from trainer.loop.watchdog import Watchdog
from trainer.optim.rates import rates_at


@dataclass
class Training:
    """A training on one rank. All ranks call the same methods in the same order.

    `origin` is asked where to begin once there is no commit, on every rank at the same time; None: from the seed.
    """

    model: ModelConfig
    config: TrainConfig
    runtime: RuntimeConfig
    data: TokenData
    val_data: TokenData
    checkpointer: Checkpointer
    save_clock: SaveClock
    world: World
    stop: StopSignal
    log: EventLog
    evaluation: Evaluation
    origin: Callable[[World], Origin] | None = None
    engine: Engine = field(init=False)
    state: TrainState = field(init=False)
    watchdog: Watchdog = field(init=False)
    agreed: Agreement = field(default_factory=Agreement)  # of the last step
    failure: Exception | None = None  # of this rank: the next step lacks data
    saved_step: int = -1  # the step that this attempt saved last

    def run(self) -> tuple[Engine, TrainState]:
        """Train until `max_steps`, a target of `stop_at` or a stop. Returns the engine with the weights, and the state.

        Raises Diverged if the loss stays infinite or NaN. Earlier commits stay, and each of them is sound: a state is
        committed once a forward pass over its weights gave a finite loss, of the next step, a validation or a probe.
        """
        world, checkpointer, log = self.world, self.checkpointer, self.log
        check_shares(self.model, self.config, world.world_size)
        with Watchdog(self.runtime, log.clock, world.rank) as self.watchdog, checkpointer:
            self.engine = engine = make_engine(self.model, self.config, self.runtime, world)
            log.clock.enter("download")
            state = checkpointer.load_latest(engine.pieces(), log)
            if state is None:
                state = self.begin()
            else:
                engine.restore(state)
            fit = choose_micro_batch(engine, self.model, self.config, self.runtime, state, world)
            state.micro_batch_size = fit.micro_batch_size
            engine.tokens_at_once = fit.micro_batch_size * self.model.block_size  # for evaluations: these fit
            state.world_size, state.devices = world.world_size, devices_of(world)
            state.memory_settings = memory_settings(engine, self.runtime)
            if world.device.type == "cpu":
                state.threads = state.threads or torch.get_num_threads()
                torch.set_num_threads(state.threads)
            device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
            self.peak_flops = peak_flops(device)
            log.write(
                Started(
                    step=state.step,
                    world_size=world.world_size,
                    device=device,
                    engine=engine.why,
                    precision=engine.precision,
                    parameters=self.model.parameters,
                    micro_batch_size=fit.micro_batch_size,
                    micro_batch_why=fit.why,
                )
            )
            if world.rank == 0:
                log_line(f"{engine.precision}, {fit.why}; {engine.why}")
            self.data.waiting = partial(log.clock.phase, "data")
            self.save_clock.last = time.monotonic()
            self.state, self.saved = state, state.measured
            self.repeat()
            return engine, state

    def begin(self) -> TrainState:
        """Fill the engine with the first weights and moments of a run. Returns its first state.

        UserError if the origin is damaged, or of another model.
        """
        if self.origin is None:
            self.engine.initialize(self.config.seed)
            return TrainState()
        found, pieces, state = self.origin(self.world), self.engine.pieces(), TrainState()
        if found.commit is None:
            assert found.path
            open_weights(found.path, found.where).fill(pieces, self.model)
        else:
            wanted = {name: piece for name, piece in pieces.items() if found.whole or name.startswith("model.")}
            loaded, damage = self.checkpointer.load(found.commit, wanted)
            if loaded is None:
                raise UserError(f"{found.where}: the commit is damaged: {damage}; name another one")
            if found.whole:
                state = loaded.on_another_text() if found.other_text else loaded
        self.engine.restore(state)
        return state

    def repeat(self) -> None:
        """Measure, save and step, from the state to the last step or a stop."""
        self.log.clock.enter("compile")  # kernels, allocations and the compiler delay the first step
        while True:
            self.checkpointer.settle(self.log)
            self.save_clock.upload_seconds = self.checkpointer.upload_seconds
            # A stop leaves no time for measurements: the next attempt does them, even after the last step.
            if self.state.val_is_due(self.config) and not self.agreed.stop:
                self.validate()
            elif self.state.evaluation_is_due(self.evaluation.every, self.config) and not self.agreed.stop:
                self.evaluate()
            elif self.agreed.stop or self.state.has_ended(self.config):
                return self.finish()
            else:
                if self.agreed.save:
                    self.save(proven=self.state.val_step == self.state.step)
                self.step()
                if not self.checkpointer.prepared:
                    self.checkpointer.prepare(self.engine.pieces())

    # --- measure

    def validate(self) -> None:
        """Measure the validation loss; it goes into the log and into the state. Stop if asked to meanwhile."""
        tokens, size = val_tokens(self.model, self.config), self.state.micro_batch_size
        with self.log.clock.phase("evaluate"):
            try:
                loss = validation_loss(self.engine.loss, self.val_data, tokens, size, self.world, self.check_stop)
            except Interrupted:  # on all ranks; the next attempt measures it
                self.agreed = replace(self.agreed, stop=True)
                return
            if not math.isfinite(loss):
                self.diverge(f"val/loss is {loss}, so the weights are ruined")
            self.state.val_loss, self.state.val_step = loss, self.state.step
            self.log.row(self.state.step, {"val/loss": loss})

    def evaluate(self) -> None:
        """Commit the weights, and evaluate them in place; the scores go into the log and into the state, the texts into
        the log. Stop if asked to meanwhile."""
        self.prove_weights()
        if self.agreed.save or self.state.has_ended(self.config):
            self.save(proven=True)
        self.agreed = replace(self.agreed, save=False)
        with self.log.clock.phase("evaluate"):
            try:
                scores = self.evaluation.scores(self.engine, self.world, self.check_stop)
                texts = self.evaluation.texts(self.engine, self.world, self.check_stop)
            except Interrupted:  # on all ranks; the next attempt evaluates
                self.agreed = replace(self.agreed, stop=True)
                return
            self.state.evaluated_step, self.state.scores = self.state.step, scores
            self.log.row(self.state.step, scores, texts)

    def check_stop(self) -> None:
        """Raise Interrupted on all ranks once one was asked to stop; also feeds the watchdog. A collective call."""
        self.watchdog.progress()
        if self.world.sum(self.stop.asked)[0]:
            raise Interrupted

    # --- save

    def save(self, proven: bool) -> None:
        """Start to commit the state, unless it is committed already."""
        state = self.state
        if state.measured == self.saved:
            return
        with self.log.clock.phase("checkpoint"):
            if state.step == self.saved_step:
                self.checkpointer.amend(state, self.engine.pieces(), self.log)
            else:
                started = time.monotonic()
                self.checkpointer.save(state, self.engine.pieces(), self.log, proven)
                self.save_clock.saved(time.monotonic() - started)
            self.saved, self.saved_step = state.measured, state.step

    def prove_weights(self) -> None:
        """Let the state be committed, after a probe of one sequence a rank if no loss of its weights is known."""
        state = self.state
        if state.measured != self.saved and state.val_step != state.step:
            sequences = self.sequences(state.data_step - 1)[:1]
            ((tokens, targets),) = self.data.micro_batches(sequences, 1, self.world.device)
            loss = self.world.sum(float(self.engine.loss(tokens, targets)))[0] / self.world.world_size
            if not math.isfinite(loss):
                self.diverge(f"the loss of a probe is {loss}, so the weights are ruined")
        self.checkpointer.prove()

    def finish(self) -> None:
        """Commit the last state. Raises the error of this rank, or of the save."""
        self.prove_weights()
        self.save(proven=True)
        with self.log.clock.phase("checkpoint"):
            if self.state.has_ended(self.config) and not self.agreed.stop:
                self.checkpointer.insist(self.engine.pieces(), self.log, self.check_stop)
            self.checkpointer.finish(self.log)
        if self.failure:
            raise self.failure

    def diverge(self, evidence: str) -> NoReturn:
        """Raise Diverged, after the saves in progress. A collective call."""
        self.checkpointer.settle(self.log, wait=True)
        self.world.gather(None)
        raise Diverged(diagnosis(self.state.step, evidence, self.config))

    # --- step

    def sequences(self, data_step: int) -> range:
        """The sequences of this rank at a position of the data order."""
        return sequences_of(data_step, self.model, self.config, self.world.rank, self.world.world_size)

    def step(self) -> None:
        """Train one step and log it."""
        state, config, world = self.state, self.config, self.world
        started = time.perf_counter()  # time.time() may jump
        sequences, upcoming = self.sequences(state.data_step), self.sequences(state.data_step + 1)
        batch_tokens = batch_tokens_at(state.data_step, config)
        batches = self.data.micro_batches(sequences, state.micro_batch_size, world.device, upcoming)
        rates = rates_at(state.step, config, self.model)
        if state.step + 1 >= config.max_steps:
            upcoming = range(0)
        loss_and_norm = self.engine.accumulate(
            self.watchdog.each(batches),
            micro_batch_count(len(sequences), state.micro_batch_size),
            batch_tokens / self.model.block_size / world.world_size,
            state.optimizer_steps + 1,
        )
        self.checkpointer.before_update()
        numbers = PendingNumbers(loss_and_norm)
        # A guarded engine gets the update before the host has read the numbers: the GPU has work meanwhile. Only the
        # host can detect outliers.
        outliers = config.skip_loss_zscore, config.skip_grad_norm_zscore
        update_first = self.engine.guarded and outliers == (None, None)
        if update_first:
            self.engine.update(rates, loss_and_norm, state.optimizer_steps + 1)
        anomaly = self.judge(numbers, sequences, upcoming)
        if not update_first and anomaly is None:
            self.engine.update(rates, loss_and_norm, state.optimizer_steps + 1)
        state.advance(batch_tokens, applied=anomaly is None)
        seconds = time.perf_counter() - started
        self.log.clock.enter("redone" if state.step < self.log.reached else "train")
        self.watchdog.step_done(seconds)
        self.log_step(anomaly, rates.of["vector"], batch_tokens / seconds)
        if state.health.diverged:
            self.diverge(state.health.diverged)
        if not state.health.not_finite:
            self.checkpointer.prove()  # this step's loss was computed with the weights before it
        else:  # the weights may be ruined already
            self.agreed = replace(self.agreed, save=False)

    def save_is_due(self) -> bool:
        """Whether this rank votes for a commit after the next step.

        Rank 0 finishes a save last: only it may request the next one, once it is no longer busy. With a commit before
        it, an evaluation that is killed repeats no step.
        """
        step, every = self.state.step + 1, self.evaluation.every
        if self.save_clock.due_at(step):
            return True
        due = self.save_clock.due_now() or bool(every and step % every == 0)
        return self.world.rank == 0 and due and not self.checkpointer.busy

    def judge(self, numbers: PendingNumbers, sequences: range, upcoming: range) -> str | None:
        """Exchange the numbers of a step, stops and saves between the ranks, and judge the step by them, as all ranks
        do. Returns its anomaly, if any.

        A rank that cannot get the shards of its next step (`upcoming`) votes for a stop. So all ranks leave between two
        steps, with the state in the store, and not in a step, where the state would be lost.
        """
        checksum = self.data.checksum(sequences)  # some ms for 512 sequences, while the GPU computes
        stop = self.stop.asked
        if not stop and self.data.is_late(upcoming):
            numbers.values()  # as long as the device computes, the data is not late
        self.failure = None if stop else self.data.failure(upcoming)
        loss, grad_norm = numbers.values()
        self.agreed = self.world.agree(loss, grad_norm, stop or self.failure is not None, self.save_is_due(), checksum)
        self.state.health, anomaly = self.state.health.after(self.agreed.loss, self.agreed.grad_norm, self.config)
        return anomaly

    def log_step(self, anomaly: str | None, learning_rate: float, tokens_per_second: float) -> None:
        """Log the row of a step, its anomaly and the engine's warnings."""
        step, agreed = self.state.step, self.agreed
        if anomaly:
            self.log.write(Warned(f"update {step:,} skipped: {anomaly}"))
        for warning in self.engine.warnings():
            self.log.write(Warned(f"slower than possible: {warning}"))
        row = {
            "train/loss": agreed.loss,
            "train/lr": learning_rate,
            "train/grad_norm": agreed.grad_norm,
            "perf/tokens_per_second": tokens_per_second,
            "data/checksum": agreed.checksum,
        }
        if self.peak_flops:
            row["perf/mfu"] = mfu(tokens_per_second, self.model, self.world.world_size, self.peak_flops)
        if anomaly:
            row["train/skipped_updates"] = self.state.health.skipped
        self.log.row(step, row | self.engine.extra_metrics())
