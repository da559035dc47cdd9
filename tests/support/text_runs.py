"""A run whose weights generate text: in a store, without training."""

from pathlib import Path

from safetensors.torch import save_file
from trainer_runs import ALONE

from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import record
from pipelines.run.stage import plans_of, run_name
from pipelines.store.layout import manifest_key
from pipelines.store.manifest import Manifest, upload
from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.store import Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.models.gpt2_module import GPT

CONTEXT = 64
RECIPE = load_recipe(
    "smoke",
    [
        *("name=speaker", f"tokens.source=hf://datasets/a/b@{'a' * 40}", "tokens.tokenizer=bytes"),
        *("model.n_layer=2", "model.n_head=2", "model.n_embd=32", f"model.block_size={CONTEXT}"),
        *("model.vocab_size=300", f"train.batch_tokens={CONTEXT}", "train.max_steps=20", "train.warmup_steps=1"),
    ],
)
PLANS = plans_of(RECIPE)
RUN = run_name(PLANS)
TRAIN = PLANS["train"].prefix


def finish(store: Store, folder: Path, model: GPT) -> None:
    """Store final weights."""
    record(store, RUN, RECIPE, PLANS, "export")
    save_file(model.state_dict(), folder / "model.safetensors")
    file, plan = upload(store, TRAIN, 1, folder / "model.safetensors"), PLANS["train"]
    about = (plan.stage, plan.label, plan.fingerprint, plan.identity)
    store.create(manifest_key(TRAIN), Manifest(*about, {}, (file,), {}, {}, RUN, 1, 1.0).to_json())


def commit(store: Store, folder: Path, model: GPT, step: int) -> None:
    """Store a commit of the training."""
    record(store, RUN, RECIPE, PLANS, "export")
    pieces = {f"model.{name}": Piece.whole(p) for name, p in model.named_parameters()}
    with Checkpointer(store, TRAIN, ALONE, attempt=1, keep_last=9) as checkpointer:
        log = EventLog(None, PhaseClock())
        checkpointer.save(TrainState(step=step), pieces, log)
        checkpointer.finish(log)
