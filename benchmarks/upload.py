"""Uploads of a checkpoint's bytes from memory to S3: our boto3 multipart upload against obstore's.

`python -m benchmarks.upload s3://BUCKET/PREFIX [GIB] [REPEATS]` with the AWS_* environment of the server (a plain
http endpoint) and `pip install obstore`, which the project itself does not need. The parts have the sizes of
GPT-2 124M's tensors, 16 MiB a request, 4 requests at once. Each upload is a process of its own; the ways alternate. It
prints MB/s and the CPU seconds of that process per GiB: median [min … max].
"""

import os
import resource
import statistics
import subprocess
import sys
import time

PART_BYTES = 16 << 20
SIZES = (50304 * 768 * 4, 768 * 3072 * 4, 768 * 2304 * 4, 3072 * 768 * 4, 768 * 768 * 4)
WAYS = ("boto3", "obstore", "obstore-unsigned")


def parts_of(gib: float) -> list[memoryview]:
    """Random bytes in parts of SIZES, `gib` GiB together."""
    parts: list[memoryview] = []
    left = int(gib * 2**30)
    while left:
        size = min(left, SIZES[len(parts) % len(SIZES)])
        parts.append(memoryview(os.urandom(min(size, 1 << 20)) * -(-size >> 20))[:size])
        left -= size
    return parts


def upload(way: str, uri: str, gib: float) -> None:
    """One upload, in this process."""
    parts, key = parts_of(gib), f"upload-{way}"
    if way == "boto3":
        from pipelines.artifacts.store import S3Store

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        store = S3Store(bucket, prefix)
        store.get("warm-up")
        before, started = cpu_seconds(), time.perf_counter()
        store.write(parts, key)
    else:
        import obstore

        options = {"unsigned_payload": way.endswith("unsigned"), "client_options": {"allow_http": True}}
        remote = obstore.store.S3Store.from_url(uri, endpoint=os.environ["AWS_ENDPOINT_URL"], **options)
        obstore.put(remote, "warm-up", b"x")
        before, started = cpu_seconds(), time.perf_counter()
        obstore.put(remote, key, iter(parts), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4)
    print(time.perf_counter() - started, cpu_seconds() - before)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):7.2f} [{min(values):.2f} … {max(values):.2f}]"


def main(uri: str, gib: float, repeats: int) -> None:
    results: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.upload", uri, str(gib), way], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr)
            wall, cpu = map(float, done.stdout.split())
            results[way].append((gib * 2**30 / 1e6 / wall, cpu / gib))
    print(f"{gib:g} GiB, {repeats} times: MB/s and CPU seconds per GiB")
    for way, times in results.items():
        print(f"  {way:17} {summary([speed for speed, _ in times])}   {summary([cpu for _, cpu in times])}")


if __name__ == "__main__":
    uri, gib, last = [*sys.argv[1:], *["s3://bench/upload", "1", "3"][len(sys.argv) - 1 :]]
    if last in WAYS:
        upload(last, uri, float(gib))
    else:
        main(uri, float(gib), int(last))
