"""benchmarks.beside_llmc: the recipe and the command for llm.c ask for the same training."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.beside_llmc import prepare
from pipelines.recipe.loader import load_recipe
from trainer.config.errors import UserError

# The options that llm.c's parser knows (train_gpt2.cu at f1e2ace), of those that the command uses. It exits on another.
KNOWN = "i j e o b t d x l u q c v m s h r ge z pn pr pg pi pf"
MOCK = f"""#!/bin/sh
echo "$@" >>calls
while [ $# -gt 0 ]; do
    case " {KNOWN} " in *" ${{1#-}} "*) shift 2 ;; *) echo "unknown: $1" >&2; exit 1 ;; esac
done
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1\n")
    return folder


def llmc(folder: Path, mock: str) -> subprocess.CompletedProcess[str]:
    program = folder / "train_gpt2cu"
    program.write_text(mock)
    program.chmod(0o755)
    command = ["sh", "llmc.sh", "shards", str(folder / "out")]
    return subprocess.run(command, cwd=folder, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_rank_of_a_mock_llmc_gets_the_training_of_the_recipe(tmp_path: Path, packages: Path, gpus: int) -> None:
    prepare(tmp_path, packages, steps=700, batch_tokens=262_144, gpus=gpus)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    done = llmc(tmp_path, MOCK)
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


def test_a_mock_llmc_whose_rank_0_fails_takes_the_other_ranks_with_it(tmp_path: Path, packages: Path) -> None:
    prepare(tmp_path, packages, steps=700, batch_tokens=262_144, gpus=4)
    waits = '#!/bin/sh\ncase "$*" in *"-pr 0 "*) sleep 0.5; exit 3 ;; esac\necho $$ >>others\nexec sleep 600\n'
    assert llmc(tmp_path, waits).returncode == 3  # its pipes close only when all ranks have ended
    assert len((tmp_path / "others").read_text().split()) == 3


@pytest.mark.parametrize(
    ("tokens", "gpus", "message"),
    [
        (196_608, 3, "--gpus 3: .* choose 1, 2, 4, 8 or 16"),
        (196_608, 2, "--batch-tokens 196608: .* multiple of 131072"),
    ],
)
def test_a_batch_that_the_gpus_cannot_share_is_refused(
    tmp_path: Path, packages: Path, tokens: int, gpus: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, packages, steps=700, batch_tokens=tokens, gpus=gpus)
