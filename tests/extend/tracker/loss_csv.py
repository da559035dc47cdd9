"""A tracker: the losses of a run as a CSV file, once its command ends."""

from pipelines.run.runs import read_run
from pipelines.run.trackers import Tracker
from pipelines.store.s3_store import open_store


class LossCsv(Tracker):
    def end(self, error: BaseException | None) -> str | None:
        rows = read_run(open_store(self.store), self.run).series
        losses = [f"{row['step']},{row['train/loss']}" for row in rows if "train/loss" in row]
        (self.home / f"{self.run}.csv").write_text("\n".join(["step,loss", *losses]) + "\n")
        return None  # or a warning for the user: what could not be sent
