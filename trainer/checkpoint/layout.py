"""The names of what a training stores below its artifact. Each is spelled here, once.

    checkpoints/step-00000100-a0002/        a checkpoint of step 100, by attempt 2
        rank-00000-of-00008.safetensors     the part of a rank
        receipt-00000.json                  the rank has uploaded it
        COMMIT.json                         created last: the checkpoint exists
    metrics/step-00000100-a0002.jsonl       rows up to step 100

pipelines/store/layout.py has everything else. An object whose name does not match is not ours.
"""

import re

CHECKPOINT_NAME = r"step-\d{8,12}-a\d{4,9}/[^/]+"
FILE_NAME = r"rank-\d{5}-of-\d{5}\.safetensors"
SEGMENT_NAME = r"step-\d{8,12}-a\d{4,9}\.jsonl"
COMMIT_FILE = "COMMIT.json"
COMMIT_KEY = re.compile(rf"(?P<artifact>.+)/checkpoints/{CHECKPOINT_NAME}(?<=/{re.escape(COMMIT_FILE)})")
CHECKPOINT_FOLDER = re.compile(r".*/checkpoints/[^/]+(?=/)")  # of an object in it


def checkpoints_of(prefix: str) -> str:
    """The beginning of the keys of all checkpoints."""
    return f"{prefix}/checkpoints/"


def metrics_of(prefix: str) -> str:
    """The beginning of the keys of all segments of rows."""
    return f"{prefix}/metrics/"


def checkpoint_folder(prefix: str, step: int, attempt: int) -> str:
    return f"{checkpoints_of(prefix)}step-{step:08d}-a{attempt:04d}"


def commit_key(folder: str) -> str:
    return f"{folder}/{COMMIT_FILE}"


def receipt_key(folder: str, rank: int) -> str:
    return f"{folder}/receipt-{rank:05d}.json"


def file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def segment_key(prefix: str, step: int, attempt: int) -> str:
    return f"{metrics_of(prefix)}step-{step:08d}-a{attempt:04d}.jsonl"


def attempt_key(prefix: str, attempt: int) -> str:
    """The claim of an attempt of `python -m trainer`, which has no ledger."""
    return f"{prefix}/attempts/{attempt:04d}.json"


def step_of(key: str) -> int:
    """The step in the name of a checkpoint's folder, or in the key of an object in it."""
    return int(key.rsplit("/step-", 1)[1].split("-")[0])


def attempt_of(key: str) -> int:
    """The attempt in the name of a checkpoint's folder or of a segment."""
    return int(key.rpartition("-a")[2].partition(".")[0])
