"""The loss that low-bit wires cost, measured in a short run of benchmarks' wire_quality."""

from pydoc_data.topics import topics

import pytest
import torch

from tests import runs
from tests.data.corpora import write_corpus
from tests.partition.tiny import backward
from tests.ranks import run_mesh

STEPS = 60
SETTINGS = (
    "model.hidden=64",
    "model.heads=2",
    "model.ffn_hidden=128",
    "model.sequence_length=64",
    f"train.steps={STEPS}",
    "train.micro_batch=2",
    "schedule.warmup_steps=6",
    "optimizer.lr=2.0e-3",  # with twice the rate, rounding alone changes the loss by 0.5 %
    "evaluate.batches=8",
    "partition.strategy=topo",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Trains on Python's own manual."""
    folder = tmp_path_factory.mktemp("wires")
    path = runs.make_config_file(folder)
    write_corpus(folder / "corpus", [[list(topics[name].encode())] for name in sorted(topics)])
    return path


@pytest.fixture(scope="module")
def final_loss(config):
    """The validation loss after a short training with some wires."""
    folder = config.parent

    def train(name, *overrides):
        lines = runs.run(
            config,
            4,
            *SETTINGS,
            "machine.levels.pair.size=1",
            "train.micro_batch=4",
            f"run.directory={folder}/{name}",
            *overrides,
        )
        return runs.valid_losses(lines)[-1]

    return train


def test_low_bit_wires_reach_the_loss_of_exact_wires(final_loss):
    exact = final_loss("exact", "partition.wires=exact")
    low = final_loss("low", "partition.wires=low")
    assert exact < 3.3, "it must have learned something"
    assert low != exact, "the wires must have an effect"
    assert low == pytest.approx(exact, rel=0.005)


REPEATS = 8


def finished(config, mesh, repeats, *chosen):
    """This rank's shards of the gradient of the same batch, `repeats` times."""
    found = []
    with runs.open_trainer(runs.load(config, *SETTINGS, *chosen), mesh) as trainer:
        for _ in range(repeats):
            for batch in trainer.loader.step(0):
                loss = trainer.model(batch.tokens, batch.targets, batch.documents)
                backward(trainer.engine, loss)
            found.append(torch.cat(trainer.engine.finish_gradients()))
            trainer.engine.clear_gradients()
    return torch.stack(found)


def test_a_gradient_arrives_to_a_tenth_unscaled_and_over_time_exactly(config):
    """After so few steps a loss does not show rotation and error feedback. These do: the error
    relative to the gradient's norm, its projection on the gradient (gain), and the number of
    elements that arrive as zero."""
    wires = {
        "exact": (1, "partition.wires=exact"),
        "low": (REPEATS, "partition.wires=low"),
        "unrotated": (1, "partition.wires={preset: low, rotation: false}"),
        "forgetful": (REPEATS, "partition.wires=low", "partition.error_feedback=false"),
    }

    def body(mesh):
        found = {name: finished(config, mesh, *chosen) for name, chosen in wires.items()}
        exact = found.pop("exact")[0]
        return exact.square().sum(), {
            name: ((got[0] - exact).square().sum(), (got[0] * exact).sum(),
                   (got.mean(0) - exact).square().sum(), ((got[0] == 0) & (exact != 0)).sum())
            for name, got in found.items()
        }  # fmt: skip

    ranks = run_mesh((2, 2, 2), body)
    norm = sum(square for square, _ in ranks)
    error, gain, over_time, lost = (
        {name: float(sum(rank[name][i] for _, rank in ranks) / norm) for name in ranks[0][1]}
        for i in range(4)
    )
    assert all(g == pytest.approx(1, abs=0.01) for g in gain.values())
    assert error["low"] ** 0.5 < 0.10
    assert error["low"] == error["forgetful"]  # there is no error from earlier steps yet
    assert lost["unrotated"] > 5 * lost["low"]  # those far below the largest value of their block
    assert over_time["forgetful"] == pytest.approx(error["low"], rel=1e-3)
    assert over_time["low"] ** 0.5 < 1.5 * error["low"] ** 0.5 / REPEATS
