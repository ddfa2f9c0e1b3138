"""Jobs at several sites train one model."""

from pathlib import Path

import pytest

from tests import runs
from tests.processes import Forked
from tests.sites.jobs import ports, site_options, start_site
from tests.slurm.cluster import wait_until

SGD = ("optimizer={name: sgd, lr: 0.5, weight_decay: 0}", "train.clip_grad_norm=0", *runs.ONE)
PARAMETERS = 22_968
AVERAGE = "optimizer: {name: sgd, lr: 1, momentum: 0}"
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


def test_averaging_after_each_step_is_data_parallelism_over_sites_of_other_sizes(
    jobs, config, tmp_path
):
    """Each brings as many tokens as it has, and each element crosses once to each other site."""
    alone = runs.run(config, 1, *SGD, f"run.directory={tmp_path}/alone")
    sites = ("every: 1", "wire: fp32", AVERAGE)
    found = train(jobs, config, tmp_path, (2, 1), (12, 4), sites, SGD)
    large, small = map(runs.losses, found)
    mean = [(12 * a + 4 * b) / 16 for a, b in zip(large, small, strict=True)]
    assert mean == pytest.approx(runs.losses(alone), rel=1e-5)
    # Means over two ranks; the last exchange comes after the last line.
    sent = 2 * sum(line["comm"]["site"]["bytes"] for line in found[0] if "comm" in line)
    assert 7 <= sent / (4 * PARAMETERS) < 8.2


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
    wait_until(lambda: taken_over in log.read_text(), 120, "site 1 to come back")
    second.unlink()
    assert [job.communicate(timeout=240) and job.returncode for job in jobs] == [0, 0]
    ends = [runs.metrics(tmp_path / f"site{n}")[-1] for n in range(2)]
    assert [end["step"] for end in ends] == [30, 30]
    assert ends[0]["valid_loss"] == ends[1]["valid_loss"]
