"""The stage train owns its ranks: they are part of its attempt, and end with it. The launcher is a stand-in."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.recipe.loader import load_recipe
from pipelines.run.nodes import launcher_process
from pipelines.run.nodes.ranks import Ranks, RankTask
from pipelines.run.stage import Work
from pipelines.run.stages import train
from pipelines.store.ledger import attempts
from pipelines.store.process_id import process_exists
from pipelines.store.records import Heartbeat
from trainer.config.errors import UserError


def sleeping(task: RankTask, folder: Path, _home: Path, grace: float, _address: Any) -> Ranks:
    return Ranks(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), task, folder, grace)


def without_us(beat: Heartbeat) -> Heartbeat:
    """As if the command had been killed."""
    return replace(beat, process=replace(beat.process, started="1"))


def test_the_ranks_are_part_of_their_attempt_and_end_with_it(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, started = work("train"), list[subprocess.Popen[bytes]]()

    def follow(work: Work, ranks: Ranks, *_: object) -> dict[str, Any]:
        started.append(ranks.launcher)
        with work.attempt:
            pass  # a heartbeat
        (seen,) = attempts(work.store, work.plan.prefix)
        assert process_exists(without_us(seen).process) is True
        raise RuntimeError("something breaks here")

    monkeypatch.setattr(train, "start_ranks", sleeping)
    monkeypatch.setattr(train, "follow", follow)
    with pytest.raises(RuntimeError, match="something breaks"):
        train.build(mine)
    assert started[0].poll() is not None
    (seen,) = attempts(mine.store, mine.plan.prefix)
    assert process_exists(without_us(seen).process) is False


def test_an_id_outside_the_vocabulary_ends_a_training_before_its_ranks_start(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = work("train")
    tokens = mine.inputs["tokenize"]
    mine.inputs["tokenize"] = replace(tokens, facts=tokens.facts | {"max_ids": {"val_000000.bin": 300}})
    monkeypatch.setattr(train, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(UserError, match=r"^val_000000.bin: its largest id is 300, but model.vocab_size is 257; use"):
        train.build(mine)


def test_a_model_too_large_for_the_memory_ends_a_training_on_a_cpu_before_its_ranks_start(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(work("train"), recipe=load_recipe("gpt2-774m", ["runtime.device=cpu"]))
    monkeypatch.setattr(train, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(train, "free_memory", lambda: 9_000_000_000)
    with pytest.raises(UserError, match=r"^train: .* parameters need at least 12.4 GB .* 9.0 GB are free"):
        train.build(mine)
    monkeypatch.setattr(train, "free_memory", lambda: 13_000_000_000)
    train.check_memory(mine.recipe, 1)
    with pytest.raises(UserError, match=r"18\.\d GB"):
        train.check_memory(mine.recipe, 2)


def test_a_launcher_that_cannot_import_its_program_says_so(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_process, "LAUNCHER_MODULE", "pipelines.run.nodes.absent")
    launcher_process.prepare_launcher()
    launcher_process._prepared[-1][0].wait()
    with pytest.raises(RuntimeError, match=r"(.|\n)*No module named pipelines.run.nodes.absent"):
        train.build(work("train"))
