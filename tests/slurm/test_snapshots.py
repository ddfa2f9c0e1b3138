"""A job that loses processes and nodes goes on from the memory of its nodes."""

import re

import pytest

from tests import runs
from tests.slurm.jobs import STEPS
from tests.slurm.test_life import assert_finished


@pytest.mark.exhaustive
def test_a_job_without_any_checkpoint_survives_the_loss_of_a_process_and_of_a_node(
    training, tmp_path
):
    """Nothing is read from the storage, where nothing is, and the losses are those of an unbroken
    run to the bit."""
    (memory := tmp_path / "memory").mkdir()
    gate = training.gate()
    job = training.submit(
        "run.spare_nodes=1", "checkpoint.every=0", "checkpoint.minutes=0",
        "checkpoint.local.every=2", f"checkpoint.local.folder={memory}", **gate.environment,
    )  # fmt: skip
    gate.let_pass(6)
    training.wait_for_step(job, 6)
    _, lost, _ = job.nodes
    job.kill_rank(1)
    gate.let_pass(11)
    training.wait_for_step(job, 11)
    training.cluster.cut(lost)
    gate.let_pass(STEPS)
    assert_finished(training, job, restarts=0)
    resumed = re.findall(
        r"resumed from snapshot of step (\d+) \((\S+) MB from own nodes, (\S+) MB from other "
        r"nodes, 0 from storage\)",
        runs.log(training.directory),
    )
    (first, _, fetched), (second, _, copied) = resumed
    assert first in ("4", "6")
    assert second in ("8", "10")
    assert float(fetched) == 0 < float(copied)
    assert list(memory.glob("*/*")) == []
