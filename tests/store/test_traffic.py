"""The bytes that are exchanged with a bucket, counted over processes that die."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from servers import S3Account

from pipelines.store.s3_store import S3Store
from pipelines.store.traffic import FILE, Traffic, count, counted_together, traffic_here
from trainer.base.store import PART_BYTES

KILLED = """
import os, signal
from pipelines.store.traffic import Traffic, count
count(Traffic(sent=7)); count(Traffic(sent=5, received=3))
if not os.fork():
    count(Traffic(sent=100))
    os._exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
AT_ONCE = """
import os, threading
from pipelines.store.traffic import Traffic, count
for fork in range(20):
    threads = [threading.Thread(target=lambda: [count(Traffic(1, 2, 3, 4)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    if not os.fork():  # while they count
        count(Traffic(sent=1))
        os._exit(0)
    for thread in threads:
        thread.join()
    os.wait()
"""

STOPPED = """
import fcntl, os, signal
file = open(os.environ["SKYTRAIN_TRAFFIC"], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_threads_forks_and_processes_count_at_once_in_constant_memory() -> None:
    with counted_together():
        before = os.stat(os.environ[FILE]).st_size
        processes = [subprocess.Popen([sys.executable, "-c", AT_ONCE]) for _ in range(3)]
        assert [process.wait(60) for process in processes] == [0] * 3
        counts = 3 * 20 * 4 * 50
        assert traffic_here() == Traffic(counts + 3 * 20, 2 * counts, 3 * counts, 4 * counts)
        assert os.stat(os.environ[FILE]).st_size == before


def test_the_bytes_of_processes_that_are_killed_stay_in_the_sum() -> None:
    with counted_together():
        count(Traffic(received=1000))
        died = subprocess.run([sys.executable, "-c", KILLED])
        assert died.returncode == -signal.SIGKILL
        assert traffic_here() == Traffic(sent=112, received=1003)


def test_a_process_that_hangs_with_the_lock_stops_no_count() -> None:
    counting = "from pipelines.store.traffic import Traffic, count; assert count(Traffic(sent=7)).sent == 7"
    with counted_together(), subprocess.Popen([sys.executable, "-c", STOPPED]) as stopped:
        try:
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            subprocess.run([sys.executable, "-c", counting], check=True, timeout=60)
        finally:
            stopped.kill()


def test_a_run_counts_before_its_first_heartbeat_without_an_import_of_numpy() -> None:
    counts = "with traffic.counted_together(): traffic.traffic_here()\nsys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys\nfrom pipelines.store import traffic\n{counts}"], check=True)


def test_every_body_to_and_from_a_bucket_counts_shown_on_motos_imitation(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store], tmp_path: Path
) -> None:
    s3_store, size = fresh_s3_store(moto_server), 2 * PART_BYTES + 5
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    with counted_together():
        s3_store.upload(file, "large")
        s3_store.put("small", b"123")
        writes = 1 + 3 + 1 + 1  # begin, three parts, complete; a put
        assert traffic_here() == Traffic(size + 3, 0, writes, 0)
        s3_store.download("large", tmp_path / "copy")
        assert s3_store.get("small") == b"123" and s3_store.read_into("small", 1, memoryview(bytearray(9))) == 2
        (found,) = s3_store.objects("large")
        assert s3_store.read_listed(found, 10, memoryview(bytearray(20))) == 20
        s3_store.delete("small")
        # A listing is as dear as a put. Three parts are read, and three other ranges.
        assert traffic_here() == Traffic(size + 3, size + 3 + 2 + 20, writes + 1, 3 + 3)
