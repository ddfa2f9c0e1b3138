"""A run that loses ranks, nodes or links goes on without a person, as if nothing had been."""

import os

import pytest

from tests.slurm.jobs import STEPS
from tests.slurm.storm import storm
from tests.slurm.test_life import assert_finished


def test_a_lost_node_is_noticed_and_left_for_another(training):
    gate = training.gate()
    job = training.submit(**gate.environment)
    gate.let_pass(5)
    training.wait_for_step(job, 5)
    lost = job.nodes[-1]
    training.cluster.cut(lost)
    gate.let_pass(STEPS)
    job.wait_for_restart(1)
    assert_finished(training, job, restarts=1)
    assert lost not in job.nodes


def test_two_nodes_that_do_not_reach_each_other_are_named_and_left_out(training):
    one, other = training.cluster.nodes[1:3]
    training.cluster.part(one, other)
    job = training.submit("train.hang_seconds=10", options=("--nodes=4",))
    job.wait_for_restart(1)
    assert f"rank 1 on {one}; rank 2 on {other}: stuck at connections to all, " in job.output
    job.wait_until(lambda: job.fields["ExcNodeList"] == f"{one},{other}", "an exclusion")


@pytest.mark.exhaustive
def test_kills_at_a_start_and_during_a_save_change_nothing(training):
    """Rank 2 while it starts, rank 0 while it saves; with more kills, at random moments."""
    kills = int(os.environ.get("MEGAFRONTIER_STORM_KILLS", "2"))
    storm(training.with_ranks(2), kills, seed=78)
