"""The exceptions with a line for the user, and the exit codes of every command.

    0   done
    2   bad input: change the command
    3   the run has failed: look at it
    69  a node is not fit for the run: start again without those in RUN/bad-nodes.txt
    70  a rank was lost or hung: start again
    75  stopped on request: start again to go on

Any other code is a bug's or a signal's.
"""

BAD_INPUT = 2
FAILED = 3
BAD_NODE = 69
LOST = 70
STOPPED = 75


class UserError(Exception):
    """Bad input: one line that names the thing, its value, and what would fit.

    The command line prints the message alone and exits with BAD_INPUT; an exception that is none
    of those here is a bug and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RankError(UserError):
    """Bad input that one rank met and the others did not: that rank has to say so."""


class RunFailed(Exception):
    """Training cannot go on, though nothing is wrong with the input's form: one line, exit code
    FAILED.

    Distinct from UserError so that a script can tell "fix the command" from "look at the run".
    """


class PeersLost(Exception):
    """Other ranks cannot be reached any more: one line, exit code LOST. Nothing is wrong with the
    run, so a script may start it again."""


class NodesUnfit(Exception):
    """Nodes on which the run cannot start: one line that names them, exit code BAD_NODE."""


class DeviceMissing(NodesUnfit):
    """This rank has no device: it cannot meet the others, so it has to say so itself."""
