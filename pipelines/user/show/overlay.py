"""Curves of other trainers for the report page: the `main.log` of llm.c.

A line is a step and its measurements: `s:250 tel:6.1565` (val loss), `s:250 trl:6.1 lr:0.0002 norm:1.2`
(training), `s:250 eval:0.2437` (HellaSwag, completion style, by mean loss: the same as our acc_norm). The log
has neither time nor tokens: the user gives the tokens of a step.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import UserError

LLMC_BATCH_TOKENS = 524_288  # of llm.c's 124M, 350M and 774M; 1558M has 1,048,576
METRICS = {
    "tel": "val/loss",
    "trl": "train/loss",
    "lr": "train/lr",
    "norm": "train/grad_norm",
    "eval": "eval/hellaswag_acc_norm",
}


@dataclass(frozen=True)
class Overlay:
    """A run of llm.c, from its log."""

    name: str
    batch_tokens: int
    series: dict[str, dict[int, float]]  # metric -> step -> value


def read_overlay(option: str) -> Overlay:
    """Read `main.log`, or `main.log@1048576` with the tokens of a step. UserError if it is not one."""
    name, at, tokens = option.rpartition("@")
    if not (at and tokens.isdigit() and int(tokens)):
        name, tokens = option, str(LLMC_BATCH_TOKENS)
    try:
        lines = Path(name).read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--overlay {name}: cannot be read ({error}); name a main.log of llm.c, FILE or FILE@TOKENS_PER_STEP"
        ) from error
    series: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        for metric, step, value in measurements_of(line, f"--overlay {name}: line {number}"):
            # llm.c appends when it resumes: the last line of a repeated step counts.
            series.setdefault(metric, {})[step] = value
    if not series:
        raise UserError(f"--overlay {name}: contains no steps; a main.log of llm.c has lines like 's:250 tel:6.1565'")
    return Overlay(Path(name).name, int(tokens), series)


def measurements_of(line: str, where: str) -> list[tuple[str, int, float]]:
    """(metric, step, value) of one line, without values that are not finite, as in our series."""
    try:
        fields = dict(word.split(":", 1) for word in line.split())
        step = int(fields.pop("s")) if fields else 0
        values = [(METRICS[key], step, float(value)) for key, value in fields.items() if key in METRICS]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{where}: {line[:60]!r} is not a line of llm.c; a line looks like 's:250 tel:6.1565'"
        ) from error
    return [each for each in values if math.isfinite(each[2])]
