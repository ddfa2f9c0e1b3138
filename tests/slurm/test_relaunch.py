"""A failure costs a job seconds, not its place in the queue: its ranks start again in it."""

import json

import pytest

from tests.slurm.jobs import STEPS, unbroken
from tests.slurm.test_life import assert_finished


def test_a_job_goes_on_without_a_killed_process_and_without_a_lost_node(training):
    """In the same job, with the losses of an unbroken run to the bit: the killed rank in its old
    task, while the other rank keeps its process, then all ranks, one on a spare node. Another spare
    node is left, which srun excludes."""

    def first_steps():
        path = training.directory / "attempts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if "first_step" in record]

    gate = training.gate()
    job = training.submit("run.spare_nodes=2", **gate.environment)
    gate.let_pass(6)
    training.wait_for_step(job, 6)
    assert len(job.nodes) == 4
    _, lost, *spare = job.nodes
    before = job.ranks()
    job.kill_rank(1)
    gate.let_pass(7)
    job.wait_until(lambda: len(first_steps()) == 2, "a step after the kill")
    after = job.ranks()
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert "started again in this job" not in job.output
    training.cluster.cut(lost)
    gate.let_pass(STEPS)
    job.wait_until(lambda: len(first_steps()) == 3, "a step without the node")
    assert {lost, *spare} & {*job.nodes} == {*spare}
    assert_finished(training, job, restarts=0)
    print([record["down_seconds"] for record in first_steps()[1:]], "s from failure to step")
    killed, cut = [line for line in job.output.splitlines() if line.startswith("restart: ")]
    assert killed.startswith(
        f"restart: rank 1 on {lost} was lost: signal 9, Killed; back from step "
    )
    assert cut.startswith(f"restart: node {lost} was lost: ")


def test_an_elastic_job_trains_on_the_nodes_that_are_left_and_on_more_when_they_are_back(training):
    gate = training.gate()
    job = training.submit("train.elastic=true", MEGAFRONTIER_GROW_SECONDS="1", **gate.environment)
    gate.let_pass(2)
    training.wait_for_step(job, 2)
    bad = training.directory / "bad-nodes.txt"
    bad.write_text(job.nodes[1])
    job.kill_rank(1)
    gate.let_pass(4)
    job.wait_until(lambda: "1 of 2 nodes are left, 1 go on (train.elastic)" in job.output, "a node")
    training.wait_for_step(job, 4)
    bad.unlink()
    gate.pass_until(
        job, lambda: "in this job: more nodes can train" in job.output, "both nodes", pace=3.0
    )
    gate.let_pass(STEPS)
    assert job.ended() == "COMPLETED", job.output
    assert job.restarts == 0, job.output
    assert training.losses == pytest.approx(unbroken(training.config, 2), rel=1e-5)
    starts = [json.loads(line) for line in (training.directory / "attempts.jsonl").open()]
    assert [start["ranks"] for start in starts if "ranks" in start] == [2, 1, 2]


@pytest.mark.exhaustive
def test_a_job_that_loses_its_first_node_and_so_its_script_goes_back_to_the_queue(training):
    """Slurm would keep it, idle, until its time limit."""
    gate = training.gate()
    given = {"MEGAFRONTIER_WATCH_SECONDS": "2", **gate.environment}
    job = training.submit("run.spare_nodes=1", **given)
    gate.let_pass(1)
    training.wait_for_step(job, 1)
    lost = job.nodes[0]
    training.cluster.cut(lost)
    job.wait_for_restart(1)
    assert f"node {lost} was lost, and with it the batch script, requeued" in job.output
