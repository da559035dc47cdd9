"""Promises of `skytrain shards verify`: every way in which shards cannot be trained on is named."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from pipelines.text.tokenizer import tokenizer
from pipelines.verbs.shards import verify
from trainer.data.shards import write_shard
from trainer.store import sha256_of

TEXTS = ["one", "a second document", "one", "x" * 30, "the last one goes on"]


def write(path: Path, ids: list[int]) -> Path:
    write_shard(path, np.array(ids, dtype=np.uint16))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five documents in two shards; the last one lies in both."""
    encoding = tokenizer("bytes")
    ids = [i for text in TEXTS for i in (encoding.eot_token, *encoding.encode_ordinary(text))]
    write(tmp_path / "train_000000.bin", ids[:-8])
    write(tmp_path / "train_000001.bin", ids[-8:])
    return tmp_path


def test_sound_shards_are_verified_with_and_without_a_manifest(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shards / "train_000000.bin"
    verify([first], "bytes")
    (shards / "MANIFEST.json").write_text(json.dumps({"files": [{"name": first.name, "sha256": sha256_of(first)}]}))
    verify([first], "bytes")
    assert capsys.readouterr().out == "sound: 1 shard(s)\n" * 2


@pytest.mark.parametrize(
    "fault, message",
    [
        ("truncated", "its header requires"),
        ("no shard", "not a token shard"),
        ("id", "its largest id is 301, and the tokenizer has 257 ids"),
        ("no document", "no document begins here: no token 256"),
        ("sha256", "its sha256 is not that of MANIFEST.json"),
        ("unknown", "MANIFEST.json does not name it"),
    ],
)
def test_a_wrong_shard_is_named_with_its_fault_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    path = write(tmp_path / "train_000000.bin", [256, 65, 66])
    manifest = {"name": path.name, "sha256": "0" * 64}
    match fault:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "no shard":
            path.write_bytes(b"text")
        case "id":
            write(path, [256, 300, 65, 301])
        case "no document":
            write(path, [65, 66])
        case "sha256":
            (tmp_path / "MANIFEST.json").write_text(json.dumps({"files": [manifest]}))
        case "unknown":
            (tmp_path / "MANIFEST.json").write_text(json.dumps({"files": [manifest | {"name": "other.bin"}]}))
    with pytest.raises(typer.Exit) as ended:
        verify([path], "bytes")
    shown = capsys.readouterr().out
    assert ended.value.exit_code == 1
    assert message in " ".join(shown.split()) and path.name in "".join(shown.split())


def test_the_shards_of_an_artifact_in_a_store_are_verified_by_its_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a0001").mkdir()
    artifact, first = tmp_path, write(tmp_path / "a0001" / "train_000000.bin", [256, 65, 66])
    file = {"name": first.name, "key": f"a0001/{first.name}", "sha256": sha256_of(first)}
    (artifact / "MANIFEST.json").write_text(json.dumps({"files": [file], "identity": {"tokenizer": "bytes"}}))
    verify([artifact])
    assert capsys.readouterr().out.startswith("sound: 1 shard(s)")
    write(first, [256, 65, 67])
    for path in (artifact, first.parent, first):
        with pytest.raises(typer.Exit):
            verify([path], "bytes")
        assert "its sha256 is not that of MANIFEST.json" in " ".join(capsys.readouterr().out.split())
    first.unlink()
    with pytest.raises(typer.Exit):
        verify([artifact], "bytes")
    assert "missing, and its MANIFEST.json names it" in " ".join(capsys.readouterr().out.split())
