"""Anomalies of a run, and the reaction to each.

- *A bad batch*: a loss or gradient that is not finite, or far above its own recent window. The run skips the update;
  weights and moments do not change.
- *Divergence*: the loss is not finite many times in a row. The run stops with a diagnosis; its commits stay.

All ranks judge the same numbers, from `World.agree`, and Health is a frozen value inside the commit. So every rank
decides alike, and a resumed run decides like an undisturbed one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from trainer.base.record import StoredRecord
from trainer.config.config import TrainConfig

OUTLIER_WINDOW = 128  # values that a z-score compares with, as in llm.c; with fewer values nothing is an outlier
NOT_FINITE_IN_A_ROW = 8  # bad batches do not come in such rows: by then the weights are ruined


@dataclass(frozen=True)
class Health(StoredRecord):
    """The recent numbers that a run judges the next ones by. Every commit holds them."""

    losses: tuple[float, ...] = ()  # the last OUTLIER_WINDOW finite ones
    grad_norms: tuple[float, ...] = ()  # the last OUTLIER_WINDOW finite ones
    skipped: int = 0  # updates not applied because of an anomaly
    not_finite: int = 0  # updates in a row, up to now, whose numbers were not finite

    def after(self, loss: float, grad_norm: float, config: TrainConfig) -> tuple["Health", str | None]:
        """The health after the next update, and the anomaly for which to skip that update, or None."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            anomaly = f"train/loss is {loss}, train/grad_norm {grad_norm}"
            return replace(self, skipped=self.skipped + 1, not_finite=self.not_finite + 1), anomaly
        loss_z, norm_z = config.skip_loss_zscore, config.skip_grad_norm_zscore
        bounded_loss, high_loss = bounded("train/loss", loss, self.losses[-OUTLIER_WINDOW:], loss_z)
        bounded_norm, high_norm = bounded("train/grad_norm", grad_norm, self.grad_norms, norm_z)
        outliers = ", ".join(outlier for outlier in (high_loss, high_norm) if outlier) or None
        health = replace(
            self,
            losses=(*self.losses, bounded_loss)[-OUTLIER_WINDOW:],
            grad_norms=(*self.grad_norms, bounded_norm)[-OUTLIER_WINDOW:],
            skipped=self.skipped + bool(outliers),
            not_finite=0,
        )
        return health, outliers

    @property
    def diverged(self) -> str | None:
        """The evidence that the run diverges, so that skipping single updates does not help; None if it is healthy."""
        if self.not_finite < NOT_FINITE_IN_A_ROW:
            return None
        return f"loss or gradient were not finite in {self.not_finite} updates in a row"


def bounded(name: str, value: float, window: Sequence[float], limit: float | None) -> tuple[float, str | None]:
    """`value`, limited to `limit` standard deviations above the mean of the window, and a description if it is above.

    The z-score is computed as in llm.c (-sl, -sg), over the values before. In llm.c an outlier enters the window
    unchanged, so that one of 1e30 hides all others for 128 steps. If outliers never entered the window, a run could
    skip updates forever. A limited outlier widens the window a little: the run accepts a lasting rise in the end.
    """
    if limit is None or len(window) < OUTLIER_WINDOW:
        return value, None
    centre = fmean(window)
    deviation = math.sqrt(fmean([(x - centre) ** 2 for x in window]))
    if deviation == 0 or value <= centre + limit * deviation:
        return value, None
    z = (value - centre) / deviation
    return centre + limit * deviation, f"{name} {value:.4g} is {z:.1f} standard deviations above its last {len(window)}"


def diagnosis(step: int, evidence: str, config: TrainConfig) -> str:
    """The message of a run that stops because it diverges: the evidence, and possible changes."""
    muon = f" and train.muon_learning_rate (now {config.muon_learning_rate:g})" if config.optimizer == "muon" else ""
    return (
        f"training diverged at step {step}: {evidence}. The last commit stays. "
        f"Possible remedies: a lower train.learning_rate (now {config.learning_rate:g}){muon}, "
        f"a longer train.warmup_steps (now {config.warmup_steps}), train.grad_clip 1.0 (now {config.grad_clip}), "
        f"train.skip_grad_norm_zscore 6 (now {config.skip_grad_norm_zscore}), "
        f"or other data around step {step}"
    )
