"""Every exception that ends a command with a message, with its exit code and the prefix of that message.

Any other exception is a fault of ours: it keeps its traceback, and the exit code is EXIT_FAILED.
"""

import errno
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1  # a fault of ours, or a run that diverged or crashed repeatedly
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 75  # the same command resumes the run; a managed job does that by itself
EXIT_STOPPED = 76  # nothing restarts the run automatically

SHOWN_CHARACTERS = 200  # of a user's value in a message
FULL = "no space left on the disk, or a file beyond `ulimit -f`; free some space, or choose another folder"
# Errors of a path that the user named, or of a folder that belongs to somebody else.
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)


class UserError(ValueError):
    """A mistake that the user can correct. The message names what is wrong, where, and what would be right."""


class DiskFull(UserError):
    """A disk or a quota is used up."""


class NotAFile(UserError):
    """A path or an object of the store is not a regular file, or larger than any that skytrain wrote."""


class Interrupted(Exception):
    """The process was asked to stop, and stopped at a point from which the same command resumes."""


class Crashed(Interrupted):
    """Processes of the run crashed, and their machine can start them again."""


class ProcessKilled(Interrupted):
    """A process of a pool was killed, mostly for lack of memory."""


class UnfitMachine(Interrupted):
    """torch finds fewer GPUs than SkyPilot has rented with this machine: another one may have a newer driver."""


class Stopped(Interrupted):
    """The whole run was asked to stop, not only this machine: nothing may restart it automatically."""


class HandedOver(Interrupted):
    """This machine's part ends here: the next task of the same launch continues on another machine."""


class RepeatedCrash(Exception):
    """A signal ended a process of the run, and the same command would not help: it
    crashed several times in a row without a new commit."""


class StaleAttempt(Exception):
    """A newer attempt has taken over: this one may neither commit nor delete."""


class Diverged(FloatingPointError):
    """The run cannot continue as configured. The message gives the evidence and remedies."""


class StoreUnavailable(OSError):
    """The store did not answer within the time limit. Not the user's mistake: the same command may work later."""


class NoSoundCommit(StoreUnavailable):
    """A run has commits, and none of them can be read. Starting over would lose them."""


@dataclass(frozen=True)
class Ending:
    """The message that a command prints on stderr as it ends, and its exit code."""

    exit_code: int
    message: str


def ending_of(error: BaseException) -> Ending | None:
    """The message and exit code of a command that ends with `error`.

    None for a fault of ours, which keeps its traceback.
    """
    reason = f" ({error})" if str(error) else ""
    match error:
        case Diverged() | RepeatedCrash():
            return Ending(EXIT_FAILED, f"failed: {error}")
        case UserError():
            return Ending(EXIT_MISTAKE, f"error: {error}")
        case StoreUnavailable():
            return Ending(EXIT_INTERRUPTED, f"error: {error}; run the same command to resume")
        case StaleAttempt():
            return Ending(EXIT_INTERRUPTED, f"superseded: {error}")
        case Stopped():
            return Ending(EXIT_STOPPED, f"stopped{reason}: nothing restarts this run automatically")
        case HandedOver():
            return Ending(EXIT_DONE, f"handed over{reason}: the next task of this launch continues")
        case Interrupted() | KeyboardInterrupt():
            return Ending(EXIT_INTERRUPTED, f"interrupted{reason}: run the same command to resume")
        case OSError() if is_full(error):
            return Ending(EXIT_MISTAKE, f"error: {error.filename or 'disk'}: {FULL}")
        case OSError() if error.errno in UNUSABLE and error.filename:
            path = cut(str(error.filename))
            return Ending(EXIT_MISTAKE, f"error: {path}: {error.strerror}; correct its permissions, or name another")
    return None


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or the limit of a file is used up. Trying again later would not help."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def shown(value: object) -> str:
    """A value in a message: its notation, cut at 200 characters."""
    return cut(repr(value))


def cut(text: str) -> str:
    """A text in a message, cut at 200 characters."""
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
