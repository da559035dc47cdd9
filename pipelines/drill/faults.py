"""The blows of a drill: of which kind, in which moment of a run, and which of them mean something here."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from pipelines.tracking.mlflow.tracker import tracking_is_off
from trainer.config import grad_accum_steps
from trainer.errors import UserError

# Where blows fall, and the stage that each place belongs to.
PLACES = {
    "tokenize": "tokenize",
    "manifest-tokenize": "tokenize",
    **dict.fromkeys(("first-step", "mid-step", "copy", "upload", "uploaded", "receipts", "committed"), "train"),
    "download": "train",
    "manifest-train": "train",
    "evaluate": "evaluate",
    "manifest-evaluate": "evaluate",
    "export": "export",
    "manifest-export": "export",
}
AT_THE_START = ("first-step", "download")  # of an attempt: a run that is under way does not pass them any more
OUTAGES = ("cut", "mlflow")  # the run goes on by itself, and past the place
LATEST_STEP = 0.8  # of all steps, so that those behind it are enough to reach any place

# Kinds, and the stages in which they mean something. An export that was asked to stop may just finish.
KINDS = {
    "kill": STAGES,
    "term": ("tokenize", "train", "evaluate"),
    "corrupt": ("train",),
    "rival": STAGES,
    "world": ("train",),
    "cut": STAGES,
    "mlflow": ("train", "evaluate"),
}


@dataclass
class Blow:
    """A blow as it is planned, and then what came of it."""

    kind: str
    place: str  # the moment in which it falls
    stage: str
    step: int = 0  # of training: it does not fall before so many steps are done
    fell: float | None = None  # unix seconds: when the run was dead, or the outage began
    attempt: int = 0
    at_step: int | None = None  # of training
    interrupted: bool = False  # the stage has to be attempted once more
    redone: int | None = None  # steps of training done twice
    seconds: float | None = None  # until work went on
    fault: str | None = None  # a promise that was broken at once


def schedule(kills: int, seed: int, kinds: Sequence[str], max_steps: int) -> list[Blow]:
    """`kills` blows in the order in which they will fall. Every kind and every place comes before one comes twice."""
    rng = random.Random(seed)

    def shuffled(items: Sequence[str]) -> list[str]:
        return rng.sample(list(items), len(items))

    blows: list[Blow] = []
    places, deck = shuffled(list(PLACES)), shuffled(kinds)
    for _ in range(kills):
        kind = deck.pop()
        deck = deck or shuffled(kinds)
        if not any(PLACES[place] in KINDS[kind] for place in places):
            places += shuffled(list(PLACES))
        place = next(place for place in places if PLACES[place] in KINDS[kind])
        places.remove(place)
        if kind in OUTAGES and passed_once(place) and any(b.place == place and b.kind in OUTAGES for b in blows):
            kind = "kill"  # a second outage would find nobody there
        steps = rng.randrange(max(1, int(LATEST_STEP * max_steps))) if PLACES[place] == "train" else 0
        blows.append(Blow(kind, place, PLACES[place], steps))
    return sorted(blows, key=falls)


def falls(blow: Blow) -> tuple[int, bool, bool, int]:
    """The order in which blows can fall: where an attempt comes by once, those behind an outage would miss it."""
    at_its_end = blow.place.startswith("manifest-")
    return STAGES.index(blow.stage), at_its_end, passed_once(blow.place) and blow.kind in OUTAGES, blow.step


def passed_once(place: str) -> bool:
    """Whether an attempt comes by a place a single time; it comes by most of training's with every step or save."""
    return PLACES[place] != "train" or place.startswith("manifest-")


def chosen(kinds: Sequence[str] | None, left_out: dict[str, str]) -> list[str]:
    """The kinds to draw from. UserError for one that there isn't, or not here."""
    for kind in kinds or ():
        if kind not in KINDS:
            raise UserError(f"--kinds {kind}: unknown; there are {', '.join(KINDS)}")
        if kind in left_out:
            raise UserError(f"--kinds {kind}: not here: {left_out[kind]}")
    return list(kinds or (kind for kind in KINDS if kind not in left_out))


def unavailable(store_uri: str, recipe: Recipe, processes: int) -> dict[str, str]:
    """The kinds of blows that can't fall here, and why."""
    import torch

    from trainer.parallel import device_kind

    reasons = {}
    if not store_uri.startswith("s3://"):
        reasons["cut"] = "the store is no S3 bucket"
    elif not s3_endpoint().startswith("http://"):
        reasons["cut"] = "only the way to a plain http endpoint (AWS_ENDPOINT_URL) can be cut from here"
    if tracking_is_off():
        reasons["mlflow"] = "tracking is off (SKYTRAIN_TRACKING)"
    try:
        grad_accum_steps(recipe.model, recipe.train, recipe.runtime, other_processes(processes))
    except UserError as error:
        reasons["world"] = str(error)
    if device_kind(recipe.runtime) == "cuda" and torch.cuda.device_count() < 2:
        reasons["world"] = "there is one GPU"
    return reasons


def other_processes(processes: int) -> int:
    """Another world size."""
    return 2 if processes == 1 else 1


def s3_endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
