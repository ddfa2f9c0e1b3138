"""How a function becomes a command with arguments, and how a command line is read."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megafrontier import __version__
from megafrontier.common.errors import BAD_INPUT, print_error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, where argparse would also print the usage."""
        print_error(f"megafrontier: {message}; see `{self.prog} --help`")
        self.exit(BAD_INPUT)


class _Version(argparse.Action):
    """Print the versions. Only `--version` looks for that of torch, which takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"megafrontier {__version__}, torch {_torch_version()}")
        parser.exit()


def _torch_version() -> str:
    """From the metadata of the package, because importing torch takes seconds."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command, with the command as `run`. Exits with code 2 for bad ones."""
    # Overrides may stand anywhere. argparse refuses them before the config and after an option.
    words = _action_first(list(sys.argv[1:] if argv is None else argv))
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


def _action_first(words: list[str]) -> list[str]:
    """The words with the action of a group right after the group's name. Options may stand before
    it, but argparse gives the action's parser only what follows."""
    actions = [name.split()[1] for name in _COMMANDS if words and name.startswith(f"{words[0]} ")]
    for at, word in enumerate(words):
        if at > 0 and word in actions:
            return [words[0], word, *words[1:at], *words[at + 1 :]]
    return words


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megafrontier",
        description="Train GPT models with weights, gradients and optimizer state each sharded "
        "to its own level of the machine.",
    )
    parser.add_argument("--version", help="print the versions", action=_Version, nargs=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    groups: dict[str, Any] = {"": commands}
    for name, (run, help, arguments) in _COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            help_of_group, about = _GROUPS[group]
            added = commands.add_parser(group, help=help_of_group, description=about)
            groups[group] = added.add_subparsers(required=True, metavar="ACTION")
        added = groups[group].add_parser(last, help=help, description=inspect.getdoc(run))
        for argument, options in arguments:
            added.add_argument(argument, **options)
        added.set_defaults(run=run)
    return parser


RunCommand = Callable[[argparse.Namespace], int | None]
Argument = tuple[str, dict[str, Any]]
_COMMANDS: dict[str, tuple[RunCommand, str, Sequence[Argument]]] = {}
_GROUPS: dict[str, tuple[str, str]] = {}


def commands_with_overrides() -> list[str]:
    """The names of the commands that take `key=value` words."""
    return [
        name
        for name, (_, _, arguments) in _COMMANDS.items()
        if any(argument == "overrides" for argument, _ in arguments)
    ]


def command(help: str, *arguments: Argument) -> Callable[[RunCommand], RunCommand]:
    """Decorator: make a function `_NAME` the command NAME, and a function `_GROUP_ACTION` the
    command GROUP ACTION of a `group`. The function's docstring is what `--help` says first."""

    def add(run: RunCommand) -> RunCommand:
        _COMMANDS[run.__name__.removeprefix("_").replace("_", " ")] = run, help, arguments
        return run

    return add


def group(name: str, help: str, about: str) -> None:
    """Name a command that consists of actions. `about` is what its `--help` says first."""
    _GROUPS[name] = help, about


def arg(name: str, help: str, **options: Any) -> Argument:
    """An argument of a command, with the options of argparse."""
    return name, {"help": help, **options}
