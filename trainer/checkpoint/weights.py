"""Weights from files: a folder in Hugging Face's format, a .bin of llm.c, and the file that ends a run.

A file is opened by its header: names, shapes and sizes are compared with the model before a tensor is read, without
torch. A rank then fills its pieces tensor by tensor, so a node reads a file once and never holds it whole. Only
safetensors and llm.c's plain numbers are read; a pickle is refused, because to load one is to run it.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.store import open_regular, read_regular
from trainer.config.errors import UserError, cut, shown
from trainer.config.model_config import ModelConfig
from trainer.models.family import family_of, section_of_hf
from trainer.models.gpt2 import MASKS, Gpt2Config

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.checkpoint.pieces import Piece

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOATS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of a number
# llm.c: 256 int32, then the blocks' tensors of one kind after the other (its llmc/train_gpt2.cu).
LLMC_MAGIC, LLMC_HEADER = 20240326, 1024
LLMC_DTYPES = {3: "F32", 5: "BF16"}  # by version


@dataclass(frozen=True)
class Origin:
    """Where a run begins, in place of weights drawn from its seed: at weights in a file, or at a commit of another run
    in its store, of which it takes the weights alone or the whole state."""

    where: str  # for messages
    path: Path | None = None  # on this node, for `open_weights`
    commit: str | None = None  # its folder
    whole: bool = False
    other_text: bool = False  # of a whole state: the run reads its own text from the start


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, under the model's name and in its shape."""

    where: str
    shape: tuple[int, ...]
    read: Callable[[], "Tensor"]


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file or folder, and the fields of `model` that it was made with, as far as it tells them."""

    where: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    def check(self, model: ModelConfig) -> None:
        """UserError, with the values that would fit, if the weights are not of this model; and if they are damaged."""
        longer = "wpe.weight" not in self.tensors and self.fields.get("block_size", 0) > model.block_size
        ours = {**model.model_dump(), **model.implied, **({"block_size": self.fields["block_size"]} if longer else {})}
        if other := {name: value for name, value in self.fields.items() if ours.get(name) != value}:
            name = "family" if "family" in other else min(other)
            sets = " ".join(f"--set model.{one}={other[one]}" for one in sorted(other, key=lambda one: one != name))
            has = ours.get(name, "no field of its family")
            raise UserError(f"{self.where}: its {name} is {other[name]}, and model.{name} is {has}; {sets} would fit")
        self.check_tensors(model)

    def check_tensors(self, model: ModelConfig) -> None:
        """UserError for missing and unknown tensors, and for one of another shape."""
        expected, ours = model.shapes, f"model of family {model.family}"
        if missing := sorted(expected.keys() - self.tensors.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"{self.where}: incomplete: it has no tensor {missing[0]}{more}; take a whole {ours}")
        if extra := sorted(self.tensors.keys() - expected.keys()):
            raise UserError(
                f"{self.where}: the tensor {shown(cut(extra[0]))} does not belong to a {ours} of this shape"
            )
        for name, shape in expected.items():
            found = self.tensors[name].shape
            padded = name in model.vocabulary_rows and found and found[0] >= model.vocab_size
            if found != (found[:1] if padded else shape[:1]) + shape[1:]:
                where = self.tensors[name].where
                raise UserError(f"{where}: {name} has the shape {cut(str(list(found)))}; this model's is {list(shape)}")

    def fill(self, pieces: "Mapping[str, Piece]", model: ModelConfig) -> None:
        """Fill the pieces `model.…` of a rank. UserError if a weight is not finite."""
        import torch.nn.functional as F

        from trainer.checkpoint.pieces import tensor_of

        self.check(model)
        for key, piece in pieces.items():
            kind, _, name = tensor_of(key).partition(".")
            if kind != "model":
                continue
            whole = self.tensors[name].read()
            if name in model.vocabulary_rows:
                rows = whole[: model.vocab_size]
                whole = F.pad(rows, (0, 0, 0, model.padded_vocab_size - model.vocab_size))
            part = piece.place.of(whole.reshape(-1)).reshape(-1).float()
            if not part.isfinite().all():
                raise UserError(f"{self.tensors[name].where}: {name} holds NaN or infinity; these weights are ruined")
            piece.live.copy_(part)


def open_weights(path: Path, where: str | None = None) -> WeightsFile:
    """The weights at a path, by their headers; `where` names them in messages. UserError if they can't be weights."""
    where = where or str(path)
    if path.is_dir():
        return open_folder(path, where)
    if not path.is_file():
        raise UserError(f"{where}: no such file or folder; name a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    refuse_pickle(path, where)
    if path.suffix == ".bin":
        return open_llmc(path, where)
    tensors = dict(stored_tensors(path, where))
    c_attn = next((one.shape for name, one in tensors.items() if name.endswith("h.0.attn.c_attn.weight")), (1, 1))
    if any(name.startswith(("transformer.", "model.layers.")) for name in tensors) or c_attn[0] < c_attn[-1]:
        raise UserError(f"{where}: in Hugging Face's layout; name its folder, with {CONFIG_FILE}: {path.parent}")
    return WeightsFile(where, {}, tensors)


def open_folder(path: Path, where: str) -> WeightsFile:
    """A folder in Hugging Face's format."""
    files = weight_files([one.name for one in path.iterdir()], where)
    tensors = dict(pair for name in files for pair in stored_tensors(path / name, f"{where}/{name}"))
    try:
        config = read_regular(path / CONFIG_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {CONFIG_FILE} cannot be read ({error}); a folder of weights has one") from error
    return from_hub_layout(where, config, tensors)


def weight_files(names: list[str], where: str) -> list[str]:
    """The files of a folder or repository that hold its weights: one, or several shards. UserError without any."""
    if WEIGHTS_FILE in names:
        return [WEIGHTS_FILE]
    if shards := sorted(name for name in names if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)):
        return shards
    if pickled := sorted(name for name in names if name.endswith((*PICKLES, ".bin"))):
        raise UserError(
            f"{where}: its weights are a pickle ({pickled[0]}), which could run any code; a pickle is never loaded: "
            f"save them as {WEIGHTS_FILE}"
        )
    raise UserError(f"{where}: no weights there; it must hold {WEIGHTS_FILE}")


def from_hub_layout(where: str, config: str, tensors: Mapping[str, StoredTensor]) -> WeightsFile:
    """Weights under Hugging Face's names, with the text of their config.json."""
    try:
        values = json.loads(config)
        fields = section_of_hf(values, f"{where}/{CONFIG_FILE}")
    except UserError:
        raise
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}/{CONFIG_FILE}: not the configuration of a model ({type(error).__name__})") from error
    section, found = family_of(fields), {}
    for theirs, stored in tensors.items():
        if name := section.own_name(theirs, fields):
            found[name] = transposed(stored) if section.hf_transposed(name) else stored
    return WeightsFile(where, fields, found)


def transposed(stored: StoredTensor) -> StoredTensor:
    return StoredTensor(stored.where, stored.shape[::-1], lambda: stored.read().t())


def stored_tensors(path: Path, where: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a safetensors file by name. UserError if it is truncated, damaged or a pickle."""
    if not path.is_file():
        raise UserError(f"{where}: no file; fetch it again")
    refuse_pickle(path, where)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: truncated, or not a safetensors file ({cut(str(error))}); fetch it again") from error
    for name, (dtype, shape) in found.items():
        if dtype not in FLOATS and not name.endswith(MASKS):
            raise UserError(f"{where}: {shown(name)} holds {shown(dtype)}; weights are F32, BF16 or F16")
        yield name, StoredTensor(where, shape, lambda name=name: read_tensor(path, name))  # type: ignore[misc]


def safetensors_header(
    shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The start of a safetensors file with tensors of one dtype, as safetensors' own `save_file` writes it, ordered by
    name; and where the bytes of each tensor begin in the file."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begins, at = {}, 0
    for name in sorted(shapes):
        end = at + prod(shapes[name]) * FLOATS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


def write_weights(path: Path, model: ModelConfig, weights: "Iterable[tuple[str, Tensor]]") -> None:
    """Write all float32 weights of a model, with the padding rows of its vocabulary, one at a time as they come."""
    shapes = {
        name: (model.padded_vocab_size, *shape[1:]) if name in model.vocabulary_rows else shape
        for name, shape in model.shapes.items()
    }
    start, begins = safetensors_header(shapes, "F32")
    with path.open("wb") as file:
        file.write(start)
        for name, tensor in weights:
            file.seek(begins[name])
            file.write(tensor.detach().cpu().contiguous().numpy().data)


def read_tensor(path: Path, name: str) -> "Tensor":
    """One tensor of a safetensors file. The file is mapped for as long as the tensor lives, no longer."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def refuse_pickle(path: Path, where: str) -> None:
    """UserError for a file of torch.save, by its name and by its first bytes: it is never loaded. And for GGUF."""
    with open_regular(path) as file:
        start = file.read(4)
    if start == b"GGUF":
        raise UserError(
            f"{where}: GGUF is not read; name the model's folder in Hugging Face's format, with {CONFIG_FILE}"
        )
    # torch.save writes a zip file, and once wrote a bare pickle of protocol 2 or later.
    if path.suffix in PICKLES or start[:2] == b"PK" or (start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5"):
        raise UserError(
            f"{where}: a pickle file, which can execute code and is refused: save the weights as safetensors"
        )


def open_llmc(path: Path, where: str) -> WeightsFile:
    """A .bin of llm.c's GPT-2, version 3 (float32) or 5 (bfloat16)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LLMC_HEADER)
    magic, version, *numbers = struct.unpack("<8i", start[:32]) if len(start) == LLMC_HEADER else (0, 0)
    if magic != LLMC_MAGIC:
        raise UserError(f"{where}: not a checkpoint of llm.c (its first number is {magic}, not {LLMC_MAGIC})")
    if version not in LLMC_DTYPES:
        raise UserError(f"{where}: version {version} of llm.c's format; 3 (float32) and 5 (bfloat16) can be read")
    names = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
    *sizes, rows = numbers
    fields = section_of_hf(dict(zip(names, sizes, strict=True)), where)
    if rows < fields["vocab_size"]:
        raise UserError(f"{where}: damaged: {rows:,} rows for a vocabulary of {fields['vocab_size']:,}; fetch it again")
    shapes = Gpt2Config(**fields).shapes
    shapes["wte.weight"] = (rows, fields["n_embd"])
    kinds = [name.removeprefix("h.0.") for name in shapes if name.startswith("h.0.")]
    in_blocks = [f"h.{block}.{kind}" for kind in kinds for block in range(fields["n_layer"])]
    dtype, offset, tensors = LLMC_DTYPES[version], LLMC_HEADER, {}
    for name in ("wte.weight", "wpe.weight", *in_blocks, "ln_f.weight", "ln_f.bias"):
        tensors[name] = StoredTensor(where, shapes[name], partial(read_llmc, path, dtype, offset, shapes[name]))
        offset += FLOATS[dtype] * prod(shapes[name])
    if size != offset:
        how = "truncated" if size < offset else "too long"
        raise UserError(f"{where}: {how}: {size:,} bytes, and its header describes {offset:,}; fetch it again")
    return WeightsFile(where, fields, tensors)


def read_llmc(path: Path, dtype: str, offset: int, shape: tuple[int, ...]) -> "Tensor":
    import torch

    with path.open("rb") as file:
        file.seek(offset)
        body = bytearray(file.read(FLOATS[dtype] * prod(shape)))
    return torch.frombuffer(body, dtype=torch.float32 if dtype == "F32" else torch.bfloat16).view(shape)
