"""benchmarks.beside_llmc: the recipe and the command for llm.c ask for the same training."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.beside_llmc import prepare
from pipelines.recipe import load_recipe
from trainer.errors import UserError


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_rank_of_a_mock_llmc_gets_the_batch_steps_and_rate_of_the_recipe(tmp_path, packages, gpus):
    prepare(tmp_path, packages, steps=700, batch_tokens=262_144, gpus=gpus)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    mock = tmp_path / "train_gpt2cu"
    mock.write_text('#!/bin/sh\necho "$@" >> calls\n')
    mock.chmod(0o755)
    out = tmp_path / "out"
    subprocess.run(["sh", "llmc.sh", "shards", str(out)], cwd=tmp_path, check=True)
    subprocess.run(["sh", "-c", "until [ $(wc -l < calls) -ge " + str(gpus) + " ]; do sleep 0.1; done"], cwd=tmp_path)
    calls = []
    for line in (tmp_path / "calls").read_text().splitlines():
        words = line.split()
        calls.append(dict(zip(words[::2], words[1::2], strict=True)))
    assert sorted(call["-pr"] for call in calls) == [str(rank) for rank in range(gpus)]
    assert recipe.runtime.processes == gpus
    for call in calls:
        assert int(call["-pn"]) == gpus and Path(call["-pp"]) == out
        assert int(call["-d"]) == recipe.train.batch_tokens == 262_144
        assert int(call["-x"]) == recipe.train.max_steps == 700
        assert float(call["-l"]) == recipe.train.learning_rate
        assert int(call["-b"]) == recipe.runtime.micro_batch_size
        assert int(call["-m"]) * int(call["-b"]) * int(call["-t"]) * gpus == recipe.train.val_tokens


def test_a_batch_that_the_gpus_cannot_share_is_refused(tmp_path, packages):
    with pytest.raises(UserError, match="choose a multiple of 196608"):
        prepare(tmp_path, packages, steps=700, batch_tokens=524_288, gpus=3)
