"""The one exception that means "the input is wrong", as opposed to "the program is wrong"."""


class UserError(Exception):
    """Bad input: one line that names the thing, its value, and what would fit.

    The command line prints the message alone and exits with code 2; every other exception is a
    bug and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RankError(UserError):
    """Bad input that one rank met and the others did not: that rank has to say so."""


class RunFailed(Exception):
    """Training cannot go on, though nothing is wrong with the input's form: one line, exit code 3.

    Distinct from UserError so that a script can tell "fix the command" from "look at the run".
    """
