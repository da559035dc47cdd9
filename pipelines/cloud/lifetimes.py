"""How long spot machines lasted at each place, by the attempts of the runs that this store's users launched.

Before a place has a history, its machines are assumed to last PRIOR_SECONDS_BETWEEN_FAILURES. The history moves this
mean: it is that of a Poisson rate with a Gamma prior which counts as one loss, as in the ledger.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pipelines.cloud.catalog import Offer
from pipelines.tracking.account import AttemptAccount
from pipelines.tracking.forecast import TAKEN_AWAY
from pipelines.tracking.ledger import prior_seconds_between_failures
from pipelines.tracking.records import Machine
from pipelines.tracking.runs import UNREADABLE, find_run
from trainer.store import Store

MOST_RUNS = 5  # the last ones: an older market says less, and every run takes some requests

Market = tuple[str | None, str | None, str | None]  # cloud, region, GPUs of a node


@dataclass(frozen=True)
class Lived:
    """Spot machines of one market."""

    hours: float = 0.0  # of all of them together
    losses: int = 0

    def __add__(self, other: "Lived") -> "Lived":
        return Lived(self.hours + other.hours, self.losses + other.losses)


def lifetimes(store: Store) -> dict[Market, Lived]:
    """The spot machines that the last launched runs had, by market."""
    newest = sorted(store.entries("launches/"), key=lambda entry: entry.modified)[-MOST_RUNS:]
    names = [entry.key.removeprefix("launches/").removesuffix(".json") for entry in newest]

    def attempts(name: str) -> Iterable[AttemptAccount]:
        with suppress(*UNREADABLE):
            if run := find_run(store, name):
                return run.account.attempts
        return ()

    with ThreadPoolExecutor(MOST_RUNS) as readers:
        return lived(attempt for several in readers.map(attempts, names) for attempt in several)


def lived(attempts: Iterable[AttemptAccount]) -> dict[Market, Lived]:
    """The spot machines of these attempts, by market."""
    found: dict[Market, Lived] = {}
    for one in attempts:
        machine = one.machine
        if machine.spot and machine.region and not one.waited:
            market = (machine.cloud, machine.region, machine.accelerators)
            hours, lost = one.nodes * (one.ended - one.started) / 3600, one.state in TAKEN_AWAY
            found[market] = found.get(market, Lived()) + Lived(hours, int(lost))
    return found


def hours_between(offer: Offer, nodes: int, known: Mapping[Market, Lived]) -> float:
    """Mean time between interruptions on `nodes` of an offer: the loss of any node interrupts all of them."""
    prior = prior_seconds_between_failures(Machine(cloud=offer.cloud, spot=offer.spot)) / 3600
    seen = known.get((offer.cloud, offer.region, offer.accelerators), Lived()) if offer.spot else Lived()
    return (prior + seen.hours) / (1 + seen.losses) / nodes


def lifetime_notes(found: Iterable[Offer], known: Mapping[Market, Lived]) -> Iterator[str]:
    """A line for each market that has lost machines."""
    for offer in {(o.cloud, o.region, o.accelerators): o for o in found if o.spot}.values():
        seen = known.get((offer.cloud, offer.region, offer.accelerators), Lived())
        if seen.losses:
            yield (
                f"{offer.cloud}/{offer.region}: a spot node with {offer.accelerators} lasts "
                f"{hours_between(offer, 1, known):.1f} h ({seen.losses} lost in {seen.hours:.1f} h of this store)"
            )
