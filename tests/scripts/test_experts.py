"""The benchmark of experts counts what leaves a node, and compares rows of one routing."""

import pytest
import torch

from scripts.benchmarks.experts.__main__ import Row, table
from scripts.benchmarks.experts.routing import rows_leaving


def test_a_token_counts_once_for_each_other_node_and_each_expert_there():
    chosen = torch.tensor([[0, 1, 8, 9, 10, 31]] * 4)  # one token on each node
    assert rows_leaving(chosen, False) * 4 == 4 + 3 + 6 + 5
    assert rows_leaving(chosen, True) * 4 == 2 + 2 + 3 + 2


@pytest.mark.parametrize("routing", ["uniform", "worst"])
def test_the_table_compares_with_the_flat_row_of_the_same_routing(routing):
    flat = [Row("uniform", "flat", 16, 1.0, 20.0, 4e6, 4e6), Row("worst", "flat", 16, 1, 9, 9e6, 0)]
    base = next(row for row in flat if row.routing == routing)
    low = Row(routing, "int8", 16, 1.0, base.seconds / 4, base.node_bytes / 2, 0)
    assert f"| {routing} (1.0) | 16 × slower | int8 |" in (text := table([*flat, low]))
    assert text.rstrip().endswith(f"| 2.00 × | {low.seconds:.2f} | 4.00 × |")
