"""The model card of an export: README.md with the metadata of the Hugging Face Hub, from what the run measured.

The card has the state of the moment when export ran: after evaluate, and with the dollars up to then.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipelines.artifacts.manifest import Manifest
from pipelines.recipe import Recipe
from pipelines.text.hub import HUB
from pipelines.tracking.account import Account, market_of, nothing_priced
from pipelines.tracking.runs import Run

CARD = "README.md"
SCORES = {
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation loss, bits per byte",
    "eval/hellaswag_acc_norm": "HellaSwag, completion style, normalized accuracy",
    "eval/hellaswag_acc": "HellaSwag, completion style, accuracy",
    "eval/core": "CORE (DCLM), centred accuracy",
}
LIMITS = (
    "The model continues text, for research and education. It follows no instructions and had no training in safety. "
    "It repeats errors, prejudices and private facts of its text, and it invents others. It knows nothing after the "
    "date of its text, and it reads no more than its context. Do not let it decide about people."
)


def model_card(recipe: Recipe, made: Mapping[str, Manifest], run: Run | None) -> str:
    """The card of an export. `made` has the artifacts by stage; without `run` the card names no cost."""
    model, train = recipe.model, made["train"]
    evaluated = made["evaluate"].facts if "evaluate" in made else {}
    scores = {name: value for name, value in evaluated.items() if "/" in name and isinstance(value, int | float)}
    texts = " and ".join(_code(public(one.source)) for one in recipe.tokens.each())
    others = ", ".join(recipe.export.other_formats)
    sections = [
        f"# {recipe.name}\n\nA {model.title} language model with {model.parameters:,} parameters, trained on {texts}: "
        f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, {model.details}, context "
        f"{model.block_size} tokens, {model.vocab_size:,} token ids. In transformers it is a "
        f"{model.hf_config()['architectures'][0]}.",
        "## Use\n\n```python\nfrom transformers import pipeline\n\n"
        'generate = pipeline("text-generation", "PATH OF THIS FOLDER")\n'
        'print(generate("<|endoftext|>Once", max_new_tokens=50)[0]["generated_text"])\n```\n\n'
        "In training, every document begins with `<|endoftext|>`."
        + (f"\n\nOther formats in this folder: {others}." if others else ""),
        "## Training\n\n" + table(training_facts(recipe, made)),
        "## Evaluation\n\n" + evaluation(scores),
        "## Cost\n\n" + table(cost_facts(run.account if run else None)),
        "## Reproduce\n\n" + reproduction(recipe, train),
        "## Intended use and limits\n\n" + LIMITS,
    ]
    # The metadata of the Hub. The licence of the weights is left to their owner.
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [model.hf_config()["model_type"], "skytrain"],
    }
    if datasets := [one.source.removeprefix(HUB) for one in recipe.tokens.each() if one.source.startswith(HUB)]:
        metadata["datasets"] = datasets
    if scores:
        results = [
            {
                "task": {"type": "text-generation"},
                "dataset": {"type": name.partition("/")[0], "name": name.partition("/")[0]},
                "metrics": [{"type": name.partition("/")[2], "value": value, "name": SCORES.get(name, name)}],
            }
            for name, value in scores.items()
        ]
        metadata["model-index"] = [{"name": recipe.name, "results": results}]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(sections) + "\n"


def training_facts(recipe: Recipe, made: Mapping[str, Manifest]) -> list[tuple[str, str]]:
    """The rows of the table of the training."""
    text, train, facts = recipe.tokens, recipe.train, made["train"].facts
    seen = facts.get("tokens", recipe.train_tokens)
    return [
        ("text", " and ".join(f"{_code(public(one.source))} {one.revision or ''}".strip() for one in text.each())),
        ("licence of the text", "see the page of the text"),
        ("tokenizer", f"{text.tokenizer}, {recipe.model.vocab_size:,} ids"),
        ("tokens trained on", f"{seen:,} in {train.max_steps:,} steps of {train.batch_tokens:,}"),
        ("first weights", first_weights(recipe, made["train"])),
        ("optimizer", train.optimizer),
        ("learning rate", f"{train.learning_rate:g}, {train.schedule}"),
        ("precision of the training", facts.get("precision") or train.precision),
        ("number format of these weights", recipe.export.dtype),
    ]


def first_weights(recipe: Recipe, train: Manifest) -> str:
    """The weights that the training began with, in words."""
    began = train.facts.get("began") or {}
    source = began.get("source") or recipe.train.branch_from or recipe.train.init_from
    if source is None:
        return f"random, from the seed {recipe.train.seed}"
    name, _, content = source.partition("@sha256:")
    at = _code(name) + (f" (sha256 {content[:12]})" if content else "")
    return f"the whole state of {at}" if recipe.train.branch_from else f"those of {at}"


def evaluation(scores: Mapping[str, float]) -> str:
    """The table of scores."""
    if not scores:
        return "The run was not evaluated when this export was made."
    return table((SCORES.get(name, name), f"{value:.4f}") for name, value in scores.items())


def cost_facts(account: Account | None) -> list[tuple[str, str]]:
    """Machines, hours and dollars of all attempts, up to this export."""
    if account is None:
        return [("cost", "no record")]
    machines = dict.fromkeys(
        f"{attempt.nodes} x {attempt.machine.accelerators or attempt.machine.instance or 'own machine'}"
        + (f" ({market_of(attempt.machine)})" if attempt.machine.cloud else "")
        for attempt in account.attempts
        if attempt.stage == "train" and not attempt.waited
    )
    total = account.total
    dollars = "unknown: this machine has no price" if nothing_priced(account) else f"{total.usd:,.2f}"
    if total.unpriced_hours and not nothing_priced(account):
        dollars += f", and {total.unpriced_hours:.2f} hours without a price"
    return [
        ("machines of the training", ", ".join(machines) or "unknown"),
        ("machine hours", f"{total.hours:,.2f}, in {len(account.attempts)} attempts of all stages"),
        ("dollars", dollars),
    ]


def reproduction(recipe: Recipe, train: Manifest) -> str:
    """The command, the code and the recipe, which is complete."""
    origin = train.provenance
    commit = origin.get("git_commit") or "unknown"
    changed = ", with local changes" if origin.get("git_dirty") else ""
    versions = ", ".join(f"{name} {version}" for name, version in (origin.get("versions") or {}).items() if version)
    values = recipe.model_dump()
    for one in values["tokens"]["sources"] or [values["tokens"]]:
        one["source"] = public(one["source"])
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return (
        f"skytrain at commit `{commit}`{changed} ({versions}), with this recipe as `recipe.yaml`:\n\n"
        f"```\nskytrain run recipe.yaml\n```\n\n```yaml\n{text}```"
    )


def table(rows: Iterable[tuple[str, ...]], heads: Sequence[str] = ("", "")) -> str:
    lines = [heads, ["---" for _ in heads], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in lines)


def public(source: str) -> str:
    """A source without what may be a secret: the user, the password and the query of a URL."""
    parts = urlsplit(source) if "://" in source else None
    if parts is None or parts.scheme not in ("http", "https"):
        return source
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _code(text: str) -> str:
    """A text of the user in Markdown's code, on one line."""
    return f"`{json.dumps(text, ensure_ascii=False)[1:-1].replace('`', ' ')}`"
