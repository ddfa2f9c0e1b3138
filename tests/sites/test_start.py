"""A job with `sites` starts without the sites that it does not reach, and stops when it is asked
to."""

import os
import signal
import time
from dataclasses import replace

import pytest

from megafrontier.common.errors import UserError
from megafrontier.common.signals import record_stop_requests
from megafrontier.launch import main
from megafrontier.sites.exchange import SiteExchange
from megafrontier.training import loop
from tests import runs
from tests.ranks import run_mesh
from tests.sites.jobs import ports, site_options

SOON = "sites.deadline_seconds=0.2"


def load(folder, *overrides):
    """The config of a site that no other one answers."""
    config_file = runs.make_config_file(folder)
    return runs.load(config_file, *runs.ONE, *site_options(folder, ports(2), 0), *overrides)


def test_a_site_goes_on_without_others_whose_names_cannot_be_looked_up(tmp_path):
    def body(mesh):
        (port,) = ports(1)
        others = "'no..name:7001', 'name.invalid:7001', '[::1]:7001'"
        addresses = f"sites.addresses=['127.0.0.1:{port}', {others}]"
        lines: list[str] = []
        with runs.open_trainer(load(tmp_path, addresses, SOON), mesh) as trainer:
            trainer.run_logger.info = lines.append
            site = SiteExchange(trainer, trainer.config.sites)
            site.at_start(trainer)
            site.at_end(trainer)
            assert [line[:35] for line in lines[1:]] == [
                f"sites: going on without site {number}: {start}"
                for number, start in ((1, "no."), (2, "nam"), (3, "::1"))
            ]

    run_mesh((1,), body)


def test_ranks_listen_on_the_address_that_others_are_told_or_on_the_given_one(tmp_path):
    config = load(tmp_path, SOON)
    configs = [config, replace(config, sites=replace(config.sites, listen="0.0.0.0"))]

    def body(mesh):
        found, fingerprints = [], set()
        for config in configs:
            with runs.open_trainer(config, mesh) as trainer:
                site = SiteExchange(trainer, trainer.config.sites)
                site.at_start(trainer)
                hosts = [entry.host for entry in site._endpoint._directory]
                found.append((site._endpoint._server.host, hosts))
                fingerprints.add(site._fingerprint)
                site._endpoint.close()
        assert len(fingerprints) == 1, "the other sites may listen elsewhere"
        return found

    for found in run_mesh((2,), body):
        assert found == [
            ("127.0.0.1", ["127.0.0.1"] * 2),
            ("0.0.0.0", ["127.0.0.1"] * 2),
        ]


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
            runs.open_trainer(load(tmp_path, "sites.deadline_seconds=30"), mesh) as trainer,
        ):
            site = kind(trainer, trainer.config.sites)
            if kind is SiteExchange:
                os.kill(os.getpid(), signal.SIGTERM)
            began = time.monotonic()
            loop.run(trainer, [site])
            assert trainer.step == 0
            assert time.monotonic() - began < 25, "not at the deadline"

    run_mesh((1,), body)


def test_a_missing_secret_is_found_before_ranks_meet(tmp_path):
    config = load(tmp_path, f"sites.secret={tmp_path}/missing")
    with pytest.raises(UserError, match=r"sites.secret: .*missing: No such file"):
        main._check(config, None, 2)
    assert not (tmp_path / "site0").exists()
