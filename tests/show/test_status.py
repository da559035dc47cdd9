"""The state of runs reads as a person speaks."""

import json

import pytest
from run_records import RUN, done_run

from pipelines.show.status import print_stopped
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.verbs.status import status
from trainer.errors import UserError
from trainer.store import LocalStore


def test_a_stopped_run_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    running = Heartbeat("r-1", "train", 3, "running", 0.0, 0.0, 0.0)
    stopped = Heartbeat("r-1", "train", 3, "stopped", 0.0, 0.0, 0.0, progress=Progress(step=17))
    print_stopped("r-1", running, stopped, launched=True)
    print_stopped("r-1", running, stopped, launched=False)
    assert capsys.readouterr().out.splitlines() == [
        "r-1: train: attempt 3 is stopped at step 17; once its job is over, skytrain resume r-1 continues",
        "r-1: train: attempt 3 is stopped at step 17; skytrain run run:r-1 continues",
    ]


@pytest.mark.parametrize("key", ["runs/other-12345678.json", "train/other-12345678/MANIFEST.json"])
@pytest.mark.parametrize("body", [b"{", b'{"format": 2}'])
def test_status_of_all_runs_leaves_an_unreadable_one_out_loudly_and_shows_the_others(
    store: LocalStore, capsys: pytest.CaptureFixture[str], key: str, body: bytes
) -> None:
    done_run(store)
    values = json.loads(store.get(f"runs/{RUN}.json") or b"")
    other = values | {"run": "other-12345678", "prefixes": values["prefixes"] | {"train": "train/other-12345678"}}
    store.put("runs/other-12345678.json", json.dumps(other).encode())
    store.put(key, body)
    status(None, store=store.uri, as_json=True)
    out, err = capsys.readouterr()
    shown = [one["run"] for one in json.loads(out)]
    if key.startswith("train/") and b"format" not in body:
        assert {one["run"]: one["state"] for one in json.loads(out)}["other-12345678"] == "damaged"
    else:
        assert shown == [RUN] and err.startswith("other-12345678: left out: ") and f"{store.uri}/{key}" in err
        with pytest.raises(UserError, match=key):
            status(["other"], store=store.uri)
