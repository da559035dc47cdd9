"""The stages evaluate and export: they leave soon after a stop. The evaluation and the export are stand-ins."""

from collections.abc import Callable
from typing import Any

import pytest

from pipelines.stage import Work
from pipelines.stages import evaluate, export
from trainer.errors import Interrupted


def test_an_evaluation_stops_between_two_batches(work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, done = work("evaluate"), []

    def validation_loss(*arguments: Any, on_batch: Callable[[], None]) -> float:
        for batch in range(10):
            on_batch()
            done.append(batch)
            mine.stop.asked = batch == 3
        return 1.0

    monkeypatch.setattr("trainer.evaluate.validation_loss", validation_loss)
    with pytest.raises(Interrupted):
        evaluate.build(mine)
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("place", ["evaluate", "export"])
def test_a_stop_takes_effect_before_the_next_long_operation(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    mine, begun = work(place), []
    module = {"evaluate": evaluate, "export": export}[place]

    def stop_here(name: str) -> None:
        mine.stop.asked = True

    monkeypatch.setattr("trainer.evaluate.validation_loss", lambda *arguments, on_batch: 1.0)
    monkeypatch.setattr(module, "failpoint", stop_here)
    for name in ("continue_text", "reload_difference"):
        monkeypatch.setattr(module, name, lambda *arguments, **options: begun.append(1), raising=False)
    with pytest.raises(Interrupted):
        module.build(mine)
    assert not begun
