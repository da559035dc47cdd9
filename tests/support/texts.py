"""A text of four files in three parts, and the work of nodes that tokenize it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipelines.artifacts.manifest import ArtifactPlan, upload
from pipelines.recipe import TokensConfig
from pipelines.text.parts import PartsJob
from pipelines.text.sources import source_identity
from trainer.store import LocalStore


class FourFiles:
    """Four text files in a folder."""

    def __init__(self, folder: Path) -> None:
        for name in range(4):
            (folder / f"{name}.txt").write_text(f"{name} " * 2000)
        self.config = TokensConfig(
            source=f"{folder}/*.txt", tokenizer="bytes", shard_tokens=1500, max_tokens=13_001, val_shards=2, parts=3
        )
        text = source_identity(self.config.source, None, None, "text")
        self.plan = ArtifactPlan("tokenize", "files", {"stage": "tokenize", "text": text})

    def job(self, parts: range, store: Path, attempt: int = 1, check: Callable[[], None] = lambda: None) -> PartsJob:
        """Some parts, made by a node with its own folder and a store."""
        opened, folder = LocalStore(store), store.with_name(f"{store.name} scratch {attempt} {parts.start}")
        folder.mkdir()
        put = partial(upload, opened, self.plan.prefix, attempt)
        return PartsJob(self.config, self.plan, opened, parts, folder, put, check, lambda text: None)
