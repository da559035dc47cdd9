"""Promises of tuning: what is refused, what the model learns, and that a stop or a kill changes no bit of it."""

import importlib
import json
import os
import re
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from core_bundle import make_bundle
from pipeline_runs import FOLDER_NAME, REPOSITORY, TINY, Project, committed, flip_a_bit
from stage_work import NoSignals

from pipelines.extras.tune.conversations import addition, answer_in, content_of, rows_of
from pipelines.extras.tune.reward_code import RewardCode
from pipelines.extras.tune.rewards import score_of
from pipelines.extras.tune.tune import checked_rows
from pipelines.extras.tune.tune_task import HELD_OUT, ROWS, TuneTask
from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import REWARDED, TRL_OPTIONS, Recipe, RewardConfig, TuneConfig
from pipelines.run.runs import read_runs
from pipelines.run.sample import load_text_model
from pipelines.run.stages.rank import Joined
from pipelines.run.text.chat import TEMPLATE, ChatTokens
from pipelines.run.text.hub import datasets_library
from pipelines.run.text.tokenizer import tokenizer, tokenizer_files
from pipelines.store.manifest import ArtifactPlan
from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.store import LocalStore
from trainer.checkpoint.commits import series
from trainer.config.errors import UserError
from trainer.models.decoder import Sampling

GRPO = {"method": "grpo", "generations": 4, "max_answer": 4, "rewards": [{"kind": "exact_match"}]}
CHAIN = [
    {"name": "sft", "method": "sft", "data": "addition", "batch": 24, "held_out": 4, "learning_rate": 1e-3}
    | {"lora_rank": 4},
    {"name": "dpo", "method": "dpo", "data": "pairs.jsonl", "batch": 4, "beta": 0.2, "options": {"warmup_steps": 2}},
    {"name": "judge", "method": "reward", "data": "pairs.jsonl", "batch": 5, "learning_rate": 1e-2},
    {"name": "rl", **GRPO, "data": "addition", "batch": 100, "learning_rate": 1e-3}
    | {"rewards": [{"kind": "exact_match"}, {"kind": "model", "step": "judge", "weight": 0.1}]},
]
CHAT = ["--chat", "--prompt", "3+4", "--temperature", "0", "--tokens", "4"]
PAIRS = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in addition()[:20]]


RUNNING: Any = SimpleNamespace(step=SimpleNamespace(name="a"), task=SimpleNamespace(allow_code=False))


def written(folder: Path, rows: list[Any], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder / name)


def step_of(**changes: Any) -> TuneConfig:
    return TuneConfig.model_validate({"name": "a", "method": "sft", "data": "addition"} | changes)


@pytest.fixture(scope="module")
def tune_rank() -> Any:
    """Imported by the workers that run a test of it: TRL and what it imports take 10 s of a slow core."""
    pytest.importorskip("trl", reason="needs trl (pip)")
    return importlib.import_module("pipelines.extras.tune.tune_rank")


@pytest.fixture(scope="module")
def exported(tune_rank: Any, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("tune") / FOLDER_NAME, TINY | {"tune": CHAIN})
    written(project.folder, PAIRS)
    project.run("run", "tiny.yaml", "--stage", "export")
    return project


def tuned(project: Project) -> dict[str, Any]:
    """The sha256 of every file and the committed rows of every step of tuning, without times and speeds."""
    (run,) = read_runs(project.store)
    files = {s: {f.name: f.sha256 for f in m.files} for s, m in run.manifests.items() if m and s.startswith("tune.")}
    rows = {
        stage: [
            {name: value for name, value in row.items() if name != "time" and "per_second" not in name}
            for row in series(project.store, prefix)
        ]
        for stage, prefix in run.record.tunings.items()
    }
    return {"files": files, "rows": rows}


@pytest.fixture(scope="module")
def undisturbed(exported: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = exported.copy(tmp_path_factory.mktemp("whole") / FOLDER_NAME)
    project.run("run", "tiny.yaml")
    return project


def test_a_chain_stopped_in_every_step_and_damaged_once_ends_bit_for_bit_like_an_undisturbed_one(
    exported: Project, undisturbed: Project, tune_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, after_step = exported.copy(tmp_path / FOLDER_NAME), tune_rank.Tuning.on_log

    def stopping(self: Any, *arguments: Any, **named: Any) -> None:
        self.stop.asked = self.state.step == 1
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
        after_step(self, *arguments, **named)

    for stopped in ("tune.sft", "tune.dpo", "tune.judge", "tune.rl"):
        with monkeypatch.context() as patch:
            patch.setattr(tune_rank.Tuning, "on_log", stopping)
            project.run("run", "tiny.yaml", "--stage", stopped, expect=75)
        if stopped == "tune.sft":
            files = project.found("tune/tiny-sft-*/checkpoints/*/*.safetensors")
            assert len(files) == 2
            for file in files:
                flip_a_bit(file)
            refused = project.run("run", "tiny.yaml", "--stage", stopped, expect=75)
            assert "none of its commits can be read" in refused.stderr and all(file.exists() for file in files)
            flip_a_bit(files[0])  # sound again: the run goes on from the commit before the damaged one
        project.run("run", "tiny.yaml", "--stage", stopped)
    assert tuned(project) == tuned(undisturbed)
    assert len(tuned(project)["rows"]["tune.rl"]) == 4 and project.report()["state"] == "done"


def test_a_stop_in_the_last_measurement_repeats_no_step(
    exported: Project, undisturbed: Project, tune_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, measure = exported.copy(tmp_path / FOLDER_NAME), tune_rank.Tuning.measure

    def stopping(self: Any) -> None:
        self.stop.asked = self.state.step == self.steps
        measure(self)

    with monkeypatch.context() as patch:
        patch.setattr(tune_rank.Tuning, "measure", stopping)
        project.run("run", "tiny.yaml", "--stage", "tune.sft", expect=75)
    monkeypatch.setattr(tune_rank.Tuning, "on_step_begin", None)
    project.run("run", "tiny.yaml", "--stage", "tune.sft")
    found, whole = tuned(project), tuned(undisturbed)
    assert all(found[part]["tune.sft"] == whole[part]["tune.sft"] for part in found)


@pytest.fixture(scope="module")
def given(tune_rank: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Any]:
    """The shipped recipe for GPT-2 with a small model and small data of the same form, and that model."""
    transformers, folder = pytest.importorskip("transformers"), tmp_path_factory.mktemp("given")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 257}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))
    theirs.save_pretrained(folder / "theirs")
    for name, body in tokenizer_files(tokenizer("bytes"), 32).items():
        (folder / "theirs" / name).write_bytes(body)
    core = str(make_bundle(folder / "bundle", items=2, examples=1))
    recipe = yaml.safe_load((REPOSITORY / "pipelines/recipes/gpt2-124m-chat.yaml").read_text())
    recipe |= {name: TINY[name] for name in ("name", "tokens", "model", "runtime")}
    recipe["train"] |= {"init_from": str(folder / "theirs"), "batch_tokens": 1024}
    recipe["evaluate"] = TINY["evaluate"] | {"hellaswag": "items.jsonl", "core": core}
    recipe["export"] = {"formats": ["hf", "gguf"], "dtype": "float32"}
    recipe["tune"][0] |= {"data": "*.parquet", "batch": 24, "held_out": 4}
    project = Project(folder / FOLDER_NAME, recipe)
    rows = [{"messages": row["messages"], "source": "sums"} for row in addition()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), project.folder / "chats.parquet")
    written(project.folder, [{"ctx": "I add", "endings": ["two", "four"], "label": 1}], "items.jsonl")
    project.run("run", "tiny.yaml")
    return project, theirs


def test_a_given_model_is_tuned_without_a_training_and_its_scores_stand_beside_the_first(
    given: tuple[Project, Any],
) -> None:
    transformers, (project, theirs) = pytest.importorskip("transformers"), given
    (run,) = read_runs(project.store)
    made = {stage: manifest.facts for stage, manifest in run.manifests.items() if manifest}
    assert [*made] == ["tokenize", "train", "evaluate", "export", "tune.sft", "evaluate.sft"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(project.path("export", "model.safetensors").parent)
    assert all(torch.equal(exported.state_dict()[name], weight) for name, weight in theirs.state_dict().items())
    before, now = (made[stage]["val/loss"] for stage in ("evaluate", "evaluate.sft"))
    card = " ".join(project.run("run", "tiny.yaml").stdout.split())
    assert "HellaSwag as a chat" in card and "CORE as a chat" in card
    assert before != now and f"val loss {before:.3f} → {now:.3f}" in card and made["train"]["steps"] == 0
    tokens = sum(len(ChatTokens(tokenizer("bytes")).conversation(row["messages"])[0]) for row in addition()[4:])
    counted = f"tune.sft: 96 rows, {tokens:,} tokens, 0 rows cropped, 4 held out"
    assert counted in project.run("plan", "tiny.yaml").stdout
    assert project.report()["state"] == "done"
    refused = project.run("plan", "tiny.yaml", "--set", "train.init_from=null", expect=2).stderr
    assert "max_steps 0 takes the weights of init_from as they are: name them there" in refused


def test_llama_cpp_chats_with_the_gguf_by_its_own_template(given: tuple[Project, Any], tmp_path: Path) -> None:
    xllamacpp, (project, _) = pytest.importorskip("xllamacpp"), given
    (run,) = read_runs(project.store)
    project.run("pull", run.name, str(tmp_path), "--tuned", "--format", "gguf")
    params = xllamacpp.CommonParams()
    params.model.path, params.warmup, params.n_parallel = str(next(tmp_path.glob("gguf/*-f16.gguf"))), False, 1
    params.n_ctx, params.cpuparams.n_threads = 32, 1
    messages = [{"role": "user", "content": "3+4"}]
    asked = {"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True}
    answer = xllamacpp.Server(params).handle_chat_completions(asked)
    text = bytes(byte for one in answer["choices"][0]["logprobs"]["content"] for byte in one["bytes"])
    ours = json.loads(project.run("sample", run.name, *CHAT, "--json").stdout)
    assert text.decode(errors="replace") == ours[0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(ChatTokens(tokenizer("bytes")).prompt(messages))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sft_and_dpo_that_were_killed_end_bit_for_bit_like_undisturbed_ones(
    exported: Project, undisturbed: Project, tmp_path: Path, ranks: int
) -> None:
    project, options = exported.copy(tmp_path / FOLDER_NAME), ("--set", f"runtime.processes={ranks}")
    stages = ("sft", "dpo") if ranks == 1 else ("dpo",)
    if ranks > 1:
        project.run("run", "tiny.yaml", "--stage", "tune.sft", *options)
    whole = project.copy(tmp_path / "whole")
    for stage in stages:
        command = "run", "tiny.yaml", "--stage", f"tune.{stage}", *options
        with project.started(*command) as process:
            project.wait_until(committed(project, 2, f"tune/tiny-{stage}-*"), process)
        project.run(*command)
    assert project.claims("tune") == whole.claims("tune") + 2 * len(stages)
    expected, found, steps = tuned(undisturbed), tuned(project), ("tune.sft", "tune.dpo")
    if ranks > 1:
        for step in steps:
            name = f"{step.replace('.', '/')}/loss"
            losses = [[row[name] for row in one["rows"][step] if name in row] for one in (found, expected)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        whole.run("run", "tiny.yaml", "--stage", "tune.dpo", *options)
        expected = tuned(whole)
    for part in found:
        assert {step: found[part][step] for step in steps} == {step: expected[part][step] for step in steps}


MINE = """
import asyncio, os, sys

async def score(prompts, completions, answer, tags, hint, **columns):
    print("to the log")
    os.system("echo '{}'; cat")
    await asyncio.sleep(0)
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"] * len(completions)
    assert tags == [[one] if int(one) % 2 else {"is": one} for one in answer], tags
    assert all(one == (None if a == "7" else int(a) if a == "5" else a) for one, a in zip(hint, answer)), hint
    assert {*columns} <= {"completion_ids", "messages", "chosen", "rejected"} and sys.stdin.read() == ""
    more = {*os.environ} - {"PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LC_CTYPE"}
    return [None if a == "9" else 1.0 if more else 0.25 for a in answer]
"""


def odd_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of several types, one of which some rows lack."""
    answer = row["answer"]
    hint = {} if answer == "7" else {"hint": int(answer) if answer == "5" else answer}
    return row | {"tags": [answer] if int(answer) % 2 else {"is": answer}} | hint


def test_a_reward_function_runs_with_the_flag_alone_and_sees_no_secret(
    exported: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = exported.copy(tmp_path / FOLDER_NAME)
    project.environment |= {"HF_TOKEN": "hf_x", "AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "x"}
    (project.folder / "mine.py").write_text(MINE)
    rows = sorted(addition(), key=lambda row: row["answer"] != "7")  # the first rows lack a hint
    written(project.folder, [*map(odd_columns, rows)], "odd.jsonl")
    step = GRPO | {"name": "mine", "data": "odd.jsonl", "batch": 100, "epochs": 2, "beta": 0.1}
    step |= {"rewards": [{"kind": "function", "function": "mine.py:score"}]}
    command = "run", "tiny.yaml", "--stage", "tune", "--set", f"tune={json.dumps([step])}"
    refused = project.run(*command, expect=2).stderr
    assert "rewards: mine.py:score is code, which runs with your rights; read it, then add --allow-code" in refused
    project.run(*command, "--allow-code")
    (run,) = read_runs(project.store)
    rows = series(project.store, run.record.tunings["tune.mine"])
    assert {row["tune/mine/reward"] for row in rows} == {0.25}
    assert "@sha256:" in str(run.recipe.tune[0].rewards[0].function)
    assert rows[0]["tune/mine/kl"] == pytest.approx(0, abs=1e-6)  # with the chat's tokens
    (project.folder / "elsewhere.py").write_text(MINE)
    same = project.run(*[one.replace("mine.py", "elsewhere.py") for one in command])  # skipped: no code runs
    assert re.search(r"tune\.mine +\S+ \(skipped\)", same.stdout)
    get = LocalStore.get

    def lying(store: LocalStore, key: str) -> bytes | None:
        body = get(store, key)
        if key.startswith("tune/tiny-mine-") and key.endswith("MANIFEST.json"):
            store.delete(key)
        return body

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", lying)
        project.run(*command)  # does what the first answer allowed
    assert project.claims("tune") == 1
    (project.folder / "mine.py").write_text(MINE + "\n")
    assert "--allow-code" in project.run(*command, expect=2).stderr  # another artifact


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("score = ", "SyntaxError: invalid syntax"),
        ("other = 1", "KeyError: 'score'"),
        ("score = lambda **_: [1.0]", "ValueError: gave [1.0] for 2 completions"),
        ("score = lambda **_: [None, float('nan')]", "ValueError: gave [None, nan] for 2 completions"),
        ("import os\nscore = lambda **_: os._exit(3)", "its process ended"),
    ],
)
def test_a_reward_function_that_fails_is_named(tmp_path: Path, source: str, wrong: str) -> None:
    (path := tmp_path / "mine.py").write_text(source)
    (reward,) = step_of(**GRPO | {"rewards": [{"kind": "function", "function": f"{path}:score"}]}).rewards
    with pytest.raises(UserError) as refused:
        RewardCode(reward, allowed=True)(prompts=[1, 2], completions=[1, 2])
    assert f"{path}:score: {wrong}" in str(refused.value)
    with pytest.raises(UserError, match="the recipe has 0000"):
        RewardCode(reward.model_copy(update={"function": f"{reward.function}@sha256:{'0' * 64}"}), allowed=True)
    with pytest.raises(UserError, match="is code, which runs with your rights"):
        RewardCode(reward, allowed=False)


def test_a_tuned_step_is_skipped_and_its_record_names_what_it_learned(undisturbed: Project) -> None:
    again = undisturbed.result()
    assert [again["artifacts"][stage]["skipped"] for stage in ("tune.sft", "tune.dpo", "tune.rl")] == [True] * 3
    (run,) = read_runs(undisturbed.store)
    facts = run.manifests["tune.sft"].facts  # type: ignore[union-attr]
    assert facts["tune/loss"] < facts["tune/loss_before"] and facts["rows"] == 96 and facts["steps"] == 4
    assert " → " in facts["sample"]  # a question that was held out, and its answer
    undisturbed.run("report", run.name, "--html", "page.html")
    exact = f"exact {facts['tune/exact_before']:.3f} → {facts['tune/exact']:.3f}"
    page = (undisturbed.folder / "page.html").read_text()
    assert exact in page or json.dumps(exact)[1:-1] in page
    assert set(series(undisturbed.store, run.record.tunings["tune.rl"])[0]) >= {"tune/rl/reward", "tune/rl/loss"}


def test_transformers_reads_the_result_with_its_template_and_its_ends(undisturbed: Project) -> None:
    transformers = pytest.importorskip("transformers")
    (run,) = read_runs(undisturbed.store)
    folder = undisturbed.store.root / run.record.tunings["tune.rl"] / "a0001"
    model, theirs = (
        kind.from_pretrained(folder) for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    assert theirs.chat_template == TEMPLATE and theirs.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == [258, 256] and model.config.vocab_size == 259
    fast = json.loads((folder / "tokenizer.json").read_text())
    assert model.config.use_cache and (fast["padding"], fast["truncation"]) == (None, None)
    ours = load_text_model(undisturbed.store, undisturbed.home, run.name, tuned=True)
    assert ours.chat
    prompt = ours.chat.prompt([{"role": "user", "content": "3+4"}])
    made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)[0, len(prompt) :]
    steps = ours.continue_prompt(prompt, 4, [0], Sampling(temperature=0))
    assert "".join(one.text for step in steps for one in step) == theirs.decode(made, skip_special_tokens=True)
    said = undisturbed.run("sample", run.name, *CHAT).stdout
    assert said == f"3+4\n{theirs.decode(made, skip_special_tokens=True)}\n"


@pytest.mark.parametrize("rows, then", [(257, 259), (320, 320)])
def test_the_chat_tokens_take_free_rows_of_the_embedding_before_it_grows(
    tune_rank: Any, tmp_path: Path, rows: int, then: int
) -> None:
    transformers, encoding = pytest.importorskip("transformers"), tokenizer("bytes")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 32, "vocab_size": rows}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))
    base.save_pretrained(tmp_path)
    for name, body in tokenizer_files(encoding, 32).items():
        (tmp_path / name).write_bytes(body)
    model, theirs = tune_rank.model_in(tmp_path, ChatTokens(encoding), step_of())
    before, after = base.transformer.wte.weight, model.transformer.wte.weight
    assert len(after) == model.config.vocab_size == then and torch.equal(after[:257], before[:257])
    assert torch.allclose(after[257], before[:257].mean(0)) and torch.equal(after[259:], before[259:])
    assert (theirs.pad_token, theirs.eos_token) == ("<|endoftext|>", "<|im_end|>")
    judge, _ = tune_rank.model_in(tmp_path, ChatTokens(encoding), step_of(method="reward"), scores=True)
    assert torch.equal(judge.transformer.wte.weight, after)  # also as the first step


@pytest.mark.parametrize("text", ["three\n plus four", " \n\n7", "größer 東京  ", "it's 12"])
def test_the_template_of_transformers_gives_our_ids_and_learns_the_same(tmp_path: Path, text: str) -> None:
    transformers, encoding = pytest.importorskip("transformers"), tokenizer("bytes")
    for name, body in tokenizer_files(encoding, 64).items():
        (tmp_path / name).write_bytes(body)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": text}]
    whole = [*messages, {"role": "assistant", "content": text}]
    found = theirs.apply_chat_template(
        whole, chat_template=TEMPLATE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = ChatTokens(encoding)
    ids, learned = ours.conversation(whole)
    assert (found["input_ids"], found["assistant_masks"]) == (ids, [int(one) for one in learned])
    asked = theirs.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=True)
    assert getattr(asked, "input_ids", asked) == ours.prompt(messages)


USER, ANSWER = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
WRONG, SYSTEM = ANSWER | {"content": "5"}, {"role": "system", "content": "short"}
LONGER = [ANSWER, USER | {"content": "3+1"}]


@pytest.mark.parametrize(
    "row, wrong",
    [
        ([1], "a row is an object"),
        ({"text": "2+2"}, "has no messages, which sft needs; it has text"),
        ({"messages": []}, "at least one message"),
        ({"messages": [USER, {"role": "bot", "content": "4"}]}, "message 2: the role is 'bot'; known are system"),
        ({"messages": [USER, ANSWER | {"content": " "}]}, "message 2: the content is empty"),
        ({"messages": [USER, ANSWER | {"content": "4<|im_end|>"}]}, "message 2: the content has <|im_end|>"),
        ({"messages": [ANSWER, USER]}, "the last message is of user, and must be of assistant"),
        ({"messages": [USER | {"content": "2" * 99}, ANSWER]}, "the first answer begins after 119 tokens"),
        ({"messages": [USER, ANSWER | {"weight": 2}]}, "message 2: the weight is 2, and must be 0 or 1"),
        ({"messages": [USER, ANSWER | {"weight": 0.0}]}, "no answer is learned: each has weight 0"),
        ({"messages": json.dumps([USER, ANSWER])}, "messages is a list of messages written as a JSON text"),
        ({"messages": "2+2"}, "messages must be a list of {role, content}"),
        ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]}, "chosen and rejected differ before their last"),
        ({"chosen": [USER, ANSWER], "rejected": [LONGER[1], WRONG]}, "chosen and rejected differ before their last"),
        (
            {"prompt": "1+1", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
            "the prompt is not among the messages",
        ),
        ({"chosen": [SYSTEM, ANSWER], "rejected": [SYSTEM, WRONG]}, "before the answers is of system, and must be of"),
        ({"chosen": "4", "rejected": "5"}, "has no prompt, which dpo needs"),
        ({"prompt": json.dumps([USER]), "chosen": "4", "rejected": "5"}, "prompt is a list of messages written as a"),
    ],
)
def test_a_wrong_row_is_named_before_anything_is_spent(tmp_path: Path, row: Any, wrong: str) -> None:
    data, pair = written(tmp_path, [{"messages": [USER, ANSWER]} | PAIRS[0], row]), "chosen" in row
    with pytest.raises(UserError, match=r"tune\.a: .*pairs\.jsonl: row 2: .*1 of 2 rows are wrong") as refused:
        rows_of(step_of(method="dpo" if pair else "sft", data=data, held_out=2), ChatTokens(tokenizer("bytes")), 64)
    assert wrong in str(refused.value)
    rows = Path(data).read_bytes()
    for damaged in (b"{]", '{"messages": "dé"}'.encode("latin-1")):
        Path(data).write_bytes(rows + b"\n" + damaged + b"\n")
        with pytest.raises(UserError, match=r"^tune\.a\.data: line 3 of '.*pairs\.jsonl' is not JSON"):
            rows_of(step_of(data=data, held_out=2), ChatTokens(tokenizer("bytes")), 64)
    (tmp_path / "lost.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"^tune\.a\.data: .* cannot be read"):
        content_of(step_of(data=str(tmp_path / "lost.jsonl")))


@pytest.mark.parametrize(
    "changes, wrong",
    [
        ({"methd": "sft"}, "methd: unknown field; did you mean 'method'?"),
        ({"options": {"weight_decy": 0.1}}, "(got 'weight_decy'); did you mean 'weight_decay'?"),
        ({"options": {"temperature": 0.5}}, "options.temperature belongs to grpo, rloo, not to sft"),
        ({"beta": 0.0}, "beta belongs to dpo, grpo, rloo, not to sft"),
        ({"method": "grpo"}, "rewards: grpo needs at least one; name {kind: exact_match}"),
        (GRPO | {"batch": 6}, "batch 6 is not divisible by generations 4"),
        (GRPO | {"rewards": [{"kind": "model", "step": "rm"}]}, "'rm' is not an earlier step of method reward"),
        ({"method": "reward", "held_out": 4}, "held_out belongs to sft, dpo, grpo, rloo, not to reward"),
        (GRPO | {"rewards": [{"kind": "format"}]}, "pattern belongs to kind format"),
        (GRPO | {"rewards": [{"kind": "format", "pattern": "("}]}, "is not a regular expression"),
        (GRPO | {"rewards": [{"kind": "format", "pattern": "(" * 499 + ")" * 499}]}, "is not a regular expression"),
    ],
)
def test_a_wrong_step_is_refused_with_what_would_be_right(tmp_path: Path, changes: Any, wrong: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(TINY | {"tune": [{"name": "a", "method": "sft", "data": "addition"} | changes]}))
    with pytest.raises(UserError) as refused:
        load_recipe(str(path))
    assert re.search(r"mine.yaml: tune(\.0|\.a|: a)", str(refused.value)) and wrong in str(refused.value)


def test_every_option_is_an_argument_of_trl(tune_rank: Any) -> None:
    for name, methods in TRL_OPTIONS.items():
        for method in methods:
            assert name in getattr(tune_rank.trl, f"{tune_rank.TRL_NAMES[method]}Config").__dataclass_fields__, method


@pytest.mark.parametrize(
    "reward, scores",
    [
        ({"kind": "exact_match"}, [1.0, 1.0, 0.0]),
        ({"kind": "format", "pattern": "#### .*"}, [0.0, 1.0, 0.0]),
        ({"kind": "length", "characters": 6}, [1.0, 0.5, 1.0]),
    ],
)
def test_the_shipped_rewards_judge_the_final_answer_its_format_and_its_length(reward: Any, scores: list[float]) -> None:
    (made,) = step_of(**GRPO | {"rewards": [reward], "batch": 4}).rewards
    texts = [[{"role": "assistant", "content": text}] for text in ("1,234", "#### 1234", "123")]
    assert score_of(made, RUNNING)(completions=texts, answer=["1234"] * 3) == scores
    assert answer_in("so\n#### 1,234.") == "1234"


def test_a_pattern_that_backtracks_is_named_within_seconds_and_holds_no_thread() -> None:
    (reward,) = step_of(**GRPO | {"rewards": [{"kind": "format", "pattern": "(a+)+b"}]}).rewards
    score, stopped, turns = score_of(reward, RUNNING), threading.Event(), list[bool]()
    (other := threading.Thread(target=lambda: turns.extend(stopped.wait(0.05) for _ in range(10)))).start()
    with pytest.raises(UserError, match=r"pattern '\(a\+\)\+b': an answer took more than 2 s"):
        score(completions=[[{"content": "a" * 64}]])
    assert len(turns) == 10
    other.join()


LEFT_OUT = ANSWER | {"weight": 0}


def test_an_answer_of_weight_0_is_not_learned() -> None:
    tokens, chat = ChatTokens(tokenizer("bytes")), [USER, ANSWER, USER, ANSWER]
    (ids, every), (same, some) = tokens.conversation(chat), tokens.conversation([USER, LEFT_OUT, USER, ANSWER])
    assert ids == same and sum(every) == 4 and some == [one and n > len(ids) // 2 for n, one in enumerate(every)]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "2+2", "chosen": "4", "rejected": "5"}, [USER]),
        ({"prompt": "2+2\ud800", "chosen": "4", "rejected": "5"}, [USER | {"content": "2+2\ufffd"}]),
        ({"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [WRONG]}, [SYSTEM, USER]),
        ({"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]}, [SYSTEM, USER]),
        ({"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, [USER]),
        ({"prompt": "2+2", "chosen": [USER, *LONGER, ANSWER], "rejected": [USER, *LONGER, WRONG]}, [USER, *LONGER]),
        ({"prompt": "2+2", "chosen": [*LONGER, ANSWER], "rejected": [*LONGER, WRONG]}, [USER, *LONGER]),
    ],
)
def test_the_turns_that_a_pair_shares_are_its_prompt(tmp_path: Path, row: Any, prompt: Any) -> None:
    tokens, data = ChatTokens(tokenizer("bytes")), written(tmp_path, [row])
    made = rows_of(step_of(method="dpo", data=data, batch=1), tokens, 256)
    assert made.train == [{"prompt": prompt, "chosen": [ANSWER], "rejected": [WRONG]}]
    made = rows_of(step_of(method="reward", data=data, batch=1), tokens, 256)
    whole = {name: tokens.conversation([*prompt, last])[0] for name, last in (("chosen", ANSWER), ("rejected", WRONG))}
    assert made.train == [{f"{name}_ids": ids for name, ids in whole.items()}]
    assert made.tokens == len(whole["chosen"])


@pytest.mark.parametrize(
    "column, wrong",
    [
        (
            {"when": datetime(2026, 1, 2)},
            "the column 'when' cannot be passed to a reward function (Object of type datetime",
        ),
        ({"completions": "4"}, "the column completions has the name of an argument of TRL's reward functions"),
    ],
)
def test_a_column_that_a_reward_function_cannot_get_is_named(tmp_path: Path, column: Any, wrong: str) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "2+2"} | column]), tmp_path / "rows.parquet")
    step = GRPO | {
        "data": str(tmp_path / "rows.parquet"),
        "rewards": [{"kind": "function", "function": "mine.py:score"}],
    }
    with pytest.raises(UserError, match=r"tune\.a: .*row 1: ") as refused:
        rows_of(step_of(**step, batch=4), ChatTokens(tokenizer("bytes")), 64)
    assert wrong in str(refused.value)


SPELLED = {"role": "user", "content": "<|endoftext|>"}


def tuning_of(tune_rank: Any, folder: Path, **step: Any) -> Any:
    """A step of tuning on the rows of a file, as its rank makes it, of a small model with random weights."""
    transformers, sizes = pytest.importorskip("transformers"), {"n_layer": 1, "n_head": 2, "n_embd": 16}
    config = transformers.GPT2Config(**sizes, n_positions=64, vocab_size=257, bos_token_id=256, eos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for name, body in tokenizer_files(tokenizer("bytes"), 64).items():
        (folder / name).write_bytes(body)
    model = TINY["model"] | {"block_size": 64}
    recipe = Recipe.model_validate(TINY | {"model": model, "tune": [{"name": "a"} | step]})
    rows = rows_of(recipe.tune[0], ChatTokens(tokenizer("bytes")), 64)
    datasets_library().Dataset.from_list(rows.train).save_to_disk(folder / ROWS)
    (folder / HELD_OUT).write_text(json.dumps(rows.held_out))
    numbers: dict[str, Any] = {"started": 0.0, "reached": 0, "between_failures": 1.0, "attempt": 1, "processes": 1}
    places: dict[str, Any] = {"store": "", "tokens": "tokens", "prefix": "tune", "weights": str(folder)}
    task = TuneTask(**numbers, **places, stage="tune.a", recipe=recipe, step="a")
    together = Joined(World.alone(recipe.runtime), EventLog(None, PhaseClock()), None, lambda: None)  # type: ignore[arg-type]
    return tune_rank.Tuning(task, folder, LocalStore(folder), together, None, NoSignals())


@pytest.mark.parametrize("method", ["dpo", "reward", "grpo", "rloo"])
def test_text_that_spells_a_control_token_stays_text(tune_rank: Any, tmp_path: Path, method: str) -> None:
    row = {"prompt": [SPELLED], "chosen": SPELLED["content"], "rejected": "5", "answer": "4"}
    more = GRPO | {"batch": 4} if method in REWARDED else {"batch": 1}
    tuning = tuning_of(tune_rank, tmp_path, **more | {"method": method, "data": written(tmp_path, [row])})
    tokens, whole = tuning.tokens, [SPELLED, SPELLED | {"role": "assistant"}]
    if method in REWARDED:
        assert tuning.trainer._tokenize_prompts([[SPELLED]])[0] == [tokens.prompt([SPELLED])]
        return
    (found,) = tuning.trainer.train_dataset
    assert found.get("prompt_ids", []) + found["chosen_ids"] == tokens.conversation(whole)[0]
    if method == "dpo":
        assert found["prompt_ids"] == tokens.prompt([SPELLED])


def test_a_judge_and_a_measurement_read_text_that_spells_a_control_token_as_text(
    tune_rank: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": [SPELLED], "answer": "4", "chosen": "4", "rejected": "5"}] * 2
    judging = tuning_of(tune_rank, tmp_path, method="reward", batch=2, data=written(tmp_path, rows))
    judging.model.save_pretrained(tmp_path / "reward-judge")
    answers = [[{"role": "assistant", "content": text}] for text in ("4<|im_end|>", "", "4" * 99)]
    tuning = tuning_of(tune_rank, tmp_path, **GRPO | {"batch": 4, "held_out": 1, "data": written(tmp_path, rows)})
    scores = score_of(RewardConfig(kind="model", step="judge"), tuning)(prompts=[[SPELLED]] * 3, completions=answers)
    ids = [torch.tensor([tuning.tokens.conversation([SPELLED, *one])[0][:64]]) for one in answers]
    with torch.no_grad():
        judge = judging.model.eval()
        assert scores == pytest.approx([float(judge(one).logits) for one in ids], abs=1e-5)
        given = torch.tensor([tuning.tokens.prompt([SPELLED])])
        made = tuning.model.eval().generate(given, do_sample=False, max_new_tokens=4)[0, given.shape[1] :]
    tuning.held_out = [([SPELLED], tuning.tokenizer.decode(made, skip_special_tokens=True))]
    tuning.measure()
    assert tuning.log.uncommitted[-1]["tune/a/exact"] == 1


def test_a_pair_longer_than_the_model_is_cropped_and_one_with_equal_answers_is_warned_of(
    tune_rank: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "2", "chosen": "4" * 99, "rejected": "5"}, {"prompt": "2", "chosen": "4", "rejected": "4"}]
    tuning = tuning_of(tune_rank, tmp_path, method="reward", batch=1, data=written(tmp_path, rows))
    assert [len(row["chosen_ids"]) for row in tuning.trainer.train_dataset] == [64, 24]
    store = LocalStore(tmp_path / "store")
    checked_rows(tuning.task.recipe, store, ArtifactPlan("tokenize", "tiny", {}))
    assert "tune.a: 1 of 2 pairs have equal answers" in caplog.text
