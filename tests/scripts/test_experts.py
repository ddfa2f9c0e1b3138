"""The benchmark of experts counts what leaves a node, and compares rows of one routing."""

import pytest
import torch

from scripts.benchmarks.experts.__main__ import Row, table
from scripts.benchmarks.experts.routing import imbalance, rows_leaving, uniform, worst


@pytest.mark.parametrize(("nodes", "fewer"), [(4, 1.76), (2, 3.0)])
def test_rows_that_leave_a_node_are_as_many_fewer_as_distinct_nodes_say(nodes, fewer):
    chosen = uniform(20_000, nodes)
    found = rows_leaving(chosen, False) / rows_leaving(chosen, True)
    assert found == pytest.approx(fewer, rel=0.01)
    assert all(len(set(row)) == 6 for row in chosen[:50].tolist())


def test_a_token_counts_once_for_each_other_node_and_each_expert_there():
    chosen = torch.tensor([[0, 1, 8, 9, 10, 31]] * 4)  # one token on each node
    assert rows_leaving(chosen, False) * 4 == 4 + 3 + 6 + 5
    assert rows_leaving(chosen, True) * 4 == 2 + 2 + 3 + 2
    assert imbalance(worst(10), 16) == pytest.approx(16 / 3)


def test_the_table_compares_with_the_flat_row_of_the_same_routing_and_link():
    rows = [
        Row("uniform", "flat", 16, 1.0, 20.0, 4e6, 4e6),
        Row("uniform", "int8", 16, 1.0, 5.0, 1e6, 1e6),
        Row("worst", "flat", 16, 5.0, 30.0, 6e6, 6e6),
    ]
    assert "| uniform (1.0) | 16 × slower | int8 | 1.0 | 4.00 × | 5.00 | 4.00 × |" in table(rows)
    assert "| worst (5.0) | 16 × slower | flat | 6.0 | 1.00 × | 30.00 | 1.00 × |" in table(rows)
