"""The faults of a drill: their kinds, their failpoints, and the kinds that are possible on this machine."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from pipelines.tracking.mlflow.settings import tracking_is_off
from trainer.amounts import check_shares
from trainer.errors import UserError

# The failpoints of a drill, and the stage of each.
FAILPOINTS = {
    "tokenize": "tokenize",
    "manifest-tokenize": "tokenize",
    **dict.fromkeys(("first-step", "mid-step", "copy", "upload", "uploaded", "receipts", "committed"), "train"),
    "download": "train",
    "scores": "train",
    "manifest-train": "train",
    "evaluate": "evaluate",
    "manifest-evaluate": "evaluate",
    "export": "export",
    "manifest-export": "export",
}
IN_EVALUATIONS = ("scores",)  # while a run trains: only where evaluate.every is set
AT_THE_START = ("first-step", "download")  # of an attempt: a run passes them once, before its other steps
# The run continues by itself, past the failpoint.
OUTAGES = ("cut", "mlflow", "odd", "twice", "eio", "gc")
TAKEOVERS = ("rival", "frozen")  # another machine takes over
LATEST_STEP = 0.8  # of all steps: the steps after it are enough to reach any failpoint

# The kinds, and the stages where each has an effect. An export that was asked to stop may simply finish.
KINDS = {
    "kill": STAGES,
    "term": ("tokenize", "train", "evaluate"),
    "corrupt": ("train",),
    "rival": STAGES,
    "world": ("train",),
    "cut": STAGES,
    "mlflow": ("train", "evaluate"),
    "odd": STAGES,
    "twice": STAGES,
    "eio": STAGES,
    "gc": STAGES,
    "frozen": ("train",),
    "clock": STAGES,
}
USUAL = ("kill", "term", "corrupt", "rival", "world", "cut", "mlflow")  # without --kinds
ON_S3 = ("cut", "odd", "twice")  # made by a proxy in front of the bucket


@dataclass
class Fault:
    """A planned fault, and its result."""

    kind: str
    failpoint: str
    stage: str
    step: int = 0  # of training: no injection before this step
    injected_at: float | None = None  # unix seconds: the run was dead, or the outage began
    attempt: int = 0
    at_step: int | None = None  # of training
    interrupted: bool = False  # the stage needs another attempt
    redone: int | None = None  # steps of training done twice
    seconds: float | None = None  # until work resumed
    violation: str | None = None  # a promise that the run broke


def schedule(kills: int, seed: int, kinds: Sequence[str], max_steps: int, evaluates: bool) -> list[Fault]:
    """`kills` faults, in the order of their injection. No kind and no failpoint repeats before all others were used.

    `evaluates`: the run also evaluates while it trains.
    """
    rng = random.Random(seed)
    names = [name for name in FAILPOINTS if evaluates or name not in IN_EVALUATIONS]

    def shuffled(items: Sequence[str]) -> list[str]:
        return rng.sample(list(items), len(items))

    faults: list[Fault] = []
    failpoints, deck = shuffled(names), shuffled(kinds)
    for _ in range(kills):
        kind = deck.pop()
        deck = deck or shuffled(kinds)
        if not any(FAILPOINTS[failpoint] in KINDS[kind] for failpoint in failpoints):
            failpoints += shuffled(names)
        failpoint = next(failpoint for failpoint in failpoints if FAILPOINTS[failpoint] in KINDS[kind])
        failpoints.remove(failpoint)
        if (
            kind in OUTAGES
            and reached_once(failpoint)
            and any(f.failpoint == failpoint and f.kind in OUTAGES for f in faults)
        ):
            kind = "kill"  # an attempt passes here once: a second outage would wait forever
        steps = rng.randrange(max(1, int(LATEST_STEP * max_steps))) if FAILPOINTS[failpoint] == "train" else 0
        faults.append(Fault(kind, failpoint, FAILPOINTS[failpoint], steps))
    return sorted(faults, key=injection_order)


def injection_order(fault: Fault) -> tuple[int, bool, bool, int]:
    """The order of injection. An outage lets the run pass: at a failpoint that is passed once, it comes last."""
    at_its_end = fault.failpoint.startswith("manifest-")
    return STAGES.index(fault.stage), at_its_end, reached_once(fault.failpoint) and fault.kind in OUTAGES, fault.step


def reached_once(failpoint: str) -> bool:
    """True if an attempt passes the failpoint once. Most failpoints of training occur in every step or save."""
    return FAILPOINTS[failpoint] != "train" or failpoint.startswith("manifest-")


def chosen(kinds: Sequence[str] | None, left_out: dict[str, str]) -> list[str]:
    """The kinds to draw from. UserError for an unknown kind, or one that is not possible here."""
    for kind in kinds or ():
        if kind not in KINDS:
            raise UserError(f"--kinds {kind}: unknown kind; choose from {', '.join(KINDS)}")
        if kind in left_out:
            raise UserError(f"--kinds {kind}: not possible here: {left_out[kind]}")
    return list(kinds or (kind for kind in USUAL if kind not in left_out))


def unavailable(store_uri: str, recipe: Recipe, processes: int) -> dict[str, str]:
    """The kinds of faults that are not possible here, each with the reason."""
    import torch

    from trainer.parallel import device_kind

    reasons: dict[str, str] = {}
    if not store_uri.startswith("s3://"):
        reasons |= dict.fromkeys(ON_S3, "the store is not an S3 bucket")
    else:
        reasons["eio"] = "the store is not a folder"
        if not s3_endpoint().startswith("http://"):
            reason = "a drill can disturb only the connection to a plain http endpoint (AWS_ENDPOINT_URL)"
            reasons |= dict.fromkeys(ON_S3, reason)
    if tracking_is_off():
        reasons["mlflow"] = "tracking is off (SKYTRAIN_TRACKING)"
    try:
        check_shares(recipe.model, recipe.train, other_processes(processes))
    except UserError as error:
        reasons["world"] = str(error)
    if device_kind(recipe.runtime) == "cuda" and torch.cuda.device_count() < 2:
        reasons["world"] = "the machine has one GPU"
    return reasons


def other_processes(processes: int) -> int:
    """Another world size."""
    return 2 if processes == 1 else 1


def s3_endpoint() -> str:
    """The S3 endpoint in the environment; empty for AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
