"""GGUF for llama.cpp and the programs around it: two files, with weights in float16 and in q8_0 (8.5 bits a weight).

Names and values are those of llama.cpp's architectures: `gpt2`, `llama`, and `qwen3` for a Llama with QK-norm. As in
its own conversion, vectors and positions stay in float32. A tied head has no tensor: llama.cpp takes the token
embedding.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.recipe.recipe import CHAT_TOKENS
from pipelines.run.formats.export_weights import Format, Weights
from pipelines.run.text.chat import TEMPLATE, ChatTokens
from pipelines.run.text.tokenizer import vocabulary
from trainer.base.install import check_package
from trainer.config.model_config import ModelConfig
from trainer.models.llama import LlamaConfig

if TYPE_CHECKING:
    import gguf
    import numpy as np

KINDS = {"f16": "F16", "q8_0": "Q8_0"}  # by the file's name, in the library's names
ROW = 32  # weights of a row that q8_0 gives one scale
TURNED = ("attn.q_proj.weight", "attn.k_proj.weight")  # whose rows have rotary positions


class Gguf(Format):
    """`<run>-f16.gguf` and `<run>-q8_0.gguf`."""

    families: ClassVar[tuple[str, ...]] = ("gpt2", "llama")

    def check(self) -> None:
        check_package("gguf", "formats", "export.formats: gguf", "or leave the format out")

    def write(self, weights: Weights, folder: Path) -> list[Path]:
        return [write_kind(weights, folder / f"{weights.name}-{kind}.gguf", kind) for kind in KINDS]


def write_kind(weights: Weights, path: Path, kind: str) -> Path:
    """Write one file, tensor by tensor."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture(weights.config))
    add_model(writer, weights, kind)
    add_tokenizer(writer, weights)
    for name, theirs in gguf_names(weights.config).items():
        shape = weights.shapes[name]
        stored = type_of(name, shape, kind)
        block, size = gguf.GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(theirs, shape, np.dtype("float32"), math.prod(shape) // block * size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in weights.shapes:
        writer.write_tensor_data(converted(weights, name, kind))
    writer.close()
    return path


def architecture(config: ModelConfig) -> str:
    """llama.cpp's name of a model."""
    if isinstance(config, LlamaConfig):
        return "qwen3" if config.qk_norm else "llama"
    return "gpt2"


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """llama.cpp's names of the tensors, by ours: `h.3.attn.c_attn.weight` is `blk.3.attn_qkv.weight`."""
    import gguf

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture(config).upper()], config.n_layer)
    return {name: known.get_name(config.hf_name(name), (".weight", ".bias")) or name for name in config.shapes}


def type_of(name: str, shape: tuple[int, ...], kind: str) -> "gguf.GGMLQuantizationType":
    """The number format of a tensor. A row that q8_0 does not divide stays in float16."""
    import gguf

    if len(shape) == 1 or name == "wpe.weight":
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType["F16" if shape[-1] % ROW else KINDS[kind]]


def converted(weights: Weights, name: str, kind: str) -> "np.ndarray[Any, Any]":
    """A tensor in its number format, as the file has it."""
    import gguf
    import torch

    stored = type_of(name, weights.shapes[name], kind)
    dtype = torch.float16 if stored.name == "F16" else torch.float32
    tensor = weights.rounded(name, dtype)
    if architecture(weights.config) == "llama" and name.endswith(TURNED):
        # llama.cpp turns neighbouring rows of a head there, and we turn row i with row i + D/2.
        pairs = tensor.view(-1, 2, weights.config.head_size // 2, tensor.size(-1))
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    found: np.ndarray[Any, Any] = gguf.quants.quantize(tensor.numpy(), stored)
    return found


def add_model(writer: "gguf.GGUFWriter", weights: Weights, kind: str) -> None:
    import gguf

    config = weights.config
    writer.add_type("model")
    writer.add_name(weights.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{KINDS[kind]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_head_count(config.n_head)
    if not isinstance(config, LlamaConfig):
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_feed_forward_length(config.inner)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: "gguf.GGUFWriter", weights: Weights) -> None:
    """The tokens, their kinds and the merges. Ids beyond the tokenizer's stand as unused tokens."""
    import gguf

    found = vocabulary(weights.encoding)
    unused = weights.config.vocab_size - len(found.tokens)
    kinds = [gguf.TokenType.NORMAL] * len(found.tokens) + [gguf.TokenType.UNUSED] * unused
    kinds[found.end_of_text] = gguf.TokenType.CONTROL
    end, last = found.tokens[found.end_of_text], found.end_of_text
    names = [*found.tokens, *(f"[PAD{len(found.tokens) + i}]" for i in range(unused))]
    if weights.chat:
        tokens = ChatTokens(weights.encoding)
        last = tokens.end
        names[tokens.start : tokens.n_vocab] = CHAT_TOKENS
        kinds[tokens.start : tokens.n_vocab] = [gguf.TokenType.CONTROL] * len(CHAT_TOKENS)
        writer.add_chat_template(re.sub(r"{% (end)?generation %}", "", TEMPLATE))  # marks that llama.cpp does not know
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    # llama.cpp wants merges, and the tokenizer "bytes" has none. A pair of special tokens never arises in a text.
    writer.add_token_merges(found.merges or [f"{end} {end}"])
    writer.add_bos_token_id(found.end_of_text)
    writer.add_eos_token_id(last)
    writer.add_add_bos_token(False)  # as transformers
