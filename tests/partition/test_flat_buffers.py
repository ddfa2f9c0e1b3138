"""Gradients are written into a flat buffer without any of its old values."""

import pytest
import torch

from megafrontier.partition import flat_buffers as module
from megafrontier.partition.flat_buffers import FlatGradient
from megafrontier.partition.layout import Layout

LAYOUT = Layout.build("unit", [("a", (2, 3)), ("b", (4,)), ("c", ())], 1)


def test_the_first_gradient_replaces_and_later_ones_add():
    buffer = torch.full((LAYOUT.numel,), 7.0)
    flat = FlatGradient(LAYOUT)
    flat.start(buffer)
    flat.put(0, torch.ones(2, 3))
    flat.put(0, torch.ones(2, 3))
    flat.put(2, torch.tensor(5.0))
    assert flat.complete() is buffer
    assert buffer[:6].tolist() == [2] * 6
    assert buffer[6:10].tolist() == [0] * 4, "b got no gradient"
    assert buffer[10] == 5
    assert not buffer[11:].any(), "padding"


def test_a_new_start_forgets_what_was_written():
    buffer = torch.full((LAYOUT.numel,), torch.nan)
    flat = FlatGradient(LAYOUT)
    for value in (1.0, 2.0):
        flat.start(buffer)
        flat.put(1, torch.full((4,), value))
        flat.complete()
        assert buffer[6:10].tolist() == [value] * 4
        assert buffer.sum() == 4 * value


def test_gradients_of_other_types_are_summed_in_fp32():
    buffer = torch.full((LAYOUT.numel,), torch.nan)
    flat = FlatGradient(LAYOUT)
    flat.start(buffer)
    for _ in range(2):
        flat.put(0, torch.full((2, 3), 1.0, dtype=torch.bfloat16))
        flat.put(1, torch.full((4,), 257.0, dtype=torch.float16))
        flat.put(0, torch.full((2, 3), 2.0**-9, dtype=torch.bfloat16))
        flat.write()
    assert flat.complete()[:10].tolist() == [2 + 2.0**-8] * 6 + [514] * 4


@pytest.mark.parametrize("bound", [0, 20, 1 << 25])
def test_waiting_gradients_stay_within_the_bound_and_are_dropped_when_written(monkeypatch, bound):
    monkeypatch.setattr(module, "GROUPED_BYTES", bound)
    flat = FlatGradient(LAYOUT)
    flat.start(torch.full((LAYOUT.numel,), torch.nan))
    for index, shape in enumerate(((2, 3), (4,), ())):
        flat.put(index, torch.ones(shape))
        assert sum(gradient.nbytes for gradient in flat._waiting.values()) <= bound
    buffer = flat.complete()
    assert not flat._waiting
    assert buffer.sum() == 11
