"""A whole training in one file: text, shards, model, steps, checkpoints, resume and a sample.

    python examples/minimal.py FOLDER [TEXT ...]

It trains a small GPT-2 on the bytes of some text files (by default the standard library of this Python) and keeps all
it makes in FOLDER. Interrupt it anywhere, also with `kill -9`: the same command goes on after the last checkpoint, and
ends with the same weights bit for bit.

Read this file first. trainer/loop/loop.py has the same loop for several ranks, with validation, a watchdog, outliers
and saves while the GPU computes. `skytrain run` puts tokenizing, export, records and the bill around that loop.
"""

import sys
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np
import torch

from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.process import StopSignal
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.config.amounts import micro_batch_count
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of, write_shard
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine
from trainer.models.decoder import Decoder, Sampling, stream
from trainer.models.family import plain_model
from trainer.models.gpt2 import Gpt2Config
from trainer.optim.rates import rates_at

# A token is a byte. A step reads 2,048 of them: 32 sequences of 64.
MODEL = Gpt2Config(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=96)
TRAIN = TrainConfig(batch_tokens=2048, max_steps=120, learning_rate=3e-3, warmup_steps=20)
RUNTIME = RuntimeConfig()
MICRO_BATCH = 16  # sequences at once; trainer/engines/micro_batch.py measures how many fit a GPU
SAVE_EVERY = 40  # steps
PREFIX = "run"  # of the checkpoints in the store


def main(folder: Path, texts: list[Path]) -> None:
    shards = folder / "shards"
    if not shards.exists():
        tokenize(texts, shards)
    train_shards = local_shards(shards, "train")
    data = TokenData(train_shards, shards.joinpath, MODEL.block_size, TRAIN.seed, MODEL.vocab_size)

    world, stop = World.start(RUNTIME), StopSignal()  # one rank; SIGTERM and Ctrl-C set `stop.asked`
    store = LocalStore(folder)
    log = EventLog(None, PhaseClock())
    engine = make_engine(MODEL, TRAIN, RUNTIME, world)
    with Checkpointer(store, PREFIX, world, take_attempt(store)) as checkpointer:
        state = checkpointer.load_latest(engine.pieces(), log)
        if state is None:
            state = TrainState()
            engine.initialize(TRAIN.seed)
        else:
            engine.restore(state)
        print(f"{engine.why}; {MODEL.parameters:,} parameters; begins at step {state.step}")
        while state.step < TRAIN.max_steps and not stop.asked:
            step(engine, data, state, world, checkpointer, log)
            if state.step % SAVE_EVERY == 0 or stop.asked:
                # Waits for the copy to host memory alone; a thread uploads it, and commits it last.
                checkpointer.save(state, engine.pieces(), log)
        checkpointer.finish(log)
    if state.step == TRAIN.max_steps:
        print(sample(engine, "def "))
    else:
        print(f"stopped after step {state.step}; the same command resumes")


def tokenize(texts: Iterable[Path], folder: Path) -> None:
    """Write the texts as one shard of tokens in llm.c's format. Here a token is a byte."""
    body = b"\n".join(path.read_bytes() for path in sorted(texts))
    folder.mkdir(parents=True)
    write_shard(folder / "train_000000.bin", np.frombuffer(body, np.uint8).astype(np.uint16))


def take_attempt(store: LocalStore) -> int:
    """The next free number of an attempt. `create` succeeds for one process alone, so two never write the same
    checkpoint."""
    return next(n for n in count(1) if store.create(f"{PREFIX}/attempts/{n:04d}.json", str(time.time()).encode()))


def step(
    engine: Engine, data: TokenData, state: TrainState, world: World, checkpointer: Checkpointer, log: EventLog
) -> None:
    """Make one update, and advance the state by it."""
    began = time.perf_counter()
    # The order of the data is a pure function of seed and step: there is no state of a loader to save.
    sequences = sequences_of(state.data_step, MODEL, TRAIN, world.rank, world.world_size)
    batches = data.micro_batches(sequences, MICRO_BATCH, world.device)
    number = state.optimizer_steps + 1
    loss_and_norm = engine.accumulate(batches, micro_batch_count(len(sequences), MICRO_BATCH), len(sequences), number)
    checkpointer.before_update()  # a copy of the weights before this update may still be under way
    engine.update(rates_at(state.step, TRAIN, MODEL), loss_and_norm, number)
    state.advance(TRAIN.batch_tokens, applied=True)
    loss, norm = loss_and_norm.tolist()
    log.row(state.step, {"train/loss": loss, "train/grad_norm": norm})  # the next checkpoint stores the row
    checkpointer.settle(log)
    if state.step % 10 == 0:
        speed = TRAIN.batch_tokens / (time.perf_counter() - began)
        print(f"step {state.step:4d}: loss {loss:.3f}, gradient {norm:.2f}, {speed:,.0f} tokens/s")


def sample(engine: Engine, prompt: str, tokens: int = 120) -> str:
    """The prompt and its continuation by the trained weights."""
    model = plain_model(MODEL)
    model.load_state_dict(dict(engine.weights()))
    drawn = stream(Decoder(model), list(prompt.encode()), tokens, [0], Sampling(temperature=0.8))
    with torch.no_grad():
        return prompt + bytes(token for ((_, token),) in drawn).decode(errors="replace")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    library = Path(sys.modules["os"].__file__ or "").parent
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]] or sorted(library.glob("*.py")))
