"""Promises of a training that begins before its tokens are whole."""

import copy
import json
import os
import random
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cloud_support import Signal
from pipeline_runs import SHIPPED_CLI, TINY, Project
from stage_work import tiny_work

from pipelines.artifacts.manifest import key_of
from pipelines.recipe import load_recipe
from pipelines.stage import Work
from pipelines.stages import train
from pipelines.text.growing import MAKER_BEGINS_BY, unfinished
from pipelines.tracking.audit import audit
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing
from pipelines.tracking.runs import read_runs
from trainer.errors import HandedOver, UserError

# Half of a second epoch: 24 training shards of 63 windows, and 60 steps of 32.
RECIPE: dict[str, Any] = copy.deepcopy(TINY)
RECIPE["tokens"] |= {"max_tokens": 40 * 2048}
RECIPE["train"]["follow_tokens"] = True
RECIPE["runtime"]["processes"] = 2
# Every shard takes a tenth of a second longer.
SLOW = f"""
import time, pipelines.text.parts as parts
real = parts.failpoint
parts.failpoint = lambda name: (time.sleep(0.1), real(name))
{SHIPPED_CLI}
"""


def waits(project: Project, attempt: int) -> bool:
    """Whether this attempt at training has waited for shards."""
    beats = [beat for beat in project.heartbeats() if beat["stage"] == "train" and beat["attempt"] == attempt]
    return any(beat["phases"].get("data", 0) > 0.5 for beat in beats)


# Training reads 23 of the 32 training shards of the first source, and the 6 of the second more than once.
MIXTURE = [
    {"source": "documents/*.jsonl", "max_tokens": 36 * 2048, "weight": 3},
    {"source": "texts/*.txt", "max_tokens": 10 * 2048, "weight": 1},
]
TEXTS = {
    "documents": {"source": "documents/*.jsonl", "packing": "documents"},
    "mixture": {"source": "", "sources": MIXTURE, "max_tokens": None, "val_shards": 4},
}


def project(folder: Path, text: str) -> Project:
    """A project with documents of 2 to 40 bytes, for rows of 33 tokens."""
    made = Project(folder, RECIPE | {"tokens": RECIPE["tokens"] | TEXTS[text]})
    (folder / "documents").mkdir()
    words, choice = (folder / "texts" / "0.txt").read_text().split(), random.Random(3)
    with (folder / "documents" / "0.jsonl").open("w") as lines:
        for _ in range(5000):
            lines.write(json.dumps({"text": " ".join(choice.choices(words, k=choice.randrange(1, 8)))}) + "\n")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("text", list(TEXTS))
def test_a_run_that_follows_its_tokens_equals_one_that_found_them_whole(tmp_path: Path, text: str) -> None:
    after = project(tmp_path / "after", text)
    after.run("run", "tiny.yaml", "--stage", "train")
    during = project(tmp_path / "during", text)
    other = Project(during.folder)  # whose processes do not end with those of `during`
    during.environment |= {MAKER_BEGINS_BY: f"{time.time() + 600:.0f}"}  # as a launch tells the job of its training
    with ExitStack() as running:
        first = running.enter_context(during.started("run", "tiny.yaml", "--stage", "train"))
        during.wait_until(partial(waits, during, 1), first)
        assert not during.found("tokens/*/shards/*.json")
        tokenize = running.enter_context(other.started("run", "tiny.yaml", "--stage", "tokenize", code=SLOW))
        during.wait_until(lambda: len(during.found("tokens/*/shards/*.json")) >= 26, tokenize)
        os.kill(tokenize.pid, signal.SIGSTOP)
        during.wait_until(lambda: during.rows_logged() > 10, first)
        first.kill()
        assert "training follows the shards of " in first.communicate(timeout=60)[1]
        del during.environment[MAKER_BEGINS_BY]
        with during.started("run", "tiny.yaml", "--stage", "train") as training:
            during.wait_until(partial(waits, during, 2), training)
            training.send_signal(signal.SIGTERM)
            _, err = training.communicate(timeout=60)
            assert training.returncode == 75, err
            assert "training follows its shards" in err
        assert during.series() == after.series()[: len(during.series())] and len(during.series()) > 10
        with during.started("run", "tiny.yaml", "--stage", "train", "--json") as training:
            during.wait_until(lambda: waits(during, 3), training)
            os.kill(tokenize.pid, signal.SIGCONT)
            out, err = training.communicate(timeout=120)
        assert training.returncode == 0, err
        assert json.loads(out)["artifacts"].keys() == {"train"}
        tokenize.communicate(timeout=60)
    assert tokenize.returncode == 0
    assert during.series() == after.series() and len(after.series()) == 60
    assert all(("rows" in tokens.facts) == (text == "documents") for tokens in during.artifacts("tokenize"))
    (ours,), (theirs,) = read_runs(during.store), read_runs(after.store)
    assert ours.name == theirs.name
    found = audit(ours)
    assert (found.steps, found.wrong_steps, found.missing_steps) == (60, (), ())
    assert found.source_sequences == ((1440, 480) if text == "mixture" else ())
    assert during.artifact("train").inputs == after.artifact("train").inputs
    assert (
        during.path("train", "model.safetensors").read_bytes() == after.path("train", "model.safetensors").read_bytes()
    )


def test_a_text_whose_split_is_known_at_its_end_cannot_be_followed() -> None:
    with pytest.raises(UserError, match=r"train.follow_tokens needs a validation split .* set tokens.val_shards to 1"):
        load_recipe("smoke", ["train.follow_tokens=true", "tokens.val_shards=null"])


def test_a_deadline_is_compared_again_once_the_first_shards_are_there(tmp_path: Path) -> None:
    work = tiny_work(tmp_path, "train")
    tokens, calls = work.inputs["tokenize"], list[Work]()

    def before_ranks(seen: Work) -> None:
        calls.append(seen)
        if len(calls) == 2:
            raise HandedOver("too few to lose a spot machine")
        seen.store.create(key_of(tokens.prefix), tokens.to_json())

    work = replace(work, inputs={"tokenize": unfinished(tokens.prefix)}, before_ranks=before_ranks)
    with pytest.raises(HandedOver):
        train.build(work)
    assert len(calls) == 2


def test_training_waits_for_a_maker_that_is_to_come_and_for_none_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(train, "UNMADE_SECONDS", 0.0)
    monkeypatch.setenv(MAKER_BEGINS_BY, f"{time.time() + 600:.0f}")
    work, prefix = tiny_work(tmp_path, "train"), "tokens/tiny-ffffffff"
    work = replace(work, inputs={"tokenize": unfinished(prefix)}, stop=Signal())
    followed = train.FollowedTokens(work)
    followed.watch(waiting=True)
    assert not work.stop.asked
    attempt = claim(work.store, prefix, "tiny-01234567", "tokenize", 1, Billing())
    assert attempt
    attempt.update(state="failed")
    work.store.put(f"{prefix}/attempts/0001/heartbeat.json", attempt.latest.to_json())
    followed.watch(waiting=True)
    assert work.stop.asked and "no process makes them" in (work.stop.reason or "")
