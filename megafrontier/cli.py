"""The commands, and nothing else: what each takes, and the one function it calls.

Imports stand inside the functions because `--help` must not wait for torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafrontier.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, or 2 after the one-line error of bad input."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except UserError as error:
        print(f"megafrontier: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megafrontier",
        description="Train GPT models with weights, gradients and optimizer state each sharded "
        "to its own level of the machine.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_checkpoint,):
        add(commands)
    return parser


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser("checkpoint", help="what is there, and is it whole")
    parser.add_argument("action", choices=("list", "show", "verify"))
    parser.add_argument("path", type=Path, help="a run, its checkpoints folder, or one checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_checkpoint)


def _checkpoint(arguments: argparse.Namespace) -> int:
    from megafrontier.checkpoint import commands

    actions = {
        "list": commands.list_command,
        "show": commands.show_command,
        "verify": commands.verify_command,
    }
    return actions[arguments.action](arguments.path, arguments.json)
