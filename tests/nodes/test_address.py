"""Where a node finds itself and the head: the environment and the network."""

import os

import pytest
from servers import LOOPBACK

from pipelines.nodes.address import NodeAddress, interface_to, this_node
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, NodeAddress()),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}, NodeAddress()),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            NodeAddress(1, 2, "10.0.0.1", 29400),
        ),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYTRAIN_PORT": "1234"},
            NodeAddress(0, 2, "10.0.0.1", 1234),
        ),
    ],
)
def test_the_environment_names_this_node(
    environment: dict[str, str], address: NodeAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert this_node() == address


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES: 'two' is not a whole number"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK: 2 of SKYPILOT_NUM_NODES=2"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_IPS: not set"),
    ],
)
def test_an_impossible_environment_is_a_mistake(
    environment: dict[str, str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(UserError, match=wrong):
        this_node()


def test_the_interface_is_the_one_that_leads_to_the_head() -> None:
    assert interface_to(LOOPBACK) == "lo"
    assert interface_to("no such host") is None
