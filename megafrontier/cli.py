"""The commands, and nothing else: what each takes, and the one function it calls.

Imports stand inside the functions because `--help` must not wait for torch.
"""

import argparse
import sys
from collections.abc import Sequence

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
    for add in ():
        add(commands)
    return parser
