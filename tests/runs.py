"""Small real runs: a learnable corpus, a config file, and what a run left in its directory."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megafrontier.config import Config, load_config
from megafrontier.launch.main import train
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.refuse import check_layout
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.checks import check_files
from megafrontier.training.trainer import Trainer, build_trainer
from tests.data.corpora import write_corpus

VOCABULARY = 61
ONE = ("machine=laptop", "evaluate.batches=0")
"""A run on any number of ranks of one level, without evaluation."""

CONFIG = """
run: {{name: test, directory: {folder}/run, seed: 7}}
model: {{layers: 2, hidden: 24, heads: 2, ffn_hidden: 40, sequence_length: 16, vocab_size: 257,
        vocab_multiple: 4, norm: rmsnorm, activation: swiglu, position: rotary, bias: false}}
tokenizer: bytes
data: {{train: [{{path: {folder}/corpus}}], split: [0.9, 0.1]}}
train: {{steps: 8, global_batch: 16, micro_batch: 2, precision: fp32}}
optimizer: {{lr: 5.0e-3}}
schedule: {{warmup_steps: 2}}
machine: {{levels: {{pair: {{size: 2}}, node: {{size: 2}}, world: {{}}}}}}
checkpoint: {{every: 0, minutes: 0}}
evaluate: {{batches: 1}}
log: {{every: 100}}
"""


def make_config_file(folder: Path) -> Path:
    """A config, and a corpus of documents in which each token follows from the one before."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(60):
        tokens = [int(rng.integers(VOCABULARY))]
        for _ in range(int(rng.integers(20, 120))):
            tokens.append((2 * tokens[-1] + 1) % VOCABULARY)
        documents.append([tokens])
    write_corpus(folder / "corpus", documents)
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def load(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides)


def check(path: Path, ranks: int, *overrides: str) -> None:
    """What `train` checks of config and files. Raises UserError."""
    config = load(path, *overrides)
    check_files(config, check_layout(config, ranks))


def run(path: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """Train on `ranks` forked ranks; the metrics of every step of the run so far."""
    config = load(path, *overrides)
    assert train(config, ranks) == 0
    return metrics(Path(config.run.directory))


@contextmanager
def open_trainer(config: Config, mesh: Mesh) -> Iterator[Trainer]:
    """One rank's trainer, for a test that makes steps itself."""
    trainer = build_trainer(config, resolve_plan(config, mesh.levels.ranks), mesh)
    try:
        yield trainer
    finally:
        trainer.close()


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def log(directory: Path) -> str:
    return unaligned((directory / "log.txt").read_text())


def unaligned(text: str) -> str:
    """Lines of the form `name: text`, with one space for those that align the texts."""
    return re.sub(r"^([a-z][a-z0-9 ]*:) +", r"\1 ", text, flags=re.MULTILINE)


def losses(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def valid_losses(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["valid_loss"] for line in lines if "valid_loss" in line]
