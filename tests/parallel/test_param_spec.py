"""A spec says which elements of a global tensor a rank holds, and any cut of them is found."""

import itertools
from math import prod

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.parallel.param_spec import ParamSpec, global_ranges, set_spec, spec_of

BOXES = [
    ((), ()),
    ((7,), ((2, 6),)),
    ((4, 6), ()),
    ((4, 6), ((1, 3), (0, 6))),
    ((4, 6), ((0, 4), (3, 6))),
    ((4, 6), ((1, 2), (2, 5))),
    ((1, 6), ((0, 1), (0, 3))),
    ((3, 4, 5), ((1, 3), (0, 4), (0, 5))),
    ((3, 4, 5), ((0, 3), (2, 4), (0, 5))),
    ((3, 4, 5), ((1, 3), (0, 4), (1, 3))),
    ((3, 4, 5), ((0, 3), (1, 3), (2, 5))),
]


@pytest.mark.parametrize(("shape", "box"), BOXES)
def test_ranges_are_the_boxs_elements_in_its_order_and_as_few_as_can_be(shape, box):
    spec = ParamSpec("w", shape, "matrix", box)
    numbers = torch.arange(prod(shape)).view(shape)
    local = numbers[tuple(slice(*part) for part in box)].flatten().tolist()
    assert len(local) == prod(spec.local_shape)
    for start, stop in itertools.combinations_with_replacement(range(len(local) + 1), 2):
        ranges = list(global_ranges(spec, start, stop))
        assert [i for first, last in ranges for i in range(first, last)] == local[start:stop]
        assert all(first < last for first, last in ranges)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_a_box_of_whole_rows_is_one_range_and_columns_are_one_a_row():
    count = {
        box: sum(1 for _ in global_ranges(ParamSpec("w", (64, 32), "matrix", box), 0, numel))
        for box, numel in [((), 2048), (((16, 32), (0, 32)), 512), (((0, 64), (0, 16)), 1024)]
    }
    assert list(count.values()) == [1, 1, 64]


def test_a_box_without_elements_has_no_range():
    assert list(global_ranges(ParamSpec("w", (4, 6), "matrix", ((0, 4), (3, 3))), 0, 0)) == []


def test_a_parameter_without_a_spec_is_whole_and_its_kind_follows_from_its_shape():
    module = nn.Linear(3, 2)
    assert spec_of("head.weight", module.weight) == ParamSpec("head.weight", (2, 3), "matrix")
    spec = spec_of("head.bias", module.bias)
    assert (spec.kind, spec.box, spec.local_shape) == ("bias", ((0, 2),), (2,))
    assert spec.axes == ("tensor", "context", "data")


def test_a_spec_that_was_set_is_found_and_named_after_the_model_unless_it_has_a_name():
    module = nn.Linear(3, 2)
    set_spec(module.weight, ParamSpec("", (2, 6), "expert", ((0, 2), (3, 6)), axes=("data",)))
    spec = spec_of("blocks.0.weight", module.weight)
    assert (spec.name, spec.kind, spec.axes) == ("blocks.0.weight", "expert", ("data",))
    set_spec(module.bias, ParamSpec("blocks.9.bias", (2,), "bias"))
    assert spec_of("blocks.0.bias", module.bias).name == "blocks.9.bias"


def test_padding_is_not_counted_among_the_valid_elements():
    assert ParamSpec("w", (64, 32), "embedding", valid_rows=50).valid_numel == 50 * 32
    assert ParamSpec("w", (64, 32), "embedding").valid_numel == 64 * 32


@pytest.mark.parametrize("box", [((0, 2),), ((0, 2), (0, 4)), ((-1, 2), (0, 3)), ((2, 1), (0, 3))])
def test_a_box_that_is_not_part_of_the_shape_is_refused(box):
    with pytest.raises(UserError, match=r"^parameter w: box .*, need part of \(2, 3\)$"):
        ParamSpec("w", (2, 3), "matrix", box)


def test_a_spec_of_another_shape_than_the_parameters_is_refused():
    found = r"^parameter w: shape \(2, 3\), need that of its spec's box, \(2, 2\)$"
    with pytest.raises(UserError, match=found):
        set_spec(nn.Linear(3, 2).weight, ParamSpec("w", (2, 4), "matrix", ((0, 2), (0, 2))))
