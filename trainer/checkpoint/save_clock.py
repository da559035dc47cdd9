"""When the next checkpoint of a run is due."""

import time

from trainer.checkpoint.commits import checkpoint_seconds
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES, RuntimeConfig


class SaveClock:
    """When the next checkpoint is due: every `checkpoint_minutes` or at the interval that loses least, and after the
    steps that must be committed."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        between_failures: float = PRIOR_SECONDS_BETWEEN_FAILURES,
        traffic_seconds: float = 0.0,
    ) -> None:
        self.minutes, self.between_failures = runtime.checkpoint_minutes, between_failures
        self.traffic_seconds = traffic_seconds  # for which the machines cost as much as the traffic of a save
        self.keep_every = runtime.keep_every_steps
        self.last = time.monotonic()
        self.save_seconds = 1.0  # until the first save is measured
        self.upload_seconds = 0.0  # of the last save; 0 as long as none is complete, and until then none is due
        self.first = True

    @property
    def interval(self) -> float:
        """Seconds from one save to the next."""
        if self.minutes == "auto":
            return checkpoint_seconds(
                self.save_seconds, self.between_failures, self.upload_seconds, self.traffic_seconds
            )
        return 60 * self.minutes

    def due_now(self) -> bool:
        """Whether the interval since the last save has passed."""
        return time.monotonic() - self.last >= self.interval

    def due_at(self, step: int) -> bool:
        """Whether to commit the state after `step` updates, to keep it for good."""
        return bool(self.keep_every and step % self.keep_every == 0)

    def saved(self, seconds: float) -> None:
        """Record a save for which training waited `seconds`."""
        # The first save may wait until its memory is pinned (10 s for 19 GB), which later ones do not.
        cost = min(self.save_seconds, seconds) if self.first else seconds
        self.last, self.save_seconds, self.first = time.monotonic(), max(0.1, cost), False
