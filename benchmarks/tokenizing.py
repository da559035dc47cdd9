"""Text in parquet on S3 to token shards on S3: the tokenize stage against the usual script.

`python -m benchmarks.tokenizing FOLDER [REPEATS]` starts the S3 server of the tests (radosgw), puts the parquet of
FOLDER there, whose column `text` has the documents, and tokenizes it to shards of 100M tokens in the same bucket.

The usual script is written as build-nanogpt's and llm.c's are: a pool of processes over `datasets`, tiktoken, an array
for each document, a file for each shard; boto3 downloads the parquet before and uploads each file. It makes no
checksums and cannot resume. Each run is a process of its own, and the ways alternate. It prints millions of tokens a
second, and a CPU second with the children's (the server's is not counted), and the peak memory of all processes, shared
pages once.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import spread

SHARD_TOKENS = 100_000_000
WAYS = ("stage", "script")
BUCKET = "tokenizing"
SAMPLE_SECONDS = 0.5  # between two looks at the memory


def stage(source: str, work: Path) -> int:
    """The shards of the tokenize stage, with receipts and checksums."""
    from pipelines.recipe.tokens_config import TokensConfig
    from pipelines.run.text.shard_writer import ShardsJob, make_shards
    from pipelines.run.text.sources import text_of
    from pipelines.store.manifest import ArtifactPlan, upload
    from pipelines.store.s3_store import S3Store

    config = TokensConfig(source=f"{source}/*.parquet", shard_tokens=SHARD_TOKENS, val_shards=1)
    plan = ArtifactPlan("tokenize", "bench", {"stage": "tokenize", "text": text_of(config).identity()})
    store = S3Store(BUCKET, work.name)
    put = partial(upload, store, plan.prefix, 1)
    job = ShardsJob(config, plan, store, work, put, lambda: None, print)
    *_, receipts = make_shards(job)
    return sum(receipt.tokens for receipt in receipts)


def encode_document(row: dict[str, Any]) -> Any:
    import numpy as np
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    tokens = [encoding.eot_token]
    tokens.extend(encoding.encode_ordinary(row["text"]))
    return np.array(tokens).astype(np.uint16)


def script(source: str, work: Path) -> int:
    """The usual script."""
    import multiprocessing

    import boto3
    import datasets
    import numpy as np

    s3 = boto3.client("s3")
    folder = source.removeprefix(f"s3://{BUCKET}/")
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{folder}/")["Contents"]:
        s3.download_file(BUCKET, item["Key"], str(work / Path(item["Key"]).name))
    rows = datasets.load_dataset("parquet", data_files=f"{work}/*.parquet", split="train", cache_dir=str(work / "hf"))
    buffer, filled, shards, total = np.empty(SHARD_TOKENS, np.uint16), 0, 0, 0

    def save() -> None:
        np.save(work / "shard.npy", buffer[:filled])
        s3.upload_file(str(work / "shard.npy"), BUCKET, f"{work.name}/{shards:06d}.npy")

    with multiprocessing.Pool(os.cpu_count()) as pool:
        for tokens in pool.imap(encode_document, rows, chunksize=16):
            total += len(tokens)
            while len(tokens):
                take = min(len(tokens), SHARD_TOKENS - filled)
                buffer[filled : filled + take] = tokens[:take]
                tokens, filled = tokens[take:], filled + take
                if filled == SHARD_TOKENS:
                    save()
                    shards, filled = shards + 1, 0
        pool.close()
        pool.join()
    save()
    return total


def one(way: str, source: str) -> dict[str, float]:
    """One run in this process."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        started = time.perf_counter()
        tokens = script(source, Path(folder)) if way == "script" else stage(source, Path(folder))
        wall = time.perf_counter() - started
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"tokens": tokens, "wall": wall, "cpu": sum(each.ru_utime + each.ru_stime for each in used)}


def measured(command: list[str]) -> tuple[int, str, str, float, int]:
    """Exit status, output, errors, CPU seconds, and the most memory of all processes of a command.

    The CPU seconds are those at the last look at each process.
    """
    most, seconds = 0, dict[int, float]()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, stdout=out, stderr=err)
        while process.poll() is None:
            memory = 0
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):  # it has ended
                    times = each.cpu_times()
                    seconds[each.pid] = times.user + times.system
                    memory += each.memory_full_info().pss  # a page that n processes share as an n-th
            most = max(most, memory)
            time.sleep(SAMPLE_SECONDS)
        out.seek(0), err.seek(0)
        return process.returncode, out.read(), err.read(), sum(seconds.values()), most


def main(folder: Path, repeats: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from servers import Radosgw

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with it
    with tempfile.TemporaryDirectory() as scratch:
        server = Radosgw(Path(scratch, "s3"))
        server.start()
        try:
            os.environ |= server.account.environment
            put_texts(folder)
            compare(repeats)
        finally:
            server.stop()


def put_texts(folder: Path) -> None:
    import boto3

    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.glob("*.parquet")):
        s3.upload_file(str(path), BUCKET, f"texts/{path.name}")


def compare(repeats: int) -> None:
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.tokenizing", "one", way, f"s3://{BUCKET}/texts"]
            status, out, err, seen, memory = measured(command)
            if status:
                print(f"{way}: {err.strip().splitlines()[-1]}")
                continue
            run = json.loads(out.splitlines()[-1]) | {"memory": memory / 2**30}
            run["cpu"] = max(run["cpu"], seen)
            results.setdefault(way, []).append(run)
            print(way, results[way][-1], flush=True)
    print(f"{repeats} times: Mtok/s, Mtok/CPU-second, peak GiB of all processes")
    for way, runs in results.items():
        speed = spread([run["tokens"] / run["wall"] / 1e6 for run in runs])
        cpu = spread([run["tokens"] / run["cpu"] / 1e6 for run in runs])
        print(f"  {way:16} {speed}   {cpu}   {max(run['memory'] for run in runs):.2f}   {runs[0]['tokens']:,} tokens")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["one", way, place]:
            print(json.dumps(one(way, place)))
        case [folder, *rest] if len(rest) <= 1:
            main(Path(folder), int(rest[0]) if rest else 1)
        case _:
            sys.exit(__doc__)
