"""The process of a reward function: gets the source, then one call a line as JSON on stdin, and answers on stdout.

It runs as a file of its own, without our packages. What the function prints goes to stderr.
"""

import json
import math
import sys
from typing import Any


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    function: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"scores": []}
        try:
            if function is None:
                names: dict[str, Any] = {"__name__": "rewards", "__file__": request["path"]}
                exec(compile(request["source"], request["path"], "exec"), names)
                function = names[request["name"]]
            else:
                answer["scores"] = scores = [float(score) for score in function(**request)]
                if len(scores) != len(request["completions"]) or not all(map(math.isfinite, scores)):
                    raise ValueError(f"gave {scores} for {len(request['completions'])} completions")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
