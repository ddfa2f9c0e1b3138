"""The exceptions with a line for the user, and the exit codes of every command.

    0   done
    2   bad input: change the command
    3   the run has failed, or nothing of it could be saved: look at it
    69  a node is not fit for the run: start again without those in RUN/bad-nodes.txt
    70  a rank was lost or hung, or the storage failed: start again
    75  stopped on request: start again to go on
    130 interrupted from the keyboard

Any other code is a bug's or a signal's.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

BAD_INPUT = 2
FAILED = 3
BAD_NODE = 69
LOST = 70
STOPPED = 75
INTERRUPTED = 130


class FatalError(Exception):
    """An end with one line for the user: the command prints the message alone and exits with
    `code`. Every other exception is a bug and keeps its traceback.

    All ranks raise it alike, and one of them speaks, unless `is_rank_local`: then the rank that met
    it has to say so itself.
    """

    code: int
    is_rank_local = False


def print_error(line: str) -> None:
    """Print a line on stderr. Where that cannot be, on a full disk or in a pipe that nobody reads
    any more, the line is lost, and the command's exit code is what it would have been."""
    try:
        if sys.stderr is not None:  # or print would take stdout
            print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Lead a stream to nowhere, with what it holds: Python flushes it at its exit, and where that
    fails too exits with 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def exit_on_fatal_error(program: str) -> Iterator[None]:
    """An `FatalError` within prints its line, after the program's name, and exits with its code."""
    try:
        yield
    except FatalError as error:
        print_error(f"{program}: {error}")
        sys.exit(error.code)


def is_collective(error: BaseException) -> bool:
    """Whether all ranks raise it, and so leave together."""
    return isinstance(error, FatalError) and not error.is_rank_local


class UserError(FatalError):
    """Bad input: the line names the thing, its value, and what would fit."""

    code = BAD_INPUT

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def need(condition: bool, key: str, value: object, fits: str) -> None:
    """Raise UserError `key: value, fits` unless the condition holds."""
    if not condition:
        raise UserError(f"{key}: {value}, {fits}")


@dataclass(frozen=True, order=True)
class Refusal:
    """Why a rank cannot start, with the exit code of that."""

    rank: int
    host: str
    why: str
    code: int


class RanksRefused(UserError):
    """`count` of `size` ranks cannot start, some of them told by `refusals`. `part` is which part
    they are of all ranks, or of those that looked for their hosts. What most met is no matter of
    nodes: it ends with the first one's code, a failed storage's perhaps."""

    def __init__(self, refusals: list[Refusal], count: int, size: int, part: float) -> None:
        first = min(refusals)
        more = f" (and {count - 1} more)" if count > 1 else ""
        where = "" if count == size else f"rank {first.rank} on {first.host}{more}: "
        super().__init__(where + first.why)
        self.refusals, self.are_few = refusals, 2 * part < 1
        self.code = BAD_INPUT if self.are_few else first.code


class RankError(UserError):
    """Bad input that one rank met and the others did not."""

    is_rank_local = True


class RunFailed(FatalError):
    """Training cannot go on, though nothing is wrong with the input's form.

    Distinct from UserError so that a script can tell "fix the command" from "look at the run".
    """

    code = FAILED


class PeersLost(FatalError):
    """Other ranks cannot be reached any more. Nothing is wrong with the run, so a script may start
    it again."""

    code = LOST


class RanksAbsent(PeersLost):
    """`ranks`, in order, are not where all others have met."""

    def __init__(self, ranks: list[int], what: str) -> None:
        numbers = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {numbers}: {what}")
        self.ranks, self.what = ranks, what


class Unconnected(PeersLost):
    """This rank does not reach another one, though both have met the others."""

    is_rank_local = True


class StorageFailed(FatalError):
    """Files that are there could not be read, or nothing be written. Another start may find the
    storage well."""

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
"""What a file system says of itself, and not of the path it was given: Lustre of a server that is
away, NFS of a handle that is old."""


def as_fatal_error(error: OSError, line: str) -> UserError | StorageFailed:
    """What a path that cannot be used is to the run: bad input, or the storage's failure."""
    return StorageFailed(line) if error.errno in STORAGE_FAULTS else UserError(line)


def as_run_directory_error(error: OSError, path: object) -> UserError | StorageFailed:
    """`as_fatal_error` for `path`, in the run directory, which cannot be written."""
    return as_fatal_error(error, f"run.directory: {path}: {error.strerror}, need a folder to write")


def as_generic_fatal_error(error: OSError) -> UserError | StorageFailed:
    """`as_fatal_error` for one that nobody has worded. Raises `error` itself where it names no path
    and is no fault of the storage: that is a bug."""
    if error.filename is None and error.errno not in STORAGE_FAULTS:
        raise error
    return as_fatal_error(error, f"{error.filename or 'storage'}: {error.strerror}")


class NodesUnfit(FatalError):
    """Nodes on which the run cannot start; the line names them."""

    code = BAD_NODE
