"""Rewards in a process of their own: by a function of the recipe's author, and by a regular expression.

The function has TRL's form: `score(prompts, completions, **columns)` returns a number or None for each completion, and
may be async; prompts and completions are lists of {role, content}. The process (reward_child.py) gets the verified
source, and none of our environment. Both talk over a socket: the function's own stdin is empty, and its stdout is the
log. A regular expression can't be interrupted in a thread, and would stop the watchdog's: the kernel ends its process.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from pipelines.recipe.recipe import RewardConfig, TuneConfig
from pipelines.run.fetch import bytes_of, path_of
from trainer.config.errors import UserError, cut, shown
from trainer.config.source import Source

LOG = 2  # descriptor
PATTERN_SECONDS = 2.0  # of processor time for one answer; those that do not backtrack take microseconds
ARGUMENTS = ("prompts", "completions", "completion_ids")  # of a function, beside the columns of the data
PASSED_ON = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")  # of the environment


class RewardCode:
    """The process of a function or a pattern. UserError if the function's file is another one than on record, or fails,
    or unless code is `allowed`: by the command line that began it, which reaches the ranks in their task and never
    through the store."""

    def __init__(self, reward: RewardConfig, allowed: bool) -> None:
        function = ":".join(file_and_name(reward)) if reward.function else None
        if function and not allowed:
            raise UserError(f"rewards: {function} is code, which runs with your rights; read it, then add --allow-code")
        self._where = function or f"pattern {shown(reward.pattern)}"
        request: dict[str, Any] = {"pattern": reward.pattern, "seconds": PATTERN_SECONDS}
        if reward.function:
            path, name = file_and_name(reward)
            request = {"path": path, "name": name, "source": code_of(reward).decode(errors="replace")}
        ours, theirs = socket.socketpair()
        with theirs:
            child = [sys.executable, "-P", "-u", str(Path(__file__).with_name("reward_child.py")), str(theirs.fileno())]
            env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            self._process = Popen(child, env=env, stdin=DEVNULL, stdout=LOG, pass_fds=[theirs.fileno()])
        with ours:
            self._pipe = ours.makefile("rw", encoding="utf8")
        self._ask(request)

    def __call__(self, **given: Any) -> list[float | None]:
        """The rewards; None skips an answer. UserError unless a finite number or None comes for each completion."""
        return self._ask(given)

    def _ask(self, request: dict[str, Any]) -> list[float | None]:
        line = ""
        with suppress(OSError):  # the process has ended
            self._pipe.write(json.dumps(request) + "\n")
            self._pipe.flush()
            line = self._pipe.readline()
        answer = json.loads(line or '{"error": "its process ended"}')
        if not line and self._process.wait() == -signal.SIGVTALRM:
            answer["error"] = f"an answer took more than {PATTERN_SECONDS:g} s; use a pattern that backtracks less"
        if "error" in answer:
            raise UserError(f"rewards: {self._where}: {cut(answer['error'])}")
        return list(answer["scores"])

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.wait()


def file_and_name(reward: RewardConfig) -> tuple[str, str]:
    """The file of a function, and its name there."""
    path, _, name = function_of(reward).name.rpartition(":")
    return path, name


def function_of(reward: RewardConfig) -> Source:
    """FILE.py:NAME, with the sha256 of the file if it is on record."""
    return Source.of(str(reward.function), "rewards", ("path",))


def code_of(reward: RewardConfig) -> bytes:
    """The file of a function. UserError if there is none, or if it is not the one on record."""
    file = replace(function_of(reward), name=file_and_name(reward)[0])
    return bytes_of(file, "rewards", path_of(file), "name a file of Python code")


def with_digests(step: TuneConfig) -> list[RewardConfig]:
    """The rewards of a step, functions with the sha256 of their files."""

    def pinned(one: RewardConfig) -> RewardConfig:
        function = function_of(one).pinned(sha256(code_of(one)).hexdigest())
        return one.model_copy(update={"function": str(function)})

    return [pinned(one) if one.function else one for one in step.rewards]


def check_code(steps: Sequence[TuneConfig], allowed: bool) -> None:
    """UserError for a function in the steps' rewards that fails to load or, unless code is `allowed`, for any."""
    for reward in (reward for step in steps for reward in step.rewards if reward.function):
        RewardCode(reward, allowed).close()
