"""What the stages do around their tools: who is told what, and when they hear that they are to end.

torchrun, the model and the evaluation are stand-ins; work, attempts and stores are the real ones.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import save_file

from pipelines.artifacts.manifest import ArtifactPlan, File, Manifest, upload
from pipelines.nodes.head import NodeAddress
from pipelines.recipe import Recipe, TokensConfig, load_recipe
from pipelines.show.console import TerminalScreen
from pipelines.stage import Work
from pipelines.stages import evaluate, export, tokenize, train
from pipelines.tracking.ledger import attempts, claim, is_there
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.records import Billing, Heartbeat
from trainer.errors import Interrupted, UserError
from trainer.model import GPT
from trainer.process import StopSignal
from trainer.shards import read_shard
from trainer.store import LocalStore

SMALL = [
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=8", "model.vocab_size=257",
    "tokens.tokenizer=bytes", "train.batch_tokens=64", "runtime.micro_batch_size=8",
    "runtime.processes=1", "runtime.device=cpu",
]  # fmt: skip


class Asked(StopSignal):
    """The tests' own signals stay pytest's."""

    def __init__(self) -> None:
        self.asked = False


class Heard:
    """A tracker and a screen that remember what they were told."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.again: list[int] = []
        self.tagged: dict[str, Any] = {}

    def metrics(self, stage: str, step: int, time: float, values: dict[str, float], again: bool = False) -> None:
        self.points.append((step, values))
        if again:
            self.again.append(step)

    def tags(self, stage: str, tags: dict[str, Any]) -> None:
        self.tagged |= tags

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("smoke", SMALL)


@pytest.fixture
def work(recipe: Recipe, tmp_path: Path) -> Callable[[str], Work]:
    def of(name: str) -> Work:
        store = LocalStore(tmp_path / "store")
        plan = ArtifactPlan(name, "tiny", {"stage": name})
        attempt = claim(store, plan.prefix, "tiny-1", name, 1, Billing())
        assert attempt
        model = GPT(recipe.model)
        model.initialize(0)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        inputs = {}
        (tmp_path / "val_000000.bin").touch()
        for made, path in (("tokenize", tmp_path / "val_000000.bin"), ("train", tmp_path / "model.safetensors")):
            its = ArtifactPlan(made, "tiny", {"stage": made, "of": "an input"})
            file, facts = upload(store, its.prefix, 1, path), {"shards": {path.name: 100}}
            inputs[made] = Manifest(
                made, "tiny", its.fingerprint, its.identity, {}, (file,), {}, facts, "tiny-1", 1, 1.0
            )
        tracker = Tracker(tmp_path / "tracking", "tiny-1", default_uri="sqlite:///unused.db")
        return Work(
            recipe, plan, inputs, store, tmp_path / "home", attempt, tracker, TerminalScreen(quiet=True), Asked()
        )

    return of


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_TRACKING", "off")


# --- train


def sleeping(*_: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def without_us(beat: Heartbeat) -> Heartbeat:
    """As if the command had been killed."""
    return replace(beat, process=replace(beat.process, started="1"))


def test_the_ranks_are_part_of_their_attempt_and_end_with_it(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, started = work("train"), []

    def follow(work: Work, torchrun: subprocess.Popen[bytes]) -> dict[str, Any]:
        started.append(torchrun)
        with work.attempt:
            pass  # a heartbeat
        (seen,) = attempts(work.store, work.plan.prefix)
        assert is_there(without_us(seen)) is True
        raise RuntimeError("something breaks here")

    monkeypatch.setattr(train, "start_torchrun", sleeping)
    monkeypatch.setattr(train, "follow", follow)
    with pytest.raises(RuntimeError, match="something breaks"):
        train.build(mine)
    assert started[0].poll() is not None
    (seen,) = attempts(mine.store, mine.plan.prefix)
    assert is_there(without_us(seen)) is False


def test_a_failed_checkpoint_is_a_warning_and_in_the_heartbeat(work: Callable[[str], Work]) -> None:
    mine = work("train")
    mine.screen = cast(TerminalScreen, heard := Heard())
    train.note_event(mine, {"event": "checkpoint_failed", "step": 1200, "reason": "OSError(28)"})
    assert heard.warnings == ["checkpoint of step 1,200 failed (OSError(28)); training goes on"]
    assert mine.attempt.latest.progress.checkpoint_failed == 1200


def test_a_step_that_is_done_again_in_one_attempt_is_told_once(work: Callable[[str], Work]) -> None:
    mine = work("train")
    mine.tracker = cast(Tracker, heard := Heard())
    tracked: dict[str, int] = {}
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (2, 4.1), (3, 3.9), (4, 3.0)):  # it turned back at 3
        train.track_row(mine, {"step": step, "time": 1.0, "train/loss": loss, "data/digest": 7}, tracked)
    assert heard.points == [(step, {"train/loss": loss}) for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (4, 3.0))]


def test_of_what_an_earlier_attempt_has_told_nothing_is_told_again_not_even_step_0(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = work("train")
    mine.tracker = cast(Tracker, heard := Heard())
    clock = {"phases": {}, "phase": "evaluate"}
    rows = [{"event": "row", "step": step, "time": 1.0, "val/loss": 5.0, **clock} for step in (0, 15, 30)]
    monkeypatch.setattr(train, "events", lambda *_: iter(rows))
    monkeypatch.setattr(train, "track_committed", lambda _: {"val/loss": 15})
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    train.follow(mine, done)
    assert heard.points == [(30, {"val/loss": 5.0})] and heard.again == []


START = {
    "event": "start",
    "step": 0,
    "parameters": 7,
    "world_size": 1,
    "device": "cpu",
    "precision": "fp32",
    "engine": "eager, on cpu; there is no CUDA device",
    "micro_batch_size": 1,
    "micro_batch_why": "micro-batches of 1, as configured",
}


def test_how_a_run_is_carried_out_and_why_is_said_and_tagged(work: Callable[[str], Work]) -> None:
    mine = work("train")
    mine.tracker, mine.screen = cast(Tracker, heard := Heard()), cast(TerminalScreen, heard)
    train.note_event(mine, START)
    train.note_event(mine, {"event": "slow", "step": 1, "reason": "torch multiplies"})
    assert heard.notes == [f"  7 parameters, 1 x cpu, fp32, {START['micro_batch_why']}; {START['engine']}"]
    assert heard.warnings == ["slower than it could be: torch multiplies"]
    assert {name: heard.tagged[name] for name in ("engine", "precision", "micro_batch")} == {
        "engine": START["engine"],
        "precision": "fp32",
        "micro_batch": START["micro_batch_why"],
    }


def test_after_a_rollback_a_step_is_told_again_and_counts_as_redone(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = work("train")
    mine.tracker = cast(Tracker, heard := Heard())
    clock = {"phases": {"setup": 2.0, "train": 1.0}, "phase": "train"}
    losses = ((1, 5.0), (2, 4.0), (3, 9.0), (2, 4.1), (3, 3.9), (4, 3.0))
    said: list[dict[str, Any]] = [
        {"event": "row", "step": step, "time": 1.0, "train/loss": loss, "perf/tokens_per_second": 9.0, **clock}
        for step, loss in losses
    ]
    said.insert(3, {"event": "rollback", "step": 3, "to": 1, "reason": "it rose"})
    said.append({"event": "checkpoint", "step": 4, "seconds": 0.1, "bytes": 7})
    monkeypatch.setattr(train, "events", lambda *_: iter([START, *said]))
    monkeypatch.setattr(train, "track_committed", lambda _: {})
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    train.follow(mine, done)
    assert [(step, values["train/loss"]) for step, values in heard.points] == list(losses)
    assert heard.again == [2, 3]
    assert "from step 3 to 1; of two points at a step the later one counts" in heard.tagged.values()
    told = mine.attempt.latest.progress
    assert (told.steps_done, told.steps_redone, told.lowest_step, told.highest_step) == (6, 2, 0, 4)
    assert (told.resumed_from, told.step, told.committed_step) == (0, 4, 4)
    assert mine.ranks == (clock["phases"], "train")


# --- tokenize


@pytest.fixture
def share(tmp_path: Path) -> Callable[..., tokenize.Share]:
    """The share of some parts of four files, on a node with a folder and a store of its own."""
    for name in range(4):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 2000)
    config = TokensConfig(
        source=f"{tmp_path}/*.txt", tokenizer="bytes", shard_tokens=1500, max_tokens=13_001, val_shards=2, parts=3
    )
    plan = ArtifactPlan("tokenize", "files", {"stage": "tokenize"})

    def of(parts: range, store: Path, attempt: int = 1, check: Callable[[], None] = lambda: None) -> tokenize.Share:
        kept, folder = LocalStore(store), store.with_name(f"{store.name} scratch {attempt} {parts.start}")
        folder.mkdir()
        put = partial(upload, kept, plan.prefix, attempt)
        return tokenize.Share(config, plan, kept, parts, folder, put, check, lambda said: None)

    return of


def shards_in(store: Path) -> dict[str, list[int]]:
    return {path.name: read_shard(path).tolist() for path in sorted(store.glob("tokens/*/a*/*.bin"))}


def test_the_shards_of_a_part_are_those_of_its_files_alone_and_share_max_tokens(
    share: Callable[..., tokenize.Share], tmp_path: Path
) -> None:
    *_, tally = tokenize.make(share(range(3), tmp_path / "store"))
    assert tally == tokenize.Tally(12_336, 12_336)  # parts 1 and 2 have one file each, of 4,001 tokens
    shards = shards_in(tmp_path / "store")
    assert list(shards) == sorted(shards) and {name: len(tokens) for name, tokens in shards.items()} == {
        **{f"train_00_{n:06d}.bin": size for n, size in enumerate([1334])},
        **{f"train_{part:02d}_{n:06d}.bin": size for part in (1, 2) for n, size in enumerate([1500, 1500, 1001])},
        **{f"val_00_{n:06d}.bin": 1500 for n in range(2)},
    }
    first = shards["val_00_000000.bin"] + shards["val_00_000001.bin"] + shards["train_00_000000.bin"]
    assert first == [256, *b"0 " * 2000, 256, *b"3 " * 166]


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_shards_are_the_same_whichever_node_makes_a_part_and_however_often_it_is_interrupted(
    nodes: int, share: Callable[..., tokenize.Share], tmp_path: Path
) -> None:
    *_, whole = tokenize.make(share(range(3), tmp_path / "one"))
    new = []
    for attempt, most in ((1, 1), (2, 2), (3, 99)):  # each node makes so many shards
        for rank in range(nodes):
            mine = share(tokenize.parts_of(NodeAddress(rank, nodes), 3), tmp_path / "several", attempt)
            with closing(cast(Generator[tokenize.Tally], tokenize.make(mine))) as tallies:
                *_, last = itertools.islice(tallies, most + 1)
            new.append(last.new)
    assert sum(new) == whole.new  # no shard was made twice
    assert shards_in(tmp_path / "several") == shards_in(tmp_path / "one")
    again = share(range(3), tmp_path / "several", 4)
    assert list(tokenize.make(again)) == [tokenize.Tally(whole.there, 0)]
    for path in tmp_path.glob("*.txt"):
        path.unlink()  # what is finished is not even opened
    assert list(tokenize.make(share(range(3), tmp_path / "several", 5))) == [tokenize.Tally(whole.there, 0)]


def test_a_node_looks_at_every_document_whether_it_is_to_leave(
    share: Callable[..., tokenize.Share], tmp_path: Path
) -> None:
    def check() -> None:
        raise Interrupted("the head is gone")

    with pytest.raises(Interrupted):
        list(tokenize.make(share(range(3), tmp_path / "store", check=check)))
    assert shards_in(tmp_path / "store") == {}


def test_a_finished_artifact_without_its_manifest_is_made_anew(
    share: Callable[..., tokenize.Share], tmp_path: Path
) -> None:
    def ended(number: int, state: str) -> tokenize.Tally:
        mine = share(range(3), tmp_path / "store", number)
        attempt = claim(mine.store, mine.plan.prefix, "tiny-1", "tokenize", number, Billing())
        assert attempt
        with attempt:
            tokenize.forget_finished(mine.store, mine.plan)
            *_, tally = tokenize.make(mine)
            attempt.update(state=state)
        return tally

    assert ended(1, "interrupted").new == 12_336
    assert ended(2, "done").new == 0
    assert ended(3, "interrupted").new == 12_336  # a shard was damaged, and the manifest removed as advised
    assert ended(4, "interrupted").new == 0  # what attempt 3 has made anew is kept


@pytest.mark.parametrize(
    ("parts", "tokens", "said"),
    [
        (2, {"train_01_000000": 1500}, r"val_shards: 2 shard\(s\) .* of the first of 2 parts, and it has 0 tokens"),
        (2, {"val_00_000000": 1500, "val_00_000001": 9, "train_01_000000": 1500}, "and it has 1,509 tokens: use fewer"),
        (2, {"val_00_000000": 1500, "val_00_000001": 1500, "train_01_000000": 1500}, None),
        (2, {"val_00_000000": 1500, "val_00_000001": 1500}, "no training sequence"),
        (1, {"val_000000": 1500, "val_000001": 9}, "no training sequence"),
    ],
)
def test_as_much_is_held_out_as_was_asked_for(
    recipe: Recipe, parts: int, tokens: dict[str, int], said: str | None
) -> None:
    config = recipe.tokens.model_copy(update={"parts": parts, "shard_tokens": 1500, "val_shards": 2})
    receipts = [tokenize.ShardReceipt(File(f"{name}.bin", "", 0, ""), n, 1, 0) for name, n in tokens.items()]
    with pytest.raises(UserError, match=said) if said else nullcontext():
        tokenize.check_split(recipe.model_copy(update={"tokens": config}), receipts)


# --- evaluate, export


def test_an_evaluation_hears_a_stop_between_two_batches(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_stop_is_heard_before_the_next_long_thing_begins(
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
