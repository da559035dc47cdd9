"""Rewards by a function of the recipe's author: code, which runs in a process of its own without our environment.

The function has TRL's form: `score(prompts, completions, **columns)` returns a number for each completion; prompts and
completions are lists of {role, content}. The process (reward_child.py) gets the verified source.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from pipelines.recipe import RewardConfig, TuneConfig
from pipelines.text.tokenizer import recorded_file
from trainer.errors import UserError, cut

PASSED_ON = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")  # of the environment


class RewardCode:
    """The process of a function. UserError if its file is another one than on record, or fails, or unless code is
    `allowed`: by the command line that began it, which reaches the ranks in their task and never through the store."""

    def __init__(self, reward: RewardConfig, allowed: bool) -> None:
        self.function = self.__name__ = str(reward.function)
        if not allowed:
            raise UserError(
                f"rewards: {self.function} is code, which runs with your rights; read it, then add --allow-code"
            )
        source, (path, _, name) = source_of(reward).decode(errors="replace"), self.function.rpartition(":")
        child = [sys.executable, "-P", str(Path(__file__).with_name("reward_child.py"))]
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self._process = Popen(child, env=env, stdin=PIPE, stdout=PIPE, encoding="utf8")
        self._ask({"path": path, "name": name, "source": source})

    def __call__(self, **columns: Any) -> list[float]:
        """The rewards, as TRL calls a function. UserError unless they are a finite number for each completion."""
        return self._ask({name: column for name, column in columns.items() if isinstance(column, list)})

    def _ask(self, request: dict[str, Any]) -> list[float]:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in answer:
            raise UserError(f"rewards: {self.function}: {cut(answer['error'])}")
        return list(answer["scores"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def source_of(reward: RewardConfig) -> bytes:
    """The file of a function. UserError if there is none, or if it is not the one on record."""
    path = Path(str(reward.function).rpartition(":")[0])
    return recorded_file(f"rewards: {path}", path, reward.sha256, "name a file of Python code")


def with_digests(step: TuneConfig) -> list[RewardConfig]:
    """The rewards of a step, those of functions with the sha256 of their files."""
    return [
        one.model_copy(update={"sha256": sha256(source_of(one)).hexdigest()}) if one.function else one
        for one in step.rewards
    ]


def check_code(steps: Sequence[TuneConfig], allowed: bool) -> None:
    """UserError for a function in the steps' rewards that fails to load or, unless code is `allowed`, for any."""
    for reward in (reward for step in steps for reward in step.rewards if reward.function):
        RewardCode(reward, allowed).close()
