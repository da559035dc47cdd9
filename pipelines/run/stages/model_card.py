"""The model card of an export: README.md with the metadata of the Hugging Face Hub, from what the run measured.

The card has the state of the moment when export ran: after evaluate, and with the dollars up to then. All values pass
through `escaped`: recipes and records of the store write no markup into it.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipelines.recipe.recipe import Recipe
from pipelines.run.formats import hf
from pipelines.run.runs import Run
from pipelines.store.account import nothing_priced
from pipelines.store.manifest import Manifest
from trainer.config.amounts import tokens_before
from trainer.config.source import HUB, Source

CARD = "README.md"
SCORES = {
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation loss, bits per byte",
    "eval/hellaswag_acc_norm": "HellaSwag, completion style, normalized accuracy",
    "eval/hellaswag_acc": "HellaSwag, completion style, accuracy",
    "eval/core": "CORE (DCLM), centred accuracy",
}
# An underscore within a word is no markup, and names of metrics have many.
MARKUP = re.compile(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])")
LIMITS = (
    "The model continues text, for research and education. It follows no instructions and had no training in safety. "
    "It repeats errors, prejudices and private facts of its text, and it invents others. It knows nothing after the "
    "date of its text, and it reads no more than its context. Do not let it decide about people."
)


def model_card(recipe: Recipe, made: Mapping[str, Manifest], run: Run | None) -> str:
    """The card of an export. `made` has the artifacts by stage; without `run` the card names no cost."""
    from huggingface_hub import ModelCardData

    model, train, facts = recipe.model, recipe.train, made["train"].facts
    evaluated = made["evaluate"].facts if "evaluate" in made else {}
    scores = {name: value for name, value in evaluated.items() if "/" in name and isinstance(value, int | float)}
    steps = facts.get("steps", train.max_steps)
    texts = " and ".join(public(one.source) for one in recipe.tokens.each())
    training = {
        "text": f"{texts}; its licence: see its page",
        "tokenizer": f"{recipe.tokens.tokenizer}, {model.vocab_size:,} ids",
        "tokens trained on": f"{tokens_before(steps, train):,} in {steps:,} steps of "
        + (f"{train.batch_ramp_from:,} to " if train.batch_ramp_from else "")
        + f"{train.batch_tokens:,}",
        "first weights": public(recipe.first_weights or f"random, from the seed {train.seed}"),
        "optimizer": f"{train.optimizer}, learning rate {train.learning_rate:g}, {train.schedule}",
        "precision": f"{facts.get('precision') or train.precision}; these weights: {recipe.export.dtype}",
        "cost": cost(run) if run else "no record",
    }
    trust, remote_code = "", ""
    if "auto_map" in model.hf_config():
        trust = ", trust_remote_code=True"
        remote_code = (
            f"This model is remote code: transformers has no class for it, and runs `{hf.REMOTE_CODE}` of this folder "
            f"(sha256 `{sha256(hf.remote_code()).hexdigest()}`). Read it first. Tried with transformers 4.57 and 5.\n\n"
        )
    measured = {SCORES.get(name, name): f"{value:.4f}" for name, value in scores.items()}
    sections = [
        f"# {recipe.name}\n\nA {model.title} language model with {model.parameters:,} parameters, trained on "
        f"{escaped(texts)}: {model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, {model.details}, "
        f"context {model.block_size} tokens, {model.vocab_size:,} token ids.",
        "## Use\n\n```python\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", "PATH OF THIS FOLDER"{trust})\n'
        'print(generate("<|endoftext|>Once", max_new_tokens=50)[0]["generated_text"])\n```\n\n'
        f"{remote_code}In training, every document begins with `<|endoftext|>`. Formats in this folder: "
        f"{', '.join(['hf', *recipe.export.other_formats])}.",
        "## Training\n\n" + table(training.items()),
        "## Evaluation\n\n" + table(measured.items() or [("scores", "none when this export was made")]),
        "## Reproduce\n\n" + reproduction(recipe, made["train"]),
        "## Intended use and limits\n\n" + LIMITS,
    ]
    on_hub = [Source.of(one.source, "tokens.source") for one in recipe.tokens.each() if one.source.startswith(HUB)]
    metadata = ModelCardData(  # of the Hub. The licence of the weights is left to their owner.
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model.hf_config()["model_type"], "skytrain"],
        datasets=[one.name for one in on_hub] or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def cost(run: Run) -> str:
    """Hours and dollars of all attempts of all stages, up to this export."""
    account, total, attempts = run.account, run.account.total, run.summary.attempts
    dollars = "dollars unknown" if nothing_priced(account) else f"{total.usd:,.2f} dollars"
    if total.unpriced_hours and not nothing_priced(account):
        dollars += f", and {total.unpriced_hours:.2f} hours without a price"
    return f"{total.hours:,.2f} machine hours in {attempts} attempt{'s' * (attempts != 1)}; {dollars}"


def reproduction(recipe: Recipe, train: Manifest) -> str:
    """The command, the code and the recipe, which is complete."""
    origin = train.provenance
    commit = origin.get("git_commit") or "unknown"
    changed = ", with local changes" if origin.get("git_dirty") else ""
    text = yaml.safe_dump(publish(recipe.model_dump()), sort_keys=False, allow_unicode=True)
    fence = max(["``", *re.findall("`+", text)], key=len) + "`"  # no line of the recipe ends the block
    return (
        f"skytrain at commit {escaped(commit)}{changed} ({escaped(train.versions)}), with this recipe as `recipe.yaml`:"
        f"\n\n```\nskytrain run recipe.yaml\n```\n\n{fence}yaml\n{text}{fence}"
    )


def table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [("", ""), ("---", "---"), *rows]
    return "\n".join(f"| {' | '.join(map(escaped, cells))} |" for cells in lines)


def publish(value: Any) -> Any:
    """Values of a recipe, each text of them `public`."""
    if isinstance(value, dict):
        return {name: publish(one) for name, one in value.items()}
    return [publish(one) for one in value] if isinstance(value, list) else public(value)


def public(value: Any) -> Any:
    """A text without what is nobody's business: the user, password and query of a URL, the folders of this machine."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(value) if value.startswith(("http://", "https://")) else None
    if parts:
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
    return re.sub(r"(^|://| )/.*/(?=[^/])", r"\1", value)


def escaped(text: object) -> str:
    """A text on one line that Markdown and HTML show as it is."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", line)
