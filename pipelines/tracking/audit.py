"""Proof that a run read the data of its recipe: the tokens of every committed step, read again from verified shards."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.artifacts.shard_cache import ShardCache, shards_in
from pipelines.text.llmc_shards import places_of
from pipelines.tracking.runs import Run
from trainer.checkpoint.commits import committed_state, data_step
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.data.shards import Mixture

CHECKSUM = "data/checksum"  # of a row: that of the tokens, see `TokenData.checksum`
POSITIONS = "data/digest"  # of a row of version 0.1: that of their places in the data order


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


def audit(run: Run, cache: Path) -> Audit:
    """Read the tokens of each step again, and compare their checksum with the one that the ranks recorded. Fetches the
    shards into `cache`.

    The order is a permutation of every epoch's windows. So equal checksums at all steps mean that the run read each
    window exactly once an epoch (except the data that rollbacks leave out). UserError without tokens.
    """
    from trainer.data.batches import TokenData
    from trainer.data.shards import sequences_of

    made, recipe = run.intact_manifests, run.recipe
    tokens, train = made.get("tokenize"), made.get("train")
    if tokens is None:
        raise UserError(f"{run.name}: the store has no tokens of this run, so there is nothing to compare with")
    shards, block_size, seed = shards_in(tokens, "train"), recipe.model.block_size, recipe.train.seed
    fetch = ShardCache(run.store, tokens, cache, recipe.runtime.data_cache_gb, places_of(recipe.tokens)).fetch
    data = TokenData(shards, fetch, block_size, seed, weights=recipe.tokens.weights, eot=tokens.facts.get("eot"))
    state = committed_state(run.store, run.record.prefixes["train"]) if train is None else None
    rollbacks = train.fact("rollbacks") if train else state.rollbacks if state else ()
    text_from = train.facts.get("text_from", 0) if train else state.text_from if state else 0
    end = train.fact("steps") if train else state.step if state else 0  # later steps are not committed
    rows = {row["step"]: row for row in run.series if {CHECKSUM, POSITIONS} & row.keys() and row["step"] <= end}
    positions = {step: data_step(step - 1, rollbacks) - text_from for step in rows}
    read = {step: sequences_of(at, recipe.model, recipe.train, 0, 1) for step, at in positions.items()}

    def differs(step: int) -> bool:
        if CHECKSUM in rows[step]:
            return bool(rows[step][CHECKSUM] != data.checksum(read[step]))
        return bool(rows[step][POSITIONS] != digest_of_positions(data.order, read[step]))

    missing = sorted(set(range(recipe.train.first_step + 1, end + 1)) - set(rows))
    order = data.order
    of_sources = tuple(
        sum(order.read_before(one.stop, n) - order.read_before(one.start, n) for one in read.values())
        for n in range(len(recipe.tokens.weights))
    )
    wrong = tuple(filter(differs, rows))
    threads = train.facts.get("threads", 0) if train else state.threads if state else 0
    sequences = sum(map(len, read.values()))
    return Audit(run.name, len(rows), sequences, wrong, tuple(missing), of_sources, threads)


def digest_of_positions(order: "Mixture", sequences: range) -> int:
    """What version 0.1 recorded of a step."""
    places = (f"{shard}:{window}".encode() for shard, window in map(order.__getitem__, sequences))
    return sum(int.from_bytes(blake2b(place, digest_size=4).digest(), "little") for place in places)
