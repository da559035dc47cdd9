"""benchmarks.beside_llmc: the recipe and the command for llm.c ask for the same training."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.beside_llmc import prepare
from pipelines.recipe.loader import load_recipe

# The options that llm.c's parser knows (train_gpt2.cu at f1e2ace), of those that the command uses. It exits on another.
KNOWN = "i j e o b t d x l u q c v m s h r ge z pn pr pg pi pf"
MOCK = f"""#!/bin/sh
echo "$@" >>calls
while [ $# -gt 0 ]; do
    case " {KNOWN} " in *" ${{1#-}} "*) shift 2 ;; *) echo "unknown: $1" >&2; exit 1 ;; esac
done
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_rank_of_a_mock_llmc_gets_the_training_of_the_recipe(tmp_path: Path, gpus: int) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "module.py").write_text("x = 1\n")
    prepare(tmp_path, tmp_path / "packages", steps=700, batch_tokens=262_144, gpus=gpus)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    (tmp_path / "train_gpt2cu").write_text(MOCK)
    (tmp_path / "train_gpt2cu").chmod(0o755)
    command = ["sh", "llmc.sh", "shards", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = []
    for line in (tmp_path / "calls").read_text().splitlines():
        words = line.split()
        calls.append(dict(zip(words[::2], words[1::2], strict=True)))
    assert sorted(call["-pr"] for call in calls) == [str(rank) for rank in range(gpus)]
    assert recipe.runtime.processes == gpus
    train = recipe.train
    for call in calls:
        assert (call["-pi"], Path(call["-pf"])) == ("fs", tmp_path / "out")
        assert int(call["-pn"]) == int(call["-pg"]) == gpus
        assert (int(call["-d"]), int(call["-x"])) == (train.batch_tokens, train.max_steps) == (262_144, 700)
        assert (float(call["-l"]), int(call["-u"])) == (train.learning_rate, train.warmup_steps)
        assert (float(call["-c"]), int(call["-v"])) == (train.weight_decay, train.val_every)
        assert (int(call["-b"]), int(call["-t"])) == (recipe.runtime.micro_batch_size, recipe.model.block_size)
        assert int(call["-m"]) * int(call["-b"]) * int(call["-t"]) * gpus == train.val_tokens
        assert int(call["-z"]) == (1 if gpus > 1 else 0)
