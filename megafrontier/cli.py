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
    for add in (_add_tokenizer, _add_prepare, _add_merge, _add_checkpoint, _add_report):
        add(commands)
    return parser


def _add_tokenizer(commands: Any) -> None:
    parser = commands.add_parser("tokenizer", help="train a SentencePiece tokenizer on text")
    _add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, help="number of token ids")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--kind", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=500,
        help="train on at most this much text, taken evenly from all of it; default: 500",
    )
    parser.set_defaults(command=_tokenizer)


def _tokenizer(arguments: argparse.Namespace) -> None:
    from megafrontier.data.train_tokenizer import train_tokenizer

    a = arguments
    sample = train_tokenizer(
        a.inputs, a.vocab_size, a.out, a.kind, a.max_megabytes, a.json_key, a.skip_bad
    )
    skipped = f"; {len(sample.bad)} bad texts skipped" if sample.bad else ""
    print(f"{a.out}: {a.vocab_size} ids, from {sample.text_bytes / 1e6:.1f} MB of text{skipped}")


def _add_prepare(commands: Any) -> None:
    parser = commands.add_parser("prepare", help="tokenise text into PREFIX.bin and PREFIX.idx")
    _add_inputs(parser)
    parser.add_argument("--split", default="train", help="of a datasets dataset; default: train")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="SentencePiece .model, Hugging Face tokenizer folder or name, or `bytes`",
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="corpus to write")
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the tokenizer's end"
    )
    parser.set_defaults(command=_prepare)


def _prepare(arguments: argparse.Namespace) -> None:
    from megafrontier.data.prepare import prepare

    a = arguments
    made = prepare(
        a.inputs, a.tokenizer, a.out, a.workers, a.append_eod, a.skip_bad, a.json_key, a.split
    )
    skipped = f"; {made.bad} bad texts skipped" if made.bad else ""
    print(
        f"{a.out}: {made.documents} documents, {made.tokens} tokens from "
        f"{made.text_bytes / 1e6:.1f} MB of text{skipped}"
    )


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text file, .jsonl(.gz, .zst), .parquet, folder or glob of these, or the folder or "
        "name (NAME or NAME:CONFIG) of a datasets dataset",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="field or column; default: text"
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="count and leave out what is no text, else refuse"
    )


def _add_merge(commands: Any) -> None:
    parser = commands.add_parser("merge", help="join several corpora of one tokenizer")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="corpora, in this order")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="corpus to write")
    parser.add_argument("--workers", type=int, help="threads; default: two a core")
    parser.set_defaults(command=_merge)


def _merge(arguments: argparse.Namespace) -> None:
    from megafrontier.data.merge import merge

    documents = merge(arguments.prefixes, arguments.out, arguments.workers)
    print(f"{arguments.out}: {documents} documents")


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


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="loss, throughput and traffic per level as pictures and one HTML page"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: the run directory of a single run, else ./report",
    )
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from megafrontier.report import write_report

    print(write_report(arguments.runs, arguments.out))
    return 0
