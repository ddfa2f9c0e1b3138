"""Ranks of a context split share tokens equally and attention nearly so, and get what they need."""

import random
import sysconfig
from math import prod
from pathlib import Path

import numpy as np
import pytest

from megafrontier.splits.documents import assign
from megafrontier.splits.key_routes import find_routes


def needed_tokens(assignment, rank):
    """How many tokens of other ranks are before a rank's last one in one of its documents."""
    last = {part.document: part.start for part in assignment.parts if part.rank == rank}
    return sum(
        part.stop - part.start
        for part in assignment.parts
        if part.rank != rank and part.start < last.get(part.document, 0)
    )


def library_rows(tokens, count):
    """Documents of Python's own library, at 4 bytes a token, in rows of `tokens`."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    lengths = [path.stat().st_size // 4 for path in files if path.stat().st_size > 8]
    random.Random(0).shuffle(lengths)
    ends = np.cumsum(lengths)
    return [
        tuple({0, *(ends[(ends > at) & (ends < at + tokens)] - at).tolist(), tokens})
        for at in range(0, count * tokens, tokens)
    ]


@pytest.mark.parametrize(("tokens", "size"), [(8192, 8), (32_768, 4), (131_072, 16)])
def test_documents_of_a_corpus_are_shared_with_less_than_5_percent_imbalance(tokens, size):
    for bounds in library_rows(tokens, 5):
        found = assign(tuple(sorted(bounds)), size)
        assert found.imbalance <= 0.05
        pairs, counts, stop = [0] * size, [0] * size, 0
        for part in found.parts:
            assert part.start == stop
            stop = part.stop
            positions = np.arange(part.start, part.stop) - part.document
            pairs[part.rank] += (positions + 1).sum()
            counts[part.rank] += len(positions)
        assert counts == [tokens // size] * size
        assert found.imbalance == pytest.approx(max(pairs) / np.mean(pairs) - 1)


def test_short_documents_cross_no_ranks():
    found = assign(tuple(range(0, 1025, 32)), 4)
    assert found.imbalance == 0
    assert [needed_tokens(found, rank) for rank in range(4)] == [0] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sequence_without_documents_is_shared_zig_zag(size):
    found = assign((0, 12 * size), size)
    assert [part.rank for part in found.parts] == [*range(size), *reversed(range(size))]
    assert {part.stop - part.start for part in found.parts} == {6}
    assert found.imbalance == 0


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 1, 4), (2, 3, 2)])
@pytest.mark.parametrize(("documents", "window"), [(1, 0), (4, 0), (20, 0), (1, 9), (4, 30)])
def test_every_rank_gets_each_token_that_it_needs_once(sizes, documents, window):
    """Over the hops of all levels, done here by hand."""
    ranks, tokens = prod(sizes), prod(sizes) * 24
    starts = sorted(random.Random(documents).sample(range(1, tokens), documents - 1))
    bounds = (0, *starts, tokens)
    routes = [find_routes(bounds, sizes, index, window) for index in range(ranks)]
    held = [[t for part in r.own for t in range(part.start, part.stop)] for r in routes]
    for number, hop in enumerate(routes[0].steps):
        step = prod(sizes[hop.level + 1 :])
        messages = {}
        for index, route in enumerate(routes):
            own = route.steps[number]
            assert own.level == hop.level
            rows = iter([held[index][i] for i in own.sent])
            for peer, count in enumerate(own.sends):
                messages[index, peer] = [next(rows) for _ in range(count)]
        for index, route in enumerate(routes):
            at = index // step % sizes[hop.level]
            for peer, count in enumerate(route.steps[number].receives):
                sender = index + (peer - at) * step
                assert len(messages[sender, at]) == count
                held[index] += messages[sender, at]
    for tokens_held, route in zip(held, routes, strict=True):
        assert len(set(tokens_held)) == len(tokens_held) == route.tokens
        past = [tokens_held[i] for i in route.past]
        for part, before in zip(route.own, route.pasts, strict=True):
            found = past[before]
            assert found == [*range(part.start - len(found), part.start)]
            first = part.document if not window else max(part.document, part.start - window + 1)
            assert part.document <= part.start - len(found) <= first
        if len(sizes) == 1:
            own = {t for part in route.own for t in range(part.start, part.stop)}
            assert set(tokens_held) - own == set(past) - own


def test_with_a_window_a_part_needs_only_the_parts_that_it_reaches():
    """Of 8 ranks with two parts of 24 tokens each, the first tokens need nobody."""
    for window, parts in ((2, 1), (25, 1), (26, 2)):
        for index in range(8):
            route = find_routes((0, 16 * 24), (8,), index, window)
            reached = [min(parts, part.start // 24) * 24 for part in route.own]
            assert [past.stop - past.start for past in route.pasts] == reached
            assert route.tokens <= 48 + sum(reached)


def test_a_token_enters_a_node_once():
    """Of 4 nodes of 2 ranks: over the slow level no node gets a token twice."""
    routes = [find_routes((0, 8 * 48), (2, 4), index) for index in range(8)]
    outer = [route.steps[0] for route in routes]
    assert [hop.level for hop in outer] == [1] * 8
    for node in range(4):
        received = sum(sum(outer[node + 4 * rank].receives) for rank in range(2))
        assert received <= 8 * 48 * 3 // 4
