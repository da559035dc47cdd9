"""tune: the export becomes a model that answers, by supervised tuning, preferences or rewards, in TRL (extra `tune`).

Each step of the recipe's list is a stage of its own, `tune.NAME`: its artifact is a folder for transformers with a chat
template. It begins with the artifact of the step before it, the first one with the export. The ranks of this node
(tune_rank.py) divide each batch (DDP); checkpoints, stops and the bill are those of train.
"""

import json
import logging
from dataclasses import replace
from typing import Any

from pipelines.extras.tune.conversations import Rows, content_of, rows_of, source_of
from pipelines.recipe.recipe import REWARD, Recipe, TuneConfig
from pipelines.run.formats.export_weights import Weights
from pipelines.run.nodes.address import NodeAddress, processes_on_this_node
from pipelines.run.stage import STAGES, TUNE, Built, Work
from pipelines.run.stages.follow import facts_of_ranks
from pipelines.run.stages.train import WEIGHTS_FILE, rank_spec, stored_as_ours
from pipelines.run.text.chat import ChatTokens
from pipelines.run.text.hub import datasets_library
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.manifest import ArtifactPlan, fetch_folder
from trainer.base.store import Store
from trainer.checkpoint.commits import series
from trainer.config.errors import UserError
from trainer.config.source import Source

# In the facts as at the start and at the end. exact: the share of exact answers to held-out prompts; accuracy: of
# pairs of a batch that a reward model ranks right.
TUNED_METRICS = ("exact", "reward", "accuracy", "loss")
TUNED = "tuned"  # folder of the result, which the rank writes; its facts come last
ROWS, HELD_OUT = "rows", "held_out.json"  # what the ranks read, as `datasets` stores it and as JSON


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the next step: the model before it, the content of the data, and its fields."""
    step = recipe.tune[len(plans) - len(STAGES)]
    own = step.model_dump(exclude={"name", "data"}, exclude_defaults=True)
    before, content = plans[recipe.model_before(step)].fingerprint, source_of(step).sha256 or content_of(step)
    for reward in (reward for reward in own.get("rewards", []) if "function" in reward):
        function = Source.of(reward["function"], "rewards")
        reward |= {"function": function.name.rpartition(":")[2], "sha256": function.sha256}
    identity = {"stage": TUNE, "from": before, "data": content, "template": "chatml", **own}
    if "gguf" in recipe.export.formats:
        identity["formats"] = ["gguf"]
    if models := [plans[f"{TUNE}.{name}"].fingerprint for name in reward_models(step)]:
        identity["reward_models"] = models
    return ArtifactPlan(TUNE, f"{recipe.name}-{step.name}", identity)


def reward_models(step: TuneConfig) -> list[str]:
    """The steps whose reward models a step uses."""
    return [reward.step for reward in step.rewards if reward.step]


def build(work: Work) -> Built:
    """Tune to the last step. Raises the error of the rank that ended it early."""
    recipe = work.recipe
    step = next(step for step in recipe.tune if work.plan.label == f"{recipe.name}-{step.name}")
    work.clock.enter("download")
    before, cache = work.inputs[recipe.model_before(step)], work.home / "cache"
    for name in reward_models(step):
        fetch_folder(work.store, work.inputs[f"{TUNE}.{name}"], cache, work.folder / f"{REWARD}-{name}")
    weights = fetch_folder(work.store, before, cache, work.folder / "before")
    work.check()
    encoding = tokenizer_of(recipe.tokens, work.store, work.inputs["tokenize"].prefix)
    rows = rows_of(step, ChatTokens(encoding), recipe.model.block_size)
    if content_of(step) != work.plan.identity["data"]:  # after the rows were read, so that these are the planned ones
        data = source_of(step).unpinned
        raise UserError(f"tune.{step.name}: {data} changed after the step was planned; run the recipe again")
    datasets_library().Dataset.from_list(rows.train).save_to_disk(work.folder / ROWS)
    (work.folder / HELD_OUT).write_text(json.dumps(rows.held_out))
    facts = {"rows": len(rows.train), "cropped": rows.cropped}
    del rows  # their memory, before the ranks start
    wanted = processes_on_this_node(recipe.runtime)
    ranks = next(n for n in range(wanted, 0, -1) if step.at_once % n == 0)
    if ranks < wanted:
        work.screen.note(f"  {ranks} of {wanted} ranks tune: they must divide the {step.at_once} rows of a pass")
    made = facts_of_ranks(work, replace(rank_spec(work, NodeAddress(), ranks), weights=str(weights), tune=step.name))
    folder = work.folder / TUNED
    work.clock.enter("upload")
    files = [work.upload(path) for path in sorted(folder.iterdir())]
    made |= facts | measured(work, step)
    if "gguf" in recipe.export.formats and step.method != REWARD:
        from pipelines.extras.formats import gguf

        config = recipe.with_vocabulary(made["vocab_size"]).model
        ours = stored_as_ours(folder, config, work.folder / WEIGHTS_FILE)
        model = Weights(ours, config, encoding, work.plan.label, work.check, chat=True)
        files += [work.upload(path, f"gguf/{path.name}") for path in gguf.write(model, work.folder)]
    return Built(files, made)


def measured(work: Work, step: TuneConfig) -> dict[str, Any]:
    """The first and the last value on record of each of TUNED_METRICS, and the last answer."""
    rows = series(work.store, work.plan.prefix)
    answers = [row["samples"][0] for row in rows if row.get("samples")]
    facts: dict[str, Any] = {"sample": answers[-1]} if answers else {}
    for name in TUNED_METRICS:
        if values := [row[key] for row in rows if (key := f"tune/{step.name}/{name}") in row]:
            facts |= {f"tune/{name}_before": values[0], f"tune/{name}": values[-1]}
    return facts


def checked_rows(recipe: Recipe, store: Store, tokens: ArtifactPlan) -> dict[str, Rows]:
    """The rows of every step by its name, checked before anything is spent, with a warning of pairs that teach nothing.
    UserError names the first wrong row."""
    if not recipe.tune:
        return {}  # without the tokenizer, which may be a download
    chat = ChatTokens(tokenizer_of(recipe.tokens, store, tokens.prefix))
    checked = {step.name: rows_of(step, chat, recipe.model.block_size) for step in recipe.tune}
    for name, rows in checked.items():
        if rows.equal:
            message = "tune.%s: %d of %d pairs have equal answers, chosen and rejected, and teach nothing; remove them"
            logging.getLogger(__name__).warning(message, name, rows.equal, len(rows.train))
    return checked
