"""The process of a reward: gets a function's source or a pattern, then one call a line as JSON, and answers likewise.

It runs as a file of its own, without our packages. The socket's descriptor is its argument.
"""

import asyncio
import inspect
import json
import math
import re
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    with socket.socket(fileno=int(sys.argv.pop())) as connection:
        connection.set_inheritable(False)  # what the function starts must not keep it open
        pipe, loop = connection.makefile("rw", encoding="utf8"), asyncio.new_event_loop()
    function: Any = None
    for line in pipe:
        request = json.loads(line)
        answer: dict[str, Any] = {"scores": []}
        try:
            if function is None:
                function = matching(**request) if "pattern" in request else loaded(**request)
            else:
                scores = function(**request)
                scores = list(loop.run_until_complete(scores) if inspect.isawaitable(scores) else scores)
                scores = answer["scores"] = [score if score is None else float(score) for score in scores]
                finite = all(score is None or math.isfinite(score) for score in scores)
                if len(scores) != len(request["completions"]) or not finite:
                    raise ValueError(f"gave {scores} for {len(request['completions'])} completions")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


def loaded(source: str, path: str, name: str) -> Any:
    """The function `name` of a source."""
    names: dict[str, Any] = {"__name__": "rewards", "__file__": path}
    exec(compile(source, path, "exec"), names)
    return names[name]


def matching(pattern: str, seconds: float) -> Callable[..., list[bool]]:
    """A reward of 1 for an answer that the pattern matches as a whole. The kernel ends this process by SIGVTALRM once
    one answer has taken this many seconds of processor time."""
    whole = re.compile(pattern, re.DOTALL)

    def matches(text: str) -> bool:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # until the next answer: waiting takes no processor time
        return bool(whole.fullmatch(text))

    return lambda completions, **_: [matches(completion[-1]["content"]) for completion in completions]


if __name__ == "__main__":
    main()
