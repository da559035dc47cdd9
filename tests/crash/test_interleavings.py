"""Random interleavings of runs and gcs with crashes, faults, damage, frozen machines and wrong clocks break no promise.

simulated.py names the promises. The machine also fails on each known mistake that a test puts back.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from simulated import DAY, Process, World, final_weights, simulate

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run import stage
from pipelines.store import ledger
from pipelines.store.layout import manifest_key
from pipelines.store.manifest import read_manifest
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer

SMALL = [
    "tokens.tokenizer=bytes", "tokens.shard_tokens=1024", "tokens.val_shards=1", "tokens.max_tokens=null",
    "model.vocab_size=257", "model.block_size=8", "train.batch_tokens=64", "runtime.processes=1", "runtime.device=cpu",
]  # fmt: skip
MACHINES = ("m1", "m2", "m3")
SKEWS = (0.0, 0.0, 2 * 3600.0, -9 * DAY, 9 * DAY)
# Operations before which a process is worth a stop.
PLACES = (
    "create .*COMMIT",
    "create .*COMMIT",
    "create .*MANIFEST",
    "create .*MANIFEST",
    "create .*claim",
    "create .*(shards|parts)/",
    "entries .*checkpoints/",
    "entries .*attempts/",
    "entries t[a-z]*/[^/]*/$",
    "delete",
    "(write|upload)",
    "wait",
)
AT_ONCE = 3  # processes
DAYS = (None, 0.0, 7.0)
memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("word " * 500)
    return load_recipe("smoke", [f"tokens.source={text}", *SMALL])


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)


class Interleavings(RuleBasedStateMachine):
    """Several processes on one store. In the end a fresh process finishes the run, and late ones change nothing."""

    recipe: Recipe
    world: World

    def __init__(self) -> None:
        super().__init__()
        folder = Path(tempfile.mkdtemp(prefix="skytrain-interleavings-", dir=memory))
        self.world = World(folder, self.recipe)
        self.frozen: set[str] = set()  # machines, until a fresh process has finished the run

    @initialize(keep_last=st.integers(1, 2), skew=st.sampled_from(SKEWS), count=st.sampled_from((0, 20, 65, 85, 105)))
    def begin(self, keep_last: int, skew: float, count: int) -> None:
        self.world.keep_last = keep_last
        first = self.world.run(MACHINES[0], skew)
        for _ in range(count):
            self.world.step(first)

    def of(self, choice: int) -> Process:
        living = self.active()
        return living[choice % len(living)]

    def active(self) -> list[Process]:
        return [one for one in self.world.living() if one.machine not in self.frozen]

    def begun(self, machine: str, days: float | None, skew: float = 0.0) -> Process:
        """A new process: gc of what is older than so many days, or without days a run."""
        return self.world.run(machine, skew) if days is None else self.world.gc(machine, skew, days)

    @precondition(lambda self: len(self.active()) < AT_ONCE)
    @rule(machine=st.sampled_from(MACHINES), days=st.sampled_from(DAYS), skew=st.sampled_from(SKEWS))
    def start(self, machine: str, days: float | None, skew: float) -> None:
        self.begun(machine, days, skew)

    @precondition(lambda self: self.active())
    @rule(choice=st.integers(0, AT_ONCE - 1), count=st.sampled_from((1, 2, 4, 10, 40)))
    def go_on(self, choice: int, count: int) -> None:
        process = self.of(choice)
        for _ in range(count):
            self.world.step(process)

    @precondition(lambda self: 0 < len(self.active()) < AT_ONCE)
    @rule(
        choice=st.integers(0, AT_ONCE - 1),
        place=st.sampled_from(PLACES),
        days=st.sampled_from(DAYS),
        seconds=st.sampled_from((3700.0, 25.0, 3700.0)),
        then=st.sampled_from(("end", *PLACES)) | st.just("end"),
        count=st.sampled_from((1, 4, 10, 40)),
    )
    def overtake(self, choice: int, place: str, days: float | None, seconds: float, then: str, count: int) -> None:
        """A process stops at a place until another one, on another machine, has come to a place or to its end."""
        first = self.of(choice)
        self.world.until(first, place, limit=150)
        self.world.now += seconds
        machine = next(one for one in (*MACHINES, "m4", "m5") if one not in {*self.frozen, first.machine})
        self.world.until(self.begun(machine, days), then, limit=300)
        for _ in range(count):
            self.world.step(first)

    @precondition(lambda self: self.frozen)
    @rule(choice=st.integers(0, 1))
    def thaw(self, choice: int) -> None:
        self.frozen.remove(sorted(self.frozen)[choice % len(self.frozen)])

    @precondition(lambda self: self.active())
    @rule(choice=st.integers(0, AT_ONCE - 1))
    def finish(self, choice: int) -> None:
        process = self.of(choice)
        for _ in range(300):
            if not self.world.step(process):
                return

    @precondition(lambda self: self.active())
    @rule(choice=st.integers(0, AT_ONCE - 1))
    def crash(self, choice: int) -> None:
        self.of(choice).crash()

    @precondition(lambda self: self.active())
    @rule(choice=st.integers(0, AT_ONCE - 1), fault=st.sampled_from(("refused", "lost", "twice")))
    def fault(self, choice: int, fault: str) -> None:
        process = self.of(choice)
        process.threads[-1 if not process.threads[-1].done else 0].fault = fault

    @precondition(lambda self: not self.world.living())  # a run does not read its own commits again
    @rule()
    def corrupt(self) -> None:
        self.world.corrupt()

    @precondition(lambda self: self.active() and len(self.frozen) < 2)
    @rule(choice=st.integers(0, AT_ONCE - 1))
    def freeze(self, choice: int) -> None:
        self.frozen.add(self.of(choice).machine)

    @rule(seconds=st.sampled_from((6.0, 25.0, 3700.0, 8 * DAY)))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.old |= seconds > 7 * DAY

    def teardown(self) -> None:
        try:
            if self.world.broken is None:
                self.conclude(self.world)
        finally:
            self.world.close()

    def conclude(self, world: World) -> None:
        world.finish(self.active())
        for _ in range(4):  # it may meet a record of a process that died, and leave with 75
            fresh = world.run("fresh")
            world.finish([fresh])
            if fresh.error is None:
                break
        assert fresh.error is None, f"a process alone ends with {fresh.error!r}"
        self.check_results(world)
        self.frozen.clear()
        world.finish(self.active())
        world.finish([world.gc("another", older_than_days=0.0)])
        world.check_manifests()
        assert world.broken is None, world.broken
        self.check_results(world)

    def check_results(self, world: World) -> None:
        tokens, train = (read_manifest(world.plain, world.prefixes[stage]) for stage in ("tokenize", "train"))
        assert tokens and train and len(tokens.files) == 3
        for manifest in (tokens, train):
            assert world.lost(manifest.prefix) is None
        key = f"{train.prefix}/{train.file('model.safetensors').key}"
        assert LocalStore.get(world.plain, key) == final_weights()


def explore(recipe: Recipe, examples: int, start: int) -> None:
    """Random interleavings; `start` is the seed. The modules that are loaded have a part in what hypothesis draws."""
    machine = type("Interleavings", (Interleavings,), {"recipe": recipe})
    run_state_machine_as_test(
        seed(start)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # no shrinking, which takes minutes: the failure lists the operations
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("start", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_interleavings_of_runs_and_gcs_break_no_promise(recipe: Recipe, start: int) -> None:
    explore(recipe, examples=60, start=start)


# --- the machine can fail


def a_commit_without_a_look_at_the_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpointer, "_check_current", lambda self, step: None)


def a_manifest_without_any_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger.Attempt, "begin_to_finish", lambda attempt: None)
    patch.setattr(
        stage, "commit", lambda store, made, _: store.create(manifest_key(made.prefix), made.to_json()) and made
    )


def a_create_that_replaces(patch: pytest.MonkeyPatch) -> None:
    def create(store: LocalStore, key: str, body: bytes) -> bool:
        LocalStore.put(store, key, body)
        return True

    patch.setattr(LocalStore, "create", create)


# --- interleavings that broke a promise once


@pytest.fixture
def world(recipe: Recipe) -> Iterator[World]:
    world = World(Path(tempfile.mkdtemp(prefix="skytrain-interleavings-", dir=memory)), recipe)
    yield world
    world.close()


def at_commit(world: World, step: int) -> Process:
    """A run that stops before the commit of this step."""
    run = world.run("m1")
    assert world.until(run, f"create .*step-{step:08d}-a0001/COMMIT")
    world.now += 3700
    return run


def test_a_commit_whose_files_gc_removed_is_taken_back(world: World) -> None:
    frozen = at_commit(world, 3)
    world.finish([world.gc("m2")])
    assert world.newest_sound() == 2
    world.finish([frozen])
    assert frozen.error is None and world.newest_sound() == 4  # it went on as attempt 3


def test_gc_spares_a_commit_that_is_made_before_it_takes_its_attempt(world: World) -> None:
    frozen, gc_elsewhere = at_commit(world, 3), world.gc("m2")
    assert world.until(gc_elsewhere, "create train/.*claim")
    assert world.until(frozen, "delete .*metrics")  # it has committed
    world.finish([gc_elsewhere])
    assert world.newest_sound() == 3


def test_gc_spares_an_artifact_whose_manifest_is_announced(world: World) -> None:
    frozen = world.run("m1")
    assert world.until(frozen, "create train/.*/MANIFEST")
    world.now += 9 * DAY
    world.finish([world.gc("m2", older_than_days=0.0)])
    world.finish([frozen])
    assert frozen.error is None and world.lost(world.prefixes["train"]) is None


def test_a_commit_of_a_dead_stale_attempt_displaces_no_sound_one(world: World) -> None:
    frozen = world.run("m1")
    assert world.until(frozen, "write .*step-00000003")
    frozen.threads[-1].fault = "refused"  # so its next commit is two steps after the last one
    assert world.until(frozen, "create .*step-00000004-a0001/COMMIT")
    world.now += 3700
    world.finish([world.gc("m2")])
    second = world.run("m2")
    assert world.until(second, "create .*step-00000003-a0003/COMMIT")
    assert world.until(frozen, "delete ")
    frozen.crash()  # after a commit whose files are gone
    world.finish([second])
    assert second.error is None and world.newest_sound() == 4


def test_two_runs_that_claim_at_once_have_an_attempt_each(world: World) -> None:
    runs = [world.run("m1"), world.run("m2")]
    for run in runs:
        assert world.until(run, "create train/.*claim")
    world.finish(runs)
    assert world.broken is None and [run.error for run in runs] == [None, None]


def test_a_process_alone_never_waits_for_itself(world: World) -> None:
    """It dies after each of its operations, on the same machine again and again."""
    for _ in range(40):
        run = world.run("m1")
        for _ in range(30):
            world.step(run)
        run.crash()
    last = world.run("m1")
    world.finish([last], limit=400)
    assert last.error is None


@pytest.mark.parametrize(
    ("mistake", "interleaving"),
    [
        (a_manifest_without_any_look, test_gc_spares_an_artifact_whose_manifest_is_announced),
        (a_commit_without_a_look_at_the_attempts, test_a_commit_whose_files_gc_removed_is_taken_back),
        (a_create_that_replaces, test_two_runs_that_claim_at_once_have_an_attempt_each),
    ],
    ids=lambda value: value.__name__,
)
def test_an_interleaving_finds_the_mistake_that_it_once_found(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    interleaving: Callable[[World], None],
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        interleaving(world)
