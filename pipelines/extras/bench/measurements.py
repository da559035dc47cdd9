"""The measured figures that code and documents share: `measurements.yaml` and its only reader.

Each figure has its value, unit, machine, torch, date, command, spread and source. A changed figure needs no other edit
than that file and `make docs`.
"""

from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

OURS = "skytrain"


class Record(BaseModel):
    """A strict, frozen part of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Size(Record):
    """A model, and the batch of its measurements."""

    family: str = "gpt2"
    parameters: float
    n_layer: int
    n_embd: int
    batch_tokens: int
    micro_batch_size: int


class Setup(Record):
    """The circumstances of a measurement."""

    machine: str
    torch: str | None  # None: no torch in it
    date: str  # YYYY-MM
    command: str
    spread: str | None = None  # None: not recorded
    source: str


class Speed(Setup):
    """The speed of whole optimizer steps."""

    size: str
    trainer: str
    engine: str | None = None  # of our trainer
    precision: str
    recompute: bool = False
    gpus: str  # "H200:4", on one node
    batch_tokens: int | None = None  # None: the size's
    tokens_per_second: int  # all GPUs together
    mfu: float | None = None
    memory_gib: float | None = None  # peak allocated
    plan: bool = False  # the planner uses it
    sustained: bool = False  # for a minute and more, so on GPUs as warm as a run's
    main: bool = False  # a row of README's table

    @property
    def name(self) -> str:
        """The trainer, or for ours the engine with its precision and options."""
        if self.trainer != OURS:
            return self.trainer
        return f"{self.engine}, {self.precision}" + (", recompute" if self.recompute else "")

    @property
    def step(self) -> str:
        """Our engine, with its precision if that is fp8."""
        return f"{self.engine}" if self.precision == "bf16" else f"{self.engine} {self.precision}"


class Figure(Setup):
    """One measured number."""

    what: str
    value: float
    unit: str


class Measurements(Record):
    """The whole file."""

    sizes: dict[str, Size]
    setups: dict[str, Setup]
    speeds: tuple[Speed, ...]
    figures: dict[str, Figure]

    def value(self, name: str) -> float:
        return self.figures[name].value

    def speed(self, size: str, name: str) -> Speed | None:
        """The speed with this `Speed.name` on one H200; None if it was not measured."""
        matches = (s for s in self.speeds if (s.size, s.name, s.gpus) == (size, name, "H200:1"))
        return next(matches, None)


@cache
def measurements() -> Measurements:
    """The whole file, read once. pydantic's ValidationError for a wrong field."""
    text = resources.files("pipelines.extras.bench").joinpath("measurements.yaml").read_text(encoding="utf8")
    values: dict[str, Any] = yaml.safe_load(text)
    return TypeAdapter(Measurements).validate_python(values)
