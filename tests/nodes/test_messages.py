"""Messages between nodes: each arrives as it was sent, in the documented form."""

import json
from typing import Any

import pytest
from node_ends import spec

from pipelines.nodes.messages import (
    CommandDied,
    End,
    Hello,
    KeepAlive,
    Message,
    StartRanks,
    StopNotice,
    Trained,
    WorkDone,
    message_from_json,
    message_to_json,
)
from pipelines.nodes.results import NodeResult


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (KeepAlive(), {"sent": 0, "received": 0, "writes": 0, "reads": 0}),
        (Hello(1, "tiny-0123", 4, "n1"), {"node": 1, "run": "tiny-0123", "processes": 4, "host": "n1"}),
        (CommandDied(1, "tiny-0123", "killed"), {"died": 1, "run": "tiny-0123", "cause": "killed"}),
        (WorkDone(2, NodeResult(1, host="n1")), {"ended": 2, "node": 1, "kind": None, "words": "", "host": "n1"}),
        (
            WorkDone(2, NodeResult(1, "mistake", "no", "n1")),
            {"ended": 2, "node": 1, "kind": "mistake", "words": "no", "host": "n1"},
        ),
        (StopNotice("SIGTERM"), {"stop": "SIGTERM"}),
        (StartRanks(1, spec(7), 1234), {"train": 1, "spec": spec(7).to_json(), "port": 1234}),
        (Trained(), {"trained": True}),
        (End(75, "SIGTERM"), {"end": 75, "why": "SIGTERM"}),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message, wire: dict[str, Any]) -> None:
    assert json.loads(message_to_json(message)) == wire
    assert message_from_json(message_to_json(message)) == message
