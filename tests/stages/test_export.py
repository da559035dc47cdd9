"""Promises of the export: what its own runtimes make of each format, and what people read in the card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file
from stage_work import tiny_work

from pipelines.formats import gguf, hf
from pipelines.formats.weights import Weights
from pipelines.stage import Built, Work
from pipelines.stages import export
from pipelines.stages.model_card import public
from pipelines.text.tokenizer import tokenizer
from trainer.config import ModelConfig
from trainer.errors import UserError
from trainer.model import GPT

TEXT = "The cat isn't on the 12 mats,  größer 東京\n\nthe end"


def small_encoding() -> tiktoken.Encoding:
    """GPT-2's pattern with a few merges: a tokenizer that needs no download."""
    merges = [b"th", b"he", b" t", b" th", b" the", b"at", b"er", b"en", b"\xc3\xb6", b"12", b"  ", b"\n\n"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(merges)}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 268})


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., tuple[GPT, Weights]]:
    """Makes a model with weights large enough that its text is no accident, and the file of its training."""

    def make(encoding: tiktoken.Encoding, **shape: Any) -> tuple[GPT, Weights]:
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 96, "vocab_size": encoding.n_vocab} | shape
        config = ModelConfig(**sizes)
        model = GPT(config).eval()
        model.initialize(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.15 * draw)
            # llama.cpp reports bytes of a character together: the model says ASCII.
            model.wte.weight[128:256] *= 0.01
            model.wte.weight[config.vocab_size :] = 0
        path = tmp_path / "trained.safetensors"
        save_file(model.state_dict(), path)
        return model, Weights(path, config, encoding, "tiny")

    return make


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Work, Built, Path]:
    """The export of a tiny training by the stage, and its folder."""
    work = tiny_work(tmp_path, "export")
    built = export.build(work)
    return work, built, work.folder


# --- hf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checkpoint_has_the_bytes_of_safetensors_own_writer(
    trained: Callable[..., tuple[GPT, Weights]], tmp_path: Path, dtype: str
) -> None:
    _, weights = trained(small_encoding(), n_layer=11)  # h.10 comes before h.2
    hf.write(weights, tmp_path, dtype)
    hf.verify(weights, tmp_path, dtype)
    again = tmp_path / "again.safetensors"
    save_file(load_file(tmp_path / hf.FILE), again, metadata={"format": "pt"})
    assert again.read_bytes() == (tmp_path / hf.FILE).read_bytes()


def test_a_pipeline_of_transformers_generates_from_the_folder(exported: tuple[Work, Built, Path]) -> None:
    import transformers

    work, _, folder = exported
    model = GPT(work.recipe.model).eval()
    model.load_state_dict(load_file(work.fetch("train", "model.safetensors")))
    generate = transformers.pipeline("text-generation", str(folder), device="cpu")
    (answer,) = generate("ab", max_new_tokens=4, do_sample=False, return_full_text=False)
    encoding = tokenizer("bytes")
    assert answer["generated_text"] == encoding.decode(greedy(model, encoding.encode("ab"), 4))
    assert generate.tokenizer.special_tokens_map["eos_token"] == "<|endoftext|>"


def test_weights_that_a_number_format_cannot_hold_are_named(
    trained: Callable[..., tuple[GPT, Weights]], tmp_path: Path
) -> None:
    model, weights = trained(small_encoding())
    state = model.state_dict()
    state["ln_f.weight"][3] = 70_000.0
    save_file(state, weights.path)
    with pytest.raises(UserError, match=r"ln_f.weight has a weight of 7e\+04, which torch.float16 cannot hold"):
        hf.write(weights, tmp_path, "float16")


# --- gguf


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path, params.warmup, params.n_parallel = str(path), False, 1
        params.n_ctx, params.cpuparams.n_threads = 96, 1
        self.server = xllamacpp.Server(params)

    def complete(self, prompt: list[int] | str, tokens: int) -> tuple[bytes, dict[int, float], int]:
        """The bytes of the likeliest text, the log-probabilities of the first token, and the prompt's length."""
        request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5}
        answer = self.server.handle_completions(request)
        said = answer["choices"][0]["logprobs"]["content"]
        first = {one["id"]: one["logprob"] for one in said[0]["top_logprobs"]}
        return bytes(b for one in said for b in one["bytes"]), first, answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("encoding", [small_encoding(), tokenizer("bytes")], ids=["merges", "bytes"])
def test_llama_cpp_says_the_same_text_from_the_gguf(
    trained: Callable[..., tuple[GPT, Weights]], tmp_path: Path, encoding: tiktoken.Encoding
) -> None:
    model, weights = trained(encoding)
    paths = dict(zip(gguf.KINDS, gguf.write(weights, tmp_path), strict=True))
    gguf.verify(weights, tmp_path)
    ids = encoding.encode_ordinary(TEXT)
    text = encoding.decode_bytes(greedy(model, ids, 12))
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0, -1].log_softmax(0)
    f16 = LlamaCpp(paths["f16"])
    assert f16.complete(ids, 12)[0] == text
    said, first, length = f16.complete(TEXT, 12)
    assert (said, length) == (text, len(ids))  # llama.cpp's tokenizer gives the same ids
    assert first == pytest.approx({token: float(ours[token]) for token in first}, abs=0.02)
    said, first, _ = LlamaCpp(paths["q8_0"]).complete(ids, 1)
    assert text.startswith(said)
    assert first == pytest.approx({token: float(ours[token]) for token in first}, abs=0.15)
    assert paths["q8_0"].stat().st_size < paths["f16"].stat().st_size


def test_a_gguf_has_an_id_for_every_row_of_the_embedding(
    trained: Callable[..., tuple[GPT, Weights]], tmp_path: Path
) -> None:
    encoding = small_encoding()
    model, weights = trained(encoding, vocab_size=300, n_embd=48)  # 48: q8_0 does not divide such rows
    ids = encoding.encode_ordinary(TEXT)
    path = gguf.write(weights, tmp_path)[1]
    gguf.verify(weights, tmp_path)
    (wanted,) = greedy(model, ids, 1)
    _, first, _ = LlamaCpp(path).complete(ids, 1)
    assert max(first, key=first.__getitem__) == wanted


# --- every format


class Bfloat16:
    """hf with its dtype, as the other formats."""

    @staticmethod
    def write(weights: Weights, folder: Path) -> list[Path]:
        return hf.write(weights, folder, "bfloat16")

    @staticmethod
    def verify(weights: Weights, folder: Path) -> None:
        hf.verify(weights, folder, "bfloat16")


FORMATS: dict[str, Any] = {"hf": Bfloat16, "gguf": gguf}


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_with_one_changed_weight_is_not_committed(
    trained: Callable[..., tuple[GPT, Weights]], tmp_path: Path, name: str
) -> None:
    _, weights = trained(small_encoding())
    paths = FORMATS[name].write(weights, tmp_path)
    FORMATS[name].verify(weights, tmp_path)
    content = bytearray(paths[0].read_bytes())
    content[-1] ^= 1
    paths[0].write_bytes(content)
    with pytest.raises(RuntimeError, match=f"{paths[0].name}, read back, differs from the trained weights: "):
        FORMATS[name].verify(weights, tmp_path)


def test_each_format_has_a_folder_in_the_artifact(tmp_path: Path) -> None:
    work = tiny_work(tmp_path, "export")
    work.recipe = work.recipe.model_copy(update={"export": work.recipe.export.model_copy(update={"formats": ["gguf"]})})
    built = export.build(work)
    names = [file.name for file in built.files]
    assert names[0] == "model.safetensors" and "README.md" in names
    assert names[-2:] == ["gguf/smoke-f16.gguf", "gguf/smoke-q8_0.gguf"]
    assert built.facts["formats"] == ["hf", "gguf"]


# --- the model card


def test_the_hub_reads_the_model_card(exported: tuple[Work, Built, Path]) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(exported[2] / "README.md", ignore_metadata_errors=False)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert "Python Software Foundation License" in card.text and "skytrain run recipe.yaml" in card.text


def test_the_card_holds_what_the_run_measured_and_cost(undisturbed: Callable[[int], Any]) -> None:
    import yaml
    from huggingface_hub import ModelCard

    project = undisturbed(1)
    card = ModelCard.load(project.path("export", "README.md"), ignore_metadata_errors=False)
    loss = project.artifact("evaluate").facts["val/loss"]
    assert f"{loss:.4f}" in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", loss)
    assert project.artifact("train").provenance["git_commit"] in card.text
    assert "| dollars | 0." in card.text and "| tokens trained on | 61,440 in 60 steps |" in card.text
    recipe = card.text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["train"]["max_steps"] == 60


def test_the_card_names_no_password_of_a_source() -> None:
    assert public("https://me:secret@host/a/*.parquet?token=secret") == "https://host/a/*.parquet"
    assert public("s3://bucket/a?.parquet") == "s3://bucket/a?.parquet"
