"""A plan has what the exchange between sites adds to a step."""

from dataclasses import replace

import pytest

from megafrontier.config import Config, MoEConfig, SitesConfig
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.rank import Simulated, run_rank
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.sites import add_sites, shard_elements
from tests import runs

SITES = SitesConfig(addresses=["a:1", "b:1", "c:1"], every=4, fragments=2, wire="fp32", secret="x")
STEP = Simulated(2.0, 10, 1.0, 2, {"world": 5.0}, {"world": 0.0}, 2.0, [{}])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return runs.load(runs.make_config_file(tmp_path_factory.mktemp("plan")), "machine=laptop")


def test_a_rank_sends_its_shard_to_each_other_site_once_in_so_many_steps(config) -> None:
    found = add_sites(replace(config, sites=SITES), resolve_plan(config, 2), STEP)
    # 22,968 parameters, and the padding of four units to two shards.
    elements = found.sent["site"] * SITES.every / 4 / 2
    assert 22_968 / 2 <= elements <= 22_968 / 2 * 1.05
    assert found.seconds == STEP.seconds, "no bandwidth is given"


def test_the_counted_shards_are_those_of_a_rank(config) -> None:
    moe, parallel = MoEConfig(experts=4, active=2), replace(config.parallel, expert=2)
    config = replace(config, model=replace(config.model, moe=moe), parallel=parallel)
    plan, shards = resolve_plan(config, 4), []

    def measure(trainer) -> None:
        shards.extend(unit.master.numel() for unit in trainer.engine.trained_units)

    run_rank(config, plan, UNKNOWN, 0, 1, measure)
    assert sorted(shard_elements(config, plan)) == sorted(shards)


def test_steps_of_the_delay_hide_an_exchange(config) -> None:
    plan, sent = resolve_plan(config, 2), 4 * 2 * 22_968 / 2 / SITES.fragments
    # An exchange of one of the fragments takes 8 s, and one comes every second step.
    sites = replace(SITES, gigabytes_per_second=sent / 8 / 1e9)
    exposed = add_sites(replace(config, sites=sites), plan, STEP).exposed["site"]
    assert exposed == pytest.approx(4.0, rel=0.05)
    delayed = replace(sites, delay=3)
    hidden = add_sites(replace(config, sites=delayed), plan, STEP)
    assert hidden.exposed["site"] == pytest.approx(1.0, rel=0.2)
    assert hidden.seconds == STEP.seconds + hidden.exposed["site"]
    assert add_sites(config, plan, STEP) is STEP
