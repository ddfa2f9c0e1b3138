"""One cluster for all tests of slurm/, and the tests left out where none can be booted."""

import pytest

from tests.slurm.cluster import boot, why_not
from tests.slurm.jobs import SubmittedRuns, make_configs

NODES = 4
"""Two more than most jobs ask for: one that loses a node, and another, goes on at once."""


@pytest.fixture(scope="session")
def booted(tmp_path_factory):
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm here: {reason}")
    with boot(tmp_path_factory.mktemp("slurm"), NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(booted):
    """The cluster with nothing on it and all nodes well, also for the next test."""
    yield booted
    booted.clear()


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """The config for a rank on each node, beside those for more."""
    return make_configs(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def training(cluster, config, tmp_path):
    """Submits runs of one tiny model, each test's in a folder of its own."""
    return SubmittedRuns(cluster, config, tmp_path / "run")
