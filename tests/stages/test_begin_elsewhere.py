"""A run begins with the weights of another one, or with its whole state: through the command, in one store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pipeline_runs import FOLDER_NAME, STEPS, Project

from pipelines.tracking.runs import read_run

SHORT = ["--set", "train.max_steps=4", "--set", "train.warmup_steps=1", "--set", "name=tuned"]


@pytest.fixture
def finished(undisturbed: Callable[[int], Project], tmp_path: Path) -> Project:
    """A copy of a finished run, its own to change."""
    return undisturbed(1).copy(tmp_path / FOLDER_NAME)


def test_a_run_is_fine_tuned_from_its_own_export(finished: Project) -> None:
    export = finished.path("export", "model.safetensors").parent
    parent, weights = finished.series(), finished.artifact("train").facts["val/loss"]
    source = f"train.init_from={export}"
    plan = json.loads(finished.run("plan", "tiny.yaml", *SHORT, "--set", source, "--json").stdout)
    made = finished.result("--stage", "train", *SHORT, "--set", source)
    assert made["run"] == plan["run"] and made["run"].startswith("tuned-")
    series = read_run(finished.store, made["run"]).series
    assert series[0]["step"] == 0 and series[0]["val/loss"] == pytest.approx(weights, abs=1e-6)
    assert series[-1]["step"] == 4 and parent[-1]["step"] == STEPS

    # By content: another path is the same run, another file is another one, and the source may go.
    moved = export.rename(finished.folder / "elsewhere")
    again = finished.result("--stage", "train", *SHORT, "--set", "train.init_from=elsewhere")
    assert again["run"] == made["run"] and again["artifacts"]["train"]["skipped"]
    (moved / "model.safetensors").unlink()
    recorded = finished.result("--stage", "train", recipe=f"run:{made['run']}")
    assert recorded["artifacts"]["train"]["skipped"]


def test_weights_that_cannot_be_a_runs_are_refused_in_a_line_before_anything_starts(finished: Project) -> None:
    export = finished.path("export", "model.safetensors").parent
    run, before = json.loads(finished.run("report", "--json").stdout)[0]["run"], finished.attempts()
    whole = (export / "model.safetensors").read_bytes()
    cases = {
        str(export): (["--set", "model.n_layer=3"], "its n_layer is 2, and model.n_layer is 3; --set model.n_layer=2"),
        "nowhere": ([], "train.init_from: "),
        "openai-community/gpt2": ([], "write openai-community/gpt2@ and the 40 hex digits"),
        "run:nobody": ([], "nobody: no such run"),
        f"run:{run}@7": ([], f"step 7 is no commit of {run}; its commits are at"),
        f"run:{run}": (["--set", "model.n_head=4"], "its n_head is 2, and model.n_head is 4"),
    }
    for source, (changes, words) in cases.items():
        for verb in (["plan", "tiny.yaml"], ["run", "tiny.yaml"])[: 1 + (source == str(export))]:
            done = finished.run(*verb, *changes, "--set", f"train.init_from={source}", expect=2)
            assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    (export / "model.safetensors").write_bytes(whole[:-100])
    done = finished.run("plan", "tiny.yaml", "--set", f"train.init_from={export}", expect=2)
    assert "truncated" in done.stderr
    assert finished.attempts() == before


def test_nan_in_the_weights_ends_the_run_with_exit_code_2_and_no_commit(finished: Project) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    export = finished.path("export", "model.safetensors").parent
    tensors = load_file(export / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = torch.nan
    save_file(tensors, export / "model.safetensors")
    source = ["--set", f"train.init_from={export}"]
    done = finished.run("run", "tiny.yaml", "--stage", "train", *SHORT, *source, expect=2)
    assert "error: train.init_from: " in done.stderr
    assert "h.1.mlp.c_fc.weight holds NaN or infinity; these weights are ruined" in done.stderr
    assert not finished.found("train/tuned-*/checkpoints/*/COMMIT.json")
    assert yaml.safe_load((finished.folder / "tiny.yaml").read_text())["name"] == "tiny"
