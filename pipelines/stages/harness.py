"""EleutherAI's lm-evaluation-harness on the trained weights (`evaluate.lm_eval`).

The harness (https://github.com/EleutherAI/lm-evaluation-harness) is a process of its own that reads the weights as the
checkpoint for transformers. Its HellaSwag normalizes by bytes and is another number than ours in completion style: its
metrics have the prefix lm_eval/.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.formats import hf
from pipelines.formats.weights import Weights
from pipelines.stage import Work
from pipelines.text.tokenizer import tokenizer_of
from trainer.errors import UserError, cut
from trainer.store import sha256_of

PACKAGE = "lm_eval"
POLL_SECONDS = 0.2  # between two checks of the stop signal
# Prints the names of its arguments that the harness does not know. It takes some seconds to list 14,000 tasks.
UNKNOWN = """
import json, sys
from lm_eval.tasks import TaskManager
manager = TaskManager()
print(json.dumps([name for name in sys.argv[1:] if not manager.match_tasks([name])]))
"""


def harness_identity(tasks: Sequence[str]) -> list[str]:
    """The tasks, with the sha256 of those that are files. UserError for a file that does not exist."""
    files = {task: file for task in tasks if (file := task_file(task))}
    return sorted({f"sha256:{sha256_of(files[task])}" if task in files else task for task in tasks})


def task_file(task: str) -> Path | None:
    """The file of a task of one's own, which ends with .yaml; None for the name of a task of the harness."""
    if not task.endswith(".yaml"):
        return None
    if not Path(task).is_file():
        raise UserError(f"evaluate.lm_eval: {cut(task)}: no such file; name a task of lm-eval, or its .yaml file")
    return Path(task).absolute()


def verify_tasks(tasks: Sequence[str]) -> int:
    """The number of tasks. UserError if the harness is not installed, or does not know one of them."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("evaluate.lm_eval: needs the package lm-eval; `pip install 'lm-eval[hf]'`, or set it to null")
    if names := [task for task in tasks if task_file(task) is None]:
        done = subprocess.run([sys.executable, "-c", UNKNOWN, *names], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"evaluate.lm_eval: {cause_in(done.stderr)}")
        if unknown := json.loads(done.stdout.splitlines()[-1]):
            raise UserError(f"evaluate.lm_eval: lm-eval has no task '{cut(unknown[0])}'; `lm-eval ls tasks` lists them")
    return len(tasks)


def harness_facts(work: Work, path: Path) -> dict[str, Any]:
    """The scores of the tasks as facts, by `lm_eval/TASK/METRIC`, and the version of the harness.

    UserError if the harness fails, with its last line: a data set that cannot be had, for instance.
    """
    import torch

    recipe, tasks = work.recipe, work.recipe.evaluate.lm_eval or []
    folder = work.folder / "harness"
    (folder / "hf").mkdir(parents=True)
    encoding = tokenizer_of(recipe.tokens, work.store, work.inputs["tokenize"].prefix)
    weights = Weights(path, recipe.model, encoding, recipe.name, work.check)
    on_gpu = torch.cuda.is_available() and recipe.runtime.device != "cpu"
    dtype = "bfloat16" if on_gpu else "float32"
    hf.write(weights, folder / "hf", dtype)
    log = folder / "log"
    command = [
        *(sys.executable, "-m", PACKAGE, "run", "--model", "hf"),
        *("--model_args", f"pretrained=hf,dtype={dtype}", "--device", "cuda:0" if on_gpu else "cpu"),
        *("--batch_size", "auto" if on_gpu else "16", "--output_path", "results.json"),
        *("--tasks", ",".join(str(task_file(task) or task) for task in tasks)),
    ]
    with log.open("wb") as output, work.screen.bar("lm-eval", len(tasks)):
        harness = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=harness_environment())
        try:
            while harness.poll() is None:
                work.check()
                time.sleep(POLL_SECONDS)
        finally:
            harness.kill()
            harness.wait()
    found = sorted(folder.glob("results*.json"))
    if harness.returncode or not found:
        raise UserError(f"evaluate.lm_eval: lm-eval failed: {cause_in(log.read_text(errors='replace'))}")
    facts = scores_in(json.loads(found[-1].read_text()))
    return facts | {"lm_eval_version": importlib.metadata.version(PACKAGE)}


def harness_environment() -> dict[str, str]:
    """The environment of the harness: none of the store's secrets, and no message of how to use threads."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MLFLOW_"))} | {
        "TOKENIZERS_PARALLELISM": "false"
    }


def scores_in(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the harness's own results, which name a metric "acc,none": with its filter."""
    return {
        f"lm_eval/{task}/{metric.removesuffix(',none').replace(',', '@')}": float(value)
        for task, values in results["results"].items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
    }


def cause_in(log: str) -> str:
    """The line of the last exception in a log, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return cut((errors or lines)[-1])
