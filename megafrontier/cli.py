"""The command line: what each command takes, and the one function that it calls.

Imports stand inside the functions, because `--help` must not wait for torch.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megafrontier.common.arguments import arg as _arg
from megafrontier.common.arguments import command as _command
from megafrontier.common.arguments import group as _group
from megafrontier.common.arguments import parse
from megafrontier.common.errors import (
    BAD_INPUT,
    INTERRUPTED,
    FatalError,
    UserError,
    as_missing_package,
    need,
    print_error,
    redirect_to_devnull,
)
from megafrontier.common.signals import exit_on_sigterm


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, one of those in errors.py."""
    arguments = parse(argv)
    try:
        return arguments.run(arguments) or 0
    except FatalError as error:
        print_error(f"megafrontier: {error}")
        return error.code
    except ModuleNotFoundError as error:
        missing = as_missing_package(error)
        print_error(f"megafrontier: {missing}")
        return missing.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed it, so nothing may be flushed at exit.
        redirect_to_devnull(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:  # about a path from the arguments or the config
        if error.filename is None:
            raise
        print_error(f"megafrontier: {error.filename}: {error.strerror}")
        return BAD_INPUT


_INPUTS = (
    _arg(
        "inputs",
        "text file, .jsonl(.gz, .zst), .parquet, a folder or glob of these, or the folder or name "
        "(NAME or NAME:CONFIG) of a datasets dataset",
        nargs="+",
        metavar="INPUT",
    ),
    _arg("--json-key", "field or column; default: text, for chats messages", metavar="KEY"),
    _arg("--skip-bad", "skip and count bad texts; default: refuse them", action="store_true"),
)
_RANKS = (
    _arg(
        "--nproc", "start N local ranks; default: join the launcher's, or 1", type=int, metavar="N"
    ),
    _arg("overrides", "for example train.steps=100", nargs="*", default=[], metavar="key=value"),
)
_CONFIG = _arg("config", "YAML file (docs/configuration.md), or a name that `configs` lists")
_CHECKPOINT = _arg("checkpoint", "a run (its newest checkpoint) or a checkpoint", type=Path)
_JSON = _arg("--json", "print JSON", action="store_true")
_KINDS = {"choices": ("weight", "ema"), "default": "weight"}
_WEIGHTS = _arg("--weights", "ema: their average (optimizer.ema); default: weight", **_KINDS)
_CORPUS = _arg("--out", "corpus to write", required=True, metavar="PREFIX")


@_command(
    "train a SentencePiece tokenizer on text",
    *_INPUTS,
    _arg("--vocab-size", "number of token ids", type=int, required=True),
    _arg("--out", "folder to write", required=True),
    _arg("--kind", "default: bpe", choices=("bpe", "unigram"), default="bpe"),
    _arg(
        "--max-megabytes",
        "train on a sample of at most this much text; default: 500",
        type=float,
        default=500,
    ),
)
def _tokenizer(a: argparse.Namespace) -> None:
    """Train a SentencePiece tokenizer on text, and write it and its settings into a folder."""
    from megafrontier.data.tokenizers.train import train_tokenizer

    with exit_on_sigterm():
        text_bytes, bad = train_tokenizer(
            a.inputs, a.vocab_size, a.out, a.kind, a.max_megabytes, a.json_key or "text", a.skip_bad
        )
    skipped = f"; {bad} bad texts skipped" if bad else ""
    print(f"{a.out}: {a.vocab_size} ids, from {text_bytes / 1e6:.1f} MB of text{skipped}")


@_command(
    "tokenize text into PREFIX.bin and PREFIX.idx",
    *_INPUTS,
    _arg("--split", "split of a datasets dataset; default: train"),
    _arg(
        "--tokenizer",
        "SentencePiece .model, Hugging Face folder or name, or `bytes`",
        required=True,
    ),
    _CORPUS,
    _arg("--workers", "number of processes; default: one per core", type=int),
    _arg("--append-eod", "add the end token to each document", action="store_true"),
    _arg(
        "--chat",
        "the inputs are chats, and their template is this; only the assistant's turns are trained",
        choices=("tokenizer", "simple"),
    ),
    _arg(
        "--append",
        "add the files that are new to a corpus that --append has made, or begin one",
        action="store_true",
    ),
    _arg(
        "--part", "only part I of N of the files, to PREFIX.part-I-of-N for `merge`", metavar="I/N"
    ),
)
def _prepare(a: argparse.Namespace) -> None:
    """Tokenize text into a corpus in Megatron's format, PREFIX.bin and PREFIX.idx, for `train`. The
    number of processes changes no byte."""
    from megafrontier.data.text.prepare import prepare

    part = _part(a.part or "1/1")
    out = a.out if a.part is None else "{}.part-{:05d}-of-{:05d}".format(a.out, *part)
    key = a.json_key or ("text" if a.chat is None else "messages")
    chosen = (a.append_eod, a.skip_bad, key, a.split, part, a.chat, a.append)
    with exit_on_sigterm():
        made = prepare(a.inputs, a.tokenizer, out, a.workers, *chosen)
    skipped = f"; {made.bad} bad texts skipped" if made.bad else ""
    if made.unknown:
        skipped += f"; {made.unknown} tokens are <unk>: characters without a piece"
    print(
        f"{out}: {made.documents} documents, {made.tokens} tokens from "
        f"{made.text_bytes / 1e6:.1f} MB of text{skipped}"
    )
    if a.chat is not None:
        share = made.trained / max(made.tokens, 1)
        print(f"trained: {made.trained} of {made.tokens} tokens ({share:.0%}), between ▶ and ◀")
        print(f"first chat:\n{made.sample}")


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if match is None:
        raise UserError(f"--part: {text!r}, need a part and the number of parts, as in 3/16")
    return int(match[1]), int(match[2])


@_command(
    "join several corpora of one tokenizer",
    _arg("prefixes", "corpora, in this order", nargs="+", metavar="PREFIX"),
    _CORPUS,
    _arg("--workers", "number of threads; default: two per core", type=int),
)
def _merge(a: argparse.Namespace) -> None:
    """Join corpora of one tokenizer, such as the parts that `prepare --part` wrote, into one."""
    from megafrontier.data.corpus.merge import merge

    with exit_on_sigterm():
        documents = merge(a.prefixes, a.out, a.workers)
    print(f"{a.out}: {documents} documents")


@_command(
    "train; joins the ranks of Slurm or torchrun, or starts local ones",
    _CONFIG,
    *_RANKS,
    _arg(
        "--restarts",
        "with --nproc: after a failure, start the ranks again from the newest checkpoint, up to K "
        "times; default: 0",
        type=int,
        default=0,
        metavar="K",
    ),
    _arg("--trace", "write a timeline, trace.json (log.trace=true)", action="store_true"),
    _arg(
        "--dry-run",
        "build rank 0 without memory and without peers, and say what it needs",
        action="store_true",
    ),
    _arg(
        "--tokens",
        "with --dry-run: tokens of the whole run, to print its node-hours",
        type=float,
        metavar="T",
    ),
)
def _train(a: argparse.Namespace) -> int:
    """Train the model of a config. In a job of Slurm or torchrun, this process becomes one of the
    ranks; otherwise the ranks start here. A run that has checkpoints goes on from the newest."""
    from megafrontier.common.signals import record_stop_requests

    _quiet_torch()
    if a.restarts < 0 or (a.restarts and a.nproc is None):
        raise UserError(
            f"--restarts: {a.restarts}, need 0, or a positive number and --nproc N "
            "(slurm/train.sbatch starts ranks again by itself, torchrun with --max-restarts)"
        )
    if a.dry_run:
        from megafrontier.planner.command import dry_run_command

        print(dry_run_command(a.config, a.overrides, a.nproc, a.tokens))
        return 0
    with record_stop_requests():  # from here on, because the imports alone take seconds
        from megafrontier.config import load_config
        from megafrontier.launch.main import load_or_refuse, train

        overrides = [*a.overrides, *(["log.trace=true"] if a.trace else [])]
        load = partial(load_config, a.config, overrides)
        return train(load_or_refuse(load, a.nproc), a.nproc, a.restarts)


@_command(
    "predict memory and time of the layouts of a config on a number of nodes, and rank them",
    _CONFIG,
    _arg("--nodes", "number of nodes", type=int, required=True, metavar="N"),
    _arg(
        "--tokens",
        "tokens of the whole run, to print its node-hours",
        type=float,
        metavar="T",
    ),
    _arg(
        "--mtbf",
        "mean time between two failures of one node, in hours: adds the best intervals of "
        "checkpoints, and the expected goodput",
        type=float,
        metavar="HOURS",
    ),
    _JSON,
    _arg("--write", "write the config of the best layout", type=Path, metavar="FILE"),
    _RANKS[1],
)
def _plan(a: argparse.Namespace) -> None:
    """Predict the memory and the step time of the layouts of a config on a number of nodes, without
    these nodes, and print them in a table, the fastest first."""
    _quiet_torch()
    from megafrontier.planner.command import plan_command

    print(plan_command(a.config, a.overrides, a.nodes, a.tokens, a.json, a.write, a.mtbf))


@_command(
    "train small copies of a layout here, and say which of its promises hold",
    _CONFIG,
    _arg("--nodes", "number of nodes; default: 1", type=int, metavar="N"),
    _arg("--nproc", "number of ranks, in place of --nodes", type=int, metavar="N"),
    _arg("--minutes", "begin nothing that would take longer", type=float, metavar="M"),
    _JSON,
    _arg("--out", "default: certificate.json in the run directory", type=Path, metavar="FILE"),
    _RANKS[1],
)
def _certify(a: argparse.Namespace) -> int:
    """Train small copies of a layout on this machine, compare them with one plain process, and
    write a certificate of which promises hold. Exit code 4: one of them is broken."""
    _quiet_torch()
    import json

    from megafrontier.certify.command import BROKEN, certify_command

    found = certify_command(a.config, a.overrides, a.nodes, a.nproc, a.minutes, a.out)
    print(json.dumps(found.as_dict(), indent=1) if a.json else found)
    return BROKEN if found.broken else 0


@_command(
    "measure the links between ranks, the levels that they form, and the device",
    _RANKS[0],
    _arg("--machine", "machine file to compare with, by name or path", metavar="NAME"),
    _arg("--write", "write a machine file", type=Path, metavar="FILE"),
    _JSON,
)
def _probe(a: argparse.Namespace) -> int:
    """Measure the links between the ranks and the speed of the device, and print the levels of the
    machine that follow. In a job of Slurm or torchrun, this process becomes one of the ranks."""
    _quiet_torch()
    from megafrontier.probe.command import probe_command

    return probe_command(a.nproc, a.machine, a.write, a.json)


def _quiet_torch() -> None:
    """Leave it to our own watchdog to name a lost rank, in one line.

    torch's C++ prints pages of warnings about a lost peer. NCCL's flight recorder lets every rank
    ask rank 0's store each second whether to write a file to $HOME, and all do after one error.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE"):
        os.environ.setdefault(name, "0")


@_command(
    "loss, perplexity and bits per byte; or tasks of lm-evaluation-harness",
    _arg("target", "a config (its run's newest checkpoint), a run, or a checkpoint", type=Path),
    _arg("--tasks", "evaluate these tasks instead (evaluate.tasks=[A,B])", metavar="A,B"),
    _arg("--limit", "documents of each task (evaluate.tasks_limit=N)", metavar="N"),
    _arg("--include-path", "folder of task files (evaluate.tasks_path=DIR)", metavar="DIR"),
    _WEIGHTS,
    *_RANKS,
)
def _evaluate(a: argparse.Namespace) -> int:
    """Print loss, perplexity and bits per byte of a checkpoint on its validation data, or with
    --tasks its results on tasks of lm-evaluation-harness."""
    _quiet_torch()
    from megafrontier.commands.evaluate import evaluate_command

    given = {
        "tasks": a.tasks and f"[{a.tasks}]",
        "tasks_limit": a.limit,
        "tasks_path": a.include_path,
    }
    chosen = [f"evaluate.{key}={value}" for key, value in given.items() if value]
    overrides = [*a.overrides, *chosen]
    with_tasks = a.tasks is not None
    return evaluate_command(a.target, overrides, a.nproc, print, with_tasks, a.weights)


_SAMPLING = (
    _arg("--temperature", "0 is greedy; default: 1", type=float, default=1.0),
    _arg("--top-k", "default: 0, all tokens", type=int, default=0, metavar="K"),
    _arg("--top-p", "default: 1", type=float, default=1.0, metavar="P"),
    _arg("--seed", "default: another text each time", type=int),
    _arg(
        "--device",
        "default: any, a GPU unless the run used the CPU",
        choices=("any", "cpu"),
        default="any",
    ),
    _WEIGHTS,
)


@_command(
    "continue a text",
    _CHECKPOINT,
    _arg("--prompt", "text to continue; may be empty", required=True),
    _arg("--max-new-tokens", "tokens to add; default: 200", type=int, default=200, metavar="N"),
    *_SAMPLING,
)
def _generate(a: argparse.Namespace) -> None:
    """Continue a text with the model of a checkpoint, and print it as it grows."""
    from megafrontier.commands.generate import generate_command

    show = partial(print, end="", flush=True)
    note = generate_command(a.checkpoint, a.prompt, show, **_sampling(a))
    print()
    if note:
        _note(note)


def _sampling(a: argparse.Namespace) -> dict[str, Any]:
    keys = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "device", "weights")
    return {key: getattr(a, key) for key in keys}


@_command(
    "talk with a model",
    _CHECKPOINT,
    _arg(
        "--chat",
        "as for prepare; default: the tokenizer's template, if it has one, else simple",
        choices=("tokenizer", "simple"),
    ),
    _arg("--system", "the system's turn, before all others", default="", metavar="TEXT"),
    _arg("--context", "tokens of the chat to keep; default: up to 8192", type=int, metavar="N"),
    _arg("--max-new-tokens", "tokens of a reply; default: 512", type=int, default=512, metavar="N"),
    *_SAMPLING,
)
def _chat(a: argparse.Namespace) -> None:
    """Talk with the model of a checkpoint. Each line of the standard input is a turn, and the reply
    is printed as it grows. /reset begins another chat, /exit or the end of the input ends it."""
    from megafrontier.commands.chat import chat_command, read_turns

    show = partial(print, end="", flush=True)
    options = {"template": a.chat, "system": a.system, "context": a.context, **_sampling(a)}
    chat_command(a.checkpoint, read_turns(), show, _note, **options)


def _note(line: str) -> None:
    print_error(f"megafrontier: {line}")


@_command(
    "checkpoint to Hugging Face model folder",
    _CHECKPOINT,
    _arg("--out", "folder to write", type=Path, required=True, metavar="DIR"),
    _arg("--precision", "default: fp32", choices=("fp32", "bf16", "fp16"), default="fp32"),
    _WEIGHTS,
)
def _export(a: argparse.Namespace) -> None:
    """Write the model of a checkpoint as a Hugging Face folder: config.json, safetensors and the
    tokenizer. A run's newest checkpoint is taken."""
    from megafrontier.commands.convert import export_command

    print(f"{a.out}: {export_command(a.checkpoint, a.out, a.precision, a.weights)}")


@_command(
    "Hugging Face model, or Megatron's checkpoint, to checkpoint",
    _arg(
        "model",
        "folder with config.json, safetensors and tokenizer, or a name in the hub",
        nargs="?",
    ),
    _arg("--megatron", "checkpoint of Megatron core instead", type=Path, metavar="DIR"),
    _arg("--out", "folder, or DIR/step-00000000", type=Path, required=True, metavar="DIR"),
    _arg("--tokenizer", "as for prepare, or `none`; default: the folder's", metavar="PATH"),
    _arg("--weights-only", "with --megatron: without the optimizer's states", action="store_true"),
)
def _import(a: argparse.Namespace) -> None:
    """Make a checkpoint of step 0 from a Hugging Face model, to train, evaluate or generate, and a
    config.yaml beside it, with which training goes on. With --megatron, make both from a checkpoint
    of Megatron core (torch_dist); if it has Adam's states, the step is its iteration."""
    fits = "need a Hugging Face model or --megatron DIR, one of both"
    need((a.model is None) != (a.megatron is None), "model", a.model or "missing", fits)
    need(
        not a.weights_only or a.megatron is not None,
        "--weights-only",
        "given",
        "need --megatron DIR with it",
    )
    if a.megatron is None:
        from megafrontier.commands.convert import import_command

        made = import_command(a.model, a.out, a.tokenizer)
    else:
        from megafrontier.commands.megatron.command import import_megatron

        made = import_megatron(a.megatron, a.out, a.tokenizer, a.weights_only)
    print(made)
    _note(f"to train: megafrontier train {made.parent}/config.yaml 'data.train=[{{path: PREFIX}}]'")


_group(
    "checkpoint",
    "list, show, verify or average checkpoints; convert them to and from torch's (DCP)",
    "List, show, verify or average checkpoints, or convert them to and from the format of "
    "torch.distributed.checkpoint (DCP).",
)
_SAVED = _arg("path", "a run, its checkpoints folder, or one checkpoint", type=Path)


@_command("step, size, date and condition of every checkpoint", _SAVED, _JSON)
def _checkpoint_list(a: argparse.Namespace) -> int:
    """List the checkpoints at a path. Exit code 2: one of them is not whole, as far as the sizes of
    its files tell."""
    from megafrontier.checkpoint.commands import list_command

    return list_command(a.path, a.json)


@_command("what a checkpoint holds, and how it was made", _SAVED, _JSON)
def _checkpoint_show(a: argparse.Namespace) -> int:
    """Print the contents of a checkpoint (the newest, if there are several): step, states, config
    and the names and shapes of tensors."""
    from megafrontier.checkpoint.commands import show_command

    return show_command(a.path, a.json)


@_command("whether every byte is intact", _SAVED, _JSON)
def _checkpoint_verify(a: argparse.Namespace) -> int:
    """Read every byte of every checkpoint at a path and compare it with its checksum. Exit code 2:
    one of them is damaged."""
    from megafrontier.checkpoint.commands import verify_command

    return verify_command(a.path, a.json)


@_command(
    "write a checkpoint as one of torch.distributed.checkpoint",
    _SAVED,
    _arg("--dcp", "folder to write", type=Path, metavar="DIR"),
)
def _checkpoint_export(a: argparse.Namespace) -> None:
    """Write a checkpoint (the newest, if there are several) in the format of
    torch.distributed.checkpoint (DCP)."""
    from megafrontier.commands.dcp import export_dcp

    need(a.dcp is not None, "--dcp", "missing", "export needs a folder")
    print(f"{a.dcp}: {export_dcp(a.path, a.dcp)}")


@_command(
    "make a checkpoint from one of torch.distributed.checkpoint",
    _arg("path", "folder to write, as the checkpoints folder of a run", type=Path),
    _arg("--dcp", "folder to read", type=Path, metavar="DIR"),
)
def _checkpoint_import(a: argparse.Namespace) -> None:
    """Make a checkpoint from one in the format of torch.distributed.checkpoint (DCP), of this or of
    another program."""
    from megafrontier.commands.dcp import import_dcp

    need(a.dcp is not None, "--dcp", "missing", "import needs a folder")
    print(import_dcp(a.dcp, a.path))


@_command(
    "write the average of several checkpoints of a run",
    _arg("path", "a run, or its checkpoints folder", type=Path),
    _arg("--out", "new folder to write", type=Path, required=True, metavar="DIR"),
    _arg("--last", "take the newest N", type=int, metavar="N"),
    _arg("--steps", "take the checkpoints of these steps", type=int, nargs="+", metavar="STEP"),
    _arg(
        "--weights",
        "mean: equal weights; linear: 1, 2, 3, … from the oldest to the newest; sqrt: their "
        "square roots; default: mean",
        choices=("mean", "linear", "sqrt"),
        default="mean",
    ),
)
def _checkpoint_average(a: argparse.Namespace) -> None:
    """Write a checkpoint whose weights, and moving averages, are the average of those of several
    checkpoints of a run, whatever their layouts. Everything else comes from the newest of them. The
    folder can be evaluated, exported and resumed from like a run."""
    from megafrontier.commands.average import average_command

    with exit_on_sigterm():
        print(average_command(a.path, a.out, a.last, a.steps, a.weights))


@_command(
    "loss, throughput and traffic per level as pictures and one HTML page",
    _arg("runs", "a run directory", nargs="+", type=Path, metavar="RUN"),
    _arg(
        "--out", "default: the directory of a single run, else ./report", type=Path, metavar="DIR"
    ),
    _arg("--live", "serve the report, and draw it anew while runs go on", action="store_true"),
    _arg("--port", "with --live; default: 8000", type=int, default=8000, metavar="N"),
    _arg("--host", "with --live: address; default: this machine only", default="127.0.0.1"),
    _arg("--seconds", "with --live: time between drawings; default: 15", type=float, default=15.0),
)
def _report(a: argparse.Namespace) -> None:
    """Draw the loss, the throughput and the traffic of runs as pictures and one HTML page, and
    print a table of their throughput."""
    from megafrontier.report.draw import write_report
    from megafrontier.report.live import serve_report
    from megafrontier.report.throughput import throughput_table

    if a.live:
        serve_report(a.runs, a.host, a.port, a.seconds, partial(print, flush=True))
        return
    print(write_report(a.runs, a.out))
    print(throughput_table(a.runs))


@_command(
    "list the configs, models, machine files and Slurm files of the package, or copy one",
    _arg("--copy", "copy it into the working directory", metavar="NAME"),
    _arg("--out", "with --copy: the file or folder to write", type=Path, metavar="PATH"),
)
def _configs(a: argparse.Namespace) -> None:
    """List the configs, models, machine files and Slurm files that come with the package, or copy
    one to change it."""
    from megafrontier.config.shipped import copy_shipped, describe_shipped

    print("\n".join(describe_shipped()) if a.copy is None else copy_shipped(a.copy, a.out))
