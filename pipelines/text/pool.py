"""Processes that read and encode the pieces of a text, and give back their tokens in order.

Process k of n takes the pieces k, k + n, k + 2n … and writes their tokens as blocks into a folder on the disk; the
parent reads piece after piece. Bounded: BLOCKS_AHEAD blocks of BLOCK_BYTES of text a process wait on the disk, and in
memory are a few batches a process, and one block.

One new process imports what they need, and forks the others: an import would cost each of them 0.3 s.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from pipelines.text.columns import read_ahead
from pipelines.text.encode import Encoder, TokenBatch
from pipelines.text.text import Piece, Text, read_piece
from trainer.errors import Interrupted, UserError
from trainer.process import die_with_parent

BLOCK_BYTES = 32 << 20  # of text
BLOCKS_AHEAD = 8  # of one process: 128 MB of tokens
CHECK_SECONDS = 0.5
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds in each period, or "max"
Task = tuple[Piece, int]  # a piece, and its first document


def cores() -> int:
    """The processor cores that this process may use."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(known, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or no limit
        return known


def tokens_of(
    text: Text,
    encoder: Encoder,
    start: int,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    processes: int | None = None,
) -> Generator[TokenBatch, None, None]:
    """The tokens of all documents from number `start` on, in order, and the same for any number of processes.

    `folder` is scratch. `check` is called while a process is waited for; it may raise. Raises the errors of `text`, and
    Interrupted if a process is killed.
    """
    text = text.resolved()
    pieces = text.pieces()
    processes = min(processes or cores(), len(pieces))
    first, skipped = _place(text, pieces, start) if start else (0, 0)
    tasks = [(piece, 0 if number else skipped) for number, piece in enumerate(pieces[first:])]
    if processes > 1:
        with closing(_tokens_of_processes(text, encoder, tasks, folder / "blocks", check, processes)) as found:
            yield from found
        return
    with closing(read_ahead(batch for task in tasks for batch in read_piece(text, *task))) as batches:
        yield from map(encoder.tokens, batches)


def _place(text: Text, pieces: Sequence[Piece], document: int) -> tuple[int, int]:
    """The number of the piece with a document, and the document's number in it."""
    with ThreadPoolExecutor(cores()) as threads:
        try:
            for number, documents in enumerate(threads.map(text.count, pieces)):
                if document < documents:
                    return number, document
                document -= documents
        finally:
            threads.shutdown(cancel_futures=True)
    return len(pieces), 0


@dataclass(frozen=True)
class Block:
    """The tokens of consecutive documents in a file, and behind them where each document begins."""

    path: Path
    dtype: str
    tokens: int
    text_bytes: int

    def take(self) -> TokenBatch:
        """Read the tokens, and remove the file."""
        import numpy as np

        with self.path.open("rb") as file:
            tokens, starts = np.fromfile(file, self.dtype, self.tokens), np.fromfile(file, np.int64)
        self.path.unlink()
        return TokenBatch(tokens, starts, self.text_bytes)


def _tokens_of_processes(
    text: Text, encoder: Encoder, tasks: Sequence[Task], blocks: Path, check: Callable[[], None], processes: int
) -> Generator[TokenBatch, None, None]:
    shutil.rmtree(blocks, ignore_errors=True)
    blocks.mkdir(parents=True)
    pipes = [Pipe() for _ in range(processes)]
    ours, theirs = [pipe[0] for pipe in pipes], [pipe[1].fileno() for pipe in pipes]
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines.text.pool", *map(str, theirs)],
        pass_fds=theirs,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # a thread would not survive the fork
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the parent alone ends them: not Ctrl-C
    )
    for _, connection in pipes:
        connection.close()
    try:
        ours[0].send((text, encoder, tasks, blocks))
        for number in range(len(tasks)):
            connection = ours[number % processes]
            while (answer := _receive(connection, check)) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer.take()
                connection.send(None)
    except (EOFError, ConnectionError) as error:
        raise Interrupted("a process of tokenize was killed; run again to resume") from error
    else:
        for connection in ours:  # so the processes end
            connection.close()
    finally:
        if not ours[0].closed:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            for connection in ours:
                with suppress(EOFError, ConnectionError):  # a process has the other end until it is gone
                    while True:
                        connection.recv()
                connection.close()
        child.wait()
        shutil.rmtree(blocks, ignore_errors=True)


def _receive(connection: Connection, check: Callable[[], None]) -> Any:
    while True:
        check()
        if connection.poll(CHECK_SECONDS):
            return connection.recv()


# The processes


def _serve(connections: list[Connection]) -> None:
    """Fork a process for each connection, and wait for all."""
    text, encoder, tasks, blocks = connections[0].recv()
    import pyarrow.parquet  # noqa: F401

    if encoder.ranks is not None:
        encoder.fast()
    for number, connection in enumerate(connections):
        if not os.fork():
            die_with_parent(signal.SIGKILL)
            for other in connections[:number] + connections[number + 1 :]:
                other.close()
            with suppress(EOFError, ConnectionError):  # the parent is gone
                _work(text, encoder, tasks[number :: len(connections)], blocks / str(number), connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _work(text: Text, encoder: Encoder, tasks: Sequence[Task], path: Path, connection: Connection) -> None:
    """Send the blocks of each task, and None behind its last one; or the error. Then wait for the end of the parent."""
    sent = 0
    try:
        for number, task in enumerate(tasks):
            for block in blocks_of(text, encoder, *task, path.with_name(f"{path.name}-{number}")):
                connection.send(block)
                sent += 1
                if sent >= BLOCKS_AHEAD:
                    connection.recv()
            connection.send(None)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        known = isinstance(error, UserError | OSError)
        connection.send(error if known else RuntimeError("".join(traceback.format_exception(error))))
    while True:
        connection.recv()


def blocks_of(text: Text, encoder: Encoder, piece: Piece, start: int, path: Path) -> Iterator[Block]:
    """The tokens of a piece from document `start` on in files of about BLOCK_BYTES of text."""
    import numpy as np

    with closing(read_ahead(read_piece(text, piece, start))) as batches:
        found = map(encoder.tokens, batches)
        batch = next(found, None)
        for number in itertools.count():
            if batch is None:
                return
            starts: list[np.ndarray] = []
            tokens = text_bytes = 0
            dtype, block = batch.tokens.dtype.str, path.with_name(f"{path.name}-{number}")
            with block.open("wb") as file:
                while batch is not None and text_bytes < BLOCK_BYTES:
                    file.write(batch.tokens.data)
                    starts.append(batch.starts + tokens)
                    tokens, text_bytes = tokens + len(batch.tokens), text_bytes + batch.text_bytes
                    batch = next(found, None)
                file.write(np.concatenate(starts).data)
            yield Block(block, dtype, tokens, text_bytes)


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    from pipelines.text import pool  # so that its blocks are those of the module

    with suppress(EOFError, ConnectionError):  # the parent is gone
        pool._serve([Connection(int(number)) for number in sys.argv[1:]])
