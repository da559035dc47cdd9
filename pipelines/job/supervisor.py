"""The supervisor of a job: the process of a rented machine that outlives the work on it.

It does the work in a child process, passes requests to stop on to it, and starts it again after a crash (kill -9, lack
of memory): SkyPilot would take minutes longer to do that. It imports nothing heavy, so lack of memory hits the work
first. If the supervisor itself is killed, the kernel asks the child to stop: the run commits and leaves.
"""

import os
import signal
import sys
from collections.abc import Callable

from trainer.base.process import StopSignal, die_with_parent
from trainer.config.errors import EXIT_INTERRUPTED

MOST_RESTARTS = 9  # of one job on one machine; then another machine goes on
REQUESTS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
AWAITED = {*REQUESTS, signal.SIGCHLD}


Work = Callable[[StopSignal, int | None], None]  # the request to stop, and the signal that ended the child before


def supervise(work: Work) -> None:
    """Do `work` in a child process; after a signal has ended it, again, to record that crash and to go on. Exits with
    the child's code, or resumable after MOST_RESTARTS. In the child, returns when the work is done, and raises what it
    raises."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # a request between two children is for the next one
    crash, asked = None, False
    for _ in range(1 + MOST_RESTARTS):
        supervisor, child = os.getpid(), os.fork()
        if child == 0:
            return work(stop_signal_of_child(supervisor, asked), crash)
        exit_code, asked = wait_for(child, asked)
        if exit_code >= 0:
            sys.exit(exit_code)
        crash = -exit_code
    sys.exit(EXIT_INTERRUPTED)


def wait_for(child: int, asked: bool) -> tuple[int, bool]:
    """Pass requests to stop on to the child until it ends. Returns its exit code (a signal's is negative), and whether
    there was a request, or one had been `asked` before."""
    while True:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            asked = True
            os.kill(child, signal.SIGTERM if number == signal.SIGHUP else number)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1]), asked


def stop_signal_of_child(supervisor: int, asked: bool) -> StopSignal:
    """Let this child take signals. A terminal's SIGHUP comes from the supervisor, as SIGTERM."""
    die_with_parent()
    stop = StopSignal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    if asked or os.getppid() != supervisor:  # which has died before the kernel knew of this child
        stop.ask(signal.SIGTERM.name)
    return stop
