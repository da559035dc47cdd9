"""Faults of GPUs and links are told from errors of programs, by texts as NVIDIA's driver, CUDA and NCCL write them.

The texts are recorded ones, of public reports: there is no GPU here that fails.
"""

import os
import platform
from pathlib import Path

import pytest

from pipelines.run.nodes.ranks import LOG_FILE, leave_error_message, result_of_ranks
from pipelines.run.nodes.results import FAULT, GPU, HARDWARE_ERRORS, KILLED, PEER, NodeResult, first_line_with

ECC = """CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1."""
REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer"""  # noqa: E501
ABORTED = (
    "[rank12]:[E817 17:40:34 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process group watchdog thread "
    "terminated with exception: CUDA error: uncorrectable ECC error encountered"
)
HOST = platform.node()


def test_a_fault_of_the_hardware_is_told_from_an_error_of_a_program() -> None:
    for line in (ABORTED, "GPU has fallen off the bus", "RuntimeError: CUDA error: unspecified launch failure"):
        assert first_line_with(HARDWARE_ERRORS, ["step 7", line, "more"]) == line
    for line in ("CUDA error: an illegal memory access was encountered", "out of memory"):
        assert first_line_with(HARDWARE_ERRORS, [line]) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an attempt."""
    (tmp_path / LOG_FILE).write_text("starting\n")
    return tmp_path


def fail(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: Exception) -> None:
    """Leave the error of a rank, later than that of the rank before."""
    monkeypatch.setenv("RANK", str(rank))
    leave_error_message(error, folder)
    (path,) = folder.glob(f"*-{rank}.txt")
    os.utime(path, (rank, rank))


def test_the_rank_whose_gpu_failed_is_named_before_the_peers_that_it_took_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(folder, monkeypatch, 9, RuntimeError(REMOTE))
    fail(folder, monkeypatch, 12, RuntimeError(ECC))
    message = f"GPU fault: CUDA error: uncorrectable ECC error encountered, rank 12 on node 1 ({HOST})"
    assert result_of_ranks(1, folder, 1) == NodeResult(1, GPU, message)


def test_a_process_that_nccl_aborted_for_its_gpu_is_no_mere_death(folder: Path) -> None:
    (folder / f"{KILLED}-12.txt").write_text("rank 12 was killed by SIGABRT")
    (folder / LOG_FILE).write_text(f"step 7\n{ABORTED}\n")
    result = result_of_ranks(1, folder, 1)
    assert result.kind == GPU and result.message.endswith(f", rank 12 on node 1 ({HOST})")


def test_lost_peers_are_no_fault_of_ours_unless_another_rank_shows_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(folder, monkeypatch, 0, RuntimeError(REMOTE))
    result = result_of_ranks(1, folder, 1)
    assert result.kind == PEER and "ncclRemoteError" in result.message
    fail(folder, monkeypatch, 1, KeyError("a bug"))
    result = result_of_ranks(1, folder, 1)
    assert result.kind == FAULT and "KeyError: 'a bug'" in result.message
