"""Jobs at several sites train one model."""

from pathlib import Path

import pytest

from tests import runs
from tests.processes import Forked
from tests.sites import plain
from tests.sites.jobs import ports, site_options, start_site
from tests.slurm.cluster import wait_until

SGD = ("optimizer={name: sgd, lr: 0.5, weight_decay: 0}", "train.clip_grad_norm=0", *runs.ONE)
NINE = "train.steps=9"
PARAMETERS = 22_968
AVERAGE = "optimizer: {name: sgd, lr: 1, momentum: 0}"
EXPERTS = (
    *SGD,
    "model.moe={experts: 4, active: 2, ffn_hidden: 16, balance: none}",
    "train.stop_at=4",
)
STREAMING = ("every: 4", "fragments: 2", "delay: 1", "mixing: 0.5", "wire: int4")


@pytest.fixture(autouse=True)
def jobs():
    """The jobs of a test. None outlives it."""
    found: list[Forked] = []
    yield found
    for job in found:
        job.kill()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.make_config_file(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def alone_with_experts(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return runs.losses(runs.run(config, 1, *EXPERTS, f"run.directory={folder}"))


def train(jobs, config: Path, folder: Path, sizes, batches, sites, options=()):
    """Train at sites of these numbers of ranks; the metrics of each."""
    found = ports(len(sizes))
    started = [
        start_site(
            config,
            ranks,
            [
                *site_options(folder, found, number, f"global_batches: {list(batches)}", *sites),
                f"train.global_batch={batches[number]}",
                *options,
            ],
        )
        for number, ranks in enumerate(sizes)
    ]
    jobs += started
    ended = [job.communicate(timeout=240) for job in started]
    assert [job.returncode for job in started] == [0] * len(sizes), ended
    return [runs.metrics(folder / f"site{number}") for number in range(len(sizes))]


def mean_losses(found, batches) -> list[float]:
    """Of each step, the mean over all sites' tokens."""
    losses = zip(*map(runs.losses, found), strict=True)
    return [
        sum(b * x for b, x in zip(batches, step, strict=True)) / sum(batches) for step in losses
    ]


def test_averaging_after_each_step_is_data_parallelism_over_sites_of_other_sizes(
    jobs, config, tmp_path
):
    """Each brings as many tokens as it has, and each element crosses once to each other site. Each
    site's checkpoint is whole: a job without `sites` goes on from it."""
    alone = runs.run(config, 1, *SGD, NINE, f"run.directory={tmp_path}/alone")
    sites = ("every: 1", "wire: fp32", AVERAGE)
    found = train(jobs, config, tmp_path, (2, 1), (12, 4), sites, (*SGD, NINE, "train.stop_at=8"))
    assert mean_losses(found, (12, 4)) == pytest.approx(runs.losses(alone)[:8], rel=1e-5)
    # Means over two ranks; the last exchange comes after the last line.
    sent = 2 * sum(line["comm"]["site"]["bytes"] for line in found[0] if "comm" in line)
    assert 7 <= sent / (4 * PARAMETERS) < 8.2
    one = (f"run.directory={tmp_path}/one", f"checkpoint.resume={tmp_path}/site1")
    (last,) = runs.losses(runs.run(config, 1, *SGD, NINE, *one))
    assert last == pytest.approx(runs.losses(alone)[-1], rel=1e-5)


@pytest.mark.parametrize(
    "split", ["tensor", "expert", pytest.param("pipeline", marks=pytest.mark.exhaustive)]
)
def test_sites_with_splits_inside_are_data_parallel(
    jobs, config, alone_with_experts, tmp_path, split
):
    sites = ("every: 1", "fragments: 1", "wire: fp32", AVERAGE)
    options = (*EXPERTS, f"parallel.{split}=2")
    found = train(jobs, config, tmp_path, (2, 2), (8, 8), sites, options)
    assert mean_losses(found, (8, 8)) == pytest.approx(alone_with_experts, rel=1e-5)


def test_a_run_goes_on_at_another_number_of_sites_with_the_outer_momentum(jobs, config, tmp_path):
    """As one site of all samples does, whose outer optimizer has the same momentum."""
    sites = ("every: 1", "wire: fp32", "optimizer: {lr: 0.8, momentum: 0.6}")
    whole = (*SGD, "checkpoint.every=4")
    (alone,) = train(jobs, config, tmp_path / "alone", (1,), (16,), sites, whole)
    resume = f"checkpoint.resume={tmp_path}/alone/site0/checkpoints/step-00000004"
    found = train(jobs, config, tmp_path, (1, 1), (12, 4), sites, (*SGD, resume))
    assert mean_losses(found, (12, 4)) == pytest.approx(runs.losses(alone)[4:], rel=1e-5)


def test_losses_are_those_of_diloco_in_plain_pytorch(jobs, config, tmp_path):
    """Sites of 2 and 1 ranks and of unequal batches, with AdamW inside and Nesterov outside."""
    outer = f"optimizer: {{lr: {plain.OUTER['lr']}, momentum: {plain.OUTER['momentum']}}}"
    options = (f"every: {plain.EVERY}", "wire: fp32", outer)
    found = train(jobs, config, tmp_path, (2, 1), plain.BATCHES, options, runs.ONE)
    expected = plain.plain_losses(runs.load(config, *runs.ONE))
    for lines, losses in zip(found, expected, strict=True):
        assert runs.losses(lines) == pytest.approx(losses, rel=1e-5)


def test_a_stopped_run_of_sites_goes_on_to_the_bit_with_exchanges_in_progress(
    jobs, config, tmp_path
):
    whole = train(jobs, config, tmp_path / "whole", (1, 1), (8, 8), STREAMING, runs.ONE)
    # After step 4 one exchange is in progress, and the other fragment's is half-way.
    train(
        jobs, config, tmp_path / "parts", (1, 1), (8, 8), STREAMING, (*runs.ONE, "train.stop_at=4")
    )
    parts = train(jobs, config, tmp_path / "parts", (1, 1), (8, 8), STREAMING, runs.ONE)
    assert [runs.losses(lines) for lines in parts] == [runs.losses(lines) for lines in whole]


def test_a_killed_site_is_left_out_and_comes_back_with_the_weights_of_the_others(
    jobs, config, tmp_path
):
    found = ports(2)
    exact = ("every: 2", "wire: fp32", "deadline_seconds: 3", "optimizer: {lr: 0.9}")
    steps = ("train.steps=30", "machine=laptop", "evaluate.batches=1", "train.global_batch=4")
    hold = ("log.callbacks=[tests.sites.jobs.Hold]",)
    options = [[*site_options(tmp_path, found, n, *exact), *steps, *hold] for n in range(2)]
    first, second = (tmp_path / f"hold-{step}" for step in (6, 20))
    first.touch()
    second.touch()
    jobs += [start_site(config, 1, own) for own in options]
    metrics = tmp_path / "site1" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4, 120, "4 steps")
    jobs[1].kill()
    log = tmp_path / "site0" / "log.txt"
    before = len(log.read_text())
    first.unlink()
    wait_until(lambda: "without site 1" in log.read_text()[before:], 120, "one to be left out")
    jobs[1] = start_site(config, 1, options[1])
    taken_over, log = "going on with the weights of site 0", tmp_path / "site1" / "log.txt"
    back = lambda: taken_over in log.read_text() or jobs[1].poll() is not None  # noqa: E731
    wait_until(back, 120, "site 1 to come back")
    assert jobs[1].poll() is None, jobs[1].communicate()
    second.unlink()
    assert [job.communicate(timeout=240) and job.returncode for job in jobs] == [0, 0]
    ends = [runs.metrics(tmp_path / f"site{n}")[-1] for n in range(2)]
    assert [end["step"] for end in ends] == [30, 30]
    assert ends[0]["valid_loss"] == ends[1]["valid_loss"]
