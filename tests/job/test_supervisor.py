"""The supervisor of a job, with small work in the place of a run; `tests/crash/test_kills.py` has the run."""

import signal
import subprocess
import sys

import psutil
import pytest
from waiting import until

from pipelines.job.supervisor import MOST_RESTARTS

START = """
import os, signal, sys, time
from pipelines.job.supervisor import supervise

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    while not stop.asked:
        time.sleep(0.01)

def work(the_stop, crash):
    global stop
    stop = the_stop
    print(os.getpid(), crash, stop.reason, flush=True)
"""


def supervisor_of(work: str) -> "subprocess.Popen[str]":
    """A supervisor of work in Python, which knows `stop` and `crash`. First the work prints its pid, and both."""
    code = f"{START}    {work}\nsupervise(work)\n"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76])
def test_a_job_exits_with_the_code_of_its_work(code: int) -> None:
    process = supervisor_of(f"sys.exit({code})")
    assert len(process.communicate()[0].splitlines()) == 1 and process.returncode == code


def test_work_that_is_killed_starts_again_and_too_often_is_for_another_machine() -> None:
    process = supervisor_of("crash or kill()")
    first, second = process.communicate()[0].splitlines()
    assert (first.split()[1:], second.split()[1:], process.returncode) == (["None", "None"], ["9", "None"], 0)
    process = supervisor_of("kill()")
    assert len(process.communicate()[0].splitlines()) == 1 + MOST_RESTARTS and process.returncode == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_request_to_stop_is_for_the_work_and_for_the_work_after_a_crash(number: signal.Signals) -> None:
    process = supervisor_of("crash or wait() or kill()")
    assert process.stdout and process.stdout.readline()
    process.send_signal(number)
    _, crash, reason = process.communicate()[0].split()
    assert (crash, reason, process.returncode) == ("9", "SIGTERM", 0)


def test_the_work_is_asked_to_stop_when_its_supervisor_is_killed() -> None:
    process = supervisor_of("wait()")
    assert process.stdout
    child = psutil.Process(int(process.stdout.readline().split()[0]))
    process.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the work has ended")
    process.communicate()
