"""Sites that take over another one's weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafrontier.sites.exchange import DIFFERS, SiteExchange, SiteProgress
from tests.ranks import run_mesh
from tests.sites.jobs import call_both, met_sites

KEYS = ("fragments: 2", "every: 4", "wire: fp32")


@contextmanager
def two_sites(folder, mesh) -> Iterator[tuple]:
    """Two sites that have met, with their trainers. The second one has gone on."""
    with met_sites(folder, mesh, *KEYS) as (sites, trainers):
        for weights, momentum in zip(sites[1].outer.weights, sites[1].outer.momentum, strict=True):
            weights.add_(1)
            momentum.fill_(2)
        sites[1]._progress = SiteProgress(2, 4, [1, 1], [2, 4])
        yield sites, trainers


def state_of(site: int, asking: SiteExchange):
    """What another site gets of a site's state: for each fragment, version and values."""
    found = []
    for fragment in range(2):
        (part,) = asking._endpoint.fetch_state(site, fragment)
        found.append((part.version, torch.cat(part.messages)))
    return found


def test_a_site_that_copies_gives_out_its_old_state_until_all_of_the_new_is_here(tmp_path):
    def body(mesh):
        with two_sites(tmp_path, mesh) as ((copier, source), (trainer, _)):
            fetch, seen = copier._endpoint.fetch_state, []

            def fetch_and_look(site, fragment):
                result = fetch(site, fragment)
                seen.append(state_of(0, asking=source))
                return result

            before, theirs = state_of(0, asking=source), state_of(1, asking=copier)
            copier._endpoint.fetch_state = fetch_and_look
            copier._adopt(trainer, [1], DIFFERS)
            assert len(seen) == 2
            for states in seen:
                torch.testing.assert_close(states, before, rtol=0, atol=0)
            torch.testing.assert_close(state_of(0, asking=source), theirs, rtol=0, atol=0)

    run_mesh((1,), body)


def test_sites_whose_weights_differ_after_the_last_exchange_end_with_the_same(tmp_path):
    def body(mesh):
        with two_sites(tmp_path, mesh) as (sites, trainers):
            expected = [weights.clone() for weights in sites[0].outer.weights]
            call_both(SiteExchange._agree, sites, trainers)
            assert sites[0]._final == sites[1]._final
            for site in sites:  # of one and one, the lower number
                torch.testing.assert_close(site.outer.weights, expected, rtol=0, atol=0)
            masters = [unit.master for unit in sites[1].outer.units]
            torch.testing.assert_close(masters, expected, rtol=0, atol=0)

    run_mesh((1,), body)


def test_a_state_that_is_not_finite_is_not_copied(tmp_path):
    def body(mesh):
        with two_sites(tmp_path, mesh) as ((copier, source), _):
            assert copier._endpoint.fetch_state(1, 0) is not None
            source.outer.momentum[0][3] = math.inf
            assert copier._endpoint.fetch_state(1, 0) is None

    run_mesh((1,), body)
