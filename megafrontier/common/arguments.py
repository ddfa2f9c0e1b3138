"""How a function becomes a command with arguments, and how a command line is read."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megafrontier.common.errors import BAD_INPUT, print_error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, where argparse would also print the usage."""
        print_error(f"megafrontier: {message}; see `{self.prog} --help`")
        self.exit(BAD_INPUT)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command, with the command as `run`. Exits with code 2 for bad ones."""
    # Overrides may stand anywhere. argparse refuses them before the config and after an option.
    words = list(sys.argv[1:] if argv is None else argv)
    splits = bool(words) and words[0] in commands_with_overrides()
    overrides, others = split_overrides(words) if splits else ([], words)
    arguments = _parser().parse_args(others)
    if overrides:  # after other words that argparse took for overrides, which the config refuses
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into `key=value` words and the others (options, paths)."""
    overrides = [word for word in words if re.match(r"[^-/=][^/=]*=", word)]
    return overrides, [word for word in words if word not in overrides]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megafrontier",
        description="Train GPT models with weights, gradients and optimizer state each sharded "
        "to its own level of the machine.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, help, arguments in _COMMANDS:
        added = commands.add_parser(run.__name__.removeprefix("_"), help=help)
        for name, options in arguments:
            added.add_argument(name, **options)
        added.set_defaults(run=run)
    return parser


RunCommand = Callable[[argparse.Namespace], int | None]
Argument = tuple[str, dict[str, Any]]
_COMMANDS: list[tuple[RunCommand, str, Sequence[Argument]]] = []


def commands_with_overrides() -> list[str]:
    """The names of the commands that take `key=value` words."""
    return [
        run.__name__.removeprefix("_")
        for run, _, arguments in _COMMANDS
        if any(name == "overrides" for name, _ in arguments)
    ]


def command(help: str, *arguments: Argument) -> Callable[[RunCommand], RunCommand]:
    """Decorator: make a function `_NAME` the command NAME."""

    def add(run: RunCommand) -> RunCommand:
        _COMMANDS.append((run, help, arguments))
        return run

    return add


def arg(name: str, help: str | None, **options: Any) -> Argument:
    """An argument of a command, with the options of argparse."""
    return name, {"help": help, **options}
