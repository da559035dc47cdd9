"""The held-out loss of a run's weights in each precision of `skytrain sample`, on a CPU.

    python -m benchmarks.precisions RUN [--store URI] [--tokens 131072]

Windows of the context's length, evenly spaced over the validation shards, each alone, by `Decoder.score`: what `serve`
answers as log probabilities. A loss is the mean over all tokens but the first of each window, in nats. A difference
from fp32 is the mean over the same windows, with its standard error: the loss itself varies far more between windows.
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from pipelines.artifacts.manifest import fetch, read_manifest
from pipelines.artifacts.shard_cache import shards_in
from pipelines.artifacts.store import open_store
from pipelines.sample import load_text_model
from pipelines.tracking.runs import read_run
from pipelines.verbs.options import home, store_uri
from trainer.sample import PRECISIONS, Decoder
from trainer.shards import read_shard
from trainer.store import Store


def windows(store: Store, run: str, cache: Path, tokens: int) -> list[list[int]]:
    """Evenly spaced windows of the validation split."""
    found = read_run(store, run)
    manifest, length = read_manifest(store, found.record.prefixes["tokenize"]), found.recipe.model.block_size
    assert manifest, f"{run} has no tokens"
    paths = [fetch(store, manifest.prefix, manifest.file(shard.name), cache) for shard in shards_in(manifest, "val")]
    text = np.concatenate([read_shard(path) for path in paths])
    count = min(max(1, tokens // length), len(text) // length)
    return [text[at : at + length].tolist() for at in np.linspace(0, len(text) - length, count).astype(int)]


def losses(decoder: Decoder, texts: list[list[int]]) -> list[float]:
    """The mean loss of each text."""
    return [-fmean(logprob for logprob, _ in decoder.score(text, 1)) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--store", default=None)
    parser.add_argument("--tokens", type=int, default=131_072)
    options = parser.parse_args()
    store, cache = open_store(store_uri(options.store)), home() / "cache"
    texts = windows(store, options.run, cache, options.tokens)
    print(f"{len(texts)} windows of {len(texts[0])} tokens")
    of_fp32: list[float] = []
    for precision in PRECISIONS:
        found = losses(load_text_model(store, cache, options.run, precision=precision).decoder, texts)
        of_fp32 = of_fp32 or found
        more = [a - b for a, b in zip(found, of_fp32, strict=True)]
        print(
            f"{precision:5} {fmean(found):.4f}  {fmean(more):+.4f} +- {stdev(more) / len(more) ** 0.5:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
