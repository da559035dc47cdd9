"""A tracker: the losses of a run as a CSV file, once its command ends."""

from pathlib import Path

from pipelines.store.runs import read_run
from pipelines.store.s3_store import open_store


class LossCsv:
    def __init__(self, store: str, run: str, home: Path) -> None:
        self.store, self.run, self.path = store, run, home / f"{run}.csv"

    def start(self) -> None:
        """Nothing to do before the end."""

    def close(self) -> str | None:
        rows = read_run(open_store(self.store), self.run).series
        losses = [f"{row['step']},{row['train/loss']}" for row in rows if "train/loss" in row]
        self.path.write_text("\n".join(["step,loss", *losses]) + "\n")
        return None  # or a line for the user: what could not be sent
