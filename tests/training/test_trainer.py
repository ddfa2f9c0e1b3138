"""No rank ever holds the whole model at the start."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.trainer import build_trainer
from tests import runs
from tests.ranks import run_mesh


class PeakMemory(TorchDispatchMode):
    """Notes the most bytes of tensors that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._storages[tensor.untyped_storage()] = None
        alive = sum(storage.nbytes() for storage in self._storages)
        self.peak = max(self.peak, alive)
        return result


def test_at_the_start_a_rank_holds_its_shards_and_at_most_a_unit_more(tmp_path):
    runs.make_config_file(tmp_path)
    config = runs.load(
        tmp_path / "config.yaml", "machine=laptop", "partition.strategy=zero3", "model.layers=12",
        "model.hidden=96", "model.ffn_hidden=256",
    )  # fmt: skip

    def body(mesh):
        with PeakMemory() as memory:
            trainer = build_trainer(config, resolve_plan(config, 4), mesh)
        units = [4 * unit.layout.numel for unit in trainer.engine.units]
        trainer.close()
        return memory.peak, units

    for peak, units in run_mesh((4,), body):
        whole = sum(units)
        assert whole > 8 * max(units)
        # weights, masters and two moments, each a quarter of the model; gradients come later
        shards = 4 * whole / 4
        assert 0.95 * shards < peak < 1.02 * shards + max(units)
