"""Old values never show: what is not written again is zero in the end."""

import torch

from megafrontier.partition.flat_gradient import FlatGradient
from megafrontier.partition.layout import Layout

LAYOUT = Layout.build("unit", [("a", (2, 3)), ("b", (4,)), ("c", ())], 1)


def test_the_first_gradient_replaces_and_later_ones_add():
    whole = torch.full((LAYOUT.numel,), 7.0)
    flat = FlatGradient(LAYOUT)
    flat.start(whole)
    flat.put(0, torch.ones(2, 3))
    flat.put(0, torch.ones(2, 3))
    flat.put(2, torch.tensor(5.0))
    assert flat.complete() is whole
    assert whole[:6].tolist() == [2] * 6
    assert whole[6:10].tolist() == [0] * 4, "b got no gradient"
    assert whole[10] == 5
    assert not whole[11:].any(), "padding"


def test_a_new_start_forgets_what_was_written():
    whole = torch.full((LAYOUT.numel,), torch.nan)
    flat = FlatGradient(LAYOUT)
    for value in (1.0, 2.0):
        flat.start(whole)
        flat.put(1, torch.full((4,), value))
        flat.complete()
        assert whole[6:10].tolist() == [value] * 4
        assert whole.sum() == 4 * value
