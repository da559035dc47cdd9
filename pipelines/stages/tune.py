"""tune: the export becomes a model that answers, by supervised tuning, preferences or rewards, in TRL (extra `tune`).

Each step of the recipe's list is a stage of its own, `tune.NAME`: its artifact is a folder for transformers with a chat
template. It begins with the artifact of the step before it, the first one with the export. One rank tunes
(tune_rank.py) on one GPU, or on the CPU; checkpoints, stops and the bill are those of train.
"""

import importlib.util
import json

from pipelines.artifacts.manifest import ArtifactPlan, fetch_folder
from pipelines.nodes.address import NodeAddress
from pipelines.nodes.ranks import RankSpec, start_ranks
from pipelines.recipe import Recipe, TuneConfig
from pipelines.stage import STAGES, TUNE, Built, Work
from pipelines.stages.evaluate import FACTS_FILE
from pipelines.stages.follow import attempt_of, follow
from pipelines.text.chat import ChatTokens
from pipelines.text.conversations import Rows, content_of, rows_of
from pipelines.text.tokenizer import tokenizer_of
from pipelines.tracking.ledger import prior_seconds_between_failures, seconds_between_failures
from trainer.checkpoint.commits import series
from trainer.errors import UserError
from trainer.process import steady_time
from trainer.store import Store

TUNED = "tuned"  # folder of the result, which the rank writes; its facts come last


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the next step: the model before it, the content of the data, and its fields."""
    step, (*_, before) = recipe.tune[len(plans) - len(STAGES)], plans.values()
    own = step.model_dump(exclude={"name", "data", "revision", "content"}, exclude_defaults=True)
    content = step.content or content_of(step)
    identity = {"stage": TUNE, "from": before.fingerprint, "data": content, "template": "chatml", **own}
    return ArtifactPlan(TUNE, f"{recipe.name}-{step.name}", identity)


def build(work: Work) -> Built:
    """Tune to the last step. Raises the error of the rank that ended it early."""
    recipe = work.recipe
    step = next(step for step in recipe.tune if work.plan.label == f"{recipe.name}-{step.name}")
    check_package()
    if content_of(step) != work.plan.identity["data"]:
        raise UserError(f"tune.{step.name}: {step.data} changed after the step was planned; run the recipe again")
    work.clock.enter("download")
    *_, before = work.inputs.values()
    spec = RankSpec(
        started=steady_time(),
        reached=max((beat.progress.highest_step or 0 for beat in work.earlier), default=0),
        recipe=recipe,
        store=work.store.uri,
        tokens=work.inputs["tokenize"].prefix,
        prefix=work.plan.prefix,
        attempt=work.attempt.number,
        between_failures=seconds_between_failures(
            (beat for beat in work.earlier if not beat.progress.waiting),
            prior_seconds_between_failures(work.attempt.latest.machine, 1),
        ),
        processes=1,
        weights=str(fetch_folder(work.store, before, work.home / "cache", work.folder / "before")),
        tune=step.name,
    )
    work.report(highest_step=spec.reached)
    work.check()
    work.clock.enter("ranks")
    launcher = start_ranks(spec, work.folder, work.home, work.stop.grace_seconds, NodeAddress())
    with attempt_of(work, launcher):
        follow(work, launcher)
    facts, folder = work.folder / FACTS_FILE, work.folder / TUNED
    if not facts.exists():
        raise work.stop.interruption()
    work.clock.enter("upload")
    files = [work.upload(path) for path in sorted(folder.iterdir())]
    return Built(files, json.loads(facts.read_text()) | measured(work, step))


def measured(work: Work, step: TuneConfig) -> dict[str, float]:
    """The first and the last loss, reward and share of exact answers on record."""
    facts: dict[str, float] = {}
    for row in series(work.store, work.plan.prefix):
        for name in ("loss", "reward", "exact"):
            if (value := row.get(f"tune/{step.name}/{name}")) is not None:
                facts.setdefault(f"tune/{name}_before", value)
                facts[f"tune/{name}"] = value
    return facts


def check_package() -> None:
    """UserError if TRL is not installed."""
    if not importlib.util.find_spec("trl"):
        raise UserError("tune: needs the package trl: make install, or pip install 'skytrain[tune]'; then run again")


def checked_rows(recipe: Recipe, store: Store, tokens: ArtifactPlan) -> dict[str, Rows]:
    """The rows of every step by its name, checked before anything is spent. UserError names the first wrong row."""
    chat = ChatTokens(tokenizer_of(recipe.tokens, store, tokens.prefix))
    return {step.name: rows_of(step, chat, recipe.model.block_size) for step in recipe.tune}
