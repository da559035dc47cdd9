"""A run is read from the store alone, and once."""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from pipelines.recipe import load_recipe
from pipelines.show.page import run_shown
from pipelines.stage import STAGES, plans_of, run_name
from pipelines.tracking.compare import compare
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing
from pipelines.tracking.runs import Run, record
from trainer.store import Entry, LocalStore


class CountingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listings: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def entries(self, prefix: str) -> list[Entry]:
        self.listings[prefix] += 1
        return super().entries(prefix)

    def get(self, key: str) -> bytes | None:
        self.reads[key] += 1
        return super().get(key)


def test_everything_that_is_shown_of_a_run_takes_one_look_at_each_of_its_objects(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "store")
    recipe = load_recipe("smoke", ["tokens.source=hf://datasets/a/b", f"tokens.revision={'a' * 40}"])
    plans, before = plans_of(recipe), plans_of(recipe.model_copy(update={"seed": 1}))
    run = run_name(plans)
    first = record(store, run, recipe, plans | {"evaluate": replace(before["evaluate"], label="earlier")}, "export")
    made = record(store, run, recipe, plans, "export")
    prefixes = {first.prefixes["evaluate"], *made.prefixes.values()}
    assert len(prefixes) == len(STAGES) + 1
    for prefix in prefixes:
        for number in (1, 2):
            attempt = claim(
                store, prefix, run, prefix.partition("/")[0].replace("tokens", "tokenize"), number, Billing()
            )
            assert attempt
            with attempt:
                pass
    store.listings.clear()
    store.reads.clear()

    snapshot = Run(store, made)
    assert len(snapshot.account.attempts) == 2 * len(prefixes) and len(snapshot.attempts["evaluate"]) == 2
    shown, compared = run_shown(snapshot), compare(snapshot, snapshot)
    assert shown["account"]["total"] == asdict(snapshot.account.total) and not compared.differs
    assert snapshot.summary.state == snapshot.state
    heartbeats = [f"{prefix}/attempts/{number:04d}/heartbeat.json" for prefix in prefixes for number in (1, 2)]
    manifests = [f"{prefix}/MANIFEST.json" for prefix in made.prefixes.values()]
    assert store.reads == Counter([*heartbeats, *manifests])
    assert {prefix: n for prefix, n in store.listings.items() if "/attempts/" in prefix} == {
        f"{prefix}/attempts/": 1 for prefix in prefixes
    }
    assert set(store.listings.values()) == {1}
