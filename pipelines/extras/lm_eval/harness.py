"""EleutherAI's lm-evaluation-harness on the trained weights (`evaluate.lm_eval`).

The harness (https://github.com/EleutherAI/lm-evaluation-harness) is a process of its own that reads the weights as the
checkpoint for transformers. Its HellaSwag normalizes by bytes and is another number than ours in completion style: its
metrics have the prefix lm_eval/.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.stage import Work
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.secrets import HUB, environment_for
from trainer.base.install import check_package
from trainer.config.errors import UserError, cut

PACKAGE = "lm_eval"
POLL_SECONDS = 0.2  # between two checks of the stop signal
# Prints the names of its arguments that the harness does not know. It takes some seconds to list 14,000 tasks.
UNKNOWN = """
import json, sys
from lm_eval.tasks import TaskManager
manager = TaskManager()
print(json.dumps([name for name in sys.argv[1:] if not manager.match_tasks([name])]))
"""


def check(tasks: Sequence[str]) -> None:
    """UserError if the harness is not installed, or does not know one of the tasks."""
    check_package(PACKAGE, "eval", "evaluate.lm_eval:", "or set it to null")
    done = subprocess.run([sys.executable, "-c", UNKNOWN, *tasks], capture_output=True, text=True, env=environment())
    if done.returncode:
        raise UserError(f"evaluate.lm_eval: {cause_in(done.stderr)}")
    if unknown := json.loads(done.stdout.splitlines()[-1]):
        raise UserError(f"evaluate.lm_eval: lm-eval has no task '{cut(unknown[0])}'; `lm-eval ls tasks` lists them")


def facts(work: Work, path: Path) -> dict[str, Any]:
    """Run the harness. Returns the scores as facts, by `lm_eval/TASK/METRIC`, and the version of the harness.

    UserError if the harness fails, with its last line: a data set that cannot be had, for instance.
    """
    import torch

    recipe, tasks = work.recipe, work.recipe.evaluate.lm_eval or []
    folder = work.folder / "harness"
    (folder / "hf").mkdir(parents=True)
    encoding = tokenizer_of(recipe.tokens, work.store, work.inputs["tokenize"].prefix)
    on_gpu = torch.cuda.is_available() and recipe.runtime.device != "cpu"
    dtype = "bfloat16" if on_gpu else "float32"
    written = hf.write(Weights(path, recipe.model, encoding, recipe.name, work.check), folder / "hf", dtype)
    # The code of this installation, just written.
    trust = ",trust_remote_code=True" if folder / "hf" / hf.REMOTE_CODE in written else ""
    log = folder / "log"
    command = [
        *(sys.executable, "-m", PACKAGE, "run", "--model", "hf"),
        *("--model_args", f"pretrained=hf,dtype={dtype}{trust}", "--device", "cuda:0" if on_gpu else "cpu"),
        *("--batch_size", "auto" if on_gpu else "16", "--output_path", "results.json", "--tasks", ",".join(tasks)),
    ]
    with log.open("wb") as output, work.screen.bar("lm-eval", None) as bar:
        harness = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment())
        try:
            while harness.poll() is None:
                work.check()
                bar.update(0, progress_in(log))
                time.sleep(POLL_SECONDS)
        finally:
            harness.kill()
            harness.wait()
    found = sorted(folder.glob("results*.json"))
    if harness.returncode or not found:
        raise UserError(f"evaluate.lm_eval: lm-eval failed: {cause_in(log.read_text(errors='replace'))}")
    return scores_in(json.loads(found[-1].read_text())) | {"lm_eval_version": importlib.metadata.version(PACKAGE)}


def environment() -> dict[str, str]:
    """That of the harness. Of the secrets, gated data sets such as gpqa's need HF_TOKEN."""
    return environment_for(HUB) | {"TOKENIZERS_PARALLELISM": "false"}  # otherwise it prints how to use threads


def scores_in(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the harness's own results, which name a metric "acc,none": with its filter."""
    return {
        f"lm_eval/{task}/{metric.removesuffix(',none').replace(',', '@')}": float(value)
        for task, values in results["results"].items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
    }


def progress_in(log: Path) -> str:
    """ "Running loglikelihood requests 12% 120/1000": the last bar that the harness drew."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        bars = re.findall(r"([\w ]+): +(\d+%)\|[^|]*\| *(\d+/\d+)", file.read().decode(errors="replace"))
    return " ".join(bars[-1]).strip() if bars else ""


def cause_in(log: str) -> str:
    """The line of the last exception in a log, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return cut((errors or lines)[-1])
