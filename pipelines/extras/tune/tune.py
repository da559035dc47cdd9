"""tune: the export becomes a model that answers, by supervised tuning, preferences or rewards, in TRL (extra `tune`).

Each step of the recipe's list is a stage of its own, `tune.NAME`: its artifact is a folder for transformers with a chat
template. It begins with the artifact of the step before it, the first one with the export. The ranks of this node
(tune_rank.py) divide each batch (DDP); checkpoints, stops and the bill work as in train.
"""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.extras.tune.conversations import Rows, content_of, rows_of, source_of, with_content
from pipelines.extras.tune.reward_code import check_code, with_digests
from pipelines.extras.tune.tune_task import HELD_OUT, ROWS, TUNED, TuneTask
from pipelines.recipe.recipe import REWARD, Recipe, TuneConfig
from pipelines.run.formats.export_weights import Weights
from pipelines.run.nodes.address import processes_on_this_node
from pipelines.run.stage import TUNE, Built, Stage, Start, Work
from pipelines.run.stages.follow import facts_of_ranks
from pipelines.run.stages.rank import joined
from pipelines.run.stages.train import WEIGHTS_FILE, saving_task, stored_as_ours
from pipelines.run.text.chat import ChatTokens
from pipelines.run.text.hub import datasets_library
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.layout import STAGES
from pipelines.store.ledger import latest_number
from pipelines.store.manifest import ArtifactPlan, fetch_folder
from pipelines.store.s3_store import open_store
from trainer.base.install import check_package
from trainer.base.process import StopSignal
from trainer.base.store import Store
from trainer.checkpoint.commits import series
from trainer.config.errors import Interrupted, UserError
from trainer.config.extensions import REWARDS, check_installed
from trainer.config.source import Source

# In the facts as at the start and at the end. exact: the share of exact answers to held-out prompts; accuracy: of
# pairs of a batch that a reward model ranks right.
TUNED_METRICS = ("exact", "reward", "accuracy", "loss")


def pinned(recipe: Recipe) -> Recipe:
    """The recipe with the content of the data of each step, and of its functions."""
    steps = [with_content(one).model_copy(update={"rewards": with_digests(one)}) for one in recipe.tune]
    return recipe.model_copy(update={"tune": steps})


def check(start: Start) -> None:
    """UserError for data, code or a package that the missing steps would refuse."""
    check_package("trl", "tune", "tune:")
    checked_rows(start.recipe, start.store, start.plans["tokenize"])
    check_code([step for step in start.recipe.tune if f"{TUNE}.{step.name}" in start.todo], start.allow_code)


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the next step: the model before it, the content of the data, and its fields. UserError for a
    reward that no package declares."""
    step = recipe.tune[len(plans) - len(STAGES)]
    for reward in step.rewards:
        check_installed(REWARDS, reward.kind, f"tune.{step.name}.rewards")
    own = step.model_dump(exclude={"name", "data"}, exclude_defaults=True)
    before, content = plans[recipe.model_before(step)].fingerprint, source_of(step).sha256 or content_of(step)
    for given in (reward for reward in own.get("rewards", []) if "function" in reward):
        function = Source.of(given["function"], "rewards")
        given |= {"function": function.name.rpartition(":")[2], "sha256": function.sha256}
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
    own: dict[str, Any] = {"weights": str(weights), "step": step.name, "allow_code": work.allow_code}
    made = facts_of_ranks(work, TuneTask(**saving_task(work, ranks), **own))
    folder = work.folder / TUNED
    work.clock.enter("upload")
    files = [work.upload(path) for path in sorted(folder.iterdir())]
    made |= facts | measured(work, step)
    if "gguf" in recipe.export.formats and step.method != REWARD:
        from pipelines.extras.formats.gguf import Gguf

        config = recipe.with_vocabulary(made["vocab_size"]).model
        ours = stored_as_ours(folder, config, work.folder / WEIGHTS_FILE)
        model = Weights(ours, config, encoding, work.plan.label, work.check, chat=True)
        files += [work.upload(path, f"gguf/{path.name}") for path in Gguf().write(model, work.folder)]
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


def rank(task: TuneTask, folder: Path, cache: Path, stop: StopSignal, starting: Callable[[str], None]) -> None:
    """Tune as one rank; rank 0 leaves its events, the tuned model and its facts in the folder."""
    set_environment_of_trl(task.processes)
    from pipelines.extras.tune.tune_rank import Tuning
    from trainer.checkpoint.checkpointer import Checkpointer

    store = open_store(task.store)
    with (
        joined(task, folder, stop, starting, task.reached) as together,
        Checkpointer(
            store,
            task.prefix,
            together.world,
            task.attempt,
            task.recipe.runtime.keep_last,
            superseded=lambda: latest_number(store, task.prefix) > task.attempt,
        ) as checkpointer,
    ):
        try:
            Tuning(task, folder, store, together, checkpointer, stop).tune()
        except Interrupted:
            checkpointer.finish(together.log)


def set_environment_of_trl(processes: int) -> None:
    """Set what TRL's packages read when they are imported, and later."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer
    if processes == 1:  # TRL would use every GPU that it sees, and join the ranks that these variables announce
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


STAGE = Stage(plan, build, pinned, check, TuneTask, rank)
