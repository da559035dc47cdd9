"""A CORE bundle with all 22 tasks and few items, for any folder."""

import csv
import json
import random
from pathlib import Path
from typing import Any

from trainer.eval.core import TASKS, Kind

WORDS = "the a cat dog sat on mat ran far and then it was blue red 12 7 don't Paris said: (yes)".split()  # noqa: SIM905


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))


def kind_of(task: str) -> Kind:
    """The kind of the real task."""
    if task in ("winograd", "winogrande"):
        return "schema"
    continued = ("jeopardy", "bigbench_qa_wikidata", "lambada_openai", "squad", "coqa")
    symbols = ("dyck_languages", "cs_algorithms", "operators", "repeat_copy_logic")
    return "language_modeling" if task in continued or task.endswith(symbols) else "multiple_choice"


def make_item(kind: Kind, chance: random.Random) -> dict[str, Any]:
    """Some items begin with white space, end with it, or have choices that begin alike. No two choices are equal: the
    rounding of the processor would choose between them."""
    space = chance.choice(("", "", "", " ", "\n"))
    if kind == "language_modeling":
        return {"context": space + sentence(chance) + space, "continuation": chance.choice("ab")}
    if kind == "schema":
        begin = sentence(chance)
        options = [f"{begin} {word} {sentence(chance)}" for word in ("he", "she")]
        return {"context_options": options, "continuation": sentence(chance), "gold": chance.randrange(2)}
    drawn = [sentence(chance) for _ in range(chance.randint(2, 4))]
    choices = [f"{one} {number}" if one in drawn[:number] else one for number, one in enumerate(drawn)]
    return {"query": space + sentence(chance), "choices": choices, "gold": chance.randrange(len(choices))}


def make_bundle(folder: Path, items: int = 5, examples: int = 3, seed: int = 0) -> Path:
    """`examples` in every second task, none in the others."""
    chance, entries = random.Random(seed), []
    (folder / "eval_data" / "all").mkdir(parents=True)
    for number, task in enumerate(TASKS):
        kind = kind_of(task)
        rows = [make_item(kind, chance) for _ in range(items)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval_data" / "all" / f"{task}.jsonl").write_text(text)
        entry = {"label": task, "dataset_uri": f"all/{task}.jsonl", "num_fewshot": [number % 2 * examples]}
        delimiter = {"continuation_delimiter": "\nAnswer: "} if number % 3 == 0 else {}
        entries.append(entry | {"icl_task_type": kind} | delimiter)
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))  # JSON is YAML
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Eval Task", "#datapoints", "Random baseline", "Description"])
        writer.writerow(["mmlu", 14042, "n/a", "not one of CORE's"])
        for task in TASKS:
            writer.writerow([task, items, {"multiple_choice": 25, "schema": 50}.get(kind_of(task), 0), "one, two"])
    return folder
