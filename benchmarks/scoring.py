"""The time of HellaSwag's 10,042 items and of CORE's 22 tasks on this machine, by the code of the stage evaluate.

    python -m benchmarks.scoring --hellaswag hellaswag_val.jsonl
    python -m benchmarks.scoring --hellaswag hellaswag_val.jsonl --weights bf16 --rounds 3
    torchrun --standalone --nproc-per-node 8 -m benchmarks.scoring --hellaswag hellaswag_val.jsonl --no-core

It needs no network: TIKTOKEN_CACHE_DIR has GPT-2's vocabulary. The weights are random, which changes no time. CORE's
items are made of random words, as many and as long as the real ones: SIZES. With `--core FOLDER` it scores that bundle.

A round is the whole work: read the file, tokenize, score, on one device or shared by torchrun's ranks. The first round
also loads the libraries' kernels. It prints the seconds of every round, of the host's part alone, tokens a second and
the shapes of the batches (under torchrun those of rank 0). `--weights float32` is the stage's way: bf16 products by
autocast over float32 weights (float32 on a CPU).
"""

import argparse
import collections
import csv
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.ranks import rank_0_prints
from pipelines.stages.measures import encoder
from pipelines.text.tokenizer import tokenizer
from trainer.config import RuntimeConfig
from trainer.core import Kind, _parts, core, read_bundle
from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.hellaswag import Encode, hellaswag, hellaswag_rows, read_hellaswag_file
from trainer.model import Branches
from trainer.parallel import World, autocast_on
from trainer.scoring import LONGEST_STRIP, TOKENS_AT_ONCE, Scored, _batches, _packed, _sorted, _strips

MODELS = {
    "124M": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "1558M": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64},
}


class Size(NamedTuple):
    """A task: its items, and tokens (GPT-2's) of beginnings and endings as mean and standard deviation."""

    kind: Kind
    items: int
    examples: int
    choices: int
    beginning: tuple[float, float]
    ending: tuple[float, float]
    guessed: float = 0.0  # accuracy in percent


MC, SCHEMA, LM = Kind.__args__  # type: ignore[attr-defined]

# Items and examples: DCLM's eval/eval_meta_data.csv and heavy.yaml. Tokens: measured over the files of MosaicML's
# llm-foundry (scripts/eval/local_data), which DCLM takes over, and HellaSwag's own. Not there, so from their papers:
# squad (Rajpurkar et al. 2016: paragraphs of 120 words, questions of 11) and coqa (Reddy et al. 2019: stories of 271
# words, 15 turns, of which half come before). Choices of language identification: its baseline, 9.1%, is 1 of 11.
SIZES = {
    "hellaswag_zeroshot": Size(MC, 10_042, 0, 4, (51, 21), (31.6, 15), 25),
    "jeopardy": Size(LM, 2_117, 10, 1, (23, 5), (3, 1.4)),
    "bigbench_qa_wikidata": Size(LM, 20_321, 10, 1, (9, 2), (1.6, 0.8)),
    "arc_easy": Size(MC, 2_376, 10, 4, (24, 15), (4.9, 3.3), 25),
    "arc_challenge": Size(MC, 1_172, 10, 4, (28, 17), (6.3, 3.8), 25),
    "copa": Size(MC, 100, 0, 2, (9, 2), (6.7, 1.8), 50),
    "commonsense_qa": Size(MC, 1_221, 10, 4, (43, 7), (1, 0), 20),
    "piqa": Size(MC, 1_838, 10, 2, (11, 4), (23, 23.6), 50),
    "openbook_qa": Size(MC, 500, 0, 4, (12, 8), (3.7, 2.4), 25),
    "lambada_openai": Size(LM, 5_153, 0, 1, (82, 13), (1.8, 0.7)),
    "hellaswag": Size(MC, 10_042, 10, 4, (51, 21), (31.6, 15), 25),
    "winograd": Size(SCHEMA, 273, 0, 2, (15, 7), (5.1, 2.4), 50),
    "winogrande": Size(SCHEMA, 1_267, 0, 2, (16, 4), (5.8, 2.7), 50),
    "bigbench_dyck_languages": Size(LM, 1_000, 10, 1, (50, 26), (1.9, 0.8)),
    "agi_eval_lsat_ar": Size(MC, 230, 3, 4, (216, 39), (1, 0), 20),
    "bigbench_cs_algorithms": Size(LM, 1_320, 10, 1, (40, 9), (1, 0)),
    "bigbench_operators": Size(LM, 210, 10, 1, (35, 7), (1.1, 0.3)),
    "bigbench_repeat_copy_logic": Size(LM, 32, 10, 1, (27, 5), (16.4, 8.4)),
    "squad": Size(LM, 10_570, 10, 1, (180, 60), (4.4, 1.7)),
    "coqa": Size(LM, 7_983, 0, 1, (450, 120), (4.3, 1.7)),
    "boolq": Size(MC, 3_270, 10, 2, (136, 70), (1, 0), 62),
    "bigbench_language_identification": Size(MC, 10_000, 10, 11, (149, 135), (1, 0), 9.1),
}

# Each is one token of GPT-2's with the space before it.
TEXT = (
    "the of and to in that was for on with as his they at be this from have or by one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over did"
)
WORDS = TEXT.split()


def make_bundle(folder: Path, seed: int = 0) -> Path:
    """A CORE bundle with items of random words, as many and as long as SIZES says."""
    chance = random.Random(seed)
    (folder / "eval_data").mkdir(parents=True)
    entries = []
    for name, size in SIZES.items():
        with (folder / "eval_data" / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(made_item(size, chance)) + "\n" for _ in range(size.items))
        entries.append(
            {"label": name, "dataset_uri": f"{name}.jsonl", "num_fewshot": [size.examples]}
            | {"icl_task_type": size.kind}
        )
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("Eval Task", "Random baseline"), *((name, size.guessed) for name, size in SIZES.items())]
        )
    return folder


def made_item(size: Size, chance: random.Random) -> dict[str, Any]:
    def words(mean: float, deviation: float) -> str:
        length = chance.gammavariate((mean / deviation) ** 2, deviation**2 / mean) if deviation else mean
        return " ".join(chance.choices(WORDS, k=max(1, round(length))))

    if size.kind == LM:
        return {"context": words(*size.beginning), "continuation": words(*size.ending)}
    gold = chance.randrange(size.choices)
    if size.kind == SCHEMA:
        begin = words(*size.beginning)
        return {"context_options": [f"{begin} he", f"{begin} she"], "continuation": words(*size.ending), "gold": gold}
    short = size.ending[0] <= 1  # the letters of choices
    choices = [chr(ord("A") + i) if short else words(*size.ending) for i in range(size.choices)]
    return {"query": words(*size.beginning), "choices": choices, "gold": gold}


class Counted:
    """A model that counts the tokens and the shapes of its batches, padding included."""

    branching = True
    tokens_at_once: int | None = None

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config
        self.shapes = collections.Counter[tuple[int, int]]()

    def hidden(self, tokens: Tensor, branches: Branches | None = None) -> Tensor:
        height, width = tokens.shape
        self.shapes[height, width] += 1
        return self.model.hidden(tokens, branches)

    def head(self, x: Tensor) -> Tensor:
        return self.model.head(x)

    @property
    def tokens(self) -> int:
        return sum(height * width * count for (height, width), count in self.shapes.items())


def timed(what: str, rounds: int, counted: Counted, device: torch.device, work: Callable[[], str]) -> None:
    """Run the work some times and print its seconds."""
    seconds = []
    for _ in range(rounds):
        counted.shapes.clear()
        started = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"{what}: {seconds[-1]:.2f} s, {counted.tokens / seconds[-1]:,.0f} tokens/s with padding; {result}")
    later, shapes = seconds[1:] or seconds, counted.shapes
    print(
        f"{what}: median {statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f} s) of {len(later)}"
        f" rounds{' after the first' if seconds[1:] else ''}"
    )
    print(
        f"{what}: {counted.tokens:,} tokens in {shapes.total()} batches of {len(shapes)} shapes, such as "
        f"{shapes.most_common(5)}",
        flush=True,
    )


def host_part(bundle: Path, encode: Encode, end_of_text: int, tokens_at_once: int) -> None:
    """CORE without a device: the time of each task's rows and batches, and the numbers of tokens."""
    seconds, whole = {"rows": 0.0, "batches": 0.0}, collections.Counter[str]()
    for task in read_bundle(bundle):
        tokens = collections.Counter[str]()
        began = time.process_time()
        for _, _, groups in _parts([task], encode, end_of_text, 1024):
            rows = [row for group in groups for row in group if row]
            made = time.process_time()
            strips = _sorted(_strips(rows, LONGEST_STRIP * 1024))
            batches = _batches(strips, tokens_at_once)
            for batch in batches:
                _packed(rows, batch, batch.width)
            seconds["batches"] += time.process_time() - made
            seconds["rows"] += made - began
            tokens["alone"] += sum(row.length - 1 for row in rows)
            tokens["shared"] += sum(strip.length for strip in strips)
            tokens["padded"] += sum(batch.height * batch.width for batch in batches)
            began = time.process_time()
        whole += tokens
        print(f"  {task.name}: {in_words(tokens)}")
    print(f"CORE: {in_words(whole)}")
    print(
        f"CORE, the host alone: {seconds['rows']:.1f} s of processor time for reading, tokenizing and making rows, "
        f"{seconds['batches']:.1f} s for batches",
        flush=True,
    )


def in_words(tokens: collections.Counter[str]) -> str:
    alone, shared, padded = (f"{tokens[name] / 1e6:.2f}M" for name in ("alone", "shared", "padded"))
    return f"{alone} tokens if each row is read alone, {shared} with shared beginnings, {padded} with padding"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time HellaSwag and CORE.")
    parser.add_argument("--hellaswag", type=Path, help="jsonl file of HellaSwag's validation split; without: not timed")
    parser.add_argument("--core", type=Path, help="folder of a bundle, instead of a made one")
    parser.add_argument("--no-core", action="store_true", help="leave CORE out")
    parser.add_argument("--model", choices=MODELS, default="124M")
    parser.add_argument("--weights", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-at-once", type=int)
    parser.add_argument("--items", type=int, help="at most so many HellaSwag items")
    parser.add_argument("--host-only", action="store_true", help="time reading, tokenizing and making rows alone")
    options = parser.parse_args()

    encoding = tokenizer("gpt2")
    world = World.start(RuntimeConfig())
    device = world.device
    rank_0_prints(world)
    encode = encoder(encoding, world)
    config = Gpt2Config.model_validate(MODELS[options.model] | {"block_size": 1024, "vocab_size": 50_257})
    name = f"{world.world_size} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}"
    print(
        f"{options.model} on {name}, torch {torch.__version__}, weights in {options.weights}, {os.cpu_count()} CPUs",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        if not options.no_core:
            bundle = options.core or make_bundle(Path(folder) / "bundle")
        if options.hellaswag:
            started = time.perf_counter()
            hellaswag_rows(read_hellaswag_file(options.hellaswag)[: options.items], encode, 1024)
            print(f"HellaSwag, the host alone: {time.perf_counter() - started:.2f} s")
        if not options.no_core:
            host_part(bundle, encode, encoding.eot_token, options.tokens_at_once or TOKENS_AT_ONCE["cuda"])
        if options.host_only:
            return
        model = GPT(config)
        model.initialize(0)
        model.to(device).requires_grad_(False)
        if options.weights == "bf16":
            model.bfloat16()
        counted = Counted(model)
        scored: Scored = counted
        half = device.type == "cuda" and options.weights == "float32"
        with autocast_on(device, "bf16") if half else nullcontext():
            if options.hellaswag:

                def hellaswag_work() -> str:
                    items = read_hellaswag_file(options.hellaswag)[: options.items]
                    return f"{hellaswag(scored, items, encode, world, options.tokens_at_once)}"

                timed("HellaSwag", options.rounds, counted, device, hellaswag_work)
            if not options.no_core:

                def core_work() -> str:
                    tasks, times = read_bundle(bundle), [(time.perf_counter(), "")]
                    score = core(
                        scored,
                        tasks,
                        encode,
                        encoding.eot_token,
                        world,
                        options.tokens_at_once,
                        progress=lambda task, done: times.append((time.perf_counter(), task)),
                    )
                    times.append((time.perf_counter(), ""))
                    spent = ((later[0] - one[0], one[1]) for one, later in zip(times[1:], times[2:], strict=False))
                    longest = ", ".join(f"{task} {seconds:.1f} s" for seconds, task in sorted(spent, reverse=True)[:6])
                    return f"CORE {score.core:.4f}; {longest}"

                timed("CORE", options.rounds, counted, device, core_work)
    world.close()


if __name__ == "__main__":
    main()
