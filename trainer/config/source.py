"""Where a recipe takes something from, in one grammar: text, weights, tokenizers, benchmarks, conversations, rewards.

    hf://ORG/NAME@COMMIT                     a model of the Hugging Face Hub
    hf://datasets/ORG/NAME[/FILES]@COMMIT    a data set of the Hub, or its files of a folder or pattern
    s3://BUCKET/FILES                        objects
    run:NAME[@STEP]                          a run of the same store: its final weights, or a commit's
    PATH                                     a file, folder or pattern of this machine

A source is pinned by its COMMIT, of 40 hex digits, or by its content: a run records `PLACE@sha256:…`, and refuses
another content from then on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from trainer.config.errors import UserError

Kind = Literal["model", "dataset", "s3", "run", "path"]
HUB = "hf://"
RUN = "run:"  # before the name of a run, also in place of a recipe
FORMS: dict[Kind, str] = {
    "model": f"{HUB}ORG/NAME@COMMIT",
    "dataset": f"{HUB}datasets/ORG/NAME@COMMIT",
    "s3": "s3://BUCKET/FILES",
    "run": f"{RUN}NAME or {RUN}NAME@STEP",
    "path": "a path",
}
WEIGHTS: tuple[Kind, ...] = ("model", "run", "path")
CONTENT = re.compile(r"(?P<rest>.+)@sha256:(?P<sha256>[0-9a-f]{64})", re.DOTALL)
ON_HUB = re.compile(
    r"hf://(?:(?P<datasets>datasets/)|(?!datasets/))(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<files>[^@]+))?(?:@(?P<commit>[^@]*))?"
)
OF_RUN = re.compile(r"run:(?P<name>[a-z0-9][a-z0-9._-]*)(?:@(?P<step>\d{1,12}))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
PINS = re.compile(r"(?:@[0-9a-f]{40})?(?:@sha256:[0-9a-f]{64})?$")
MODEL_OF_0_2 = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")


@dataclass(frozen=True)
class Source:
    """One source, taken apart."""

    kind: Kind
    name: str  # ORG/NAME, the run, BUCKET/FILES, or the path
    files: str = ""  # of a data set: a folder or a pattern
    commit: str | None = None  # of the Hub
    step: int | None = None  # of a run; None: its final weights
    sha256: str | None = None  # of the content, if it is known

    @classmethod
    def of(cls, text: str, field: str, kinds: Sequence[Kind] = tuple(FORMS), moving: bool = False) -> Self:
        """The source of one of these kinds that a text names. UserError for any other text, and for a source of the Hub
        without its commit, unless it may be `moving`. The error begins with the field of the recipe, if it is given."""
        at, forms = f"{field}: " if field else "", ", ".join(FORMS[kind] for kind in kinds)
        pinned = CONTENT.fullmatch(text)
        rest, content = (pinned["rest"], pinned["sha256"]) if pinned else (text, None)
        scheme, separator, place = rest.partition("://")
        if rest.startswith(RUN):
            if not (run := OF_RUN.fullmatch(rest)):
                raise UserError(f"{at}{text}: not a run; write {FORMS['run']}")
            found = cls("run", run["name"], step=int(run["step"]) if run["step"] else None, sha256=content)
        elif rest.startswith(HUB):
            found = cls._on_hub(rest, at, forms, moving, content)
        elif separator:
            found = cls("s3", place, sha256=content)
            if scheme != "s3":
                raise UserError(f"{at}'{text}': unknown scheme '{scheme}'; use {forms}")
        else:
            found = cls("path", rest, sha256=content)
            if MODEL_OF_0_2.fullmatch(rest):
                raise UserError(f"{at}{text}: write {HUB}{text}")
        if found.kind not in kinds:
            raise UserError(f"{at}{found.place}: use {forms}")
        return found

    @classmethod
    def _on_hub(cls, text: str, at: str, forms: str, moving: bool, content: str | None) -> Self:
        found = ON_HUB.fullmatch(text)
        if not found or ".." in text or (found["files"] and not found["datasets"]):
            raise UserError(f"{at}{text}: not a place on the Hub; use {forms}")
        name, commit, datasets = found["name"], found["commit"], found["datasets"] or ""
        if not (COMMIT.fullmatch(commit or "") or (moving and commit is None)):
            why = f"'{commit}' can move" if commit else "lacks its commit"
            raise UserError(
                f"{at}{text}: {why}; write {text.partition('@')[0]}@ and the 40 hex digits that "
                f"`git ls-remote https://huggingface.co/{datasets}{name} main` prints"
            )
        return cls("dataset" if datasets else "model", name, found["files"] or "", commit, sha256=content)

    @property
    def place(self) -> str:
        """The source without its commit and its content, for people."""
        if self.kind in ("model", "dataset"):
            return "/".join(filter(None, (f"{HUB}{'datasets/' * (self.kind == 'dataset')}{self.name}", self.files)))
        return {"s3": "s3://", "run": RUN, "path": ""}[self.kind] + self.name

    @property
    def unpinned(self) -> str:
        """The source without its content, as a user wrote it."""
        version = self.commit if self.step is None else self.step
        return self.place if version is None else f"{self.place}@{version}"

    def __str__(self) -> str:
        return self.unpinned + (f"@sha256:{self.sha256}" if self.sha256 else "")

    def pinned(self, sha256: str) -> Self:
        """This source with its content."""
        return replace(self, sha256=sha256)


def unpinned(text: str) -> str:
    """A source without its commit and content, for people."""
    return PINS.sub("", text)
