"""The config that `import` writes beside a checkpoint: it trains on from the imported state."""

import json
from collections.abc import Sequence
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from megafrontier.common.files import write_atomically
from megafrontier.config import ModelConfig
from megafrontier.model.flops import parameter_count

CONFIG = "config.yaml"
LONGEST_SEQUENCE = 2048
"""Tokens of a sequence, unless the model has learned positions. Memory grows with them."""


class Line(NamedTuple):
    """A key of the config, with a comment."""

    key: str
    """`section.key`, or a key at the top."""
    value: object
    comment: str


SPLIT = Line("data.split", [0.99, 0.01], "the last 1 % is for validation; or give data.valid")
MACHINE = Line("machine", "laptop", "one level of links; `megafrontier configs` lists others")
"""Lines of each such config."""


def write_config(
    checkpoint: Path, model: ModelConfig, has_tokenizer: bool, continued: Sequence[Line] = ()
) -> Path:
    """Write config.yaml beside the checkpoint of an imported model. The folder of both is the run
    directory. Returns the path. Raises OSError.

    continued: the lines about data and training, to go on with the run that made the checkpoint;
        default: fine-tuning.
    """
    path = checkpoint.parent.absolute() / CONFIG
    checkpoint = path.parent / checkpoint.name
    count = parameter_count(model)
    tokenizer = str(checkpoint / "tokenizer") if has_tokenizer else "none"
    length = model.sequence_length if continued else _sequence_length(model)
    lines = [
        Line("run.name", path.parent.name, "in logs and reports"),
        Line("run.directory", str(path.parent), "of checkpoints, metrics and log"),
        Line("model.preset", "from_checkpoint", "the imported one; `checkpoint show` lists it"),
        Line("model.sequence_length", length, "tokens; memory grows with them"),
        Line("tokenizer", tokenizer, "the imported one, also for `prepare`"),
        *(continued or [*_DATA, *_training(count)]),
        Line("checkpoint.resume", str(checkpoint), "what training begins with"),
        Line("checkpoint.every", 100, "steps; the newest two are kept"),
        Line("evaluate.every", 50, "steps between two validation losses"),
        Line("evaluate.batches", 4, "global batches of each"),
    ]
    purpose = "Goes on with" if continued else "Fine-tunes"
    write_atomically(path, _head(path, purpose, count) + "\n".join(_written(lines)) + "\n")
    return path


_DATA = (
    Line("data.train", [], "yours to give: [{path: PREFIX}], what `prepare` wrote"),
    SPLIT,
    Line("data.document_mask", True, "attention stays within a document or chat"),
    Line("data.packing", "best_fit", "whole documents side by side in a sequence"),
)


def _training(count: int) -> list[Line]:
    """For a model of `count` parameters. Larger ones take larger batches at lower rates: Tulu 3
    (Lambert et al. 2024, arXiv:2411.15124, table 8) has 5e-6 for 8B and 2e-6 for 70B, both with a
    linear schedule, 3 % of warm-up and 128 sequences of 4096."""
    rate = min(max(2e-5 / sqrt(count / 1e9), 2e-6), 1e-4)
    micro = 4 if count < 2e9 else 2 if count < 1e10 else 1
    batch = 32 if count < 1e9 else 64 if count < 2e10 else 128
    epochs = "3 epochs: 3 · tokens of the corpus / (global_batch · sequence_length)"
    return [
        Line("train.steps", 300, epochs),
        Line("train.global_batch", batch, "sequences of a step, over all ranks"),
        Line("train.micro_batch", micro, "sequences that a rank computes at a time"),
        Line("train.precision", "bf16", "of weights and activations; masters are fp32"),
        Line("train.activation_checkpointing", "block", "less memory, a third more work"),
        Line("optimizer.lr", f"{rate:.1e}", "2e-5 at 1B parameters, less for more"),
        Line("optimizer.weight_decay", 0.0, "the weights stay near the imported ones"),
        Line("schedule.name", "linear", "decay to 0 at the last step"),
        Line("schedule.warmup_fraction", 0.03, "of the steps"),
        MACHINE,
    ]


def _sequence_length(model: ModelConfig) -> int:
    """The checkpoint has as many learned positions as its own length."""
    is_learned = model.position == "learned"
    return model.sequence_length if is_learned else min(model.sequence_length, LONGEST_SEQUENCE)


def _head(path: Path, purpose: str, count: int) -> str:
    return (
        f"# {purpose} an imported model of {count / 1e6:,.3g} million parameters:\n"
        f"#     megafrontier train {path} 'data.train=[{{path: PREFIX}}]'\n"
        "# with `--nproc 8 machine=nvlink8` on 8 GPUs. Each key can also be given there, as in\n"
        "# train.steps=100; docs/configuration.md has all keys. When the run starts, this file\n"
        "# becomes config.given.yaml, because config.yaml then has every key.\n"
    )


def _written(lines: list[Line]) -> list[str]:
    """YAML of a column of values and one of comments. Long values stand alone."""
    found = []
    for section, group in groupby(lines, lambda line: line.key.rpartition(".")[0]):
        found += [f"{section}:"] * bool(section)
        for line in group:
            name = "  " * bool(section) + line.key.rpartition(".")[2]
            text = f"{name}: {json.dumps(line.value) if _is_quoted(line) else line.value}"
            found.append(f"{text:38}  # {line.comment}")
    return found


def _is_quoted(line: Line) -> bool:
    """Whether the value is a path or a name of any characters, or a flag."""
    is_path = line.key in ("run.name", "run.directory", "tokenizer", "checkpoint.resume")
    return is_path or isinstance(line.value, bool | list)
