"""What of a machine's time attempts have billed."""

import math
import os
from pathlib import Path

from pipelines.store.process_id import process_began
from pipelines.store.records import HEARTBEAT_SECONDS
from trainer.base.process import since_boot, steady_time
from trainer.config.errors import UserError


class Meter:
    """The time up to which attempts have billed this machine, and the phase that follows.

    A file of the machine, named by SKYTRAIN_METER: unix seconds, the phase after them, and the same time in seconds
    since boot. The set-up of the machine creates it: the next attempt's bill begins there, with "provision".
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def here(cls) -> "Meter":
        """The meter of this machine. UserError if the folder in SKYTRAIN_METER does not exist."""
        named = os.environ.get("SKYTRAIN_METER")
        if named and not Path(named).parent.is_dir():
            raise UserError(f"SKYTRAIN_METER: {named}: its folder does not exist; make it, or name another file")
        return cls(Path(named) if named else None)

    def read(self) -> tuple[float, str] | None:
        """The end of the last bill, and the phase that began then. UserError for a damaged file."""
        if self.path is None or not self.path.exists():
            return None
        if self.path.is_dir():
            raise UserError(f"SKYTRAIN_METER: {self.path}: is a folder; name a file")
        try:
            fields = self.path.read_text().split()
            since = float(fields[0])
            if not 0.0 <= since < math.inf:  # nor NaN, with which every sum of the bill would be NaN
                raise ValueError(fields[0])
            if len(fields) > 2:
                since = steady_time() - (since_boot() - float(fields[2]))
            return since, fields[1] if len(fields) > 1 else "provision"
        except (ValueError, IndexError) as error:
            raise UserError(f"SKYTRAIN_METER: {self.path}: holds no unix seconds; remove it") from error

    def forward(self, time: float, phase: str) -> None:
        """Record that the machine is billed up to `time` (unix seconds), and the phase after it."""
        if self.path is not None:
            fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            fresh.write_text(f"{time} {phase} {since_boot() - steady_time() + time}\n")
            fresh.replace(self.path)

    def unbilled(
        self, now: float, idle: float = 0.0, billed: float = 0.0, since: float | None = None
    ) -> dict[str, float]:
        """Seconds by phase that no attempt has billed yet. This process spent `idle` seconds of them waiting.

        Without a meter they begin at `since`, and there are none without that.
        An attempt has billed the time up to `billed`, even if the file lags behind: a kill may come between a
        heartbeat and the meter.
        """
        reading = self.read() or (None if since is None else (since, "start"))
        if reading is None or max(reading[0], billed) >= now:
            return {}
        unbilled_since, phase = reading if reading[0] >= billed else (billed, "lost")
        began = min(now, max(unbilled_since, process_began()))
        phases = {phase: began - unbilled_since}
        if phase == "lost":  # the attempt may have worked until just before its next heartbeat; then nothing ran
            lost = min(began - unbilled_since, HEARTBEAT_SECONDS)
            phases = {"lost": lost, "idle": began - unbilled_since - lost}
        waited = min(idle, now - began)
        phases["idle"] = phases.get("idle", 0.0) + waited
        phases["start"] = phases.get("start", 0.0) + now - began - waited
        return {phase: seconds for phase, seconds in phases.items() if seconds > 0}
