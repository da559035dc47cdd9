"""A format of the export: all tensors in one file of NumPy."""

from pathlib import Path
from typing import Any

import numpy as np

from pipelines.run.formats.export_weights import Format, Weights


class Npz(Format):
    families = ("gpt2", "squared")  # without this line: all

    def write(self, weights: Weights, folder: Path) -> list[Path]:
        arrays: dict[str, Any] = {name: weights.tensor(name).numpy() for name in weights.shapes}
        np.savez(folder / "weights.npz", **arrays)
        return [folder / "weights.npz"]
