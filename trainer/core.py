"""CORE: 22 tasks of in-context learning, by centred accuracy (Li et al. 2024, "DataComp-LM", arXiv 2406.11794).

The tasks and their random baselines are DCLM's; the rules are those of nanochat's `core_eval.py` and `base_eval.py`
(github.com/karpathy/nanochat), so that the scores compare with its leaderboard and with GPT-2's (.1139 for 124M, .2565
for 1558M):

- The items of a task are shuffled with `Random(1337)`. The few-shot examples of item i are drawn with
  `Random(1234 + i)` from the other items. A prompt is end-of-text, the examples, each with an empty line after it, and
  the item. GPT-2 sees the last `block_size` tokens of it.
- Multiple choice: the prompts of an item differ after the tokens that all have in common; the one whose rest has the
  lowest mean loss is the model's answer. Schema: the prompts differ in front of the tokens that all end with; that
  ending counts. Language modelling: every token of the continuation must have the largest logit.
- With the accuracy a of a task and its random baseline b, the centred accuracy is (a - b) / (1 - b); CORE is the mean
  over the tasks.

A choice whose tokens are the beginning of another's has no token of its own, and is never the answer.

A bundle is a folder with `core.yaml` (the tasks), `eval_meta_data.csv` (their baselines in percent) and
`eval_data/` (a jsonl file of items for each task).
"""

import csv
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import yaml

from trainer.errors import UserError, cut
from trainer.hellaswag import Encode
from trainer.parallel import World
from trainer.scoring import Row, RowScore, Scored, score_rows
from trainer.strict_yaml import load_yaml

TASKS = (
    *("hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa"),
    *("piqa", "openbook_qa", "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages"),
    *("agi_eval_lsat_ar", "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic", "squad"),
    *("coqa", "boolq", "bigbench_language_identification"),
)
TASKS_FILE, BASELINES_FILE, DATA_FOLDER = "core.yaml", "eval_meta_data.csv", "eval_data"
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234
PART = 5000  # items whose rows are made and scored at once: of more, fewer tokens are padding

Kind = Literal["multiple_choice", "schema", "language_modeling"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "schema", "language_modeling")
T = TypeVar("T")
Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class Item:
    """The beginnings and endings whose pairs are the prompts, and the index of the right prompt.

    Multiple choice has one beginning and several endings, schema several beginnings and one ending, language modelling
    one of each.
    """

    beginnings: tuple[str, ...]
    endings: tuple[str, ...]
    right: int = 0

    def prompts(self, delimiter: str) -> list[str]:
        return [f"{b}{delimiter}{e}" for b, e in itertools.product(self.beginnings, self.endings)]


@dataclass(frozen=True)
class Task:
    """A task of a bundle. `baseline` is the accuracy of guessing, from 0 to 1."""

    name: str
    kind: Kind
    examples: int
    delimiter: str  # between beginning and ending
    baseline: float
    file: Path

    def centred(self, accuracy: float) -> float:
        return (accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class CoreScore:
    """The centred accuracies, their mean, and the accuracies themselves."""

    core: float
    centred: Mapping[str, float]
    accuracy: Mapping[str, float]

    @classmethod
    def of(cls, tasks: Sequence[Task], accuracy: Mapping[str, float]) -> "CoreScore":
        centred = {task.name: task.centred(accuracy[task.name]) for task in tasks}
        return cls(sum(centred.values()) / len(centred), centred, accuracy)


def core(
    model: Scored,
    tasks: Sequence[Task],
    encode: Encode,
    end_of_text: int,
    world: World,
    tokens_at_once: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    progress: Callable[[str, int], None] = lambda task, done: None,
) -> CoreScore:
    """The score over all items of all tasks. `progress` gets the name of a task and the number of tasks before it; for
    the other arguments see `score_rows`. A collective call."""
    rights: dict[str, list[bool]] = {}
    with closing(_ahead(_parts(tasks, encode, end_of_text, model.config.block_size))) as parts:
        for task, items, groups in parts:
            if task.name not in rights:
                progress(task.name, len(rights))
            more = _answers(model, task, items, groups, world, tokens_at_once, before_batch)
            rights[task.name] = rights.get(task.name, []) + more
    return CoreScore.of(tasks, {name: sum(each) / len(each) for name, each in rights.items()})


def answers(
    model: Scored,
    task: Task,
    items: Sequence[Item],
    encode: Encode,
    end_of_text: int,
    world: World,
    tokens_at_once: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> list[bool]:
    """Whether the model's answer is right, item by item, in the order of `items`. A collective call."""
    groups = [item_rows(task.kind, p, model.config.block_size) for p in prompts(task, items, encode, end_of_text)]
    return _answers(model, task, items, groups, world, tokens_at_once, before_batch)


def _answers(
    model: Scored,
    task: Task,
    items: Sequence[Item],
    groups: Sequence[list[Row | None]],
    world: World,
    tokens_at_once: int | None,
    before_batch: Callable[[], None],
) -> list[bool]:
    rows = [row for group in groups for row in group if row]
    scores = iter(score_rows(model, rows, world, tokens_at_once, before_batch))
    return [
        _is_right(task.kind, item, [next(scores) if row else None for row in group])
        for item, group in zip(items, groups, strict=True)
    ]


def _parts(
    tasks: Sequence[Task], encode: Encode, end_of_text: int, block_size: int
) -> Iterator[tuple[Task, list[Item], list[list[Row | None]]]]:
    """The items of all tasks with their rows, PART at a time: they take the host about half a second."""
    for task in tasks:
        items = read_items(task)
        rows = (item_rows(task.kind, item, block_size) for item in prompts(task, items, encode, end_of_text))
        for begin in range(0, len(items), PART):
            part = items[begin : begin + PART]
            yield task, part, list(itertools.islice(rows, len(part)))


def _ahead(values: Iterator[T]) -> Generator[T, None, None]:
    """The same values; a thread makes the next one meanwhile."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="core")
    try:
        value = pool.submit(next, values, None)
        while (ready := value.result()) is not None:
            value = pool.submit(next, values, None)
            yield ready
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _is_right(kind: Kind, item: Item, scores: list[RowScore | None]) -> bool:
    if kind == "language_modeling":
        return bool(scores[0] and scores[0].greedy)
    return int(np.argmin([score.mean if score else np.inf for score in scores])) == item.right


# --- prompts


class Prompts(NamedTuple):
    """The prompts of an item as tokens: the beginning that all have in common, and the rest of each. Language modelling
    has two prompts: without its continuation and with it."""

    beginning: Tokens
    rests: list[Tokens]


class _Pieces(NamedTuple):
    """The prompts of an item as texts, each in pieces that are encoded by themselves, as `Prompts`."""

    beginning: tuple[str, ...]
    rests: list[tuple[str, ...]]


def prompts(task: Task, items: Sequence[Item], encode: Encode, end_of_text: int) -> Iterator[Prompts]:
    """The prompts of every item. Each piece of text is encoded once, in however many prompts it is."""
    own = [_own_pieces(task, item) for item in items]
    shown = [_as_example(task, item, pieces) for item, pieces in zip(items, own, strict=True)] if task.examples else []
    texts = dict.fromkeys(text for pieces in own for some in (pieces.beginning, *pieces.rests) for text in some)
    texts |= dict.fromkeys(text for pieces in shown for text in pieces)
    tokens_of = dict(zip(texts, _arrays(encode(list(texts))), strict=True))
    # Without the letter behind each: see `_as_example`.
    examples = [_joined([tokens_of[text] for text in pieces])[:-1] for pieces in shown]
    in_text = [_begins_in_text(pieces[0]) for pieces in shown]
    bos = np.array([end_of_text], dtype=np.int32)
    for i, (beginning, rests) in enumerate(own):
        shots = few_shot(i, len(items), task.examples)
        firsts = beginning[:1] or [rest[0] for rest in rests]
        if all(in_text[j] for j in shots[1:]) and all(map(_begins_in_text, firsts)):
            context = [bos, *(examples[j] for j in shots), *(tokens_of[text] for text in beginning)]
            yield Prompts(np.concatenate(context), [_joined([tokens_of[text] for text in rest]) for rest in rests])
        else:
            before = "".join("".join(shown[j])[:-1] for j in shots)
            yield Prompts(bos, _arrays(encode([before + "".join(beginning + rest) for rest in rests])))


def _own_pieces(task: Task, item: Item) -> _Pieces:
    cut = [_cut(begin + task.delimiter, item.endings) for begin in item.beginnings]
    if task.kind == "language_modeling":
        # Without white space at its end, which would be a token of its own there and part of the next one in the other.
        without = f"{item.beginnings[0]}{task.delimiter}".strip()
        if cut[0] and cut[0][0] == without:
            return _Pieces((without,), [(), (cut[0][1][0],)])
        return _Pieces((), [(without,), (item.prompts(task.delimiter)[0],)])
    if len(cut) == 1 and cut[0]:
        return _Pieces((cut[0][0],), [(ending,) for ending in cut[0][1]])
    if all(cut):
        return _Pieces((), [(head, ending) for head, endings in filter(None, cut) for ending in endings])
    return _Pieces((), [(text,) for text in item.prompts(task.delimiter)])


def _as_example(task: Task, item: Item, own: _Pieces) -> tuple[str, ...]:
    """The pieces of an item that is an example, with a letter behind it.

    The tokenizers split a text at the end of white space before they merge, but an empty line at the end of a whole
    text is one token where in front of a letter it is two. So each example is encoded with a letter after it.
    """
    *pieces, last = own.beginning + own.rests[-1 if task.kind == "language_modeling" else item.right]
    return (*pieces, f"{last}\n\nA")


def _cut(before: str, endings: Sequence[str]) -> tuple[str, list[str]] | None:
    """Text and endings as pieces whose tokens are those of the whole, one after the other.

    Tokenizers never merge over the place in front of a single space that stands between two other characters, because
    they cut there before they merge. None if the endings do not begin at such a place.
    """
    if len(before) < 2 or before[-1] != " " or before[-2].isspace() or any(not e or e[0].isspace() for e in endings):
        return None
    return before[:-1], [" " + ending for ending in endings]


def few_shot(index: int, items: int, count: int) -> list[int]:
    """The indices of the examples of item `index`."""
    if not count:
        return []
    drawn = random.Random(EXAMPLES_SEED + index).sample(range(items - 1), count)  # positions among the others
    return [i + (i >= index) for i in drawn]


def _begins_in_text(text: str) -> bool:
    return not text[:1].isspace()


def _arrays(tokens: Sequence[Sequence[int] | np.ndarray]) -> list[Tokens]:
    return [np.asarray(ids, dtype=np.int32) for ids in tokens]


def _joined(tokens: Sequence[Tokens]) -> Tokens:
    if len(tokens) == 1:
        return tokens[0]
    return np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32)


def item_rows(kind: Kind, item: Prompts, block_size: int) -> list[Row | None]:
    """A row for every choice, or one for a continuation; None for a choice without a token of its own."""
    begin, rests = item
    if kind == "schema":
        ending = _common([np.concatenate((begin, rest))[::-1] for rest in rests])
        starts = [len(begin) + len(rest) - ending for rest in rests]
    else:
        starts = [len(begin) + _common(rests)] * len(rests)
    if kind == "language_modeling":
        rests, starts = rests[1:], [min(starts[1], len(begin) + len(rests[1]) - 1)]
    rows: list[Row | None] = []
    lost, kept = 0, begin  # rows that lose as many tokens share one array
    for rest, start in zip(rests, starts, strict=True):
        count = len(begin) + len(rest)
        if start >= count:
            rows.append(None)
            continue
        if lost != max(0, count - block_size):
            lost = max(0, count - block_size)
            kept = begin[lost:]
        rows.append(Row(rest[max(0, lost - len(begin)) :], max(1, start - lost), None, kept))
    return rows


def _common(tokens: Sequence[Tokens]) -> int:
    """The number of tokens with which all begin."""
    shortest = min(map(len, tokens))
    if not shortest or any(ids[0] != tokens[0][0] for ids in tokens):
        return 0
    same = np.ones(shortest, dtype=bool)
    for ids in tokens[1:]:
        same &= ids[:shortest] == tokens[0][:shortest]
    return shortest if same.all() else int(same.argmin())


# --- the bundle


def read_bundle(folder: Path) -> list[Task]:
    """The 22 tasks of a bundle. UserError if one is missing, unknown, or not as described above.

    It reads no items: see `read_items`.
    """
    listed = _listed_tasks(folder / TASKS_FILE)
    names = [str(entry.get("label")) for entry in listed]
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"{folder / TASKS_FILE}: CORE has no task '{cut(unknown[0])}'; it has {', '.join(TASKS)}")
    if missing := [name for name in TASKS if name not in names]:
        raise UserError(
            f"{folder / TASKS_FILE}: {len(missing)} of CORE's {len(TASKS)} tasks are missing: {', '.join(missing)}; "
            "use a whole bundle"
        )
    if twice := [name for name in TASKS if names.count(name) > 1]:
        raise UserError(f"{folder / TASKS_FILE}: the task {twice[0]} is there twice; remove one")
    baselines = _baselines(folder / BASELINES_FILE)
    tasks = [_task(folder, entry, baselines) for entry in listed]
    if absent := [task for task in tasks if not task.file.is_file()]:
        raise UserError(
            f"{folder}: the items of {len(absent)} of CORE's {len(TASKS)} tasks are missing: "
            f"{', '.join(task.name for task in absent)}; there is no file {absent[0].file.relative_to(folder)}"
        )
    return tasks


def bundle_digest(tasks: Sequence[Task]) -> str:
    """sha256 of everything that decides the scores: the tasks, their baselines and their items."""
    digest = hashlib.sha256()
    for task in sorted(tasks, key=lambda task: task.name):
        facts = [task.name, task.kind, task.examples, task.delimiter, task.baseline]
        with task.file.open("rb") as file:
            items = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(json.dumps([*facts, items]).encode() + b"\n")
    return digest.hexdigest()


def _listed_tasks(path: Path) -> list[dict[str, Any]]:
    text = _text(path)
    try:
        listed = load_yaml(text)["icl_tasks"]
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise TypeError
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is not a list of tasks under icl_tasks, as in nanochat's bundle") from error
    return listed


def _task(folder: Path, entry: Mapping[str, Any], baselines: Mapping[str, float]) -> Task:
    name = str(entry["label"])
    where = f"{folder / TASKS_FILE}: {name}"
    kind = entry.get("icl_task_type")
    if kind not in KINDS:
        raise UserError(f"{where}: icl_task_type '{cut(str(kind))}' is not one of {', '.join(KINDS)}")
    shots, delimiter, uri = entry.get("num_fewshot"), entry.get("continuation_delimiter", " "), entry.get("dataset_uri")
    if not (isinstance(shots, list) and len(shots) == 1 and type(shots[0]) is int and 0 <= shots[0] <= 100):
        raise UserError(f"{where}: num_fewshot must be one number from 0 to 100 in brackets, such as [10]")
    if not isinstance(delimiter, str) or not isinstance(uri, str):
        raise UserError(f"{where}: dataset_uri and continuation_delimiter must be texts")
    if PurePosixPath(uri).is_absolute() or ".." in PurePosixPath(uri).parts:
        raise UserError(f"{where}: dataset_uri '{cut(uri)}' must be a path inside {DATA_FOLDER}/")
    if name not in baselines:
        raise UserError(f"{folder / BASELINES_FILE}: has no random baseline of the task {name}")
    return Task(name, kind, shots[0], delimiter, baselines[name], folder / DATA_FOLDER / uri)


def _baselines(path: Path) -> dict[str, float]:
    """The accuracies of guessing, from 0 to 1, by task."""
    baselines = {}
    for row in csv.DictReader(_text(path).splitlines()):
        name = row.get("Eval Task") or ""
        if name not in TASKS:
            continue
        try:
            percent = float(row.get("Random baseline") or "")
        except ValueError:
            percent = -1.0
        if not 0 <= percent < 100:
            raise UserError(f"{path}: {name}: the column 'Random baseline' must be a number of percent below 100")
        baselines[name] = 0.01 * percent
    return baselines


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a CORE bundle has this file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text in UTF-8") from error


def read_items(task: Task) -> list[Item]:
    """The items of a task, shuffled. UserError for a file of something else."""
    items, number = [], 0
    try:
        with task.file.open(encoding="utf8") as file:
            for line in file:
                number += 1
                if line.strip():
                    items.append(_item(task.kind, json.loads(line)))
    except OSError as error:
        raise UserError(f"{task.file}: {error.strerror}; it has the items of CORE's task {task.name}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{task.file}: is not a text in UTF-8") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{task.file}: line {number}: is not an item of kind {task.kind} ({_fields(task)})") from error
    if len(items) <= task.examples:
        raise UserError(
            f"{task.file}: {len(items)} items are too few: an item needs {task.examples} others as examples"
        )
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items


def _fields(task: Task) -> str:
    return {
        "multiple_choice": "query, choices and gold",
        "schema": "context_options, continuation and gold",
        "language_modeling": "context and continuation",
    }[task.kind]


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
    prompts = len(item.beginnings) * len(item.endings)
    if type(item.right) is not int or not 0 <= item.right < prompts or (kind != "language_modeling" and prompts < 2):
        raise ValueError("not the index of a choice")
    return item
