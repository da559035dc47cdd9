"""The speed of sampling, beside the loop without a cache and transformers' `generate` with its own.

    python -m benchmarks.sampling [--tokens 100] [--rounds 3] [--threads 2]

A GPT-2 of 124M with random weights continues a prompt of 64 tokens, greedily, on a CPU. Every way runs once in each
round, in turn, so that another load of the machine meets all of them. The figures are tokens/s of single texts: the
median over the rounds, and the best one. Rows with a batch add up its texts. `of transformers` is the ratio of medians
to transformers in the same precision (int8 and int4: in bf16).
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch

from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.family import to_hf
from trainer.sample import Decoder, Sampling, stream

CONFIG = Gpt2Config(n_layer=12, n_head=12, n_embd=768, block_size=1024)
PROMPT = [(7919 * i) % CONFIG.vocab_size for i in range(64)]
UNCACHED_TOKENS = 5  # each costs a pass over the whole context
BATCH = 8

Way = Callable[[int], int]  # generates so many tokens, and returns their number


def uncached(model: GPT) -> Way:
    """A forward pass over the whole context for each token."""

    @torch.inference_mode()
    def generate(tokens: int) -> int:
        ids = list(PROMPT)
        for _ in range(tokens := min(tokens, UNCACHED_TOKENS)):
            ids.append(int(model.head(model.hidden(torch.tensor([ids]))[:, -1]).argmax()))
        return tokens

    return generate


def ours(model: GPT, precision: str, rows: int = 1) -> Way:
    decoder = Decoder(model, precision)

    def generate(tokens: int) -> int:
        return sum(len(step) for step in stream(decoder, [PROMPT] * rows, tokens, [0] * rows, Sampling(0.0)))

    return generate


def transformers(model: GPT, dtype: torch.dtype, rows: int = 1) -> Way:
    """`generate` of transformers, with its cache, on the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {name: getattr(CONFIG, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")}
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=CONFIG.block_size, **shape)).eval()
    theirs.load_state_dict(to_hf(model.state_dict(), CONFIG), strict=False)
    theirs.tie_weights()
    theirs.to(dtype)
    prompt = torch.tensor([PROMPT] * rows)
    mask = torch.ones_like(prompt)

    @torch.inference_mode()
    def generate(tokens: int) -> int:
        asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
        found = theirs.generate(prompt, attention_mask=mask, pad_token_id=0, **asked)
        return int(found.numel() - prompt.numel())

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model = GPT(CONFIG)
    model.initialize(0)
    ways: dict[str, tuple[Way, str | None]] = {  # and transformers' row to compare with
        "without a cache, fp32": (uncached(model), None),
        "transformers, fp32": (transformers(model, torch.float32), None),
        "skytrain, fp32": (ours(model, "fp32"), "transformers, fp32"),
        "transformers, bf16": (transformers(model, torch.bfloat16), None),
        "skytrain, bf16": (ours(model, "bf16"), "transformers, bf16"),
        "skytrain, int8": (ours(model, "int8"), "transformers, bf16"),
        "skytrain, int4": (ours(model, "int4"), "transformers, bf16"),
        f"transformers, bf16, batch of {BATCH}": (transformers(model, torch.bfloat16, BATCH), None),
        f"skytrain, bf16, batch of {BATCH}": (ours(model, "bf16", BATCH), f"transformers, bf16, batch of {BATCH}"),
        f"skytrain, int8, batch of {BATCH}": (ours(model, "int8", BATCH), f"transformers, bf16, batch of {BATCH}"),
        f"skytrain, int4, batch of {BATCH}": (ours(model, "int4", BATCH), f"transformers, bf16, batch of {BATCH}"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    loads = [os.getloadavg()[0]]
    for _ in range(chosen.rounds):
        for name, (way, _) in ways.items():
            way(2)  # warm
            began = time.perf_counter()
            made = way(chosen.tokens)
            speeds[name].append(made / (time.perf_counter() - began))
        loads.append(os.getloadavg()[0])
    print(f"torch {torch.__version__}, {chosen.threads} threads, {chosen.tokens} tokens, {chosen.rounds} rounds;")
    print(f"load of the machine before and after each round: {', '.join(f'{load:.1f}' for load in loads)}\n")
    print(f"{'':36} {'tokens/s':>9} {'best':>7}  of transformers")
    for name, (_, other) in ways.items():
        ratio = f"x {median(speeds[name]) / median(speeds[other]):.2f}" if other else ""
        print(f"{name:36} {median(speeds[name]):9.1f} {max(speeds[name]):7.1f}  {ratio}")


if __name__ == "__main__":
    main()
