"""The config that `import` writes beside a checkpoint: it trains on from the imported weights."""

import json
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


class _Line(NamedTuple):
    key: str
    """`section.key`, or a key at the top."""
    value: object
    comment: str


def write_config(checkpoint: Path, model: ModelConfig, has_tokenizer: bool) -> Path:
    """Write config.yaml beside the checkpoint of an imported model. The folder of both is the run
    directory. Returns the path. Raises OSError."""
    path = checkpoint.parent.absolute() / CONFIG
    checkpoint = path.parent / checkpoint.name
    count = parameter_count(model)
    tokenizer = str(checkpoint / "tokenizer") if has_tokenizer else "none"
    lines = [
        _Line("run.name", path.parent.name, "in logs and reports"),
        _Line("run.directory", str(path.parent), "of checkpoints, metrics and log"),
        _Line("model.preset", "from_checkpoint", "the imported one; `checkpoint show` lists it"),
        _Line("model.sequence_length", _sequence_length(model), "tokens; memory grows with them"),
        _Line("tokenizer", tokenizer, "the imported one, also for `prepare`"),
        *_DATA,
        *_training(count),
        _Line("checkpoint.resume", str(checkpoint), "the weights that training begins with"),
        _Line("checkpoint.every", 100, "steps; the newest two are kept"),
        _Line("evaluate.every", 50, "steps between two validation losses"),
        _Line("evaluate.batches", 4, "global batches of each"),
    ]
    write_atomically(path, _head(path, count) + "\n".join(_written(lines)) + "\n")
    return path


_DATA = (
    _Line("data.train", [], "yours to give: [{path: PREFIX}], what `prepare` wrote"),
    _Line("data.split", [0.99, 0.01], "the last 1 % is for validation; or give data.valid"),
    _Line("data.document_mask", True, "attention stays within a document or chat"),
    _Line("data.packing", "best_fit", "whole documents side by side in a sequence"),
)


def _training(count: int) -> list[_Line]:
    """For a model of `count` parameters. Larger ones take larger batches at lower rates: Tulu 3
    (Lambert et al. 2024, arXiv:2411.15124, table 8) has 5e-6 for 8B and 2e-6 for 70B, both with a
    linear schedule, 3 % of warm-up and 128 sequences of 4096."""
    rate = min(max(2e-5 / sqrt(count / 1e9), 2e-6), 1e-4)
    micro = 4 if count < 2e9 else 2 if count < 1e10 else 1
    batch = 32 if count < 1e9 else 64 if count < 2e10 else 128
    epochs = "3 epochs: 3 · tokens of the corpus / (global_batch · sequence_length)"
    return [
        _Line("train.steps", 300, epochs),
        _Line("train.global_batch", batch, "sequences of a step, over all ranks"),
        _Line("train.micro_batch", micro, "sequences that a rank computes at a time"),
        _Line("train.precision", "bf16", "of weights and activations; masters are fp32"),
        _Line("train.activation_checkpointing", "block", "less memory, a third more work"),
        _Line("optimizer.lr", f"{rate:.1e}", "2e-5 at 1B parameters, less for more"),
        _Line("optimizer.weight_decay", 0.0, "the weights stay near the imported ones"),
        _Line("schedule.name", "linear", "decay to 0 at the last step"),
        _Line("schedule.warmup_fraction", 0.03, "of the steps"),
        _Line("machine", "laptop", "one level of links; `megafrontier configs` lists others"),
    ]


def _sequence_length(model: ModelConfig) -> int:
    """The checkpoint has as many learned positions as its own length."""
    is_learned = model.position == "learned"
    return model.sequence_length if is_learned else min(model.sequence_length, LONGEST_SEQUENCE)


def _head(path: Path, count: int) -> str:
    return (
        f"# Fine-tunes an imported model of {count / 1e6:,.3g} million parameters:\n"
        f"#     megafrontier train {path} 'data.train=[{{path: PREFIX}}]'\n"
        "# with `--nproc 8 machine=nvlink8` on 8 GPUs. Each key can also be given there, as in\n"
        "# train.steps=100; docs/configuration.md has all keys. When the run starts, this file\n"
        "# becomes config.given.yaml, because config.yaml then has every key.\n"
    )


def _written(lines: list[_Line]) -> list[str]:
    """YAML of a column of values and one of comments. Long values stand alone."""
    found = []
    for section, group in groupby(lines, lambda line: line.key.rpartition(".")[0]):
        found += [f"{section}:"] * bool(section)
        for line in group:
            name = "  " * bool(section) + line.key.rpartition(".")[2]
            text = f"{name}: {json.dumps(line.value) if _is_quoted(line) else line.value}"
            found.append(f"{text:38}  # {line.comment}")
    return found


def _is_quoted(line: _Line) -> bool:
    """Whether the value is a path or a name of any characters, or a flag."""
    is_path = line.key in ("run.name", "run.directory", "tokenizer", "checkpoint.resume")
    return is_path or isinstance(line.value, bool | list)
