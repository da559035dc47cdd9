"""Promises of the export: what its own runtimes make of each format, and what people read in the card."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from stage_work import tiny_work
from tiny_models import greedy

from pipelines.extras.formats.gguf import KINDS, Gguf
from pipelines.extras.formats.llmc import Llmc
from pipelines.recipe.loader import load_recipe
from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.stage import Built, Work
from pipelines.run.stages import export
from pipelines.run.stages.model_card import model_card, public
from pipelines.run.text.tokenizer import tokenizer
from pipelines.store.manifest import Manifest
from trainer.config.errors import UserError
from trainer.models.family import plain_model, section_of
from trainer.models.gpt2_module import GPT
from trainer.models.language_model import LanguageModel

ROOT = Path(__file__).resolve().parents[3]
TEXT = "The cat isn't on the 12 mats,  größer 東京\n\nthe end"


def small_encoding() -> tiktoken.Encoding:
    """GPT-2's pattern with a few merges: a tokenizer that needs no download."""
    merges = [b"th", b"he", b" t", b" th", b" the", b"at", b"er", b"en", b"\xc3\xb6", b"12", b"  ", b"\n\n"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(merges)}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 268})


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., tuple[LanguageModel, Weights]]:
    """Makes a model with weights large enough that its text is no accident, and the file of its training."""

    def make(encoding: tiktoken.Encoding, **shape: Any) -> tuple[LanguageModel, Weights]:
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 96, "vocab_size": encoding.n_vocab} | shape
        config = section_of(sizes)
        model = plain_model(config).eval()
        model.initialize(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.15 * draw)
            # llama.cpp reports bytes of a character together: the model says ASCII.
            model.head_weight[128:256] *= 0.01
            for name in config.vocabulary_rows:
                if name in config.shapes:
                    model.get_parameter(name)[config.vocab_size :] = 0
        path = tmp_path / "trained.safetensors"
        save_file(model.state_dict(), path)
        return model, Weights(path, config, encoding, "tiny")

    return make


@pytest.fixture
def exported(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Work, Built, Path]:
    """The export of a tiny training by the stage, and its folder; with files of as many bytes as the parameter."""
    monkeypatch.setattr(hf, "MOST_BYTES", getattr(request, "param", hf.MOST_BYTES))
    work = tiny_work(tmp_path, "export")
    built = export.build(work)
    return work, built, work.folder


# --- hf


@pytest.mark.parametrize("exported", [hf.MOST_BYTES, 20_000], indirect=True)
def test_a_pipeline_of_transformers_generates_from_the_folder(exported: tuple[Work, Built, Path]) -> None:
    import transformers

    work, built, folder = exported
    files = [path for path in folder.glob("model*.safetensors") if path.name in {file.name for file in built.files}]
    assert all(path.stat().st_size < hf.MOST_BYTES + 10_000 for path in files)
    assert (len(files) > 1) == (hf.INDEX in {file.name for file in built.files})
    model = GPT(work.recipe.model).eval()
    model.load_state_dict(load_file(work.fetch("train", "model.safetensors")))
    generate = transformers.pipeline("text-generation", str(folder), device="cpu")
    (answer,) = generate("ab", max_new_tokens=4, do_sample=False, return_full_text=False)
    encoding = tokenizer("bytes")
    assert answer["generated_text"] == encoding.decode(greedy(model, encoding.encode("ab"), 4))
    assert generate.tokenizer.special_tokens_map["eos_token"] == "<|endoftext|>"
    assert [sum(mask) for mask in generate.tokenizer(["a", "abc"], padding=True)["attention_mask"]] == [1, 3]


def test_weights_that_a_number_format_cannot_hold_are_named(
    trained: Callable[..., tuple[LanguageModel, Weights]], tmp_path: Path
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


LLAMAS: dict[str, dict[str, Any]] = {
    "tied": {"tied_head": True},
    "grouped": {"n_kv_head": 2, "rope_base": 500.0},
    "QK-norm": {"n_kv_head": 2, "qk_norm": True, "n_inner": 160},
}


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [
        pytest.param(small_encoding(), {}, id="merges"),
        pytest.param(tokenizer("bytes"), {}, id="bytes"),
        *(pytest.param(tokenizer("bytes"), {"family": "llama"} | own, id=name) for name, own in LLAMAS.items()),
    ],
)
def test_llama_cpp_says_the_same_text_from_the_gguf(
    trained: Callable[..., tuple[LanguageModel, Weights]],
    tmp_path: Path,
    encoding: tiktoken.Encoding,
    shape: dict[str, Any],
) -> None:
    model, weights = trained(encoding, **shape)
    paths = dict(zip(KINDS, Gguf().write(weights, tmp_path), strict=True))
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


# --- llm.c


def read_llmc(path: Path) -> tuple[list[int], dict[str, torch.Tensor]]:
    """A checkpoint of llm.c, read as its build_from_checkpoint does: the header, and the tensors by its own names."""
    content = path.read_bytes()
    magic, version, context, vocab, layers, heads, width, padded = np.frombuffer(content, "<i4", 8).tolist()
    assert magic == 20240326
    sizes = {
        "wte": (padded, width), "wpe": (context, width), "ln1w": (layers, width), "ln1b": (layers, width),
        "qkvw": (layers, 3 * width, width), "qkvb": (layers, 3 * width), "attprojw": (layers, width, width),
        "attprojb": (layers, width), "ln2w": (layers, width), "ln2b": (layers, width),
        "fcw": (layers, 4 * width, width), "fcb": (layers, 4 * width), "fcprojw": (layers, width, 4 * width),
        "fcprojb": (layers, width), "lnfw": (width,), "lnfb": (width,),
    }  # fmt: skip
    dtype = {3: torch.float32, 5: torch.bfloat16}[version]
    tensors, offset = {}, 1024
    for name, shape in sizes.items():
        end = offset + int(np.prod(shape)) * dtype.itemsize
        tensors[name] = torch.frombuffer(bytearray(content[offset:end]), dtype=dtype).view(shape)
        offset = end
    assert offset == len(content)
    return [version, context, vocab, layers, heads, width, padded], tensors


LLMC = {
    "ln1": "ln_1", "qkv": "attn.c_attn", "attproj": "attn.c_proj", "ln2": "ln_2", "fc": "mlp.c_fc",
    "fcproj": "mlp.c_proj",
}  # fmt: skip


def test_a_reader_of_llmc_finds_the_weights_and_the_tokens(
    trained: Callable[..., tuple[LanguageModel, Weights]], tmp_path: Path
) -> None:
    encoding = small_encoding()
    model, weights = trained(encoding)
    Llmc().write(weights, tmp_path)
    state = model.state_dict()
    for name, version, dtype in (("model.bin", 5, torch.bfloat16), ("model_fp32.bin", 3, torch.float32)):
        header, found = read_llmc(tmp_path / name)
        assert header == [version, 96, 269, 2, 4, 64, 384]
        assert torch.equal(found["wte"], state["wte.weight"].to(dtype)) and not found["wte"][269:].any()
        assert torch.equal(found["wpe"], state["wpe.weight"].to(dtype))
        for theirs, ours in LLMC.items():
            for part in ("weight", "bias"):
                stacked = torch.stack([state[f"h.{block}.{ours}.{part}"] for block in range(2)])
                assert torch.equal(found[f"{theirs}{part[0]}"], stacked.to(dtype)), (theirs, part)
        assert torch.equal(found["lnfw"], state["ln_f.weight"].to(dtype))

    content = (tmp_path / "tokenizer.bin").read_bytes()
    assert np.frombuffer(content, "<i4", 4).tolist() == [20240328, 2, 269, 268]
    tokens, at = [], 1024
    while at < len(content):
        tokens.append(content[at + 1 : at + 1 + content[at]])
        at += 1 + content[at]
    assert tokens == [encoding.decode_bytes([i]) for i in range(269)]


# --- every format


def test_a_format_without_its_package_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tiny_work(tmp_path, "export")
    work.recipe = work.recipe.model_copy(update={"export": work.recipe.export.model_copy(update={"formats": ["gguf"]})})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"export.formats: gguf needs the package gguf: make install"):
        export.build(work)
    assert not list(work.folder.iterdir())


# --- the model card


def test_the_card_holds_what_the_run_measured_and_cost(undisturbed: Callable[[int], Any]) -> None:
    import yaml
    from huggingface_hub import ModelCard

    project = undisturbed(1)
    card = ModelCard.load(project.path("export", "README.md"), ignore_metadata_errors=False)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    loss = project.artifact("evaluate").facts["val/loss"]
    assert f"{loss:.4f}" in card.text and "skytrain run recipe.yaml" in card.text
    assert project.artifact("train").provenance["git_commit"] in card.text
    assert "machine hours in " in card.text and "| tokens trained on | 61,440 in 60 steps of 1,024 |" in card.text
    recipe = card.text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["train"]["max_steps"] == 60


def test_the_card_names_the_first_weights_and_the_scores() -> None:
    def made(stage: str, **facts: Any) -> Manifest:
        return Manifest(stage, stage, "f" * 64, {}, {}, (), {}, facts, "run", 1, 1.0)

    source, scores = f"run:wsd-1a@50@sha256:{'d' * 64}", {"val/loss": 2.5, "eval/core": 0.1}
    stages = {"tokenize": made("tokenize"), "train": made("train", steps=60), "evaluate": made("evaluate", **scores)}
    card = model_card(load_recipe("smoke", [f"train.branch_from={source}"]), stages, None)
    assert "| first weights | the whole state of run:wsd-1a@50 (sha256 dddddddddddd) |" in card
    assert "| validation loss, nats per token | 2.5000 |" in card
    assert "| CORE (DCLM), centred accuracy | 0.1000 |" in card


def test_no_value_of_a_record_or_a_recipe_writes_markup_into_the_card() -> None:
    hostile = "a|\n\n# head\u2028<script>alert(1)</script> [x](javascript:alert(1)) `c` &lt; __b__ ![i](x) ~~s~~ $x$"
    fenced = "x\n```\n<script>\n````\n# head"

    def made(stage: str, **facts: Any) -> Manifest:
        origin = {"git_commit": hostile, "git_dirty": True, "versions": {hostile: hostile}}
        return Manifest(stage, stage, "f" * 64, {}, {}, (), origin, facts, "run", 1, 1.0)

    stages = {"train": made("train", steps=60, precision=hostile, tokens=hostile)}
    stages["evaluate"] = made("evaluate", **{f"eval/{hostile}": 0.5})
    changes = [f"tokens.{name}={json.dumps(fenced)}" for name in ("source", "subset", "text_column")]
    card = model_card(load_recipe("smoke", changes), stages, None)
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(card.split("\n---\n", 1)[1])
    kinds = set(re.findall(r"<(\w+)", page))
    assert kinds == {"h1", "h2", "p", "pre", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert (page.count("<h1>"), page.count("<h2>"), page.count("<pre>")) == (1, 5, 3) and page.count("</td>") % 2 == 0
    assert html.escape("eval/" + re.sub("[\n\u2028]", " ", hostile), quote=False) in page  # as it is, on one line
    assert page.count("&lt;script&gt;\n") == 3  # in the recipe
    stages["train"].provenance["versions"] = "none"
    assert "(), with this recipe" in model_card(load_recipe("smoke"), stages, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/a/*.parquet?token=secret", "https://host/a/*.parquet"),
        ("s3://bucket/a?.parquet", "s3://bucket/a?.parquet"),
        ("/data/mine/text/*.txt", "*.txt"),
        ("llmc:///data/mine/shards", "llmc://shards"),
    ],
)
def test_the_card_has_no_password_and_no_folder_of_this_machine(text: str, shown: str) -> None:
    assert public(text) == shown
    recipe = load_recipe("smoke", [f"tokens.source={text}"])
    train = Manifest("train", "x", "f" * 64, {}, {}, (), {}, {}, "run", 1, 1.0)
    card = model_card(recipe, {"train": train}, None)
    assert shown in card and "secret" not in card and "/data" not in card
