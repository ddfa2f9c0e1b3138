"""On how many nodes an elastic run can go on."""

import pytest

from megafrontier.launch.elastic import most_nodes
from tests import runs


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return runs.make_config_file(tmp_path_factory.mktemp("elastic"))


@pytest.mark.parametrize(
    ("overrides", "tasks", "most", "found"),
    [
        (["machine=laptop"], 1, 3, 3),  # 8 micro-batches on 3 ranks
        ([], 4, 3, 3),  # levels of 2 and 2 ranks
        (["machine={levels: {pair: {size: 2}, world: {}}}"], 1, 3, 2),
        (["parallel.tensor=pair"], 2, 3, 2),
        (["machine.levels.pair.size=4"], 1, 3, 3),  # a part of one pair
        (["parallel.tensor=2"], 1, 1, 0),
    ],
)
def test_a_run_goes_on_over_the_most_nodes_that_its_levels_and_splits_fit(
    config_file, overrides, tasks, most, found
):
    chosen = ["train.elastic=true", *overrides]
    assert most_nodes(str(config_file), chosen, tasks, most) == found
