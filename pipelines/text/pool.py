"""Processes that read and encode the pieces of a text, and give back their tokens in order.

Each process writes the tokens of a piece as blocks into a folder on the disk and names them; the parent reads them in
order. Bounded: 2 pieces a process are dealt out beyond the one that is being read, and of each, BLOCKS_AHEAD blocks of
BLOCK_BYTES of text wait on the disk. In memory are a few batches a process, and one block.

A machine with one core, and a text of one piece, need no other process.
"""

import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.text.columns import read_ahead
from pipelines.text.encode import Encoder, TokenBatch, token_batches
from pipelines.text.text import Piece, Text, read_piece
from trainer.errors import FULL, DiskFull, Interrupted, UserError, is_full
from trainer.process import die_with_parent

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

BLOCK_BYTES = 32 << 20  # of text
BLOCKS_AHEAD = 32  # of one piece: 500 MB of tokens, or 1 GB of text
PIECES_AHEAD = 2  # a process
CHECK_SECONDS = 0.5
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds in each period, or "max"
COUNT = -1  # in place of a first document: only count them


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
    encoding: "tiktoken.Encoding",
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
    first, skipped = _place(text, encoding, pieces, start, folder, check, processes) if start else (0, 0)
    tasks = [(piece, 0 if number else skipped) for number, piece in enumerate(pieces[first:])]
    if processes < 2:
        with closing(read_ahead(_each(text, tasks))) as batches:
            yield from token_batches(Encoder(encoding), batches)
        return
    with closing(_answers(text, encoding, tasks, folder, check, processes)) as answers:
        yield from answers


def _each(text: Text, tasks: Iterable[tuple[Piece, int]]) -> Generator[Any, None, None]:
    for piece, start in tasks:
        yield from read_piece(text, piece, start)


def _place(
    text: Text,
    encoding: "tiktoken.Encoding",
    pieces: Sequence[Piece],
    document: int,
    folder: Path,
    check: Callable[[], None],
    processes: int,
) -> tuple[int, int]:
    """The number of the piece with a document, and the document's number in it."""
    unknown = [(piece, COUNT) for piece in pieces if piece.documents is None]
    counted: Generator[Any, None, None] = (text.count(piece) for piece, _ in unknown)
    if processes > 1 and unknown:
        counted = _answers(text, encoding, unknown, folder, check, processes)
    with closing(counted):
        for number, piece in enumerate(pieces):
            documents = next(counted) if piece.documents is None else piece.documents
            if document < documents:
                return number, document
            document -= documents
    return len(pieces), 0


# The parent


def _answers(
    text: Text,
    encoding: "tiktoken.Encoding",
    tasks: Sequence[tuple[Piece, int]],
    folder: Path,
    check: Callable[[], None],
    processes: int,
) -> Generator[Any, None, None]:
    """The answers of processes to all tasks, in order."""
    blocks = folder / "blocks"
    shutil.rmtree(blocks, ignore_errors=True)
    blocks.mkdir(parents=True)
    found = [queue.Queue[Any]() for _ in tasks]
    room = threading.Semaphore(PIECES_AHEAD * processes)
    numbers = iter(range(len(tasks)))  # next() of it is atomic
    children = [_start(number) for number in range(processes)]
    closed = threading.Event()

    def serve(child: "subprocess.Popen[bytes]", connection: Connection) -> None:
        number = 0
        try:
            connection.send((text, encoding, blocks))
            while room.acquire() and not closed.is_set() and (number := next(numbers, -1)) >= 0:
                connection.send(tasks[number])
                while (answer := connection.recv()) is not None:
                    found[number].put(answer)
                    if isinstance(answer, BaseException):
                        return
                    while found[number].qsize() >= BLOCKS_AHEAD and not closed.wait(0.01):
                        pass
                    connection.send(None)
                found[number].put(None)
        except (EOFError, OSError):
            code = child.wait()
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            found[number].put(Interrupted(f"a process of tokenize has ended ({ended}); run again to resume"))

    threads = [threading.Thread(target=serve, args=child, daemon=True, name="tokenize") for child in children]
    for thread in threads:
        thread.start()
    try:
        for answers in found:
            while (answer := _next(answers, check)) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer.take() if isinstance(answer, Block) else answer
            room.release()
    finally:
        closed.set()
        room.release(processes)
        for child, _ in children:
            child.kill()
        for (child, connection), thread in zip(children, threads, strict=True):
            child.wait()
            thread.join()
            connection.close()
        shutil.rmtree(blocks, ignore_errors=True)


def _start(number: int) -> "tuple[subprocess.Popen[bytes], Connection]":
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "pipelines.text.pool", str(theirs.fileno())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    theirs.close()
    return child, ours


def _next(answers: "queue.Queue[Any]", check: Callable[[], None]) -> Any:
    while True:
        check()
        try:
            return answers.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            continue


# A process


@dataclass(frozen=True)
class Block:
    """The tokens of consecutive documents in a file of the folder of all processes."""

    path: Path
    dtype: str
    starts: "np.ndarray[Any, np.dtype[np.int64]]"
    text_bytes: int
    invalid: tuple[int, ...]

    def take(self) -> TokenBatch:
        """Read the tokens, and remove the file."""
        import numpy as np

        tokens = np.fromfile(self.path, self.dtype)
        self.path.unlink()
        return TokenBatch(tokens, self.starts, self.text_bytes, self.invalid)


def _work(connection: Connection) -> None:
    """Do one task after the other, until the parent is gone."""
    text, encoding, folder = connection.recv()
    encoder = Encoder(encoding)
    for number in itertools.count():
        piece, start = connection.recv()
        path = folder / f"{os.getpid()}-{number}"
        try:
            answers = iter([text.count(piece)]) if start == COUNT else _blocks(text, encoder, piece, start, path)
            answer = next(answers, None)
            while answer is not None:
                connection.send(answer)
                answer = next(answers, None)  # the next one is made before the parent has taken this one
                connection.recv()
        except EOFError:
            raise
        except OSError as error:
            answer = DiskFull(f"{folder}: {FULL}") if is_full(error) else error
        except Exception as error:
            answer = error if isinstance(error, UserError) else RuntimeError("".join(traceback.format_exception(error)))
        connection.send(answer)
        if answer is not None:
            return


def _blocks(text: Text, encoder: Encoder, piece: Piece, start: int, path: Path) -> Iterator[Block]:
    """The tokens of a piece in files of about BLOCK_BYTES of text."""
    import numpy as np

    with closing(read_ahead(read_piece(text, piece, start))) as batches:
        found = token_batches(encoder, batches)
        batch = next(found, None)
        for number in itertools.count():
            if batch is None:
                return
            starts: list[np.ndarray] = []
            invalid: list[int] = []
            tokens = documents = text_bytes = 0
            dtype, name = batch.tokens.dtype.str, path.with_name(f"{path.name}-{number}")
            with name.open("wb") as file:
                while batch is not None and text_bytes < BLOCK_BYTES:
                    file.write(batch.tokens.data)
                    starts.append(batch.starts + tokens)
                    invalid += [documents + one for one in batch.invalid]
                    tokens, documents = tokens + len(batch.tokens), documents + len(batch.starts)
                    text_bytes += batch.text_bytes
                    batch = next(found, None)
            yield Block(name, dtype, np.concatenate(starts), text_bytes, tuple(invalid))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    from pipelines.text.pool import _work as work  # so that its blocks are those of the module

    with suppress(EOFError, ConnectionError):  # the parent is gone
        work(Connection(int(sys.argv[1])))
