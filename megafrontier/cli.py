"""The commands, and nothing else: what each takes, and the one function it calls.

Imports stand inside the functions because `--help` must not wait for torch.
"""

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megafrontier.common.errors import (
    BAD_INPUT,
    INTERRUPTED,
    FatalError,
    UserError,
    discard,
    print_error,
)
from megafrontier.common.signals import termination_raised

_OF_A_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, one of those in errors.py."""
    _open_closed_streams()
    arguments = _parse(argv)
    if arguments.command not in (_train, _evaluate) and getattr(arguments, "part", None) is None:
        _tell_of_copies()
    try:
        return arguments.command(arguments) or 0
    except FatalError as error:
        print_error(f"megafrontier: {error}")
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough. Nothing may be flushed into it at exit.
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:  # of whichever path among the arguments or in the config
        if error.filename is None or error.errno not in _OF_A_PATH:
            raise
        print_error(f"megafrontier: {error.filename}: {error.strerror}")
        return BAD_INPUT


def _tell_of_copies() -> None:
    """Warn where a launcher has started several of what is one process's work: each does all of it,
    and of those that write the same files one can."""
    from megafrontier.parallel.env import identify

    with suppress(UserError):  # only ranks need to know who they are
        found = identify(os.environ)
        if found.world_size > 1 and found.rank == 0:
            said = f"each of {found.world_size} tasks of {found.source} does all of this"
            print_error(f"megafrontier: warning: {said}; need one, as by srun -n1")


def _open_closed_streams() -> None:
    """Have /dev/null for what our starter has closed (`>&-`): Python has None for it, and the next
    file to be opened would get its number, by which the backstop knows stderr, say."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse would print the usage too."""
        print_error(f"megafrontier: {message}; see `{self.prog} --help`")
        self.exit(BAD_INPUT)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere: argparse by itself refuses them before the config and after
    an option."""
    words = list(sys.argv[1:] if argv is None else argv)
    takes_overrides = bool(words) and words[0] in ("train", "evaluate")
    overrides, others = split_overrides(words) if takes_overrides else ([], words)
    arguments = _parser().parse_args(others)
    if overrides:  # after what argparse took for one, which the config will refuse
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are `key=value`, not options or paths, and the others."""
    overrides = [word for word in words if re.match(r"[^-/=][^/=]*=", word)]
    return overrides, [word for word in words if word not in overrides]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megafrontier",
        description="Train GPT models with weights, gradients and optimizer state each sharded "
        "to its own level of the machine.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_tokenizer,
        _add_prepare,
        _add_merge,
        _add_train,
        _add_evaluate,
        _add_generate,
        _add_export,
        _add_import,
        _add_checkpoint,
        _add_report,
    ):
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
    from megafrontier.data.tokenizers.train import train_tokenizer

    a = arguments
    with termination_raised():
        sample = train_tokenizer(
            a.inputs, a.vocab_size, a.out, a.kind, a.max_megabytes, a.json_key, a.skip_bad
        )
    skipped = f"; {len(sample.bad)} bad texts skipped" if sample.bad else ""
    print(f"{a.out}: {a.vocab_size} ids, from {sample.text_bytes / 1e6:.1f} MB of text{skipped}")


def _add_prepare(commands: Any) -> None:
    parser = commands.add_parser("prepare", help="tokenise text into PREFIX.bin and PREFIX.idx")
    _add_inputs(parser)
    parser.add_argument("--split", help="of a datasets dataset; default: train")
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
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="only the I-th of N shares of the files, to PREFIX.part-I-of-N for `merge`",
    )
    parser.set_defaults(command=_prepare)


def _prepare(arguments: argparse.Namespace) -> None:
    from megafrontier.data.text.prepare import prepare

    a = arguments
    part = _part(a.part or "1/1")
    out = a.out if a.part is None else "{}.part-{:05d}-of-{:05d}".format(a.out, *part)
    chosen = (a.append_eod, a.skip_bad, a.json_key, a.split, part)
    with termination_raised():
        made = prepare(a.inputs, a.tokenizer, out, a.workers, *chosen)
    skipped = f"; {made.bad} bad texts skipped" if made.bad else ""
    if made.unknown:
        share = f"{made.unknown_documents / made.documents:.1%} of the documents"
        skipped += f"; {made.unknown} tokens in {share} are <unk>: characters without a piece"
    print(
        f"{out}: {made.documents} documents, {made.tokens} tokens from "
        f"{made.text_bytes / 1e6:.1f} MB of text{skipped}"
    )


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if match is None:
        raise UserError(f"--part: {text!r}, need a share of how many, as in 3/16")
    return int(match[1]), int(match[2])


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
    from megafrontier.data.corpus.merge import merge

    with termination_raised():
        documents = merge(arguments.prefixes, arguments.out, arguments.workers)
    print(f"{arguments.out}: {documents} documents")


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="train; joins Slurm or torchrun, or starts ranks")
    parser.add_argument("config", help="YAML file, see docs/configuration.md")
    _add_ranks(parser)
    parser.add_argument(
        "--trace", action="store_true", help="write a timeline, trace.json (log.trace=true)"
    )
    parser.set_defaults(command=_train)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N local ranks; default: join the launcher's, 1 without a launcher",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="as in train.steps=100"
    )


def _train(arguments: argparse.Namespace) -> int:
    from megafrontier.common.signals import stops_remembered

    _quiet_torch()
    with stops_remembered():  # from here on: the imports alone take seconds
        from megafrontier.config import load_config
        from megafrontier.launch.main import prepared, train

        overrides = [*arguments.overrides, *(["log.trace=true"] if arguments.trace else [])]
        load = partial(load_config, arguments.config, overrides)
        return train(prepared(load, arguments.nproc), arguments.nproc)


def _quiet_torch() -> None:
    """Leave it to our own watch to say who was lost, in one line.

    torch's C++ meets a lost peer with pages of warnings, and NCCL's recorder has every rank ask
    rank 0's store each second whether to write a file to $HOME, and all do after one error.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE"):
        os.environ.setdefault(name, "0")


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="loss, perplexity and bits per byte")
    parser.add_argument(
        "target", type=Path, help="a config (its run's newest checkpoint), a run, or a checkpoint"
    )
    _add_ranks(parser)
    parser.set_defaults(command=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    _quiet_torch()
    from megafrontier.commands.evaluate import evaluate_command

    a = arguments
    return evaluate_command(a.target, a.overrides, a.nproc, print)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue a text")
    parser.add_argument("checkpoint", type=Path, help="a run (its newest) or a checkpoint")
    parser.add_argument("--prompt", required=True, help="text to continue; may be empty")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default: 1")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default: 0, all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1")
    parser.add_argument("--seed", type=int, help="default: another text each time")
    parser.add_argument(
        "--device",
        choices=("any", "cpu"),
        default="any",
        help="default: any, a GPU if there is one and the run was not for the CPU",
    )
    parser.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    from megafrontier.commands.convert import generate_command

    def show(text: str) -> None:
        print(text, end="", flush=True)

    keys = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "device")
    chosen = {key: getattr(arguments, key) for key in keys}
    note = generate_command(arguments.checkpoint, arguments.prompt, show, **chosen)
    print()
    if note:
        print_error(f"megafrontier: {note}")


def _add_export(commands: Any) -> None:
    parser = commands.add_parser("export", help="checkpoint to Hugging Face model folder")
    parser.add_argument("checkpoint", type=Path, help="a run (its newest) or a checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> None:
    from megafrontier.commands.convert import export_command

    name = export_command(arguments.checkpoint, arguments.out, arguments.precision)
    print(f"{arguments.out}: {name}")


def _add_import(commands: Any) -> None:
    parser = commands.add_parser("import", help="Hugging Face model folder to checkpoint")
    parser.add_argument("folder", type=Path, help="config.json, safetensors, tokenizer files")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the checkpoint, or DIR/step-00000000",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="as for prepare, or `none`; default: the folder's"
    )
    parser.set_defaults(command=_import)


def _import(arguments: argparse.Namespace) -> None:
    from megafrontier.commands.convert import import_command

    print(import_command(arguments.folder, arguments.out, arguments.tokenizer))


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
