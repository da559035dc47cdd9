"""A recipe states everything once, rejects unknown fields and values, and decides the fingerprints."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from core_bundle import make_bundle

from pipelines.recipe.loader import load_recipe, recorded_recipe, shipped
from pipelines.recipe.recipe import EvaluateConfig, Recipe
from pipelines.run.stage import STAGES, plans_of, run_name
from trainer.config.config import MUON_FIELDS, StopAt
from trainer.config.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]

COMMIT = "1a" * 20
# The artifacts of gpt2-124m.
PINNED = {
    "tokenize": "7210dafe1f319f8733f11860ffe4aa803966a6c2b75d7b19b9b2e6ec5c09cde7",
    "train": "7c762e5f7e980b95b33440de4d0fb26c90d4a8b4790c512dee44a67ba5ec4e24",
    "evaluate": "97aa05899f1d4c80e7377366d09d952626cda7626551fe8a4eeacb347fd24d24",
    "export": "c86ce9b873df7002a7209567d65fa00dd957a00987fcbdada2cabf5e5d310cad",
}

# Of gpt2-124m-chat with a second step of tuning.
RECORDED_BY_0_2 = {
    "tokenize": "6ef8fd63ac0817ded39a092ace40d772a465aae0552657d0ddb8fa674606fee2",
    "train": "f5b1632764350a4755c19f8fe5b2437bd0a8369f02f04cc78e4f6ab3365f48ed",
    "evaluate": "a4da75cef1fff81442b84ed2528023f746c9ad4d510bb97853c6a3216b0b0be6",
    "export": "84ee7c4495cb121cf1b3b4245ba5ff36171aec53e32c6b06a0db42a2bdd7f709",
    "tune.sft": "bf7904347de8c8d1a02de09ad4fbd82af438cb40ec7dc85cd5371eb26bf6e2d0",
    "tune.g": "39dbde995cc8535e8eb8c328eaa556a868d62c0f38360d41ea6003be5129c48d",
    "evaluate.g": "86cfe8b773f47d1574645ecfe8d66d9e3f1db4b894f2590e615c4efda643d0c0",
}

DOWNSTREAM = {
    "tokens": {"tokenize", "train", "evaluate", "export"},
    "model": {"train", "evaluate", "export"},
    "train": {"train", "evaluate", "export"},
    "evaluate": {"evaluate"},
    "export": {"export"},
    "runtime": set(),
}
# Values of fields to which one cannot be added.
OTHER: dict[str, Any] = {
    "source": f"hf://datasets/other/text@{COMMIT}",
    "packing": "documents",
    "stop_at": StopAt(val_loss=3.0),
    "init_from": f"hf://openai-community/gpt2@{'0' * 40}",
    "branch_from": f"run:other-12345678@5@sha256:{'0' * 64}",
    "lm_eval": ["piqa"],
    "engine": "eager",
    "formats": ["hf", "gguf"],
}
# Other tests change these: `core` needs a bundle, `sources` replace a source, and `every` alone decides no byte of an
# artifact.
ELSEWHERE = ("core", "every", "sources")
FIELDS = [
    (section, field)
    for section in DOWNSTREAM
    for field in type(getattr(load_recipe("gpt2-124m"), section)).model_fields
    if field not in ELSEWHERE
]


ON_ONE_GPU = (
    "gpt2-124m",
    "gpt2-350m",
    "gpt2-774m",
    "gpt2-1558m",
    "gpt3-125m",
    "llama-124m",
    "modern-124m",
    "modern-d24",
)


def write_recipe(folder: Path, **changes: Any) -> Path:
    """The recipe smoke with whole sections or single values replaced, as a file."""
    values = yaml.safe_load(shipped()["smoke"].read_text())
    for section, value in changes.items():
        values[section] = values[section] | value if isinstance(value, dict) else value
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def complaint(recipe: str | Path, *changes: str) -> str:
    with pytest.raises(UserError) as mistake:
        load_recipe(str(recipe), changes)
    assert "\n" not in str(mistake.value)
    return str(mistake.value)


def fingerprints(recipe: Recipe) -> dict[str, str]:
    return {stage: plan.fingerprint for stage, plan in plans_of(recipe).items()}


# --- the shipped ones


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_a_shipped_recipe_divides_its_batch_over_one_gpu_and_over_eight(name: str, processes: int) -> None:
    recipe = load_recipe(name)
    sequences = recipe.train.batch_tokens // recipe.model.block_size
    assert isinstance(recipe.runtime.micro_batch_size, int)
    assert sequences % (recipe.runtime.micro_batch_size * processes) == 0


def test_the_recipe_laptop_takes_three_small_texts_and_a_name_of_the_users(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a few words. " * 340)
    recipe = load_recipe("laptop", ["name=mine", f"tokens.source={tmp_path}/*.txt"])
    assert run_name(plans_of(recipe)).startswith("mine-")
    size = sum(1 + path.stat().st_size for path in tmp_path.iterdir())
    held_out = recipe.tokens.held_out(size)
    assert size < 13_300
    recipe.tokens.check_splits(size - held_out, held_out, recipe.model.block_size)


# --- mistakes


def test_an_unknown_recipe_is_refused_with_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint("smoek") == "smoek: neither a shipped recipe nor a file; did you mean 'smoke'?"
    assert "shipped are smoke, laptop, smoke-chat, smoke-modern, gpt2-124m" in complaint("zzz")
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    assert complaint("my").endswith("did you mean 'my.yaml'?")
    assert "shipped are smoke, laptop, smoke-chat" in complaint("a" * 300)  # longer than a file's name may be


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("train.learning_rte=1", "my.yaml: train.learning_rte: unknown field; did you mean 'learning_rate'?"),
        ("trian.max_steps=1", "my.yaml: trian: unknown field; did you mean 'train'?"),
        ("tokens.colour=red", "my.yaml: tokens.colour: unknown field; the nearest are source, text_column, sources"),
        ("train.lr=1", "my.yaml: train.lr: unknown field; did you mean 'learning_rate'?"),
        ("max_steps=3", "my.yaml: max_steps: unknown field; did you mean 'train.max_steps'?"),
        ("train.batch_size=8", "my.yaml: train.batch_size: unknown field; did you mean 'batch_tokens'?"),
        ("train.hidden_size=8", "my.yaml: train.hidden_size: unknown field; did you mean 'model.n_embd'?"),
        ("train.max_steps=fast", "my.yaml: train.max_steps: must be a valid integer (got 'fast')"),
        ("train.schedule=sine", "my.yaml: train.schedule: must be 'cosine', 'wsd', 'linear' or 'constant'"),
        ("name=Big Run", "my.yaml: name: must be: Name of the run and of its artifacts: up to 63 of a-z, 0-9, '.'"),
        ("model=3", "my.yaml: model: must be fields: {NAME: VALUE, …} (got 3)"),
        ("runtime.device=gpu", "runtime.device: must be 'auto', 'cpu', 'cuda' or 'mps' (got 'gpu')"),
        (
            "tokens.tokenizer=gpt3",
            "my.yaml: tokens.tokenizer: must be 'gpt2', 'bytes', a tokenizer.json or hf://ORG/NAME@COMMIT (got 'gpt3')",
        ),
        # Impossible together
        (
            "train.batch_tokens=1000",
            "train.batch_tokens: 1000 is not a multiple of model.block_size 128; 1024 would be",
        ),
        (
            "train={batch_tokens: 2048, max_steps: 9, learning_rate: 1, batch_ramp_from: 768, batch_ramp_tokens: 9}",
            "train: batch_ramp_from 768 does not divide batch_tokens 2048; 512 would",
        ),
        (
            "train.batch_ramp_from=512",
            "train: batch_ramp_from is given without batch_ramp_tokens; a ramp needs both, a constant batch neither",
        ),
        ("model.n_head=3", "my.yaml: model: n_embd 128 is not divisible by n_head 3; 126 would be"),
        (
            "model.vocab_size=256",
            "model.vocab_size 256 is smaller than the 257 ids of tokens.tokenizer 'bytes'; use 257",
        ),
        ("train.warmup_steps=601", "my.yaml: train: warmup_steps 601 is more than max_steps 600"),
        ("tokens.max_tokens=2_000_128", "no training shard holds a sequence of 129 tokens: the largest has 128;"),
        ("tokens.val_shards=4", "no training shard holds a sequence of 129 tokens: the largest has 0;"),
        (
            "train.stop_at={hellaswag: 0.3}",
            "my.yaml: train.stop_at.hellaswag needs evaluate.hellaswag, which is null; name its items there",
        ),
        (
            "train={max_steps: 9, learning_rate: 1, stop_at: {val_loss: 3.2}, batch_tokens: 4096, val_every: null}",
            "my.yaml: train: stop_at.val_loss needs validations, and val_every is null; set train.val_every to 250",
        ),
        # The spellings of 0.2
        (
            f"tokens.revision={COMMIT}",
            f"my.yaml: tokens.revision: belongs to the source now; write tokens.source: python-stdlib@{COMMIT}",
        ),
        (
            f"tokens.tokenizer={{file: a.json, sha256: {'1a' * 32}}}",
            "tokens.tokenizer.sha256: belongs to the source now; write tokens.tokenizer.file: a.json@sha256:1a1a",
        ),
        (f"train.init_from=org/name@{COMMIT}", f"init_from: org/name@{COMMIT}: write hf://org/name@{COMMIT}"),
        ("train.stop_at={}", "my.yaml: train.stop_at: no target is given; name one of hellaswag, core, val_loss"),
        # --set itself
        ("train.max_steps", "--set train.max_steps: not of the form section.field=value, such as train.max_steps=50"),
        ("name.x=1", "--set name.x=1: name has no fields"),
        ("train.max_steps=[1", "--set train.max_steps=[1: '[1' is not a YAML value; quote text"),
        # PyYAML takes these for a date and for an integer, and fails in its own way.
        ("tokens.subset=2024-13-45", "'2024-13-45' is not a YAML value"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_field(tmp_path: Path, change: str, line: str) -> None:
    message = complaint(write_recipe(tmp_path), change)
    assert line in message
    assert message.startswith(("--set ", str(tmp_path / "my.yaml: ")))


def test_a_new_text_or_tokenizer_drops_what_belonged_to_the_former(tmp_path: Path) -> None:
    own = load_recipe("gpt2-124m", ["tokens.source=mine.txt", "tokens.tokenizer=bytes"])
    assert (own.tokens.subset, own.model.vocab_size) == (None, 257)
    assert load_recipe(str(write_recipe(tmp_path)), ["tokens.tokenizer=gpt2"]).model.vocab_size == 50_257
    same = load_recipe("gpt2-124m", ["tokens.tokenizer=gpt2", "model.vocab_size=50304"])
    assert same.tokens.subset and same.model.vocab_size == 50_304


def test_all_mistakes_of_a_recipe_are_reported_at_once(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, train={"max_stepps": 1, "learning_rate": "fast"}, model={"n_layer": 0})
    with pytest.raises(UserError) as mistake:
        load_recipe(str(path))
    fields = [line.split(": ")[1] for line in str(mistake.value).splitlines()]
    assert sorted(fields) == ["model.n_layer", "train.learning_rate", "train.max_stepps"]
    path.write_text(path.read_text().replace("max_steps:", "max_stps:"))  # one line, and none that it is missing
    with pytest.raises(UserError) as mistake:
        load_recipe(str(path))
    assert ": train.max_stps: unknown field" in str(mistake.value) and "missing" not in str(mistake.value)
    misplaced = yaml.safe_load(write_recipe(tmp_path).read_text())
    misplaced["max_steps"] = misplaced["train"].pop("max_steps")
    path.write_text(yaml.safe_dump(misplaced))
    assert complaint(path) == f"{path}: max_steps: unknown field; did you mean 'train.max_steps'?"
    path.write_text("".join(f"field{n}: 1\n" for n in range(5000)))
    with pytest.raises(UserError) as mistake:
        load_recipe(str(path))
    *lines, last = str(mistake.value).splitlines()
    assert len(lines) == 20 and last == f"{path}: and 4,984 more errors"  # with the four sections that it lacks


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 10}]\n" for a, b in itertools.pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "a recipe has sections"),
        ("\x80\x81\xfe\xff", "not a YAML file"),
        ("name: !!python/object:os.system x\n", "not a YAML file"),
        ("name: 2024-13-45\n", "not a YAML file: month must be in 1..12"),
        (BOMB + "name: *j\n", "a recipe has no aliases; write the value again in"),
        ("name: a\nname: b\n", "'name' is here twice; keep one in"),
        ("train: {seed: 1, seed: 2}\n", "'seed' is here twice; keep one in"),
        ("train: {max_steps: 020}\n", "020 is not a plain decimal integer of at most 18 digits; write it as one"),
        (f"train: {{max_steps: {'9' * 400}}}\n", f"{'9' * 199}… is not a plain decimal integer"),
        (f"name: {'[' * 3000}{']' * 3000}\n", "too many levels of values in values"),
        ("? [name]\n: a\n", "a name is a plain text"),
        ("".join(f"field{n}: 1\n" for n in range(40_000)), "larger than a recipe of 131,072 bytes"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_short_line(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content.encode("latin-1"))
    message = complaint(path)
    assert message.startswith(f"{path}: {line}") and len(message) < len(str(path)) + 500


# --- changes


def test_set_changes_one_field_with_the_types_of_yaml(tmp_path: Path) -> None:
    changes = ["train.max_steps=50", "train.learning_rate=6e-4", "train.grad_clip=null", "runtime.engine=compiled"]
    changes += ["name=other", "export.dtype=bfloat16", "evaluate={val_tokens: 300}", "train.max_steps=1_000"]
    before, recipe = load_recipe("smoke"), load_recipe("smoke", changes)
    assert recipe.train.max_steps == 1000  # the last one wins
    assert (recipe.train.learning_rate, recipe.train.grad_clip) == (6e-4, None)
    assert (recipe.runtime.engine, recipe.name, recipe.export.dtype) == ("compiled", "other", "bfloat16")
    assert recipe.evaluate == EvaluateConfig(val_tokens=300)
    assert recipe.tokens == before.tokens and recipe.model == before.model
    assert load_recipe("smoke") == before


# --- fingerprints


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_a_field_changes_the_fingerprints_downstream_and_no_others(section: str, field: str) -> None:
    recipe = load_recipe("gpt2-124m", ["train.optimizer=muon"] if field in MUON_FIELDS else [])
    before = getattr(recipe, section)
    value = getattr(before, field)
    if field in OTHER or value is None:
        another = OTHER.get(field, 5)
    else:
        another = not value if isinstance(value, bool) else value + type(value)(1)
    changed = recipe.model_copy(update={section: before.model_copy(update={field: another})})
    was, now = fingerprints(recipe), fingerprints(changed)
    assert {stage for stage in STAGES if was[stage] != now[stage]} == DOWNSTREAM[section]


def test_the_name_of_a_recipe_is_in_no_fingerprint() -> None:
    one, other = load_recipe("gpt2-124m"), load_recipe("gpt2-124m", ["name=other"])
    assert fingerprints(one) == fingerprints(other)
    assert run_name(plans_of(other)) == run_name(plans_of(one)).replace("gpt2-124m", "other")


def test_fingerprints_of_existing_artifacts_never_change() -> None:
    """If this fails, every artifact in every store is obsolete and will be made again."""
    assert fingerprints(load_recipe("gpt2-124m")) == PINNED


def test_a_recipe_that_0_2_recorded_has_the_sources_and_the_fingerprints_that_it_had() -> None:
    values = load_recipe("gpt2-124m-chat").model_dump()
    source, _, commit = values["tokens"]["source"].partition("@")
    values["tokens"] |= {"source": source, "revision": commit}
    values["train"]["init_from"] = values["train"]["init_from"].removeprefix("hf://")
    reward = {"kind": "function", "weight": 1.0, "function": "mine.py:score", "sha256": "b" * 64}
    grpo = {"name": "g", "method": "grpo", "data": "rows.jsonl", "revision": None, "content": "c" * 64}
    data, _, commit = values["tune"][0]["data"].partition("@")
    values["tune"] = [values["tune"][0] | {"data": data, "revision": commit, "content": "d" * 64}, grpo]
    values["tune"][1]["rewards"] = [reward]
    recipe = recorded_recipe(values, "runs/a.json")
    assert recipe.tokens.source == f"{source}@{values['tokens']['revision']}"
    assert [step.data for step in recipe.tune] == [
        f"{data}@{commit}@sha256:{'d' * 64}",
        f"rows.jsonl@sha256:{'c' * 64}",
    ]
    assert recipe.tune[1].rewards[0].function == f"mine.py:score@sha256:{'b' * 64}"
    plans = plans_of(recipe)
    assert {stage: plan.fingerprint for stage, plan in plans.items()} == RECORDED_BY_0_2
    tokenizer = {"file": f"hf://a/b@{COMMIT}", "sha256": "e" * 64, "end_of_text": None}
    values["tokens"] |= {"tokenizer": tokenizer, "sources": [{"source": source, "revision": commit, "weight": 1.0}]}
    values["tokens"] |= {"source": "", "revision": None, "subset": None, "max_tokens": None}
    tokens = recorded_recipe(values, "runs/a.json").tokens
    assert tokens.tokenizer_identity == {"sha256": "e" * 64} and tokens.each()[0].source == f"{source}@{commit}"


def test_the_content_of_text_counts_and_its_path_does_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "one.txt").write_text("Weights and measures.\n" * 30)
    (tmp_path / "b" / "other name.txt").write_text("Weights and measures.\n" * 30)
    (tmp_path / "b" / "third.txt").write_text("Weights and measure.\n" * 30)

    def tokens_of(path: Path) -> str:
        return fingerprints(load_recipe("smoke", [f"tokens.source={path}"]))["tokenize"]

    first = tokens_of(tmp_path / "a" / "one.txt")
    assert tokens_of(tmp_path / "b" / "other name.txt") == first
    assert tokens_of(tmp_path / "b" / "third.txt") != first


def test_a_core_that_ends_the_training_counts_for_its_fingerprint(tmp_path: Path) -> None:
    def trained(seed: int, target: float) -> str:
        folder = make_bundle(tmp_path / f"{seed} {target}", seed=seed)
        changes = [f"evaluate.core={folder}", "evaluate.every=250", f"train.stop_at={{core: {target}}}"]
        return fingerprints(load_recipe("gpt2-124m", changes))["train"]

    assert len({trained(0, 0.1), trained(1, 0.1), trained(0, 0.2)}) == 3


def test_the_content_of_a_hellaswag_file_counts_and_its_path_does_not(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "{}\n"), ("b.jsonl", "{}\n"), ("c.jsonl", "{} \n")):
        (tmp_path / name).write_text(text)
    a, b, c = (
        fingerprints(load_recipe("gpt2-124m", [f"evaluate.hellaswag={tmp_path / n}"]))["evaluate"]
        for n in ("a.jsonl", "b.jsonl", "c.jsonl")
    )
    assert a == b != c
    for field, file in (("hellaswag", tmp_path / "a.jsonl"), ("core", make_bundle(tmp_path / "bundle"))):
        other = load_recipe("gpt2-124m", [f"evaluate.{field}={file}@sha256:{'0' * 64}"])
        with pytest.raises(UserError, match=rf"^evaluate\.{field}: .*: its sha256 is \w+, and the recipe has 0000"):
            plans_of(other)
    with pytest.raises(UserError, match=r"^evaluate\.hellaswag: .*/d\.jsonl: no such file; use hf://"):
        plans_of(load_recipe("gpt2-124m", [f"evaluate.hellaswag={tmp_path / 'd.jsonl'}"]))
