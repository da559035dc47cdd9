"""A run may begin with weights from a file. What can't be its weights is refused before a step, and never unpickled."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from trainer_runs import ALONE, Runners, configured, weights

from pipelines.run.formats.hf import hf_config
from trainer.checkpoint.weights import Origin, open_weights
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.engines.choice import make_engine
from trainer.models.family import to_hf
from trainer.models.gpt2_module import GPT

MODEL = configured().model


def drawn(config: ModelConfig = MODEL) -> GPT:
    model = GPT(config)
    model.initialize(7)
    return model


def hf_folder(folder: Path, model: GPT, prefix: str = "transformer.", **config: Any) -> Path:
    """The weights as transformers would save them."""
    folder.mkdir(exist_ok=True)
    tensors = {prefix + name.removeprefix("transformer."): t for name, t in to_hf(model.state_dict(), MODEL).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(MODEL, "float32", 0) | config))
    return folder


def llmc_file(path: Path, model: GPT, version: int = 3) -> Path:
    """The weights in the format of llm.c, written from its description."""
    c, state = MODEL, model.state_dict()
    numbers = (20240326, version, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.padded_vocab_size)
    kinds = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    blocks = [f"h.{i}.{kind}.{part}" for kind in kinds for part in ("weight", "bias") for i in range(c.n_layer)]
    with path.open("wb") as file:
        file.write(np.array([*numbers, *[0] * (256 - len(numbers))], np.int32).tobytes())
        for name in ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]:
            tensor = state[name] if version == 3 else state[name].to(torch.bfloat16).view(torch.int16)
            file.write(tensor.numpy().tobytes())
    return path


def loaded(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights of an engine that begins with a file."""
    config = configured(**changes)
    engine = make_engine(config.model, config.train, config.runtime, ALONE)
    open_weights(path).fill(engine.pieces(), config.model)
    return dict(engine.weights())


def complaint(path: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as mistake:
        loaded(path, **changes)
    assert "\n" not in str(mistake.value)
    return str(mistake.value)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_a_hugging_face_folder_gives_the_same_weights_bit_for_bit(tmp_path: Path, prefix: str) -> None:
    model = drawn()
    found = loaded(hf_folder(tmp_path / "hf", model, prefix))
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert found["wte.weight"].shape[0] == MODEL.padded_vocab_size > MODEL.vocab_size
    save_file(model.state_dict(), own := tmp_path / "model.safetensors")  # as a run ends
    assert all(torch.equal(tensor, found[name]) for name, tensor in loaded(own).items())


@pytest.mark.parametrize("version", [3, 5])
def test_a_file_of_llmc_gives_the_same_weights(tmp_path: Path, version: int) -> None:
    found = loaded(llmc_file(tmp_path / "model.bin", drawn(), version))
    for name, tensor in drawn().state_dict().items():
        assert torch.equal(found[name], tensor if version == 3 else tensor.to(torch.bfloat16).float()), name


def test_a_run_begins_with_the_weights_and_resumes_without_their_source(runner: Runners, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", drawn())
    asked = []

    def origin(world: Any) -> Origin:
        asked.append(world)
        return Origin("train.init_from: hf", path=folder)

    undisturbed = runner("undisturbed", checkpoint_minutes=1e-9)
    undisturbed.origin = origin
    expected, _ = undisturbed.attempt()
    disturbed = runner("disturbed", checkpoint_minutes=1e-9)
    disturbed.origin = origin
    disturbed.attempt(stop_after=4)
    assert len(asked) == 2
    (folder / "model.safetensors").unlink()
    model, state = disturbed.attempt()
    assert len(asked) == 2 and state.step == 12
    assert weights(model) == weights(expected) and disturbed.rows() == undisturbed.rows()
    from_seed = runner("from seed")
    from_seed.attempt()
    assert from_seed.rows()[0]["val/loss"] != undisturbed.rows()[0]["val/loss"]


def test_another_shape_is_refused_with_the_field_and_the_value_that_would_fit(tmp_path: Path) -> None:
    hf, bin_ = hf_folder(tmp_path / "hf", drawn()), llmc_file(tmp_path / "model.bin", drawn())
    for path in (hf, bin_):
        for field, value in (("n_layer", 3), ("n_head", 4), ("n_embd", 64), ("block_size", 16), ("vocab_size", 80)):
            fits = getattr(MODEL, field)
            assert complaint(path, **{field: value}) == (
                f"{path}: its {field} is {fits}, and model.{field} is {value}; --set model.{field}={fits} would fit"
            )
    assert complaint(hf, n_head=4, n_embd=64).endswith("--set model.n_embd=32 --set model.n_head=2 would fit")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_layer": "2"}, "n_layer: must be a valid integer (got '2')"),
        ({"n_head": 5}, "n_embd 32 is not divisible by n_head 5; 30 would be"),
        ({"n_embd": None}, "not the configuration of a model (TypeError)"),
        (
            {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 0},
            "not the configuration of a model (ZeroDivisionError)",
        ),
        ({"activation_function": "relu"}, "activation_function is 'relu'; skytrain's gpt2 has 'gelu_new'"),
    ],
)
def test_a_config_of_another_model_is_refused_with_its_field(tmp_path: Path, config: Any, message: str) -> None:
    hf = hf_folder(tmp_path / "hf", drawn(), **config)
    assert complaint(hf) == f"{hf}/config.json: {message}"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    hf, bin_ = hf_folder(tmp_path / "hf", drawn()), llmc_file(tmp_path / "model.bin", drawn())
    for path in (bin_, hf / "model.safetensors"):
        whole = path.read_bytes()
        for size in (len(whole) - 1, len(whole) // 2):
            path.write_bytes(whole[:size])
            assert "truncated" in complaint(bin_ if path == bin_ else hf)
    path.write_bytes(b"")
    assert "not a safetensors file" in complaint(hf)
    path.unlink()
    path.mkdir()
    assert complaint(hf) == f"{hf}/model.safetensors: no file; fetch it again"


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "it ran",)

    folder = tmp_path / "hf"
    folder.mkdir()
    torch.save({"weights": Trap()}, folder / "pytorch_model.bin")
    torch.save({"weights": Trap()}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (folder / "config.json").write_text("{}")
    (tmp_path / "model.pt").write_bytes(b"anything")
    for path in (folder, folder / "pytorch_model.bin", tmp_path / "old.bin", tmp_path / "model.pt"):
        assert "a pickle" in complaint(path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "model.gguf: GGUF is not read; name the model's folder" in complaint(tmp_path / "model.gguf")
    for numbers, message in (
        ((7, 3, 8, 60, 2, 2, 32, 64), "not a checkpoint of llm.c (its first number is 7, not 20240326)"),
        ((20240326, 4, 8, 60, 2, 2, 32, 64), "version 4 of llm.c's format; 3 (float32) and 5 (bfloat16) can be read"),
        ((20240326, 3, 8, 60, 2, 2, 32, 59), "damaged: 59 rows for a vocabulary of 60; fetch it again"),
        ((20240326, 3, 8, 60, -2, 2, 32, 64), "n_layer: must be at least 1 (got -2)"),
    ):
        (tmp_path / "llmc.bin").write_bytes(struct.pack("<8i", *numbers).ljust(1024, b"\0"))
        assert complaint(tmp_path / "llmc.bin") == f"{tmp_path}/llmc.bin: {message}"
    hf_folder(folder, drawn())
    (folder / "model.safetensors").write_bytes((folder / "pytorch_model.bin").read_bytes())
    assert "a pickle" in complaint(folder)
    assert not (tmp_path / "it ran").exists()


def test_a_missing_and_an_extra_tensor_are_refused_by_name(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", drawn())
    tensors = to_hf(drawn().state_dict(), MODEL)
    gone = tensors.pop("transformer.h.0.ln_2.bias")
    save_file(tensors, folder / "model.safetensors")
    assert (
        complaint(folder) == f"{folder}: incomplete: it has no tensor h.0.ln_2.bias; take a whole model of family gpt2"
    )
    save_file(tensors | {"transformer.h.0.ln_2.bias": gone, "score.weight": gone + 1}, folder / "model.safetensors")
    assert "'score.weight' does not belong to a model of family gpt2" in complaint(folder)
    save_file(tensors | {"transformer.h.0.ln_2.bias": gone[:-1].clone()}, folder / "model.safetensors")
    assert "h.0.ln_2.bias has the shape [31]" in complaint(folder)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "truncated, or not a safetensors file"),
        ({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, "I64"),
        ({"a": []}, "truncated, or not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [10**18] * 200_000, "data_offsets": [0, 8]}}, "not a safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, word: str) -> None:
    body = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body + b"\0" * 8)
    assert word in complaint(tmp_path / "model.safetensors")
