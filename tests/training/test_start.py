"""No rank ever holds the whole model at the start."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafrontier.training.arrangement import arrange
from megafrontier.training.trainer import build_trainer
from tests.partition.test_formulas import tensor_bytes
from tests.ranks import run_ranks
from tests.training import runs


class Watch(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_no_tensor_of_the_start_is_larger_than_a_unit_and_only_shards_stay(tmp_path):
    runs.make_config_file(tmp_path)
    config = runs.load(
        tmp_path / "config.yaml", "machine=laptop", "partition.strategy=zero3", "model.layers=12",
        "model.hidden=96", "model.ffn_hidden=256",
    )  # fmt: skip

    def body(hierarchy):
        before = tensor_bytes()
        with Watch() as watch:
            trainer = build_trainer(config, arrange(config, 4), hierarchy)
        held = tensor_bytes() - before
        units = [4 * unit.layout.numel for unit in trainer.engine.units]
        trainer.close()
        return watch.largest, held, units

    for largest, held, units in run_ranks((4,), body):
        whole = sum(units)
        assert whole > 8 * max(units)
        assert largest <= max(units)
        # weights, gradients, masters and two moments, each a quarter of the model
        assert held < 1.05 * 5 * whole / 4 + max(units)
