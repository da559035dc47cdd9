"""CORE's bundle in a folder and in the cache of the Hub's library, without network."""

import shutil
from pathlib import Path

import pytest
from core_bundle import make_bundle

from pipelines.text.core_bundle import core_identity, core_tasks, verify_items
from trainer.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"hf://datasets/org/bundle@{COMMIT}"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache in a folder, without network."""
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub (pip)")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_dataset_that_was_fetched_once_is_used_without_network(tmp_path: Path, hub_cache: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    snapshot = hub_cache / "datasets--org--bundle" / "snapshots" / COMMIT
    shutil.copytree(bundle, snapshot)
    shutil.copytree(bundle, snapshot / "inside")
    assert (
        core_identity(SOURCE)
        == core_identity(str(bundle))
        == core_identity(f"hf://datasets/org/bundle/inside@{COMMIT}")
    )
    assert verify_items(SOURCE) == 22 * 5


def test_a_dataset_that_is_not_here_is_named_without_network(hub_cache: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^evaluate\.core: {SOURCE}: is not on this machine and cannot be fet"
    ) as error:
        core_tasks(SOURCE)
    assert "\n" not in str(error.value) and "or null to leave CORE out" in str(error.value)


@pytest.mark.parametrize(
    "source", ["hf://datasets/org/bundle", "hf://datasets/org/bundle@main", f"hf://datasets/org/b/../..@{COMMIT}"]
)
def test_a_dataset_without_a_commit_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"^evaluate\.core: .*: use hf://datasets/ORG/NAME@COMMIT or "):
        core_tasks(source)


def test_no_bundle_has_no_identity() -> None:
    assert core_identity(None) is None
