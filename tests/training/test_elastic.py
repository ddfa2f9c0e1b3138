"""A run goes on over any number of ranks: same samples, same losses."""

import pytest

from tests import runs

MOE = (
    "model.moe={experts: 4, active: 2, ffn_hidden: 20, balance: loss, z_loss: 0.01}",
    "data.document_mask=true",
)
ELASTIC = ("machine=laptop", "train.elastic=true", "train.z_loss=0.01")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return runs.make_config_file(tmp_path_factory.mktemp("elastic"))


def test_a_batch_that_does_not_divide_has_the_losses_of_one_process(config_file, tmp_path):
    def run(name, ranks, *overrides):
        chosen = (*MOE, *ELASTIC, f"run.directory={tmp_path / name}", *overrides)
        return runs.run(config_file, ranks, *chosen)

    whole = run("whole", 1)
    split = "partition.strategy=zero3"
    run("moved", 4, split, "train.stop_at=2")
    run("moved", 3, split, "train.stop_at=4")
    run("moved", 2, split, "train.stop_at=6")
    moved = run("moved", 4, split)
    assert runs.losses(moved) == pytest.approx(runs.losses(whole), rel=1e-5)
    assert runs.valid_losses(moved)[-1:] == pytest.approx(runs.valid_losses(whole), rel=1e-5)
    for key in ("grad_norm", "tokens"):
        found, expected = (
            [line[key] for line in lines if "loss" in line] for lines in (moved, whole)
        )
        assert found == pytest.approx(expected, rel=1e-5)
