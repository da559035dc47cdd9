"""Text from the weights of a run: the final ones, or a commit's."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipelines.recipe.recipe import CHAT_TOKENS
from pipelines.run.runs import Run, read_run, tuned_model
from pipelines.run.text.chat import ChatTokens
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.manifest import fetch, fetch_folder, read_manifest
from trainer.base.record import DamagedRecord
from trainer.base.store import Store
from trainer.checkpoint.commits import committed_folders, read_commit
from trainer.checkpoint.layout import commit_key, step_of
from trainer.checkpoint.weights import open_weights
from trainer.config.errors import NotAFile, UserError
from trainer.config.model_config import ModelConfig

if TYPE_CHECKING:
    import tiktoken
    import torch

    from trainer.checkpoint.weights import WeightsFile
    from trainer.models.decoder import Decoder, Sampling
    from trainer.models.language_model import LanguageModel


@dataclass(frozen=True)
class Fragment:
    """The next part of a text, and why the text ends: `stop` (end of text, or a stop string), or `length`."""

    number: int  # of the text
    text: str
    finish: str | None = None
    tokens: int = 0  # of the whole text so far
    ids: Sequence[int] = ()  # of the whole text so far, and of a special token that ends it


class GrowingText:
    """A text that grows token by token. It holds back incomplete characters, and the beginnings of stop strings."""

    def __init__(self, encoding: "tiktoken.Encoding", stop: Sequence[str] = ()) -> None:
        self.encoding, self.stop = encoding, [text for text in stop if text]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.tokens = 0
        self.ids: list[int] = []
        self.finish: str | None = None

    def add(self, token: int) -> bool:
        """Add a token. Returns whether the text ends here."""
        self.ids.append(token)
        if token == self.encoding.eot_token or token >= self.encoding.n_vocab:  # a special token of ChatML
            self.finish = "stop"
            return True
        self.tokens += 1
        self.held += self.decoder.decode(self.encoding.decode_single_token_bytes(token))
        ends = [at for text in self.stop if (at := self.held.find(text)) >= 0]
        if ends:
            self.held, self.finish = self.held[: min(ends)], "stop"
            self.decoder.reset()
        return bool(ends)

    def take(self) -> str:
        """The text that is certain since the last call; after `finish`, all the rest."""
        if self.finish:
            self.held += self.decoder.decode(b"", final=True)
            keep = 0
        else:
            sizes = (size for text in self.stop for size in range(1, len(text)) if self.held.endswith(text[:size]))
            keep = max(sizes, default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text


@dataclass(frozen=True)
class TextModel:
    """The weights of a run, ready to continue text."""

    run: str
    step: int | None  # of the commit; None for final weights
    decoder: "Decoder"
    encoding: "tiktoken.Encoding"
    chat: ChatTokens | None = None  # of a model that was tuned to answer

    @property
    def context(self) -> int:
        """The tokens that a prompt may have, with the end-of-text token that begins each document."""
        return self.decoder.config.block_size

    def ids_of(self, prompt: str) -> list[int]:
        """The ids of a prompt as the start of a document."""
        return [self.encoding.eot_token, *self.encoding.encode_ordinary(prompt)]

    def bytes_of(self, token: int) -> bytes:
        special = token - self.encoding.n_vocab
        return CHAT_TOKENS[special].encode() if special >= 0 else self.encoding.decode_single_token_bytes(token)

    def name_of(self, token: int) -> str:
        """A token in OpenAI's notation: its text, which shows the bytes of incomplete characters."""
        content = self.bytes_of(token)
        text = content.decode("utf-8", "backslashreplace")
        return text if text.encode() == content else f"bytes:{text}"

    def text_of(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of tokens, and for each the number of characters before the one that has its first byte."""
        decoder, text, offsets = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        for content in map(self.bytes_of, ids):
            text += decoder.decode(content[:1])
            offsets.append(len(text) + bool(decoder.getstate()[0]) - 1)  # a state: the character is incomplete
            text += decoder.decode(content[1:])
        return text + decoder.decode(b"", final=True), offsets

    def continue_prompt(
        self, prompt: Sequence[int], tokens: int, seeds: Sequence[int], sampling: "Sampling", stop: Sequence[str] = ()
    ) -> Iterator[list[Fragment]]:
        """Continue a prompt once for each seed, step by step. Each text ends with exactly one fragment that has
        `finish`."""
        from trainer.models.decoder import stream

        texts = [GrowingText(self.encoding, stop) for _ in seeds]
        growing = dict(enumerate(texts))

        def fragments() -> list[Fragment]:
            made = [Fragment(n, text.take(), text.finish, text.tokens, text.ids) for n, text in growing.items()]
            for one in made:
                if one.finish:
                    del growing[one.number]
            return [one for one in made if one.text or one.finish]

        for _ in stream(self.decoder, prompt, tokens, seeds, sampling, lambda n, token: texts[n].add(token)):
            yield fragments()
        for text in growing.values():
            text.finish = "length"
        yield fragments()


# --- weights


def load_text_model(
    store: Store, cache: Path, name: str, at: int | None = None, precision: str | None = None, tuned: bool = False
) -> TextModel:
    """The final weights of a run, or the newest commit of a run without any; with `at`, the commit of that step. With
    `tuned`, the model of the last finished step of tuning, if there is one.

    `precision` is one of trainer.models.decoder.PRECISIONS; None: the best one of this machine. UserError without
    such weights.
    """
    from trainer.base.parallel import World
    from trainer.config.config import RuntimeConfig
    from trainer.models.decoder import Decoder, best_precision

    run = read_run(store, name)
    device = World.alone(RuntimeConfig()).device
    if precision == "int8" and device.type != "cpu":
        raise UserError(f"--precision {precision}: is for CPUs, and this machine has {device.type}; use bf16")
    encoding = tokenizer_of(run.recipe.tokens, store, run.record.prefixes["tokenize"])
    made = tuned_model(store, run.record) if tuned else None
    chat, precision = ChatTokens(encoding) if made else None, precision or best_precision(device)
    if made:
        config = run.recipe.with_vocabulary(made.fact("vocab_size")).model
        with TemporaryDirectory() as scratch:
            weights = open_weights(
                fetch_folder(store, made, cache, Path(scratch) / "tuned"), f"{store.uri}/{made.prefix}"
            )
            model, step = load_weights(weights, config, device), None
    else:
        model, step = read_weights(store, cache, run, at)
    return TextModel(run.name, step, Decoder(model.to(device), precision, (chat or encoding).n_vocab), encoding, chat)


def read_weights(store: Store, cache: Path, run: Run, at: int | None) -> "tuple[LanguageModel, int | None]":
    """A model with weights of a run, and the step of the commit that they are from; None for final ones."""
    import torch

    prefix = run.record.prefixes.get("train")
    manifest = read_manifest(store, prefix) if prefix else None
    if manifest and at in (None, run.recipe.train.max_steps):
        path = fetch(store, manifest.prefix, manifest.file("model.safetensors"), cache)
        return load_weights(open_weights(path), run.recipe.model, torch.device("cpu")), None
    folders = {step_of(folder): folder for folder in committed_folders(store, prefix)} if prefix else {}
    if not folders and manifest:
        raise UserError(f"--at {at}: {run.name} has no commit any more, only its final weights; leave out --at")
    if not folders:
        raise UserError(f"{run.name}: the run has no trained weights yet, and no commit; `skytrain run` trains it")
    step = max(folders) if at is None else at
    if step not in folders:
        raise UserError(f"--at {at}: {run.name} has no such commit; it has {', '.join(map(str, sorted(folders)))}")
    return load_commit(store, folders[step], run.recipe.model), step


def load_commit(store: Store, folder: str, config: ModelConfig) -> "LanguageModel":
    """A model with the weights of a commit. UserError if it is damaged, or was removed meanwhile."""
    import torch

    from trainer.base.parallel import World
    from trainer.checkpoint.loading import load_files
    from trainer.checkpoint.pieces import Piece
    from trainer.models.family import plain_model

    model = plain_model(config)
    pieces = {f"model.{name}": Piece.whole(p) for name, p in model.named_parameters()}
    alone = World(0, 0, 1, torch.device("cpu"))
    try:
        damage = load_files(store, folder, read_commit(store, folder).files, pieces, alone)
    except (DamagedRecord, NotAFile) as error:
        damage = str(error)
    if store.get(commit_key(folder)) is None:
        raise UserError(f"{store.uri}/{folder}: was removed while it was read; run the same command again")
    if damage:
        raise UserError(f"{store.uri}/{folder}: is damaged: {damage}; choose another commit with --at")
    return model


def load_weights(weights: "WeightsFile", config: ModelConfig, device: "torch.device") -> "LanguageModel":
    """A model with weights in float32, on a device. UserError if they are of another model, or not finite."""
    from trainer.checkpoint.pieces import Piece
    from trainer.models.family import plain_model

    model = plain_model(config)
    weights.fill({f"model.{name}": Piece.whole(p) for name, p in model.named_parameters()}, config)
    return model.to(device)
