"""The memory of the stage export: whole commands on a model with random weights, a format at a time.

    python -m benchmarks.export_memory FOLDER [--recipe gpt2-1558m] [--formats hf gguf onnx llmc nanogpt]

FOLDER is new. It gets a store with the artifacts before the export, which are all made up: only the training has a
file, the weights in float32. 1558M takes 6.2 GB for them, and up to 22 GB during an export; each export is removed
before the next one. The stage writes Hugging Face's files first, whatever the format.

Two figures of the command and its child processes together, read every 50 ms from /proc/PID/status: the highest sum of
RssAnon, which only swap could free, and the highest sum of VmRSS. The second one counts pages of mapped files too,
which the kernel drops when it needs room.
"""

import argparse
import json
import math
import os
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from pipelines.artifacts.manifest import ArtifactPlan, File, Manifest, commit, upload
from pipelines.recipe import HF, OTHER_FORMATS, Recipe
from pipelines.stage import planned
from trainer.store import LocalStore, Store

STEP_SECONDS = 0.05
GIB = 1 << 30
FACTS: dict[str, dict[str, Any]] = {
    "tokenize": {"shards": {}, "train_tokens": 0},
    "train": {"steps": 0, "tokens": 0, "train/loss": 0.0, "val/loss": 0.0, "perf/tokens_per_second": 0.0},
    "evaluate": {"val/loss": 0.0},
}


def write_weights(recipe: Recipe, path: Path) -> None:
    """Random weights under our names, as the end of a training stores them, a tensor at a time."""
    entries, at = {}, 0
    for name, shape in recipe.model.shapes.items():
        end = at + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for shape in recipe.model.shapes.values():
            (0.02 * torch.randn(shape, generator=generator)).numpy().tofile(file)


def put(store: Store, plan: ArtifactPlan, files: tuple[File, ...]) -> None:
    """A made-up artifact."""
    identity, facts = plan.identity, FACTS[plan.stage]
    made = Manifest(plan.stage, plan.label, plan.fingerprint, identity, {}, files, {}, facts, "made-up", 1, time.time())
    commit(store, made)


def memory(process: psutil.Process) -> tuple[int, int]:
    """RssAnon and VmRSS of a process and its children, in bytes."""
    anonymous = resident = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{one.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found = dict(line.split(":", 1) for line in text.splitlines())
        if "VmRSS" in found:  # a process that has ended has none
            anonymous += 1024 * int(found["RssAnon"].split()[0])
            resident += 1024 * int(found["VmRSS"].split()[0])
    return anonymous, resident


def measure(recipe: str, formats: str, folder: Path) -> dict[str, float]:
    """Run the export of one format, and remove it."""
    command = [sys.executable, "-m", "pipelines.cli", "run", recipe, "--set", f"export.formats=[{formats}]", "--yes"]
    environment = os.environ | {"SKYTRAIN_TRACKING": "off", "SKYTRAIN_HOME": str(folder / "home")}
    began = time.monotonic()
    with (folder / f"{formats}.log").open("wb") as log:
        process = psutil.Popen(
            [*command, "--store", (folder / "store").as_uri()], stdout=log, stderr=log, env=environment
        )
        peaks = (0, 0)
        while process.poll() is None:
            peaks = tuple(max(pair) for pair in zip(peaks, memory(process), strict=True))  # type: ignore[assignment]
            time.sleep(STEP_SECONDS)
    if process.returncode:
        raise SystemExit((folder / f"{formats}.log").read_text())
    shutil.rmtree(folder / "store" / "export")
    return {
        "anonymous, GiB": peaks[0] / GIB,
        "resident, GiB": peaks[1] / GIB,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="gpt2-1558m")
    parser.add_argument("--formats", nargs="+", default=[HF, *OTHER_FORMATS])
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True)
    store = LocalStore(folder / "store")
    recipe, plans = planned(options.recipe, [], store)
    weights = folder / "model.safetensors"
    write_weights(recipe, weights)
    put(store, plans["tokenize"], ())
    put(store, plans["train"], (upload(store, plans["train"].prefix, 1, weights),))
    put(store, plans["evaluate"], ())
    weights.unlink()
    for formats in options.formats:
        found = measure(options.recipe, formats, folder)
        print(f"{formats:10}", "  ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
