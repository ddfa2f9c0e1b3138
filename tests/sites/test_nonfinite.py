"""One site's values that are not finite do not reach the others."""

import math
import struct

import pytest
import torch

from megafrontier.common.errors import RunFailed
from megafrontier.sites.exchange import SiteExchange
from tests.ranks import run_mesh
from tests.sites.jobs import call_both, met_sites

AVERAGE = "optimizer: {name: sgd, lr: 1, momentum: 0}"


def train_a_step(sites, trainers, change: float = 0.5) -> list[list[str]]:
    """Move the weights of both sites by a change, and exchange that. Returns their logs."""
    logs: list[list[str]] = [[], []]
    for site, log in zip(sites, logs, strict=True):
        site._info = log.append
        site._fresh_tokens.fill_(10)
        for unit in site.outer.units:
            unit.master.add_(change)
    call_both(SiteExchange._offer, sites, trainers, [4, 4])
    call_both(SiteExchange._finish, sites, trainers)
    return logs


def weights_of(site) -> list[torch.Tensor]:
    return [unit.master for unit in site.outer.units]


def make_nan(site) -> None:
    site.outer.units[0].master[5] = math.nan


def test_a_site_whose_change_is_not_finite_does_not_send_it_and_takes_the_weights_of_the_others(
    tmp_path,
):
    def body(mesh):
        keys = AVERAGE, "delay: 1", "mixing: 0.5", "wire: int4"
        with met_sites(tmp_path, mesh, *keys) as (sites, trainers):
            begun = [weights.clone() for weights in sites[0].outer.weights]
            make_nan(sites[1])
            logs = train_a_step(sites, trainers)
            assert "change of site 1, this one, is not finite" in logs[1][0]
            assert logs[0] == ["sites: step 4: exchange 0 of site 0, without site 1"]
            for weights, before in zip(sites[0].outer.weights, begun, strict=True):
                torch.testing.assert_close(weights, before + 0.5, rtol=0, atol=2e-3)
            torch.testing.assert_close(sites[1].outer.weights, sites[0].outer.weights)
            assert all(weights.isfinite().all() for weights in weights_of(sites[1]))
            # Site 1 takes part again.
            logs = train_a_step(sites, trainers)
            assert logs[0] == logs[1] == ["sites: step 4: exchange 1 of sites 0, 1"]

    run_mesh((1,), body)


def test_a_site_whose_change_stays_not_finite_fails_as_other_runs_do(tmp_path):
    def body(mesh):
        limit = ["train.nonfinite_limit=2"]
        with met_sites(tmp_path, mesh, AVERAGE, options=limit) as (sites, trainers):
            make_nan(sites[1])
            train_a_step(sites, trainers)
            kept = sites[1].state_dict()
            sites[1].load_state_dict(kept)
            make_nan(sites[1])
            with pytest.raises(RunFailed, match=r"last 2 changes .*train.nonfinite_limit"):
                sites[1]._offer(trainers[1], 8)

    run_mesh((1,), body)


def send_nan(message: torch.Tensor) -> torch.Tensor:
    return torch.cat([message[:-4], torch.tensor(list(struct.pack("<f", math.nan))).byte()])


def send_too_few(message: torch.Tensor) -> torch.Tensor:
    return message[:-4]


def send_a_place_beyond_the_chunk(message: torch.Tensor) -> torch.Tensor:
    return torch.cat([message[:4], torch.tensor([0, 16]).byte(), message[6:]])


@pytest.mark.parametrize(
    ("wire", "corrupt"),
    [
        ("fp32", send_nan),
        ("fp32", send_too_few),
        ("topk", send_a_place_beyond_the_chunk),
    ],
)
def test_a_message_that_is_not_finite_or_misshapen_is_refused_and_the_others_go_on_at_once(
    tmp_path, wire, corrupt
):
    """The program of the site is a wrong one. It takes part with what the others say."""

    def body(mesh):
        keys = AVERAGE, f"wire: {wire}", "deadline_seconds: 500"
        with met_sites(tmp_path, mesh, *keys) as (sites, trainers):
            publish = sites[1]._endpoint.publish
            sites[1]._endpoint.publish = lambda event, messages: publish(
                event, [corrupt(messages[0]), *messages[1:]]
            )
            logs = train_a_step(sites, trainers)
            assert logs[0] == [
                "sites: step 4: the message of site 1 is refused, because it is not finite or "
                "misshapen",
                "sites: step 4: exchange 0 of site 0, without site 1",
            ]
            assert all(weights.isfinite().all() for weights in weights_of(sites[0]))
            torch.testing.assert_close(weights_of(sites[0]), weights_of(sites[1]))

    run_mesh((1,), body)
