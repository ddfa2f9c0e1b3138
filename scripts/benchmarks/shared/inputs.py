"""What the benchmarks on slow links train: a small GPT on random walks over bytes."""

from pathlib import Path

import numpy as np

from megafrontier.data.corpus.writer import CorpusWriter

PER_NODE = 4
"""Ranks of a node: pair 2 × node 2."""
CONFIG = """
run: {{name: slow-network, directory: {folder}/run}}
model: {{layers: 4, hidden: 160, heads: 4, sequence_length: 512, vocab_size: 257}}
tokenizer: bytes
data: {{train: [{{path: {folder}/corpus}}], split: [1.0, 0.0]}}
train: {{steps: 1000, micro_batch: 6, global_batch: "${{train.micro_batch}}", precision: bf16}}
machine: {{levels: {{pair: {{size: 2}}, node: {{size: 2}}, world: {{}}}}, device: {{name: cpu}}}}
"""


def write_inputs(folder: Path) -> str:
    """Write a corpus of seeded random walks and the config that trains on it; return its path."""
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.integers(-3, 4, 2**20)) % 256
    with CorpusWriter(folder / "corpus", np.dtype(np.uint16)) as corpus:
        corpus.data.write(tokens.astype(np.uint16).tobytes())
        corpus.index.add(np.array([len(tokens)], np.int32), np.array([1]))
        corpus.publish()
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return str(path)
