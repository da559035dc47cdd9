"""An engine: the plain one, with the largest weight after each step as a metric."""

from trainer.engines.plain import PlainEngine


class WatchedEngine(PlainEngine):
    def extra_metrics(self) -> dict[str, float]:
        return {"watched/largest_weight": max(float(weight.abs().max()) for weight in self.model.parameters())}
