"""The layout of a store: every key and folder name is spelled here, once.

store.json                      the id of the store
runs/RUN.json                   a run: its recipe and its artifacts
summaries/RUN.json              its row in a list, once it has ended
launches/RUN.json               its last launch
control/RUN/stop.json           a request to stop it
control/RUN/releases.json       when its rented machines were released
control/RUN/attempts/           the claims of its launches, as below
control/clock/, control/tried/  objects of a moment: what time it is, whether the store obeys
FOLDER/LABEL-FINGERPRINT/       an artifact
    MANIFEST.json               created last: the artifact exists
    a0002/FILE                  a file that attempt 2 made
    attempts/0002/              claim.json, heartbeat.json; with several nodes ranks.json, node-0001.json
    shards/000003.json          tokenize: the receipt of a finished shard
    tokenizer.json              tokenize: the tokenizer, if it is a file
    checkpoints/, metrics/      train, tune: see trainer/checkpoint/layout.py
"""

import re
import uuid

from trainer.base.store import Entry

STORE_ID = "store.json"
RUNS, SUMMARIES, LAUNCHES, CONTROL = "runs/", "summaries/", "launches/", "control/"
STAGES = ("tokenize", "train", "evaluate", "export")  # of every run; tune.NAME, an evaluate.NAME and custom.NAME follow
CUSTOM = "custom"  # stages of other packages
FOLDERS = {**dict(zip(STAGES, ("tokens", *STAGES[1:]), strict=True)), "tune": "tune", CUSTOM: CUSTOM}
SHORT = 8  # hex digits of a fingerprint in names; the manifest holds all 64
MANIFEST, TOKENIZER = "MANIFEST.json", "tokenizer.json"
ATTEMPT_KEY = re.compile(r".*/attempts/([0-9]{4,9})/(?:claim|heartbeat)\.json")
ATTEMPT_FILE = re.compile(r"a\d{4,9}/.*")  # below an artifact

# --- runs


def run_key(run: str) -> str:
    return f"{RUNS}{run}.json"


def summary_key(run: str) -> str:
    return f"{SUMMARIES}{run}.json"


def launch_key(run: str) -> str:
    return f"{LAUNCHES}{run}.json"


def stop_key(run: str) -> str:
    return f"{CONTROL}{run}/stop.json"


def releases_key(run: str) -> str:
    return f"{CONTROL}{run}/releases.json"


def launch_claims(run: str) -> str:
    """The prefix of the attempts to launch a run."""
    return f"{CONTROL}{run}"


def records_of(run: str) -> list[str]:
    """The beginnings of the keys of all records of a run."""
    return [f"{CONTROL}{run}/", launch_key(run), summary_key(run), run_key(run)]


def run_of(entry: Entry) -> str:
    """The run in the key of one of its records."""
    return entry.key.split("/")[1].removesuffix(".json")


def momentary_key(purpose: str) -> str:
    """A new key of an object that its writer removes at once: "clock" or "tried"."""
    return f"{CONTROL}{purpose}/{uuid.uuid4().hex}"


# --- artifacts


def artifact_prefix(stage: str, label: str, fingerprint: str) -> str:
    """The prefix of an artifact, such as train/gpt2-124m-0f3a9c21."""
    return f"{FOLDERS[stage]}/{label}-{fingerprint[:SHORT]}"


def artifact_of(key: str) -> str:
    """The prefix of the artifact to which an object belongs."""
    return "/".join(key.split("/")[:2])


def manifest_key(prefix: str) -> str:
    return f"{prefix}/{MANIFEST}"


def file_folder(attempt: int) -> str:
    """The folder of the files of an attempt, below its artifact."""
    return f"a{attempt:04d}"


def receipt_key(index: int) -> str:
    """The receipt of a shard, below its artifact."""
    return f"shards/{index:06d}.json"


def attempts_of(prefix: str) -> str:
    """The beginning of the keys of all attempts."""
    return f"{prefix}/attempts/"


def attempt_folder(prefix: str, attempt: int) -> str:
    return f"{attempts_of(prefix)}{attempt:04d}/"


def claim_key(prefix: str, attempt: int) -> str:
    return f"{attempt_folder(prefix, attempt)}claim.json"


def heartbeat_key(prefix: str, attempt: int) -> str:
    return f"{attempt_folder(prefix, attempt)}heartbeat.json"


def ranks_key(prefix: str, attempt: int) -> str:
    return f"{attempt_folder(prefix, attempt)}ranks.json"


def node_key(prefix: str, attempt: int, node: int) -> str:
    return f"{attempt_folder(prefix, attempt)}node-{node:04d}.json"
