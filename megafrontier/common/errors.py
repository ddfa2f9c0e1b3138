"""The exit codes of all commands, and the exceptions that are printed as one line.

    0   done
    2   bad input: change the command
    3   the run failed, or none of it could be saved: look at it
    69  a node is unfit for the run: start again without the nodes in RUN/bad-nodes.txt
    70  a rank was lost or hung, or the storage failed: start again
    75  stopped on request: start again to go on
    130 interrupted from the keyboard

Any other code comes from a bug or a signal.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

BAD_INPUT = 2
FAILED = 3
BAD_NODE = 69
LOST = 70
STOPPED = 75
INTERRUPTED = 130
FINAL = (0, BAD_INPUT, FAILED, STOPPED, INTERRUPTED)
"""Exit codes after which the ranks do not start again by themselves."""


class FatalError(Exception):
    """Ends the command with one line and exit code `code`. Other exceptions are bugs and keep their
    traceback.

    All ranks raise it alike, and one of them prints it. If `is_rank_local`, only the rank that met
    it raises and prints it.
    """

    code: int
    is_rank_local = False


def print_error(line: str) -> None:
    """Print a line on stderr. If stderr cannot be written (a full disk, a closed pipe), the line is
    lost and the exit code stays what it would have been."""
    try:
        if sys.stderr is not None:  # otherwise print would use stdout
            print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        redirect_to_devnull(sys.stderr)


def redirect_to_devnull(stream: TextIO) -> None:
    """Drop what a stream holds and all later output. Otherwise Python flushes it at exit, and exits
    with code 120 if that fails."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def exit_on_fatal_error(program: str) -> Iterator[None]:
    """Exit with the code of a FatalError in the body, after printing `program: ` and its line."""
    try:
        yield
    except FatalError as error:
        print_error(f"{program}: {error}")
        sys.exit(error.code)


def is_collective(error: BaseException) -> bool:
    """Whether all ranks raise this error, so that they end together."""
    return isinstance(error, FatalError) and not error.is_rank_local


class UserError(FatalError):
    """Bad input. The line has the form `key: value, need …`."""

    code = BAD_INPUT

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


TRAIN_PACKAGES = frozenset(
    {"transformers", "datasets", "tokenizers", "sentencepiece", "pyarrow", "zstandard", "rich"}
)
"""What the extra `train` installs and commands import when they need it."""


def as_missing_package(error: ModuleNotFoundError) -> UserError:
    """The line for a package of the extra `train` that is not installed. Raises `error` itself for
    any other module, because that is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in TRAIN_PACKAGES:
        raise error
    return UserError(f"{package}: not installed, need pip install 'megafrontier[train]'")


def need(condition: bool, key: str, value: object, fits: str) -> None:
    """Raise UserError `key: value, fits` unless the condition holds."""
    if not condition:
        raise UserError(f"{key}: {value}, {fits}")


class RanksRefused(UserError):
    """`count` of `size` ranks cannot start. `refusals` has the first of them, in rank order: rank,
    host, reason, exit code.

    `are_few`: whether the ranks are those of less than half of the hosts. Otherwise no single node
    is at fault, and the run ends with the first refusal's exit code.
    """

    def __init__(
        self, refusals: list[tuple[int, str, str, int]], count: int, size: int, are_few: bool
    ) -> None:
        rank, host, why, code = refusals[0]
        more = f" (and {count - 1} more)" if count > 1 else ""
        where = "" if count == size else f"rank {rank} on {host}{more}: "
        super().__init__(where + why)
        self.refusals, self.are_few = refusals, are_few
        self.code = BAD_INPUT if are_few else code


class RankError(UserError):
    """Bad input that only this rank met."""

    is_rank_local = True


class RunFailed(FatalError):
    """Training cannot go on, though the input is valid: look at the run, not at the command."""

    code = FAILED


class PeersLost(FatalError):
    """Other ranks, or sites, cannot be reached any more. A script may start the run again."""

    code = LOST


class RanksAbsent(PeersLost):
    """`ranks`, in rank order, did not arrive where the other ranks met."""

    def __init__(self, ranks: list[int], what: str) -> None:
        numbers = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {numbers}: {what}")
        self.ranks, self.what = ranks, what


class Unconnected(PeersLost):
    """This rank cannot connect to another one, though both have met at the store."""

    is_rank_local = True


class StorageFailed(FatalError):
    """The storage failed to read or write a file. Another start may succeed."""

    code = LOST


STORAGE_FAULTS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ESHUTDOWN,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EREMOTEIO,
    }
)
"""Errors of a file system itself, not of the path, as of Lustre without its server."""


def as_fatal_error(error: OSError, line: str) -> UserError | StorageFailed:
    """The error, with this line, for a path that cannot be used: bad input or a failed storage."""
    return StorageFailed(line) if error.errno in STORAGE_FAULTS else UserError(line)


def as_run_directory_error(error: OSError, path: object) -> UserError | StorageFailed:
    """`as_fatal_error` for `path` in the run directory, which cannot be written."""
    return as_fatal_error(error, f"run.directory: {path}: {error.strerror}, need a folder to write")


def as_fatal_os_error(error: OSError) -> UserError | StorageFailed:
    """`as_fatal_error` with a general line. Raises `error` itself if it names no path and is no
    fault of the storage, because then it is a bug."""
    if error.filename is None and error.errno not in STORAGE_FAULTS:
        raise error
    return as_fatal_error(error, f"{error.filename or 'storage'}: {error.strerror}")


class NodesUnfit(FatalError):
    """The run cannot start on some nodes. The line names them."""

    code = BAD_NODE
