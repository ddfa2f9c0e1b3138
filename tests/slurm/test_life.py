"""A run on a cluster goes on to its end, whatever happens to its jobs, with an unbroken run's
losses."""

import json
import sys

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.jobs import ASKING_SECONDS, ENDED, STEPS, unbroken


def assert_finished(training, job, restarts, ranks=2):
    """To the last step, by so many requeues and nobody's hand, with the losses of an unbroken run
    to the last bit."""
    assert job.ended() == "COMPLETED", job.output
    assert job.restarts == restarts, job.output
    assert training.losses == unbroken(training.config, ranks)


def test_a_submitted_run_finishes(training):
    training = training.with_ranks(2)
    job = training.submit("preflight.enabled=true")
    assert_finished(training, job, restarts=0, ranks=4)
    assert f"start 1 on {job.fields['NodeList']}" in job.output
    assert job.fields["JobName"] == "test", "the run's name"


def test_a_run_longer_than_its_jobs_time_limit_goes_on_in_the_next(training):
    """The first job's rank stops when the limit is near, the second's does not stop before it."""
    gate = training.gate()
    options = ("--nodes=1", "--signal=B:USR1@30")
    job = training.submit(options=options, **gate.environment)
    gate.let_pass(2)
    training.wait_for_step(job, 2)
    job.let_time_run_out(60)
    # The signal comes within 30 s: the run must not be done before.
    gate.pass_until(job, lambda: job.restarts == 1, "restart 1", pace=3.0)
    job.set_time_limit(minutes=20)
    gate.let_pass(gate.opened + 1)
    training.wait_for_a_step_more(job)
    job.freeze_ranks()
    job.let_time_run_out(10)
    # Again and again: Slurm wakes them to let them end.
    job.wait_until(lambda: job.freeze_ranks() or job.restarts == 2, "restart 2", ASKING_SECONDS)
    job.set_time_limit(minutes=20)
    gate.let_pass(STEPS)
    assert_finished(training, job, restarts=2, ranks=1)
    assert job.output.count("exit code 75, requeued") == 1
    assert job.output.count("by the time limit, requeued") == 1


def test_a_signalled_run_goes_on_without_the_bad_nodes_and_a_cancelled_one_when_submitted_again(
    training,
):
    gate = training.gate()
    job = training.submit("checkpoint.every=0", **gate.environment)
    gate.let_pass(2)
    training.wait_for_step(job, 2)
    bad = job.nodes[-1]
    (training.directory / "bad-nodes.txt").write_text(f"{bad}\n{bad}\n")
    job.signal("USR1")
    gate.pass_until(job, lambda: job.restarts == 1, "restart 1", pace=1.0)
    gate.let_pass(gate.opened + 1)
    training.wait_for_a_step_more(job)
    assert "resumed from" in job.output, "the checkpoint with which it stopped"
    assert job.fields["ExcNodeList"] == bad
    assert bad not in job.nodes
    job.cancel()
    gate.pass_until(job, lambda: job.state in ENDED, "its end", pace=1.0)
    assert job.state == "CANCELLED"
    assert job.restarts == 1
    reached = len(training.losses)
    again = training.submit()
    assert_finished(training, again, restarts=0)
    assert f"at step {reached}" in again.output, "the step in hand was finished and saved"


def test_a_wrong_override_fails_at_once_in_one_line_and_is_not_requeued(training):
    job = training.submit_by_hand("train.stepz=3")
    assert job.ended() == "FAILED"
    assert job.fields["ExitCode"] == "2:0"
    assert job.restarts == 0
    (line,) = job.output.splitlines()
    assert "train.stepz: 3, no such key; did you mean steps?" in line


def test_ranks_that_srun_starts_from_a_login_node_meet_on_the_first_of_their_own(cluster):
    script = (
        "import os; from megafrontier.parallel.env import identify; "
        "print(identify(os.environ).rendezvous)"
    )
    nodes = cluster.nodes[1:3]
    where = ("--nodes=2", "--ntasks=2", f"--nodelist={','.join(nodes)}")
    said = cluster.run("srun", *where, sys.executable, "-c", script, PYTHONPATH=str(ROOT))
    assert said.split() == [f"tcp://{nodes[0]}:3442"] * 2


@pytest.mark.exhaustive
def test_probe_under_srun_finds_the_nodes_and_the_rate_between_them(cluster):
    rate = 96e6
    cluster.network.shape(rate)
    where = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1")
    probe = (sys.executable, "-m", "megafrontier", "probe", "--json")
    said = cluster.run("srun", *where, *probe, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    found = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
    assert {name: level["size"] for name, level in found["levels"].items()} == {
        "node": 2,
        "world": None,
    }
    # Two ranks share the link of a node.
    world = found["levels"]["world"]["gigabytes_per_second"] * 1e9
    assert rate / 4 < world < rate
