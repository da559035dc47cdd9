"""A store that does not answer, as its requests report it to the log."""

from dataclasses import dataclass

LOGGER = "pipelines.artifacts.store"


@dataclass(frozen=True)
class Outage:
    """A request that is being repeated. Seconds by the monotonic clock."""

    what: str  # "put s3://bucket/prefix/key"
    cause: str  # of the last failure
    began: float
    time_limit_s: float
    ended: float | None = None  # None: it is still being repeated
    answered: bool = False

    def text(self, now: float) -> str:
        """One line for people, at `now`; the times come first, because a narrow terminal cuts the end."""
        waited = f"{now - self.began:.0f} s"
        if self.ended is not None:
            return f"{self.what}: {'answered' if self.answered else 'given up'} after {waited}"
        left = max(0.0, self.began + self.time_limit_s - now)
        return f"{waited} without an answer, {left:.0f} s left: {self.what}: {self.cause}; trying again"
