"""The one exception that means "the input is wrong", as opposed to "the program is wrong"."""


class UserError(Exception):
    """Bad input: one line that names the thing, its value, and what would fit.

    The command line prints the message alone and exits with code 2; every other exception is a
    bug and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
