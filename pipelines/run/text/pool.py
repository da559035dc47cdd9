"""Processes that read and encode the pieces of a text, and give back their tokens in order.

Process k of n takes the pieces k, k + n, k + 2n … and writes their tokens into files of a folder, a batch each; the
parent reads piece after piece. Bounded: BATCHES_AHEAD batches of a process wait on the disk, and in memory are a few.

One new process imports what they need, makes the client of S3, and forks the others: that takes 0.6 s.
"""

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run.text.documents import batches_of, read_ahead
from pipelines.run.text.encode import Encoder, TokenBatch
from pipelines.run.text.files import Files, TextShare
from pipelines.run.text.hub import reading
from pipelines.run.text.machine import cores
from pipelines.store.secrets import environment_for, services_of
from trainer.base.process import die_with_parent
from trainer.config.errors import ProcessKilled, UserError

if TYPE_CHECKING:
    from pipelines.run.text.sources import Text

BATCHES_AHEAD = 128  # of one process, about 1 MB each
CHECK_SECONDS = 0.5
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a thread would not survive the fork
    "TOKENIZERS_PARALLELISM": "false",
    # Columns in memory that is used again: the kernel clears new pages, which took a tenth of the time.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
Task = tuple[TextShare, int]  # a piece, and its first document


def tokens_of(
    text: "Text",
    encoder: Encoder,
    start: int,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    processes: int | None = None,
) -> Generator[TokenBatch, None, None]:
    """The tokens of all documents from number `start` on, in order, and the same for any number of processes.

    `folder` is scratch. `check` is called while a process is waited for; it may raise. Raises the errors of `text`, and
    ProcessKilled.
    """
    files = text.resolved()
    pieces = files.pieces()
    first, skipped = _place(files, pieces, start) if start else (0, 0)
    tasks = [(piece, 0 if number else skipped) for number, piece in enumerate(pieces[first:])]
    at_once = processes or cores()
    processes = max(1, min(at_once, len(tasks)))
    encoder.threads = at_once // processes  # of a few long documents each has parts for several cores
    if processes > 1:
        yield from _tokens_of_processes(files, encoder, tasks, folder / "batches", check, processes)
    else:
        for task in tasks:
            yield from _encoded(files, encoder, *task)


def _place(files: Files, pieces: Sequence[TextShare], document: int) -> tuple[int, int]:
    """The number of the piece with a document, and the document's number in it."""
    with ThreadPoolExecutor(cores()) as threads:
        try:
            for number, documents in enumerate(threads.map(files.count, pieces)):
                if document < documents:
                    return number, document
                document -= documents
        finally:
            threads.shutdown(cancel_futures=True)
    return len(pieces), 0


def _encoded(files: Files, encoder: Encoder, piece: TextShare, start: int) -> Generator[TokenBatch, None, None]:
    """The tokens of a piece from document `start` on."""
    documents = itertools.islice(files.read(piece), start, None)
    with reading(piece.names[0]), closing(read_ahead(batches_of(documents))) as batches:
        yield from map(encoder.tokens, batches)


def _tokens_of_processes(
    files: Files, encoder: Encoder, tasks: Sequence[Task], folder: Path, check: Callable[[], None], processes: int
) -> Generator[TokenBatch, None, None]:
    import numpy as np

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pipes = [Pipe() for _ in range(processes)]
    ours, theirs = [pipe[0] for pipe in pipes], [pipe[1].fileno() for pipe in pipes]
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines.run.text.pool", *map(str, theirs)],
        pass_fds=theirs,
        env=environment_for(services_of(*files.paths)) | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the parent alone ends them: not Ctrl-C
    )
    for _, connection in pipes:
        connection.close()
    try:
        ours[0].send((files, encoder, tasks, folder))
        for number in range(len(tasks)):
            connection = ours[number % processes]
            while (answer := _receive(connection, check)) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                path, dtype, count = answer
                tokens = np.memmap(path, dtype, "r", shape=count)
                starts = np.fromfile(path, np.int64, offset=tokens.nbytes)
                path.unlink()
                yield TokenBatch(tokens, starts)
                connection.send(None)
        for connection in ours:  # so the processes end
            connection.close()
        child.wait()
    except (EOFError, ConnectionError) as error:
        raise ProcessKilled("a process of tokenize was killed; run again to resume") from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for connection in ours:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


def _receive(connection: Connection, check: Callable[[], None]) -> Any:
    check()
    while not connection.poll(CHECK_SECONDS):
        check()
    return connection.recv()


# The processes


def _serve(connections: list[Connection]) -> None:
    """Fork a process for each connection, and wait for all."""
    files, encoder, tasks, folder = connections[0].recv()
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    files.connect()
    if encoder.ranks is not None:
        encoder.fast()
    gc.freeze()
    for number, connection in enumerate(connections):
        if not os.fork():
            die_with_parent(signal.SIGKILL)
            for other in connections[:number] + connections[number + 1 :]:
                other.close()
            with suppress(EOFError, ConnectionError):  # the parent is gone
                _work(files, encoder, tasks[number :: len(connections)], folder / str(number), connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _work(files: Files, encoder: Encoder, tasks: Sequence[Task], path: Path, connection: Connection) -> None:
    """Send the batches of each task, and None behind its last one; or the error. Then wait for the parent's end."""
    numbers = itertools.count()
    try:
        for task in tasks:
            for batch in _encoded(files, encoder, *task):
                number = next(numbers)
                if number >= BATCHES_AHEAD:
                    connection.recv()
                file = path.with_name(f"{path.name}-{number}")
                with file.open("wb") as opened:
                    batch.tokens.tofile(opened)
                    batch.starts.tofile(opened)
                connection.send((file, batch.tokens.dtype.str, len(batch.tokens)))
            connection.send(None)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        known = isinstance(error, UserError | OSError)
        connection.send(error if known else RuntimeError("".join(traceback.format_exception(error))))
    while True:
        connection.recv()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        _serve([Connection(int(number)) for number in sys.argv[1:]])
