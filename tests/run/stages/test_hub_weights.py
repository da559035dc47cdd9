"""Weights of the Hugging Face Hub: checked by their headers, fetched once, verified. The Hub is a server of ours."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import Hub, answering
from safetensors.torch import save_file
from stage_work import SMALL

from pipelines.recipe.loader import load_recipe
from pipelines.run.formats.hf import hf_config
from pipelines.run.text.tokenizer import tokenizer, tokenizer_files
from trainer.models.family import to_hf
from trainer.models.gpt2_module import GPT

REPOSITORY = Path(__file__).resolve().parents[3]
COMMIT = "a" * 40
MODEL = "openai-community/gpt2"
SOURCE = f"hf://{MODEL}@{COMMIT}"
CODE = """
import json, os, sys
from stage_work import SMALL
from pipelines.recipe.loader import load_recipe
from pipelines.recipe.tokens_config import TokenizerFile
from pipelines.run.text.tokenizer import own_tokenizer, tokenizer_file_bytes
from pipelines.run.weight_sources import fetched_from_hub, hub_weights, tokenizer_beside
from trainer.config.errors import UserError
from trainer.config.source import Source
def answer(what, named, *changes):
    source = Source.of(named, "train.init_from")
    try:
        if what == "check":
            return hub_weights(source, "train.init_from").check(load_recipe("smoke", [*SMALL, *changes]).model)
        if what == "tokenizer":
            own = TokenizerFile(file=named)
            assert tokenizer_file_bytes(own) == tokenizer_beside(source, None, "init_from")
            return own_tokenizer(tokenizer_file_bytes(own), "it").n_vocab
        return str(fetched_from_hub(source, "train.init_from"))
    except UserError as error:
        return f"error: {error}"
for line in sys.stdin:  # a process for each question: a thing is remembered on disk alone
    if not (child := os.fork()):
        print(json.dumps(answer(*json.loads(line))), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    model = load_recipe("smoke", SMALL).model
    gpt = GPT(model)
    gpt.initialize(0)
    save_file(to_hf(gpt.state_dict(), model), tmp_path / "model.safetensors")
    config = json.dumps(hf_config(model, "float32", 0)).encode()
    files = {"config.json": config, "model.safetensors": (tmp_path / "model.safetensors").read_bytes()}
    return Hub("models", MODEL, COMMIT, files)


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/support")]),
    }
    with answering(hub.answer) as address:
        environment["HF_ENDPOINT"] = address
        command, pipe = [sys.executable, "-c", CODE], subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            questions, answers = process.stdin, process.stdout
            assert questions and answers

            def asked(what: str, source: str = SOURCE, *changes: str) -> Any:
                print(json.dumps([what, source, *changes]), file=questions, flush=True)
                return json.loads(answers.readline())

            yield asked


@pytest.mark.slow
def test_weights_of_the_hub_are_checked_by_their_header_and_fetched_verified(hub: Hub, ask: Callable[..., Any]) -> None:
    assert ask("check") is None
    shape = ask("check", SOURCE, "model.n_layer=2")
    assert shape.endswith("its n_layer is 1, and model.n_layer is 2; --set model.n_layer=1 would fit")
    assert ask("check", f"hf://{MODEL}-xl@{COMMIT}").startswith(
        f"error: train.init_from: hf://{MODEL}-xl@{COMMIT[:12]}: cannot be"
    )
    folder = Path(ask("fetch"))
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert (folder / "config.json").exists()
    before = len(hub.sent)
    assert Path(ask("fetch")) == folder
    assert not hub.sent[before:]  # once a machine
    assert ask("tokenizer").startswith("error: tokens.tokenizer: hf://openai-community/gpt2@aaaa")
    hub.files["tokenizer.json"] = tokenizer_files(tokenizer("bytes"), 0)["tokenizer.json"]
    assert ask("tokenizer") == 257
    hub.wrong_sum = True
    assert "damaged on its way (sha256 differs)" in ask("fetch")
    hub.files = {"pytorch_model.bin": b"PK", "config.json": b"{}"}
    assert "its weights are a pickle (pytorch_model.bin)" in ask("check")
