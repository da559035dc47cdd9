"""Text in parquet to token shards: the tokenize stage, with gigatoken and with tiktoken, against the usual script.

`python -m benchmarks.tokenizing make FOLDER [MB]` writes parquet of 100 MB a file from the documentation and sources of
all installed packages: each text once, between 200 and 200,000 characters. `python -m benchmarks.tokenizing FOLDER
[REPEATS]` tokenizes it to shards of 100M tokens on the local disk. The usual script is written as build-nanogpt's and
llm.c's are: a pool of processes over `datasets`, tiktoken, an array for each document, a file for each shard; it makes
no checksums and cannot resume. datatrove's pipeline runs, too, if it is installed (`pip install datatrove`); it writes
no shards in llm.c's format. Each run is a process of its own, and the ways alternate. It prints millions of tokens a
second, and a CPU second with the children's, and the peak memory of the largest process.
"""

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

SHARD_TOKENS = 100_000_000
WAYS = ("stage", "stage, tiktoken", "script", "datatrove")
KINDS = (
    ".py",
    ".pyi",
    ".md",
    ".rst",
    ".txt",
    ".html",
    ".c",
    ".h",
    ".cpp",
    ".hpp",
    ".cuh",
    ".js",
    ".json",
    ".rs",
    ".ts",
)


def texts(roots: list[Path]) -> Iterator[str]:
    """Each text below some folders once, in the order of paths."""
    seen = set()
    for path in (path for root in roots for path in sorted(root.rglob("*"))):
        if path.suffix not in KINDS or path.is_symlink() or not path.is_file():
            continue
        if not 200 <= path.stat().st_size <= 200_000:
            continue
        content = path.read_bytes()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        if digest not in seen:
            seen.add(digest)
            yield content.decode(errors="replace")


def make(folder: Path, megabytes: int, roots: list[Path]) -> None:
    """Write the texts below some folders as parquet, at most so many megabytes of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    size = written = files = 0

    def write() -> None:
        nonlocal rows, size, written, files
        pq.write_table(pa.table({"text": rows}), folder / f"{files:03d}.parquet", row_group_size=1000)
        rows, size, written, files = [], 0, written + size, files + 1

    for text in texts(roots):
        rows.append(text)
        size += len(text.encode())
        if size >= 100_000_000:
            write()
        if written + size >= megabytes * 1_000_000:
            break
    if rows:
        write()
    print(f"{written / 1e6:,.0f} MB of text in {files} files")


def stage(source: Path, work: Path, reference: bool) -> int:
    """The parts of the tokenize stage on one node, with receipts and checksums, into a store on the local disk."""
    from pipelines.artifacts.manifest import ArtifactPlan, upload
    from pipelines.recipe import TokensConfig
    from pipelines.text.parts import PartsJob, Reading, make_parts
    from pipelines.text.sources import source_identity
    from trainer.store import LocalStore

    config = TokensConfig(source=f"{source}/*.parquet", shard_tokens=SHARD_TOKENS, val_shards=1)
    text = source_identity(config.source, None, None, "text")
    plan = ArtifactPlan("tokenize", "bench", {"stage": "tokenize", "text": text})
    store, scratch = LocalStore(work / "store"), work / "scratch"
    scratch.mkdir()
    put = partial(upload, store, plan.prefix, 1)
    job = PartsJob(config, plan, store, range(1), scratch, put, lambda: None, print, Reading(reference=reference))
    return [progress.stored for progress in make_parts(job)][-1]


def encode_document(row: dict[str, Any]) -> Any:
    import numpy as np
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    tokens = [encoding.eot_token]
    tokens.extend(encoding.encode_ordinary(row["text"]))
    return np.array(tokens).astype(np.uint16)


def script(source: Path, work: Path) -> int:
    """The usual script."""
    import multiprocessing

    import datasets
    import numpy as np

    rows = datasets.load_dataset("parquet", data_files=f"{source}/*.parquet", split="train", cache_dir=str(work / "hf"))
    buffer, filled, shards, total = np.empty(SHARD_TOKENS, np.uint16), 0, 0, 0
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for tokens in pool.imap(encode_document, rows, chunksize=16):
            total += len(tokens)
            while len(tokens):
                take = min(len(tokens), SHARD_TOKENS - filled)
                buffer[filled : filled + take] = tokens[:take]
                tokens, filled = tokens[take:], filled + take
                if filled == SHARD_TOKENS:
                    np.save(work / f"{shards:06d}.npy", buffer)
                    shards, filled = shards + 1, 0
    np.save(work / f"{shards:06d}.npy", buffer[:filled])
    return total


def datatrove(source: Path, work: Path) -> int:
    """datatrove's tokenizer pipeline on all cores, with its own file format."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    cores = os.cpu_count() or 1
    tokenizer = work / "tokenizer.json"
    from pipelines.text.tokenizer import tokenizer as tokenizer_of
    from pipelines.text.tokenizer import tokenizer_files

    tokenizer.write_bytes(tokenizer_files(tokenizer_of("gpt2"), 1024)["tokenizer.json"])
    pipeline = [
        ParquetReader(str(source)),
        DocumentTokenizer(str(work / "out"), tokenizer_name_or_path=str(tokenizer), eos_token="<|endoftext|>"),
    ]
    LocalPipelineExecutor(pipeline, tasks=cores, workers=cores, logging_dir=str(work / "logs")).run()
    return sum(path.stat().st_size for path in (work / "out").glob("*.ds")) // 2


def one(way: str, source: Path) -> dict[str, float]:
    """One run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        match way:
            case "script":
                tokens = script(source, Path(folder))
            case "datatrove":
                tokens = datatrove(source, Path(folder))
            case _:
                tokens = stage(source, Path(folder), reference=way.endswith("tiktoken"))
        wall = time.perf_counter() - started
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    return {"tokens": tokens, "wall": wall, "cpu": cpu, "peak_gib": max(each.ru_maxrss for each in used) / 2**20}


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):7.2f} [{min(values):.2f} … {max(values):.2f}]"


def main(source: Path, repeats: int) -> None:
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.tokenizing", "one", way, str(source)], capture_output=True, text=True
            )
            if done.returncode:
                print(f"{way}: {done.stderr.strip().splitlines()[-1]}")
                continue
            results.setdefault(way, []).append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{repeats} times: Mtok/s, Mtok/CPU-second, peak GiB of a process")
    for way, runs in results.items():
        speed = shown([run["tokens"] / run["wall"] / 1e6 for run in runs])
        cpu = shown([run["tokens"] / run["cpu"] / 1e6 for run in runs])
        print(f"  {way:16} {speed}   {cpu}   {max(run['peak_gib'] for run in runs):.2f}   {runs[0]['tokens']:,} tokens")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder, size, *roots]:
            installed = [Path(one) for one in sys.path if one.endswith("site-packages")]
            stdlib = Path(sysconfig.get_path("stdlib"))
            make(Path(folder), int(size), [Path(root) for root in roots] or [*installed, stdlib])
        case ["one", way, folder]:
            print(json.dumps(one(way, Path(folder))))
        case [folder, *repeats]:
            main(Path(folder), int(repeats[0]) if repeats else 3)
        case _:
            sys.exit(__doc__)
