"""CORE: 22 tasks of in-context learning, by centred accuracy (Li et al. 2024, "DataComp-LM", arXiv 2406.11794).

The tasks and their random baselines are DCLM's; the rules are those of nanochat's `core_eval.py` and `base_eval.py`
(github.com/karpathy/nanochat), so that the scores compare with its leaderboard and with GPT-2's (.1139 for 124M, .2565
for 1558M):

- The items of a task are shuffled with `Random(1337)`. The few-shot examples of item i are drawn with
  `Random(1234 + i)` from the other items. A prompt is end-of-text, the examples, each with an empty line after it, and
  the item. A model with learned positions sees the last `block_size` tokens of it,
  one with rotary positions all.
- Multiple choice: the prompts of an item differ after the tokens that all have in common; the one whose rest has the
  lowest mean loss is the model's answer. Schema: the prompts differ in front of the tokens that all end with; that
  ending counts. Language modelling: every token of the continuation must have the largest logit.
- With the accuracy a of a task and its random baseline b, the centred accuracy is (a - b) / (1 - b); CORE is the mean
  over the tasks.

A choice whose tokens are the beginning of another's has no token of its own, and is never the answer.

In chat form, which is ours and compares with no leaderboard, beginnings are questions and endings their answers, the
few-shot examples are earlier turns, and the tokens of the last answer count.

A bundle is a folder with `core.yaml` (the tasks), `eval_meta_data.csv` (their baselines in percent) and
`eval_data/` (a jsonl file of items for each task).
"""

import csv
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import yaml

from trainer.base.parallel import World
from trainer.base.store import read_regular
from trainer.base.strict_yaml import load_yaml
from trainer.config.errors import UserError, cut
from trainer.eval.scoring import Chat, Encode, Scored, ScoredRow, cropped_row, read_jsonl, score_items

TASKS = (
    *("hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa"),
    *("piqa", "openbook_qa", "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages"),
    *("agi_eval_lsat_ar", "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic", "squad"),
    *("coqa", "boolq", "bigbench_language_identification"),
)
TASKS_FILE, BASELINES_FILE, DATA_FOLDER = "core.yaml", "eval_meta_data.csv", "eval_data"
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234

Kind = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass(frozen=True)
class Item:
    """The beginnings and endings whose pairs are the prompts, and the index of the right prompt.

    Multiple choice has one beginning and several endings, schema several beginnings and one ending, language modelling
    one of each.
    """

    beginnings: tuple[str, ...]
    endings: tuple[str, ...]
    right: int = 0

    def texts(self, delimiter: str) -> list[str]:
        return [f"{b}{delimiter}{e}" for b, e in itertools.product(self.beginnings, self.endings)]


@dataclass(frozen=True)
class CoreTask:
    """A task of a bundle. `baseline` is the accuracy of guessing, from 0 to 1."""

    name: str
    kind: Kind
    examples: int
    delimiter: str  # between beginning and ending
    baseline: float
    file: Path


def core(
    model: Scored,
    world: World,
    before_batch: Callable[[], None],
    tasks: Sequence[CoreTask],
    encode: Encode,
    end_of_text: int,
    chat: Chat | None = None,
) -> dict[str, float]:
    """CORE and the centred accuracy of every task, by metric; for `before_batch` see `score_items`. With `chat`, all in
    chat form. A collective call."""
    centred, name = {}, "core_chat" if chat else "core"
    for task in tasks:
        right = answers(model, world, before_batch, task, read_items(task), encode, end_of_text, chat)
        centred[f"{name}/{task.name}"] = (sum(right) / len(right) - task.baseline) / (1 - task.baseline)
    return {f"eval/{name}": sum(centred.values()) / len(centred)} | centred


def answers(
    model: Scored,
    world: World,
    before_batch: Callable[[], None],
    task: CoreTask,
    items: Sequence[Item],
    encode: Encode,
    end_of_text: int,
    chat: Chat | None = None,
) -> list[bool]:
    """Whether the model's answer is right, item by item, in the order of `items`. A collective call."""

    def rows_of(indices: Sequence[int]) -> list[list[ScoredRow]]:
        if chat:
            return [chat_rows(task, items, i, encode, chat, model.config.reach) for i in indices]
        texts = [prompts(task, items, i) for i in indices]
        tokens = iter(encode([text for of_item in texts for text in of_item]))
        start = np.array([end_of_text], dtype=np.int32)
        return [
            item_rows(
                task.kind,
                [np.concatenate((start, np.asarray(next(tokens), np.int32))) for _ in of_item],
                model.config.reach,
            )
            for of_item in texts
        ]

    scores = score_items(model, len(items), rows_of, world, before_batch)
    if task.kind == "language_modeling":
        return [score.greedy for (score,) in scores]
    choices = [int(np.argmin([score.mean for score in of_item])) for of_item in scores]
    return [choice == item.right for choice, item in zip(choices, items, strict=True)]


def prompts(task: CoreTask, items: Sequence[Item], index: int) -> list[str]:
    """The prompts of an item; language modelling has two: without its continuation and with it."""
    item = items[index]
    before = "".join(shot.texts(task.delimiter)[shot.right] + "\n\n" for shot in examples_of(task, items, index))
    texts = item.texts(task.delimiter)
    if task.kind == "language_modeling":
        # Without white space at its end, which would be a token of its own there and part of the next one in the other.
        texts.insert(0, f"{item.beginnings[0]}{task.delimiter}".strip())
    return [before + text for text in texts]


def examples_of(task: CoreTask, items: Sequence[Item], index: int) -> list[Item]:
    """The few-shot examples of an item."""
    drawn = random.Random(EXAMPLES_SEED + index).sample(range(len(items) - 1), task.examples) if task.examples else []
    return [items[i + (i >= index)] for i in drawn]


def chat_rows(
    task: CoreTask, items: Sequence[Item], index: int, encode: Encode, chat: Chat, reach: int | None
) -> list[ScoredRow]:
    """The rows of an item in chat form: one for every choice, or one for a continuation."""

    def messages(item: Item, choice: int) -> list[dict[str, str]]:
        asked, said = [*itertools.product(item.beginnings, item.endings)][choice]
        question = {"role": "user", "content": f"{asked}{task.delimiter}".strip()}
        return [question, {"role": "assistant", "content": said.strip()}]

    before = [message for shot in examples_of(task, items, index) for message in messages(shot, shot.right)]
    choices = [messages(items[index], n) for n in range(len(items[index].beginnings) * len(items[index].endings))]
    rows = []
    for (question, _), answer in zip(choices, encode([said["content"] for _, said in choices]), strict=True):
        context = chat([*before, question])
        rows.append(cropped_row(np.concatenate((context, answer)), len(context), reach))
    return rows


def item_rows(kind: Kind, tokens: list[np.ndarray], reach: int | None) -> list[ScoredRow]:
    """The rows of an item's prompts: one for every choice, or one for a continuation."""
    if kind == "schema":
        ending = _common([ids[::-1] for ids in tokens])
        starts = [len(ids) - ending for ids in tokens]
    else:
        starts = [_common(tokens)] * len(tokens)
    if kind == "language_modeling":
        tokens, starts = tokens[1:], [min(starts[1], len(tokens[1]) - 1)]
    return [cropped_row(ids, start, reach) for ids, start in zip(tokens, starts, strict=True)]


def _common(tokens: Sequence[np.ndarray]) -> int:
    """The number of tokens with which all begin."""
    shortest = min(map(len, tokens))
    same = np.all([ids[:shortest] == tokens[0][:shortest] for ids in tokens], axis=0)
    return shortest if same.all() else int(same.argmin())


# --- the bundle


def read_bundle(folder: Path) -> list[CoreTask]:
    """The 22 tasks of a bundle. UserError if one is missing, unknown, or not as described above.

    It reads no items: see `read_items`.
    """
    try:
        entries = load_yaml(read_regular(folder / TASKS_FILE))["icl_tasks"]
        rows = list(csv.DictReader(read_regular(folder / BASELINES_FILE).decode().splitlines()))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in rows if row["Eval Task"] in TASKS}
        tasks = [
            CoreTask(
                name := entry["label"],
                entry["icl_task_type"],
                int(entry["num_fewshot"][0]),
                entry.get("continuation_delimiter", " "),
                0.01 * baselines[name],
                folder / DATA_FOLDER / entry["dataset_uri"],
            )
            for entry in entries
        ]
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}: {error.filename}; a CORE bundle has this file") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{TASKS_FILE} or {BASELINES_FILE} is not as in nanochat's bundle"
        raise UserError(f"{folder}: {what} ({cut(repr(error))})") from error
    names = [task.name for task in tasks]
    if wrong := [name for name in TASKS if names.count(name) != 1] or [name for name in names if name not in TASKS]:
        raise UserError(f"{folder}: {', '.join(wrong)}: {TASKS_FILE} must have each of CORE's {len(TASKS)} tasks once")
    for task in tasks:
        if task.kind not in get_args(Kind) or not 0 <= task.baseline < 1:
            raise UserError(f"{folder}: {task.name}: its type must be one of {get_args(Kind)}, its baseline below 100")
        if ".." in task.file.parts or not task.file.is_relative_to(folder) or not task.file.is_file():
            raise UserError(f"{folder}: the file {task.file} of the task {task.name} is missing; use a whole bundle")
    return tasks


def bundle_digest(tasks: Sequence[CoreTask]) -> str:
    """sha256 of everything that decides the scores: the tasks, their baselines and their items."""
    digest = hashlib.sha256()
    for task in sorted(tasks, key=lambda task: task.name):
        facts = [task.name, task.kind, task.examples, task.delimiter, task.baseline]
        with task.file.open("rb") as file:
            items = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(json.dumps([*facts, items]).encode() + b"\n")
    return digest.hexdigest()


def read_items(task: CoreTask) -> list[Item]:
    """The items of a task, shuffled. UserError for a file of something else."""
    items = read_jsonl(
        task.file, f"an item of kind {task.kind}, with all of its fields", lambda row: _item(task.kind, row)
    )
    if len(items) <= task.examples:
        raise UserError(
            f"{task.file}: {len(items)} items are too few: an item needs {task.examples} others as examples"
        )
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items


def _item(kind: Kind, row: dict[str, Any]) -> Item:
    if kind == "language_modeling":
        item = Item((row["context"].strip(),), (row["continuation"],))
        if not item.endings[0].strip():
            raise ValueError("an empty continuation")
    elif kind == "multiple_choice":
        item = Item((row["query"],), tuple(row["choices"]), row["gold"])
    else:
        item = Item(tuple(row["context_options"]), (row["continuation"],), row["gold"])
    if not all(isinstance(text, str) for text in (*item.beginnings, *item.endings)):
        raise TypeError("not a text")
    count = len(item.beginnings) * len(item.endings)
    if type(item.right) is not int or not 0 <= item.right < count or (kind != "language_modeling" and count < 2):
        raise ValueError("not the index of a choice")
    return item
