"""What the stage tune leaves for its ranks: their task, and files in the attempt's folder."""

from dataclasses import dataclass

from pipelines.run.nodes.ranks import SavingTask

ROWS, HELD_OUT = "rows", "held_out.json"  # what the ranks read, as `datasets` stores it and as JSON
TUNED = "tuned"  # folder of the result, which the rank writes; its facts come last


@dataclass(frozen=True, kw_only=True)
class TuneTask(SavingTask):
    """The task of the ranks that tune a model."""

    weights: str  # its folder on this node
    step: str  # name
    allow_code: bool = False  # whether the recipe's own code may run
