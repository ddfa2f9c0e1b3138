"""A job with `sites` stops when it is asked to."""

import os
import signal

import pytest

from megafrontier.common.errors import UserError
from megafrontier.common.signals import record_stop_requests
from megafrontier.launch import main
from megafrontier.sites.exchange import SiteExchange
from megafrontier.training import loop
from tests import runs
from tests.ranks import run_mesh
from tests.sites.jobs import ports, site_options


def load(folder, *overrides):
    """The config of a site that no other one answers."""
    config_file = runs.make_config_file(folder)
    return runs.load(config_file, *runs.ONE, *site_options(folder, ports(2), 0), *overrides)


class StopInAtStart(SiteExchange):
    """Is asked to stop while it waits for the other sites."""

    def at_start(self, trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        super().at_start(trainer)


@pytest.mark.parametrize("kind", [SiteExchange, StopInAtStart])
def test_a_site_that_is_asked_to_stop_at_its_start_ends_before_a_step(tmp_path, kind):
    def body(mesh):
        with (
            record_stop_requests(),
            runs.open_trainer(load(tmp_path, "sites.deadline_seconds=500"), mesh) as trainer,
        ):
            site = kind(trainer, trainer.config.sites)
            if kind is SiteExchange:
                os.kill(os.getpid(), signal.SIGTERM)
            loop.run(trainer, [site])
            assert trainer.step == 0

    run_mesh((1,), body)


def test_a_missing_secret_is_found_before_ranks_meet(tmp_path):
    config = load(tmp_path, f"sites.secret={tmp_path}/missing")
    with pytest.raises(UserError, match=r"sites.secret: .*missing: No such file"):
        main._check(config, None, 2)
    assert not (tmp_path / "site0").exists()
