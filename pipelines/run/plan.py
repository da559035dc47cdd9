"""The plan of a recipe: the state of each artifact, and the size and cost of the training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import plans_of, run_name
from pipelines.run.text.mixture import SourcePlan, sources_planned
from pipelines.store.layout import artifact_of, manifest_key
from pipelines.store.ledger import GC, attempts, newest_attempt, working_attempt
from pipelines.store.manifest import ArtifactPlan, Manifest, differences, find, read_manifest
from trainer.base.store import Entry, Store
from trainer.checkpoint.commits import committed_folders, newest_commit
from trainer.checkpoint.layout import COMMIT_KEY, step_of
from trainer.config.amounts import val_share, val_tokens, validations
from trainer.optim.rates import peaks


@dataclass(frozen=True)
class StagePlan:
    """The artifact of a stage, and the reason if it does not exist."""

    artifact: str  # prefix
    fingerprint: str
    exists: bool
    why: str | None = None  # the reason if it does not exist, and something of its name does
    other: str | None = None  # how to resume or continue another training of its name, instead of starting at step 0


@dataclass(frozen=True)
class RunPlan:
    """The artifacts of a run by stage, and the size of its text and its training."""

    run: str
    store: str
    parameters: int
    steps: int
    tokens: int
    flops: float
    stages: Mapping[str, StagePlan]
    sources: tuple[SourcePlan, ...] = ()  # of the text; none: only a server knows its size
    estimated: bool = False  # the tokens of the sources, before tokenize has counted them
    validations: int = 0  # of the stage train
    val_tokens: int = 0  # of each, at most the held-out text
    val_share: float = 0.0  # of the time of the training
    evaluations: int = 0  # while it trains
    evaluation_tokens: int = 0  # of each, an estimate
    evaluation_share: float = 0.0  # of the time of the training
    first_weights: str | None = None  # None: drawn from the seed
    growth: tuple[int, int, int] | None = None  # tokens of the first batch, of the full one, and until it is reached
    rates: Mapping[str, float] = field(default_factory=dict)  # with train.scale_rates: the largest ones, and the decay


def plan_of(recipe: Recipe, store: Store, plans: Mapping[str, ArtifactPlan] | None = None) -> RunPlan:
    """The plan of `run`: for each stage its artifact, and the reason if the store does not have it."""
    known = dict(plans or plans_of(recipe))
    train, evaluations = recipe.train, recipe.evaluations(recipe.train.max_steps)
    first, length = train.batch_ramp_from, train.batch_ramp_tokens
    growth = (first, train.batch_tokens, length) if first and length else None
    made = find(store, known["tokenize"])
    sources, full = tuple(sources_planned(recipe, made)), val_tokens(recipe.model, recipe.train)
    read = min(full, sum(one.val_tokens for one in sources) or full)
    return RunPlan(
        run=run_name(known),
        store=store.uri,
        parameters=recipe.model.parameters,
        steps=recipe.train.max_steps - recipe.train.first_step,
        tokens=recipe.train_tokens,
        flops=recipe.train_flops,
        stages={stage: stage_plan(store, plan) for stage, plan in known.items()},
        sources=sources,
        estimated=made is None,
        validations=validations(recipe.train),
        val_tokens=read,
        val_share=val_share(recipe.model, recipe.train) * read / full,
        evaluations=evaluations,
        evaluation_tokens=recipe.benchmark_tokens if evaluations else 0,
        evaluation_share=evaluations * recipe.benchmark_tokens / 3 / max(1, recipe.train_tokens),  # a forward pass
        first_weights=recipe.first_weights,
        growth=growth,
        rates=scaled_rates(recipe),
    )


def scaled_rates(recipe: Recipe) -> dict[str, float]:
    """What train.scale_rates makes of the rates, by group of parameters, and of Muon's weight decay."""
    if not recipe.train.scale_rates:
        return {}
    top = peaks(recipe.train, recipe.model)
    return {group: rate for group, rate in top.of.items() if group != "vector"} | {"weight decay": top.matrix_decay}


def stage_plan(store: Store, plan: ArtifactPlan) -> StagePlan:
    """The state of one artifact in the store, and the reason if it does not exist."""
    if find(store, plan) is not None:
        return StagePlan(plan.prefix, plan.fingerprint, exists=True)
    if started := [beat for beat in attempts(store, plan.prefix) if beat.run != GC]:
        last = started[-1]
        counts = {"step": last.progress.step, "tokens": last.progress.tokens}
        where = "".join(f", {name} {count:,}" for name, count in counts.items() if count is not None)
        why = f"attempt {last.attempt} is {last.state}{where}; `skytrain run` continues it"
        return StagePlan(plan.prefix, plan.fingerprint, exists=False, why=why)
    entries = store.entries(f"{plan.prefix.partition('/')[0]}/{plan.label}-")  # also of labels that begin with this one
    sibling, differs = nearest_sibling(store, plan, entries)
    fields = [f"{field}: {shortened(a)}, not {shortened(b)}" for field, (a, b) in differs.items()]
    more = f" and {len(fields) - 3} more fields" if len(fields) > 3 else ""
    reason = f"differs from {sibling.prefix} in {'; '.join(fields[:3])}{more}" if sibling else ""
    other = how_to_resume(store, plan, entries) or how_to_continue(store, plan, sibling)
    return StagePlan(plan.prefix, plan.fingerprint, False, "; ".join(filter(None, (reason, other))) or None, other)


def how_to_resume(store: Store, plan: ArtifactPlan, entries: list[Entry]) -> str | None:
    """The recipe that resumes the training with the newest commit of this label; None if that is finished, runs or
    has failed, or if this one is a branch."""
    if plan.stage != "train" or "branch_from" in plan.identity["train"]:
        return None
    ours = {e.key for e in entries if e.key.split("/")[1].rpartition("-")[0] == plan.label}
    prefixes = {found["artifact"] for key in ours if (found := COMMIT_KEY.fullmatch(key))}
    commits = {prefix: commit for prefix in prefixes if (commit := newest_commit(store, prefix))}
    prefix = max(commits, key=lambda prefix: commits[prefix].time, default="")
    if not prefix or manifest_key(prefix) in ours or working_attempt(store, prefix):
        return None
    last, run = newest_attempt(store, prefix), prefix.partition("/")[2]
    if last and last.state == "failed":  # it diverged, for example
        return None
    return f"it starts at step 0; the recipe run:{run} resumes {run} at step {commits[prefix].step} instead"


def how_to_continue(store: Store, plan: ArtifactPlan, sibling: Manifest | None) -> str | None:
    """The ways to go on from a finished training of this label, unless the recipe names where it begins."""
    if sibling is None or plan.stage != "train" or {"branch_from", "init_from"} & set(plan.identity["train"]):
        return None
    run, steps = sibling.run, map(step_of, committed_folders(store, sibling.prefix))
    before_the_end = [step for step in steps if step < plan.identity["train"]["max_steps"]]
    ways = [f"--set train.branch_from=run:{run}@{step} continues it" for step in before_the_end[:1]]
    ways += [f"--set train.init_from=run:{run} begins with its weights", f"run:{run} is its recipe"]
    return f"it starts at step 0, beside the finished {run}: {', '.join(ways)}"


def nearest_sibling(store: Store, plan: ArtifactPlan, entries: list[Entry]) -> tuple[Manifest | None, dict[str, Any]]:
    """The finished artifact of the same stage and label that differs in the fewest fields, and those fields."""
    prefixes = (artifact_of(e.key) for e in entries if e.key == manifest_key(artifact_of(e.key)))
    found = (read_manifest(store, prefix) for prefix in prefixes)
    compared = [(m, differences(plan.identity, m.identity)) for m in found if m and m.label == plan.label]
    return min(compared, key=lambda pair: len(pair[1]), default=(None, {}))


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:21] + "…"
