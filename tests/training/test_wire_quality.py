"""What low-bit wires cost in loss: a short version of scripts/benchmarks/wire_quality.py."""

from pydoc_data.topics import topics

import pytest

from tests.data.corpora import write_corpus
from tests.training import runs

STEPS = 60
SETTINGS = (
    "model.hidden=64",
    "model.heads=2",
    "model.ffn_hidden=128",
    "model.sequence_length=64",
    f"train.steps={STEPS}",
    "train.micro_batch=2",
    "schedule.warmup_steps=6",
    "optimizer.lr=2.0e-3",  # twice as much, and rounding alone moves the loss by 0.5 %
    "evaluate.batches=16",
    "partition.strategy=topo",
)


@pytest.fixture(scope="module")
def final_loss(tmp_path_factory):
    """The validation loss after a short training on Python's own manual, by its wires."""
    folder = tmp_path_factory.mktemp("wires")
    config = runs.make_config_file(folder)
    write_corpus(folder / "corpus", [[list(topics[name].encode())] for name in sorted(topics)])

    def train(name, *overrides):
        lines = runs.run(config, 8, *SETTINGS, f"run.directory={folder}/{name}", *overrides)
        return runs.valid_losses(lines)[-1]

    with runs.one_core():
        yield train


def test_low_bit_wires_learn_what_exact_ones_do(final_loss):
    exact = final_loss("exact", "partition.wires=exact")
    low = final_loss("low", "partition.wires=low")
    assert exact < 3.3, "it must have learned something to lose"
    assert low != exact, "the wires must have had something to say"
    assert low == pytest.approx(exact, rel=0.005)
