"""Several nodes as one: equal shards and losses, and whichever node dies, all leave resumable."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import SHIPPED_CLI, STEPS, TINY, Project, sums
from servers import LOOPBACK, Fault, FaultyProxy, S3Account, free_ports

from pipelines.artifacts.manifest import Manifest, read_manifest
from pipelines.artifacts.store import S3Store
from trainer.process import DRILL
from trainer.shards import local_shards


@pytest.mark.slow
def test_after_the_death_of_any_node_all_leave_resumable_and_the_losses_stay_equal(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    head, other = two_nodes(tmp_path / "two nodes")
    command = ("run", "tiny.yaml", "--stage", "train", "--price-per-hour", "36")

    for dying, left in ((other, head), (head, other)):
        before = head.rows_committed()
        with other.started(*command) as second, head.started(*command) as first:
            processes = {id(head): first, id(other): second}
            head.wait_until(lambda: head.rows_committed() > before + 5, first)  # noqa: B023
            dying.kill_all(processes[id(dying)])
            _, output = processes[id(left)].communicate(timeout=60)
            assert processes[id(left)].returncode == 75, output
            assert "node 1 is gone" in output or "the head is gone" in output
            assert not left.alive()

    with other.started(*command) as second, head.started(*command) as first:
        assert [process.wait(120) for process in (first, second)] == [0, 0]
    assert head.series() == undisturbed(2).series()
    beats = [beat for beat in head.heartbeats() if beat["stage"] == "train"]
    assert [(beat["nodes"], beat["state"]) for beat in beats] == [
        (2, "interrupted"),
        (2, "running"),  # it died silently
        (2, "done"),
    ]
    other.run(*command)  # alone: there is nothing left to train


PARTS = TINY | {"tokens": TINY["tokens"] | {"parts": 3}}
TOKENIZE = ("run", "tiny.yaml", "--stage", "tokenize")
# Leases of 3 s, and 150 ms more a shard, or until the gate opens: then a signal finds all at work.
PATIENT = f"""
import os, time
from pipelines.text import leases, parts

def failpoint(name):
    time.sleep(0.15)
    while os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)

parts.failpoint = failpoint
leases.RENEW_SECONDS, leases.SILENT_SECONDS = 0.5, 3.0
{SHIPPED_CLI}
"""


def content(manifest: Manifest) -> tuple[str, dict[str, Any], dict[str, str]]:
    """All of a manifest but the record of who made it, and when."""
    return manifest.fingerprint, manifest.facts, sums(manifest)


@pytest.fixture(scope="module")
def three_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The tokens that one node makes of a text in three parts."""
    alone = Project(tmp_path_factory.mktemp("alone") / "project", PARTS)
    alone.run(*TOKENIZE)
    return content(alone.artifact("tokenize"))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_nodes_tokenizes_to_the_same_shards(
    count: int, tmp_path: Path, three_parts: tuple[str, dict[str, Any], dict[str, str]]
) -> None:
    head, *others = several_nodes(tmp_path / "nodes", count, PARTS)
    with ExitStack() as stack:
        processes = [stack.enter_context(node.started(*TOKENIZE, "--price-per-hour", "36")) for node in (head, *others)]
        output = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, output
    made = head.artifact("tokenize")
    assert content(made) == three_parts
    (beat,) = head.heartbeats()
    assert (beat["state"], beat["nodes"]) == ("done", count)
    assert beat["progress"]["tokens"] == made.facts["tokens"]  # of all nodes
    bill = json.loads(head.run("report", "--json").stdout)[0]["account"]["total"]
    assert bill["usd"] == pytest.approx(count * 36 * (beat["time"] - beat["started"]) / 3600)
    (other, *_) = others
    assert "nothing to do" in other.run(*TOKENIZE).stderr  # alone


@pytest.mark.slow
def test_nodes_that_are_killed_frozen_and_refused_by_their_bucket_make_the_manifest_of_one_node(
    tmp_path: Path, three_parts: tuple[str, dict[str, Any], dict[str, str]], s3_store: S3Store, s3_server: S3Account
) -> None:
    nodes = several_nodes(tmp_path / "all", 4, PARTS)
    gate, proxy = tmp_path / "gate", FaultyProxy(s3_server.endpoint)
    proxy.start()
    for rank, node in enumerate(nodes):  # they share only the bucket
        node.environment |= {"SKYTRAIN_STORE": s3_store.uri, "AWS_ENDPOINT_URL": proxy.endpoint, "GATE": str(gate)}
        node.folder = tmp_path / str(rank)
        shutil.copytree(tmp_path / "all", node.folder)
    shutil.rmtree(tmp_path / "all")

    def keys(pattern: str) -> list[str]:
        return [one.key for one in s3_store.entries("tokens/") if re.search(pattern, one.key)]

    def refuse() -> None:
        proxy.fail(Fault(503, "SlowDown"), Fault(twice=True), Fault(damage=True), Fault(reset_at=50), method="PUT")
        proxy.fail(Fault(body_bytes=10), Fault(), Fault(500, "InternalError"), method="GET")

    parts: dict[int, str] = {}  # the first one of each worker that has one

    def two_work() -> bool:
        for rank in (1, 2, 3):
            for shard in Path(nodes[rank].environment["SKYTRAIN_HOME"]).rglob("*.bin"):
                parts.setdefault(rank, shard.name.split("_")[1])
        return len(parts) > 1

    with ExitStack() as stack:
        stack.callback(proxy.stop)
        running = [stack.enter_context(node.started(*TOKENIZE, code=PATIENT)) for node in nodes]

        def start(rank: int) -> None:
            running[rank] = stack.enter_context(nodes[rank].started(*TOKENIZE, code=PATIENT))

        nodes[0].wait_until(two_work, running[0])
        frozen, victim = list(parts)[:2]
        running[frozen].send_signal(signal.SIGSTOP)
        refuse()
        nodes[victim].kill_all(running[victim])
        start(victim)
        nodes[0].wait_until(lambda: keys(f"/leases/{parts[frozen]}/0002.json"), running[0])
        running[frozen].send_signal(signal.SIGCONT)
        nodes[0].wait_until(lambda: len(keys(f"/shards/{parts[frozen]}_")) > 2, running[0])
        gate.touch()
        for node, process in zip(nodes, running, strict=True):
            node.kill_all(process)
        gate.unlink()
        assert not keys("MANIFEST.json")
        refuse()
        for rank in range(4):
            start(rank)
        ended = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, ended
    (key,) = keys("MANIFEST.json")
    made = read_manifest(s3_store, key.removesuffix("/MANIFEST.json"))
    assert made and content(made) == three_parts


@pytest.mark.slow
def test_the_part_of_a_node_that_is_killed_is_taken_over_without_its_finished_shards(
    tmp_path: Path, three_parts: tuple[str, dict[str, Any], dict[str, str]]
) -> None:
    head, other = several_nodes(tmp_path / "nodes", 2, PARTS)
    (tmp_path / "tokenize").touch()
    other.environment[DRILL] = str(tmp_path)  # it halts after its first shard
    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        head.wait_until(lambda: (tmp_path / "tokenize.here").exists() and head.found("tokens/*/parts/02.json"), second)
        assert [path.stem for path in head.found("tokens/*/parts/*")] == ["00", "02"]
        done = [json.loads(path.read_text())["file"]["name"] for path in head.found("tokens/*/shards/*")]
        assert [name for name in done if name.startswith("train_01")] == ["train_01_000000.bin"]
        other.kill_all(second)
        _, output = first.communicate(timeout=90)
    assert first.returncode == 0 and "1 shards exist from an earlier attempt" in output, output
    assert content(head.artifact("tokenize")) == three_parts


@pytest.mark.slow
def test_nodes_share_the_sources_of_a_mixture_and_take_over_that_of_a_killed_one(tmp_path: Path) -> None:
    tokens = {key: value for key, value in TINY["tokens"].items() if key not in ("source", "max_tokens")}
    sources = [{"source": f"texts/[{of}].txt", "weight": 1} for of in ("01", "2", "3")]
    recipe = TINY | {"tokens": tokens | {"sources": sources}}
    alone = Project(tmp_path / "alone", recipe)
    alone.run(*TOKENIZE)
    head, other = several_nodes(tmp_path / "nodes", 2, recipe)
    (tmp_path / "tokenize").touch()
    other.environment[DRILL] = str(tmp_path)  # it halts after the first shard of its first source, the second one
    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        head.wait_until(lambda: (tmp_path / "tokenize.here").exists() and head.artifacts("tokenize"), first)
        # The head's second source is the third one; it soon forgets the list of the first.
        head.wait_until(lambda: len(head.found("tokens/*/parts/*")) == 1, first)
        other.kill_all(second)
        _, output = first.communicate(timeout=90)
    assert first.returncode == 0 and "1 shards exist from an earlier attempt" in output, output
    made, expected = (
        next(one for one in project.artifacts("tokenize") if "sources" in one.facts) for project in (head, alone)
    )
    assert sums(made) == sums(expected) and made.facts == expected.facts
    (beat,) = head.heartbeats()
    assert beat["progress"]["tokens"] == made.facts["tokens"]
    assert not head.found("tokens/*/parts/*")  # finished sources forget them


@pytest.mark.slow
def test_the_head_reports_the_damaged_text_of_a_worker(tmp_path: Path) -> None:
    lines = PARTS | {"tokens": PARTS["tokens"] | {"source": "texts/*.jsonl", "parts": 2}}
    head, other = several_nodes(tmp_path / "nodes", 2, lines)
    for name, last in (("0", '{"text": "sound"}'), ("1", '{"text": "cut o')):
        body = "".join(f'{{"text": "line {n} of a file of lines"}}\n' for n in range(9000))
        (head.folder / "texts" / f"{name}.jsonl").write_text(body + last)
    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        output = [process.communicate(timeout=90) for process in (first, second)]
    assert (first.returncode, second.returncode) == (2, 0), output
    where = "'texts/*.jsonl' (counted in its files 1, 3, 5, …)"
    assert f"error: tokens.source: document 9000 of {where} is not JSON" in output[0][1]


def test_two_nodes_train_on_the_parts_that_both_have_made(tmp_path: Path) -> None:
    head, other = several_nodes(tmp_path / "nodes", 2, TINY | {"tokens": TINY["tokens"] | {"parts": 2}})
    with other.started("run", "tiny.yaml") as second, head.started("run", "tiny.yaml") as first:
        output = [process.communicate(timeout=300) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), output
    (folder,) = head.found("tokens/*/a0001")
    facts = head.artifact("tokenize").facts
    found = [shard for split in ("train", "val") for shard in local_shards(folder, split)]  # as llm.c globs for them
    assert {shard.name: shard.tokens for shard in found} == facts["shards"]
    assert [shard.name for shard in found if shard.name.startswith("val")][-1] == "val_00_000015.bin"
    (audit,) = json.loads(head.run("report", "--audit", "--json").stdout)
    assert (audit["steps"], audit["wrong_steps"], audit["missing_steps"]) == (STEPS, [], [])


def two_nodes(folder: Path) -> list[Project]:
    return several_nodes(folder, 2)


def several_nodes(folder: Path, count: int, recipe: dict[str, Any] | None = None) -> list[Project]:
    """Nodes that share only a store."""
    port = free_ports(1)[0]
    nodes = [Project(folder, recipe) for _ in range(count)]
    for rank, node in enumerate(nodes):
        node.environment |= {
            "SKYTRAIN_HOME": str(folder / f"home {rank}"),
            "SKYTRAIN_STORE": f"file://{node.home / 'store'}",
            "SKYTRAIN_PORT": str(port),
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": f"{LOOPBACK}\n{LOOPBACK}",
        }
        del node.environment["GLOO_SOCKET_IFNAME"]  # each finds its own
    return nodes
