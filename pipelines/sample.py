"""Text from the weights of a run: final ones, or those of a commit."""

import codecs
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.artifacts.manifest import fetch, read_manifest
from pipelines.recipe import Recipe
from pipelines.text.encode import encode
from pipelines.text.tokenizer import tokenizer_of
from pipelines.tracking.runs import Run, key_of, read_run
from trainer.commits import Commit, DamagedCommit, committed_folders, step_of
from trainer.errors import NotAFile, UserError
from trainer.store import Store
from trainer.weights import open_weights

if TYPE_CHECKING:
    import tiktoken
    import torch

    from trainer.model import LanguageModel
    from trainer.sample import Decoder, Sampling


def continue_text(
    model: "LanguageModel",
    encoding: "tiktoken.Encoding",
    prompt: str,
    tokens: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> str:
    """`prompt` and `tokens` generated tokens after it. The model sees the prompt as the start of a document. `check` is
    called after each token; it may raise to end the generation."""
    from trainer.sample import generate

    ids = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    return prompt + encoding.decode(generate(model, ids, tokens, seed, ids=encoding.n_vocab, check=check))


# --- text


@dataclass(frozen=True)
class Fragment:
    """The next part of a text, and why the text ends: `stop` (end of text, or a stop string), or `length`."""

    number: int  # of the text in its batch
    text: str
    finish: str | None = None
    tokens: int = 0  # of the whole text so far
    ids: tuple[int, ...] = ()  # of the whole text, once it ends


class GrowingText:
    """A text that grows token by token. It holds back incomplete characters, and the beginnings of stop strings."""

    def __init__(self, encoding: "tiktoken.Encoding", stop: Sequence[str] = ()) -> None:
        self.encoding, self.stop = encoding, [text for text in stop if text]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.ids: list[int] = []
        self.finish: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def add(self, token: int) -> bool:
        """Add a token. Returns whether the text ends here."""
        if token == self.encoding.eot_token:
            self.finish = "stop"
            return True
        self.ids.append(token)
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

    def fragment(self, number: int) -> Fragment:
        text = self.take()
        return Fragment(number, text, self.finish, self.tokens, tuple(self.ids) if self.finish else ())


@dataclass(frozen=True)
class TextModel:
    """The weights of a run, ready to continue text."""

    run: str
    step: int | None  # of the commit; None for final weights
    decoder: "Decoder"
    encoding: "tiktoken.Encoding"

    @property
    def context(self) -> int:
        """The tokens that a prompt may have, with the end-of-text token that begins each document."""
        return self.decoder.config.block_size

    def ids_of(self, prompt: str) -> list[int]:
        """The ids of a prompt as the start of a document."""
        return [self.encoding.eot_token, *encode(self.encoding, prompt).tolist()]

    def token_text(self, token: int) -> str:
        """A token in OpenAI's notation: its text, or its bytes if they are no whole characters."""
        if token == self.encoding.eot_token:
            return self.encoding.decode([token])
        content = self.encoding.decode_single_token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def continue_all(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        seeds: Sequence[int],
        sampling: "Sampling",
        stop: Sequence[str] = (),
    ) -> Iterator[list[Fragment]]:
        """Continue prompts as one batch, step by step. Each text ends with exactly one fragment that has `finish`."""
        from trainer.sample import stream

        texts = [GrowingText(self.encoding, stop) for _ in prompts]
        growing = set(range(len(prompts)))

        def fragments() -> list[Fragment]:
            made = [texts[n].fragment(n) for n in sorted(growing)]
            growing.difference_update(one.number for one in made if one.finish)
            return [one for one in made if one.text or one.finish]

        for _ in stream(self.decoder, prompts, tokens, seeds, sampling, lambda n, token: texts[n].add(token)):
            yield fragments()
        for n in growing:
            texts[n].finish = "length"
        yield fragments()


# --- weights


def load_text_model(
    store: Store, cache: Path, name: str, at: int | None = None, precision: str | None = None
) -> TextModel:
    """The final weights of a run, or the newest commit of a run without any; with `at`, the commit of that step.

    `precision` is one of trainer.sample.PRECISIONS; None: the best one of this machine. UserError without such weights.
    """
    from trainer.config import RuntimeConfig
    from trainer.family import plain_model
    from trainer.parallel import World
    from trainer.sample import Decoder, best_precision

    run = read_run(store, name)
    device = World.alone(RuntimeConfig()).device
    if precision in ("int8", "int4") and device.type != "cpu":
        raise UserError(f"--precision {precision}: for CPUs alone, and this machine has {device.type}; use bf16")
    encoding = tokenizer_of(run.recipe.tokens, store, run.record.prefixes["tokenize"])
    model = plain_model(run.recipe.model)
    step = read_weights(store, cache, run, model, at)
    decoder = Decoder(model.to(device), precision or best_precision(device), encoding.n_vocab)
    return TextModel(run.name, step, decoder, encoding)


def read_weights(store: Store, cache: Path, run: Run, model: "LanguageModel", at: int | None) -> int | None:
    """Fill the model with weights of a run. Returns the step of the commit that they are from; None for final ones."""
    prefix = run.record.prefixes.get("train")
    manifest = read_manifest(store, prefix) if prefix else None
    if manifest and at in (None, run.recipe.train.max_steps):
        from safetensors.torch import load_file

        path = fetch(store, manifest.prefix, manifest.file("model.safetensors"), cache)
        try:
            open_weights(path).check(model.config)
        except UserError as error:
            where = f"{store.uri}/{key_of(run.name)}"
            raise UserError(f"{where}: has another model ({error}); run its recipe to write it again") from error
        model.load_state_dict(load_file(path))
        return None
    folders = committed_folders(store, prefix) if prefix else []
    if not folders and manifest:
        raise UserError(f"--at {at}: {run.name} has no commit any more, only its final weights; leave out --at")
    if not folders:
        raise UserError(f"{run.name}: the run has no trained weights yet, and no commit; `skytrain run` trains it")
    steps = sorted({step_of(folder) for folder in folders})
    step = steps[-1] if at is None else at
    if step not in steps:
        raise UserError(f"--at {at}: {run.name} has no such commit; it has {', '.join(map(str, steps))}")
    load_commit(store, next(folder for folder in folders if step_of(folder) == step), cache, model)
    return step


def load_commit(store: Store, folder: str, cache: Path, model: "LanguageModel") -> None:
    """Fill the model with the weights of a commit. UserError if it is damaged, or was removed meanwhile."""
    import torch

    from trainer.loading import load_files
    from trainer.parallel import World
    from trainer.pieces import Piece

    pieces = {f"model.{name}": Piece.whole(p) for name, p in model.named_parameters()}
    where, alone = f"{store.uri}/{folder}", World(0, 0, 1, torch.device("cpu"))
    cache.mkdir(parents=True, exist_ok=True)
    try:
        body = store.get(f"{folder}/COMMIT.json")
        if body is None:
            raise UserError(f"{where}: removed meanwhile; run the same command again")
        files = Commit.decode(body, folder).files
        with tempfile.TemporaryDirectory(dir=cache) as local:
            damage: object = load_files(store, folder, files, pieces, alone, Path(local))
    except (DamagedCommit, NotAFile) as error:
        damage = error
    if damage and store.get(f"{folder}/COMMIT.json") is None:
        raise UserError(f"{where}: removed meanwhile; run the same command again")
    if damage:
        raise UserError(f"{where}: damaged: {damage}; choose another commit with --at")


def load_weights(recipe: Recipe, path: Path, device: "torch.device | None" = None) -> "LanguageModel":
    """The model with a run's weights in float32, on a device, or on the best one of this machine."""
    from safetensors.torch import load_file

    from trainer.family import plain_model
    from trainer.parallel import World

    model = plain_model(recipe.model)
    model.load_state_dict(load_file(path))
    return model.to(device or World.alone(recipe.runtime).device)
