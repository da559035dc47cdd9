"""Checks of a job before a machine is rented."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cloud_support import KEYS
from core_bundle import make_bundle

from pipelines.artifacts.store import S3Store
from pipelines.cloud.checks import Finding
from pipelines.cloud.preflight import (
    credentials,
    formats_in_image,
    hellaswag_readable,
    preflight,
    quotas,
    skypilot_installed,
)
from pipelines.cloud.request import LaunchRequest
from pipelines.cloud.tasks import managed_job
from pipelines.recipe import load_recipe
from pipelines.stage import STAGES
from trainer.store import LocalStore, Store

pytestmark = pytest.mark.usefixtures("clean_shell")


def looked(
    store: Store,
    secrets: dict[str, str],
    source: str = "hf://datasets/a/b",
    changes: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Finding]:
    """The findings that are not fine, by subject."""
    asked = LaunchRequest("tiny-12345678", store.uri, **options)
    recipe = load_recipe("smoke", [f"tokens.source={source}", f"tokens.revision={'a' * 40}", *changes])
    findings = preflight(managed_job(asked, STAGES), asked, recipe, store, secrets)
    return {finding.what: finding for finding in findings if finding.state != "ok"}


def test_a_folder_is_no_store_for_machines_elsewhere(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert looked(store, KEYS, infra="aws")["store"].remedy == "--store s3://BUCKET/PREFIX"
    assert "store" not in looked(store, KEYS, infra="slurm/here")


def test_text_on_this_machine_must_be_tokenized_here(tmp_path: Path) -> None:
    found = looked(LocalStore(tmp_path), KEYS, "mine/*.txt", infra="aws")["text for tokenize"]
    assert found.state == "broken" and "skytrain run RECIPE --stage tokenize" in found.remedy


def test_hellaswag_items_that_no_run_could_score_are_found_before_a_machine_is_rented(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    changes = (f"evaluate.hellaswag={items}", "evaluate.every=null")
    items.write_text('{"ctx": "a store", "endings": ["keeps", "loses"], "label": 2}\n')
    found = looked(LocalStore(tmp_path), KEYS, changes=changes, infra="slurm/here")["HellaSwag"]
    assert found.state == "broken" and "item 1: label 2 is not the index of one of the 2 endings" in found.seen
    items.write_text('{"ctx": "a store", "endings": ["keeps", "loses"], "label": 1}\n')
    assert "HellaSwag" not in looked(LocalStore(tmp_path), KEYS, changes=changes, infra="slurm/here")


def test_without_a_network_the_benchmark_is_a_finding_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> None:  # as huggingface_hub 1.x ends without a network
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    monkeypatch.setattr("datasets.load_dataset", closed)
    monkeypatch.setattr("pipelines.stages.measures.LOOK_SECONDS", 0.0)
    found = hellaswag_readable("hf://datasets/Rowan/hellaswag")
    assert found.state == "broken" and "cannot be loaded (the server cannot be reached)" in found.seen


def test_weights_at_a_path_of_this_machine_are_refused_for_rented_machines(tmp_path: Path) -> None:
    weights = f"train.init_from={tmp_path}/model@sha256:{'0' * 64}"
    found = looked(LocalStore(tmp_path), KEYS, changes=(weights,), infra="aws")["weights for train"]
    assert found.state == "broken" and "run:NAME" in found.remedy
    assert (
        looked(LocalStore(tmp_path), KEYS, changes=(weights,), infra="slurm/here")["weights for train"].state == "note"
    )
    of_a_run = "train.init_from=run:other"
    assert "weights for train" not in looked(LocalStore(tmp_path), KEYS, changes=(of_a_run,), infra="aws")


def test_a_core_bundle_is_verified_before_a_machine_is_rented(tmp_path: Path) -> None:
    def found(infra: str) -> Finding | None:
        return looked(LocalStore(tmp_path), KEYS, changes=(f"evaluate.core={bundle}",), infra=infra).get("CORE")

    bundle = make_bundle(tmp_path / "bundle")
    here, elsewhere = found("slurm/here"), found("aws")
    assert here and here.state == "note" and "22 tasks with 110 items" in here.seen
    assert elsewhere and elsewhere.state == "broken" and "is on this machine" in elsewhere.seen
    (bundle / "eval_data" / "all" / "squad.jsonl").write_text("{}\n" * 5)
    damaged = found("slurm/here")
    assert damaged and damaged.state == "broken" and "squad.jsonl: line 1: is not an item of kind" in damaged.seen
    assert "CORE" not in looked(LocalStore(tmp_path), KEYS, infra="aws")


def test_a_format_that_the_image_cannot_make_is_refused_before_a_machine_is_rented() -> None:
    recipe = load_recipe("smoke", ["export.formats=[gguf, onnx, llmc]"])
    (found,) = formats_in_image(recipe)
    assert found.state == "broken" and found.seen == "the image has no packages for gguf and onnx"
    assert "export.formats=[llmc]" in found.remedy
    assert not list(formats_in_image(load_recipe("smoke", ["export.formats=[llmc, nanogpt]"])))


def test_gpus_that_cannot_train_the_recipe_are_refused(tmp_path: Path) -> None:
    def found(gpus: str, *changes: str, nodes: int = 1) -> Finding | None:
        where: dict[str, Any] = {"infra": "slurm/here", "gpus": gpus, "nodes": nodes}
        return looked(LocalStore(tmp_path), KEYS, changes=changes, **where).get("GPUs")

    assert found("H100:1") is None
    for own_count in ("runtime.processes=1", "runtime.device=cpu"):
        assert found("H100:8", own_count) is None
    shared = found("H100:8", nodes=3)  # a step has 16 sequences
    assert shared and shared.state == "broken" and "3 x H100:8: train.batch_tokens: " in shared.seen
    assert found("H100:1", "train.precision=fp8") is None
    old = found("V100:1", "train.precision=fp8")
    assert old and "1 x V100:1: no hardware for train.precision fp8" in old.seen


def test_an_address_of_this_machine_is_refused_for_rented_machines(tmp_path: Path) -> None:
    variables = {"AWS_ENDPOINT_URL": "http://localhost:9000", "MLFLOW_TRACKING_URI": "https://mlflow.example.invalid"}
    store = LocalStore(tmp_path)
    assert "AWS_ENDPOINT_URL" in looked(store, KEYS, infra="aws", variables=variables)["network"].seen
    assert "network" not in looked(store, KEYS, infra="slurm/here", variables=variables)
    for local in ("sqlite:///mlflow.db", "file:///somewhere"):
        found = looked(store, KEYS, infra="slurm/here", variables={"MLFLOW_TRACKING_URI": local})
        assert found["network"].state == "broken"
    for private in ("http://10.0.0.8:5000", "http://mlflow:5000"):
        finding = looked(store, KEYS, infra="aws", variables={"MLFLOW_TRACKING_URI": private})["network"]
        assert finding.state == "note" and private in finding.seen and "in its network" in finding.remedy
    assert "network" not in looked(store, KEYS, infra="aws", variables={"AWS_ENDPOINT_URL": "https://8.8.8.8"})


@pytest.mark.parametrize(
    ("secrets", "clouds", "state"),
    [
        (KEYS, ["lambda"], "ok"),
        ({}, ["aws"], "note"),  # the nodes' role
        ({}, ["aws", "lambda"], "broken"),
        ({"AWS_ACCESS_KEY_ID": "an id"}, ["aws"], "broken"),
        (KEYS | {"AWS_SESSION_TOKEN": "for an hour"}, ["aws"], "note"),
    ],
)
def test_a_job_that_could_not_open_the_bucket_is_not_launched(
    secrets: dict[str, str], clouds: list[str], state: str
) -> None:
    assert credentials(S3Store("bucket", client=object()), clouds, secrets).state == state


def test_a_path_that_skypilot_does_not_quote_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a place/bin/python")
    finding = skypilot_installed()
    assert finding.state == "note" and "/a place/bin/python" in finding.seen


def test_the_quotas_named_are_those_of_the_gpus_asked_for() -> None:
    def named(stages: tuple[str, ...] = ("train",), **options: Any) -> dict[str, str]:
        job = managed_job(LaunchRequest("tiny-12345678", "s3://bucket/prefix", **options), stages)
        return {finding.seen.partition(" ")[0]: finding.seen.partition(" ")[2] for finding in quotas(job)}

    assert named() == {
        "aws": "needs 'All P5 Spot Instance Requests' (192 vCPUs)",
        "gcp": "needs 'Preemptible NVIDIA H100 GPUs' and 'GPUs (all regions)' (8)",
        "lambda": "has no quota, but often no free 1 x H100:8",
    }
    small = named(gpus="L4:1", spot=False)
    assert small["aws"] == "needs 'Running On-Demand G and VT instances' (4 vCPUs)"
    assert small["gcp"] == "needs 'NVIDIA L4 GPUs' and 'GPUs (all regions)' (1)"
    assert named(gpus="A100-80GB:8", nodes=2)["gcp"].endswith("A100 80GB GPUs' and 'GPUs (all regions)' (16)")
    both = named(("train", "evaluate"))["aws"]
    assert both.count("P5") == 1 and "'All G and VT Spot Instance Requests' (4 vCPUs)" in both
    assert named(infra="slurm/here") == {} and named(("tokenize", "export")) == {}
