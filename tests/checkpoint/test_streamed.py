"""Checkpoints whose tensors are loaded when they are written."""

import weakref

import pytest
import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.streamed import save_streamed, unit_of
from megafrontier.common.errors import UserError

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2)}
STATES = {"weight": torch.float32, "exp_avg": torch.float32}


def test_one_tensor_at_a_time_is_held_and_each_is_loaded_once(tmp_path):
    held, loaded = [], []

    def load(state, name):
        assert all(reference() is None for reference in held)
        loaded.append((state, name))
        tensor = torch.full(SHAPES[name], float(len(loaded)))
        held.append(weakref.ref(tensor))
        return tensor

    units = [unit_of("u", SHAPES, STATES), unit_of("v", {"d": ()}, {"buffer": torch.int64})]
    load_all = lambda state, name: torch.tensor(9) if name == "d" else load(state, name)  # noqa: E731
    found = open_checkpoint(
        save_streamed(tmp_path, Manifest(0, 0, slice_elements=4), units, load_all)
    )
    assert sorted(loaded) == sorted((state, name) for state in STATES for name in SHAPES)
    for number, (state, name) in enumerate(loaded, 1):
        assert torch.equal(found.tensor(state, name), torch.full(SHAPES[name], float(number)))
    assert found.tensor("buffer", "d") == 9


def test_a_tensor_that_cannot_be_loaded_leaves_nothing_and_keeps_its_line(tmp_path):
    def load(state, name):
        if name == "b":
            raise UserError("b: damaged, need it whole")
        return torch.zeros(SHAPES[name])

    units = [unit_of("u", SHAPES, STATES)]
    with pytest.raises(UserError, match=r"^b: damaged, need it whole$"):
        save_streamed(tmp_path / "new", Manifest(0, 0), units, load)
    assert not (tmp_path / "new").exists()
