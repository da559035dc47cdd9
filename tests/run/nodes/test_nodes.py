"""Several nodes as one: equal losses, and whichever node is lost or must stop, all leave resumable."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pipeline_runs import Project
from servers import LOOPBACK

from pipelines.run.nodes.launcher_process import LAUNCHER_MODULE

COMMAND = ("run", "tiny.yaml", "--stage", "train", "--price-per-hour", "36")


@pytest.mark.slow
def test_after_the_loss_of_any_node_all_leave_resumable_and_the_losses_stay_equal(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    node_0, node_1 = two_nodes(tmp_path / "two nodes")

    for killed, left in ((node_1, node_0), (node_0, node_1)):
        before = node_0.rows_committed()
        with node_1.started(*COMMAND) as second, node_0.started(*COMMAND) as first:
            processes = {id(node_0): first, id(node_1): second}
            node_0.wait_until(lambda: node_0.rows_committed() > before + 5, first)  # noqa: B023
            killed.kill_all(processes[id(killed)])
            _, output = processes[id(left)].communicate(timeout=300)
            assert processes[id(left)].returncode == 75, output
            assert f"node {int(killed is node_1)} is lost" in output
            assert not left.alive()

    with node_1.started(*COMMAND) as second, node_0.started(*COMMAND) as first:
        assert [process.wait(300) for process in (first, second)] == [0, 0]
    assert node_0.series() == undisturbed(2).series()
    beats = [beat for beat in node_0.heartbeats() if beat["stage"] == "train"]
    assert [(beat["nodes"], beat["state"]) for beat in beats] == [
        (2, "interrupted"),
        (2, "running"),  # killed
        (2, "done"),
    ]
    assert "nothing to do" in node_1.run(*COMMAND).stderr  # alone


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_rented_nodes_start_again_together_after_a_rank_of_one_crashed(
    tmp_path: Path, undisturbed: Callable[[int], Project], node: int
) -> None:
    nodes = two_nodes(tmp_path / "nodes")
    for one in nodes:
        one.environment["SKYPILOT_CLUSTER_INFO"] = '{"cloud": "aws", "cluster_name": "train-9"}'
    with nodes[1].started(*COMMAND) as second, nodes[0].started(*COMMAND) as first:
        processes = (first, second)
        nodes[0].wait_until(lambda: nodes[0].rows_committed() > 5, first)
        (launcher,) = (
            one for one in psutil.Process(processes[node].pid).children() if LAUNCHER_MODULE in one.cmdline()
        )
        launcher.children()[0].kill()
        assert [process.wait(300) for process in processes] == [0, 0]
    assert nodes[0].series() == undisturbed(2).series()
    beats = [beat for beat in nodes[0].heartbeats() if beat["stage"] == "train"]
    assert [(beat["state"], beat["progress"].get("restarting")) for beat in beats] == [
        ("interrupted", True),
        ("done", None),
    ]


@pytest.mark.slow
def test_a_worker_that_must_stop_stops_the_run_on_a_commit(tmp_path: Path) -> None:
    node_0, node_1 = two_nodes(tmp_path / "nodes")
    patient = ("--set", "runtime.checkpoint_minutes=1000", "--set", "train.max_steps=100000")
    with node_1.started(*COMMAND, *patient) as second, node_0.started(*COMMAND, *patient) as first:
        node_0.wait_until(lambda: any(beat["progress"].get("step", 0) > 5 for beat in node_0.heartbeats()), first)
        second.send_signal(signal.SIGTERM)
        ended = [process.communicate(timeout=300) for process in (first, second)]
    assert (first.returncode, second.returncode) == (75, 0), ended
    assert "node 0 has ended (interrupted)" in ended[1][1]
    (beat,) = [beat for beat in node_0.heartbeats() if beat["stage"] == "train"]
    assert beat["progress"]["notice"] == "node 1: SIGTERM"
    assert len(node_0.found("train/*/checkpoints/*/COMMIT.json")) == 1


def two_nodes(folder: Path) -> list[Project]:
    """Nodes that share only a store."""
    nodes = [Project(folder) for _ in range(2)]
    for rank, node in enumerate(nodes):
        node.environment |= {
            "SKYTRAIN_HOME": str(folder / f"home {rank}"),
            "SKYTRAIN_STORE": f"file://{node.home / 'store'}",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": f"{LOOPBACK}\n{LOOPBACK}",
        }
        del node.environment["GLOO_SOCKET_IFNAME"]  # each finds its own
    return nodes
