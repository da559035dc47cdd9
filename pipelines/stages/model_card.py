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
from trainer.config import TrainConfig

CARD = "README.md"
# Licences as the pages of these texts state them. Any other text has a licence that its owner knows.
LICENSES = {
    "python-stdlib": "Python Software Foundation License 2.0",
    f"{HUB}HuggingFaceFW/fineweb": "ODC-By 1.0",
    f"{HUB}HuggingFaceFW/fineweb-edu": "ODC-By 1.0",
}
SCORES = {
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation loss, bits per byte",
    "eval/hellaswag_acc_norm": "HellaSwag, completion style, normalized accuracy",
    "eval/hellaswag_acc": "HellaSwag, completion style, accuracy",
    "eval/core": "CORE (DCLM), centred accuracy",
}


def model_card(recipe: Recipe, made: Mapping[str, Manifest], run: Run | None) -> str:
    """The card of an export. `made` has the artifacts by stage; without `run` the card names no cost."""
    train = made["train"]
    sections = {
        "": introduction(recipe),
        "Use": usage(recipe),
        "Training": table(training_facts(recipe, made)),
        "Evaluation": evaluation(made),
        "Cost": table(cost_facts(run.account if run else None)),
        "Reproduce": reproduction(recipe, train),
        "Intended use and limits": LIMITS,
    }
    body = "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in sections.items())
    return f"---\n{yaml.safe_dump(metadata(recipe, made), sort_keys=False, allow_unicode=True)}---\n\n{body}\n"


def metadata(recipe: Recipe, made: Mapping[str, Manifest]) -> dict[str, Any]:
    """The metadata of the Hub. The licence of the weights is left to their owner."""
    facts: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [recipe.model.hf_config()["model_type"], "skytrain"],
    }
    if datasets := [one.source.removeprefix(HUB) for one in recipe.tokens.each() if one.source.startswith(HUB)]:
        facts["datasets"] = datasets
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": data_of(name), "name": data_of(name)},
            "metrics": [{"type": name.partition("/")[2], "value": value, "name": name_of(name)}],
        }
        for name, value in scores(made)
    ]
    if results:
        facts["model-index"] = [{"name": recipe.name, "results": results}]
    return facts


def introduction(recipe: Recipe) -> str:
    model = recipe.model
    texts = " and ".join(_code(public(one.source)) for one in recipe.tokens.each())
    return (
        f"# {recipe.name}\n\nA {model.title} language model with {model.parameters:,} parameters, trained on "
        f"{texts}: {model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, "
        f"{model.details}, context {model.block_size} tokens, {model.vocab_size:,} token ids. In transformers it is a "
        f"{model.hf_config()['architectures'][0]}."
    )


def usage(recipe: Recipe) -> str:
    return (
        "```python\nfrom transformers import pipeline\n\n"
        'generate = pipeline("text-generation", "PATH OF THIS FOLDER")\n'
        'print(generate("<|endoftext|>Once", max_new_tokens=50)[0]["generated_text"])\n```\n\n'
        "In training, every document begins with `<|endoftext|>`."
        + (f"\n\nOther formats in this folder: {', '.join(others)}." if (others := recipe.export.other_formats) else "")
    )


def training_facts(recipe: Recipe, made: Mapping[str, Manifest]) -> list[tuple[str, str]]:
    text, train, tokens = recipe.tokens, made["train"].facts, made["tokenize"].facts
    texts = []
    for one in text.each():
        version = ", ".join(filter(None, (one.subset, one.revision)))
        texts.append(_code(public(one.source)) + (f" ({version})" if version else ""))
    seen = _count(train.get("tokens", recipe.train_tokens))
    rows = [
        ("text", " and ".join(texts)),
        ("licence of the text", LICENSES.get(text.source, "not known to skytrain; see the page of the text")),
        ("tokenizer", f"{text.tokenizer}, {recipe.model.vocab_size:,} ids"),
        ("tokens in the training split", _count(tokens.get("train_tokens"))),
        (
            "tokens trained on",
            f"{seen} in {recipe.train.max_steps:,} steps",
        ),
        ("first weights", first_weights(recipe)),
        ("batch", f"{recipe.train.batch_tokens:,} tokens"),
        ("optimizer", _optimizer(recipe.train)),
        ("learning rate", f"{recipe.train.learning_rate:g}, {recipe.train.schedule}"),
        ("number format of the products", str(train.get("precision") or recipe.train.precision)),
        ("number format of these weights", recipe.export.dtype),
    ]
    if isinstance(loss := train.get("train/loss"), float):
        rows.append(("last training loss", f"{loss:.4f} nats per token"))
    return rows


def first_weights(recipe: Recipe) -> str:
    """The weights that the training began with, in words."""
    source = recipe.train.branch_from or recipe.train.init_from
    if source is None:
        return f"random, from the seed {recipe.train.seed}"
    name, _, content = source.partition("@sha256:")
    at = _code(name) + (f" (sha256 {content[:12]})" if content else "")
    return f"the whole state of {at}" if recipe.train.branch_from else f"those of {at}"


def _optimizer(train: TrainConfig) -> str:
    if train.optimizer == "adamw":
        return "AdamW"
    return f"Muon for the matrices of the blocks, with learning rate {train.muon_learning_rate:g}; AdamW for the rest"


def scores(made: Mapping[str, Manifest]) -> Iterable[tuple[str, float]]:
    """The measures of evaluate by name."""
    facts = made["evaluate"].facts if "evaluate" in made else {}
    return [(name, value) for name, value in facts.items() if "/" in name and isinstance(value, int | float)]


def name_of(score: str) -> str:
    """A measure in words; the tasks of CORE are `core/TASK`, those of the harness `lm_eval/TASK/METRIC`."""
    if score.startswith("lm_eval/"):
        return "lm-evaluation-harness, " + score.removeprefix("lm_eval/").replace("/", ", ")
    task = score.removeprefix("core/")
    return SCORES.get(score, score if task == score else f"CORE task {task}, centred accuracy")


def data_of(score: str) -> str:
    """The data of a measure."""
    if score.startswith("lm_eval/"):
        return score.split("/")[1]
    return next((data for data in ("hellaswag", "core") if data in score), "the held-out text")


def evaluation(made: Mapping[str, Manifest]) -> str:
    found = list(scores(made))
    if not found:
        return "The run was not evaluated when this export was made."
    baselines = made["evaluate"].facts.get("baselines", {})
    rows = [
        (name_of(name), f"{value:.4f}", *(_score(measured.get(name)) for measured in baselines.values()))
        for name, value in found
    ]
    return table(rows, ("", *(["this model", *map(_code, baselines)] if baselines else [""])))


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
        ("energy", "not read"),
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


LIMITS = (
    "The model continues text, for research and education. It follows no instructions and had no training in safety. "
    "It repeats errors, prejudices and private facts of its text, and it invents others. It knows nothing after the "
    "date of its text, and it reads no more than its context. Do not let it decide about people."
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


def _score(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _count(tokens: object) -> str:
    return f"{tokens:,}" if isinstance(tokens, int) else "unknown"
