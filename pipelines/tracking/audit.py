"""Proof that a run read the data of its recipe: the windows of every committed step, recomputed."""

from dataclasses import dataclass

from pipelines.artifacts.shard_cache import shards_in
from pipelines.tracking.runs import Run
from trainer.checkpoint.commits import committed_state, data_step
from trainer.errors import UserError


@dataclass(frozen=True)
class Audit:
    """Whether a run read the data of its recipe."""

    run: str
    steps: int  # that were compared
    sequences: int
    wrong_steps: tuple[int, ...]  # with another digest
    missing_steps: tuple[int, ...]  # without a row
    source_sequences: tuple[int, ...] = ()  # of a mixture: how many each source gave
    threads: int = 0  # of a rank on the CPU, of which its losses depend; 0: unknown, or on GPUs


def audit(run: Run) -> Audit:
    """Recompute the windows of each step and compare them with the digest that the ranks recorded.

    The order is a permutation of every epoch's windows. So equal digests at all steps mean that the run read each
    window exactly once an epoch (except the data that rollbacks leave out). UserError without tokens.
    """
    from trainer.data.shards import Mixture, order_of, sequence_digest, sequences_of

    made, recipe = run.intact_manifests, run.recipe
    tokens, train = made.get("tokenize"), made.get("train")
    if tokens is None:
        raise UserError(f"{run.name}: the store has no tokens of this run, so there is nothing to compare with")
    shards, block_size, seed = shards_in(tokens, "train"), recipe.model.block_size, recipe.train.seed
    weights = recipe.tokens.weights
    order = order_of(shards, block_size, seed, weights)
    state = committed_state(run.store, run.record.prefixes["train"]) if train is None else None
    rollbacks = train.fact("rollbacks") if train else state.rollbacks if state else ()
    text_from = train.facts.get("text_from", 0) if train else state.text_from if state else 0
    end = train.fact("steps") if train else state.step if state else 0  # later steps are not committed
    digests = {row["step"]: row["data/digest"] for row in run.series if "data/digest" in row and row["step"] <= end}
    positions = {step: data_step(step - 1, rollbacks) - text_from for step in digests}
    read = {step: sequences_of(at, recipe.model, recipe.train, 0, 1) for step, at in positions.items()}
    wrong = [step for step, digest in digests.items() if digest != sequence_digest(order, read[step])]
    missing = sorted(set(range(recipe.train.first_step + 1, end + 1)) - set(digests))
    of_sources: tuple[int, ...] = ()
    if isinstance(order, Mixture):
        of_sources = tuple(
            sum(order.read_before(one.stop, n) - order.read_before(one.start, n) for one in read.values())
            for n in range(len(order.shares))
        )
    threads = train.facts.get("threads", 0) if train else state.threads if state else 0
    sequences = sum(map(len, read.values()))
    return Audit(run.name, len(digests), sequences, tuple(wrong), tuple(missing), of_sources, threads)
