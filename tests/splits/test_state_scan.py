"""The states before parts of documents, and what it takes to exchange them."""

from itertools import chain, product
from math import prod

import pytest

from megafrontier.config import AttentionConfig, DeltaConfig
from megafrontier.parallel.mesh import Splits
from megafrontier.splits.documents import assign_over, ranks_in_line
from megafrontier.splits.state_scan import PartRun, cut_documents, plan_scan
from tests.ranks import run_mesh
from tests.splits.test_context import built, ids

MESHES = [(2,), (4,), (2, 2), (2, 2, 2), (1, 4), (3, 2)]
DOCUMENTS = [(0, 240), (0, 100, 101, 240), (0, 7, 240), (0, 60, 120, 180, 240)]


@pytest.mark.parametrize(("sizes", "backwards"), product(MESHES, (False, True)))
def test_each_part_gets_all_parts_before_it_in_their_order(sizes, backwards):
    """A run's map is here the list of its parts."""
    for bounds in DOCUMENTS:
        order = ranks_in_line(sizes)
        cut = {
            document: [part._replace(rank=order[part.rank]) for part in parts]
            for document, parts in cut_documents(bounds, len(order)).items()
        }
        numbers = {
            part: PartRun(document, number, number + 1)
            for document, parts in cut.items()
            for number, part in enumerate(reversed(parts) if backwards else parts)
        }
        parts = [part for part in assign_over(bounds, sizes) if part in numbers]
        plans = [plan_scan(bounds, sizes, rank, backwards) for rank in order]
        held = [[[numbers[p]] for p in parts if p.rank == rank] for rank in order]
        before = [[[] for _ in own] for own in held]
        for level, size in enumerate((1, *sizes)):
            inner = prod(sizes[: level - 1]) if level else 1
            sent, held = held, []
            for place, plan in enumerate(plans):
                first = place // (inner * size) * inner * size + place % inner
                members = [sent[first + i * inner] for i in range(size)]
                step = plan[level]
                assert max(map(len, members)) <= step.room
                runs = [
                    [members[source // step.room][source % step.room] for source in run]
                    for run in step.runs
                ]
                for earlier, (run, at) in zip(before[place], step.own, strict=True):
                    earlier[:0] = chain(*runs[run][:at])
                held.append([[*chain(*run)] for run in runs])
        for rank, found in zip(order, before, strict=True):
            own = [numbers[p] for p in parts if p.rank == rank]
            expected = [
                [PartRun(part.document, i, i + 1) for i in range(part.first)] for part in own
            ]
            assert found == expected


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 2, 2)])
def test_a_group_has_two_maps_of_a_document_that_is_cut_for_all_ranks(sizes):
    rooms = [step.room for step in plan_scan((0, 4096), sizes, 0, backwards=False)]
    assert rooms == [2] * (len(sizes) + 1)


def test_bytes_do_not_depend_on_the_length_of_a_sequence():
    heads, key, value, taps, ranks = 2, 4, 6, 4, 4
    attention = AttentionConfig(pattern=["delta"], delta=DeltaConfig(heads, heads, key, value))

    def sent_bytes(mesh, length):
        changes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "attention": attention}
        model, engine = built(mesh, length, **changes)
        tokens = ids(length)
        engine.ledger.take(wait=True)
        with engine.no_sync(True):
            model(tokens, tokens).backward()
        return sum(engine.ledger.take(wait=True)[0])

    def body(mesh):
        return [sent_bytes(mesh, length) for length in (32, 128)]

    found = run_mesh((ranks,), body, splits=Splits(context=ranks))
    channels = heads * (2 * key + value)
    maps = heads * key * (key + value) + (taps - 1) * (taps - 1 + channels)
    # Two maps of each rank to each other one, in forward and in backward, in fp32.
    sent = 2 * ranks * (ranks - 1) * 2 * 4 * maps
    assert [sum(one) for one in zip(*found, strict=True)] == [sent, sent]
