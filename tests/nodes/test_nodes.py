"""Several nodes as one: equal shards and losses, and whichever node dies, all leave resumable."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import Project
from servers import LOOPBACK, free_ports


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
