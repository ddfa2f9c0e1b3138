"""Ranks that hold boxes of global tensors save them, and any other boxes are read from these."""

from itertools import pairwise, product
from math import prod
from random import Random

import pytest
import torch

from megafrontier.checkpoint.boxes import (
    BoxEntry,
    copy_common,
    count_common,
    intersection,
    regions,
    span,
)
from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.requests import Request
from megafrontier.checkpoint.save import OwnShard, save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.common.errors import UserError
from megafrontier.partition.layout import Layout
from tests.checkpoint.helpers import own_shard, run_threads

SHAPE = (6, 10)


def draw_box(rng, shape):
    bounds = (sorted(rng.sample(range(size + 1), 2)) for size in shape)
    return tuple((start, stop) for start, stop in bounds)


def in_box(values, box):
    return values[tuple(slice(start, stop) for start, stop in box)].flatten()


@pytest.mark.parametrize("shape", [(9,), (4, 5), (3, 4, 5), (2, 3, 2, 3)])
def test_flat_ranges_of_any_boxes_have_their_common_elements_copied(shape):
    rng = Random(len(shape))
    values = torch.arange(prod(shape)).view(shape)
    for _ in range(200):
        ranges = []
        for box in (draw_box(rng, shape), draw_box(rng, shape)):
            flat = in_box(values, box)
            start, stop = sorted((rng.randint(0, len(flat)), rng.randint(0, len(flat))))
            ranges.append((flat[start:stop], regions(box, start, stop)))
        (source, held), (wanted, asked) = ranges
        found = torch.full_like(wanted, -1)
        copy_common(source, held, found, asked)
        common = torch.isin(wanted, source)
        assert torch.equal(found, torch.where(common, wanted, -1))
        assert count_common(held, asked) == common.sum()


def test_a_span_is_the_least_that_holds_a_part():
    rng, values = Random(0), torch.arange(24).view(2, 3, 4)
    for _ in range(100):
        box, other = draw_box(rng, (2, 3, 4)), draw_box(rng, (2, 3, 4))
        if (part := intersection(box, other)) is not None:
            places = torch.isin(in_box(values, box), in_box(values, part)).nonzero()
            assert span(box, part) == (places.min(), places.max() + 1)


def boxes_of(cuts):
    """The boxes that `cuts` (positions in each dimension) divide SHAPE into."""
    edges = [(0, *cut, size) for cut, size in zip(cuts, SHAPE, strict=True)]
    return list(product(*(pairwise(edge) for edge in edges)))


def box_entry(name, box, offset=0):
    return BoxEntry(name, tuple(stop - start for start, stop in box), offset, SHAPE, box)


def save_boxes(root, boxes, num_shards, slice_elements=5):
    """A checkpoint of a matrix "w" of which each box is held by `num_shards` ranks, and of a vector
    "n" that all ranks hold."""
    matrix, vector = torch.arange(60.0).view(SHAPE), torch.arange(7.0) / 4
    ranks = len(boxes) * num_shards

    def body(world):
        number, index = divmod(world.rank, num_shards)
        entry = box_entry("w", boxes[number])
        numel = -(-entry.numel // num_shards) * num_shards
        flat = torch.zeros(numel)
        flat[: entry.numel] = in_box(matrix, entry.box)
        unit = StoredUnit(Layout("u", (entry,), numel), {"weight": torch.float32})
        cut = ShardSet(f"tensor{number}", num_shards, [unit])
        shared = Layout.build("norms", [("n", (7,))], ranks)
        padded = torch.zeros(shared.numel)
        padded[:7] = vector
        own = [
            OwnShard(cut, index, True, {"weight": [flat.chunk(num_shards)[index]]}),
            own_shard([shared], {"weight": [padded.chunk(ranks)[world.rank]]}, world.rank, ranks),
        ]
        return save(root, Manifest(1, 2, slice_elements=slice_elements), own, world)

    results = run_threads(ranks, body)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results[0], matrix, vector


CUTS = [((), ()), ((), (5,)), ((2,), ()), ((3,), (1, 5))]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("num_shards", "slice_elements"), [(1, 5), (2, 100), (3, 4)])
def test_every_box_is_read_from_every_other(tmp_path, cuts, num_shards, slice_elements):
    path, matrix, vector = save_boxes(tmp_path, boxes_of(cuts), num_shards, slice_elements)
    assert verify(path).problems == []
    checkpoint = open_checkpoint(path)
    assert checkpoint.shapes == {"n": (7,), "w": SHAPE}
    assert torch.equal(checkpoint.tensor("weight", "w"), matrix)
    assert torch.equal(checkpoint.tensor("weight", "n"), vector)
    for box in (box for other in CUTS for box in boxes_of(other)):
        need = in_box(matrix, box)
        middle = len(need) // 3
        for start, stop in ((0, len(need)), (0, middle), (middle, len(need))):
            out = torch.zeros(stop - start, dtype=torch.bfloat16)
            checkpoint.read([Request("weight", box_entry("w", box), start, out)])
            assert torch.equal(out, need[start:stop].bfloat16())


def test_files_of_each_set_have_a_folder_of_their_own(tmp_path):
    path, *_ = save_boxes(tmp_path, boxes_of(((), (5,))), 2)
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*.safetensors"))
    assert names == [
        *(f"pieces/00000/{rank:08d}.safetensors" for rank in range(4)),
        *(f"pieces/tensor{number}/00000/{i:08d}.safetensors" for number in (0, 1) for i in (0, 1)),
    ]


def test_boxes_that_do_not_make_the_tensor_or_overlap_are_not_published(tmp_path):
    whole = boxes_of(((), (5,)))
    with pytest.raises(UserError, match=r"w: boxes .*, need all of \[6, 10\]"):
        save_boxes(tmp_path, whole[:1], 1)
    halves = [((0, 4), (0, 10)), ((3, 6), (0, 5)), ((3, 6), (0, 5)), ((5, 6), (5, 10))]
    with pytest.raises(UserError, match=r"w: boxes .* overlap"):
        save_boxes(tmp_path, halves, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_box_that_several_sets_have_is_read_once(tmp_path):
    path, matrix, _ = save_boxes(tmp_path, [*boxes_of(((), (5,))), *boxes_of(((), (5,)))], 1)
    assert torch.equal(open_checkpoint(path).tensor("weight", "w"), matrix)


def test_the_manifest_of_a_large_mixture_of_experts_stays_small():
    """96 layers over tensor 2 × pipeline 16 × expert 8: 256 places in the model-parallel axes."""
    types = {"weight": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def unit(layer, names, rows):
        entries, offset = [], 0
        for name in names:
            shape = (64, 4096, 1024)
            box = (rows, (0, 4096), (0, 1024))
            full = f"blocks.{layer}.{name}.weight"
            entries.append(BoxEntry(full, tuple(b - a for a, b in box), offset, shape, box))
            offset += entries[-1].numel
        return StoredUnit(Layout(f"blocks.{layer}", tuple(entries), offset), types)

    sets = []
    for stage, tensor, expert in product(range(16), range(2), range(8)):
        layers = range(6 * stage, 6 * stage + 6)
        number = 2 * expert + tensor
        names = ("experts.gate", "experts.up", "experts.down")
        units = [unit(layer, names, (4 * number, 4 * number + 4)) for layer in layers]
        sets.append(ShardSet(f"tensor{tensor}-expert{expert}-pipeline{stage}", 256, units))
        if expert == 0:
            names = ("attention.q", "attention.k", "attention.v", "attention.out", "router")
            units = [unit(layer, names, (32 * tensor, 32 * tensor + 32)) for layer in layers]
            sets.append(ShardSet(f"tensor{tensor}-pipeline{stage}", 2048, units))
    manifest = Manifest(1, 2, sets=sets)
    text = manifest.encode()
    assert len(text) < 2**20
    assert Manifest.decode(text, "checkpoint.json").sets == sets
