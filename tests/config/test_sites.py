"""Values of `sites` that do not fit each other are refused in one line."""

from dataclasses import replace

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config.sites import SitesConfig, check_sites, split_address

SITES = SitesConfig(addresses=["a:1", "[fd00::1]:1"], secret="file")
TWICE = "given twice, need another one for each site"
FORM = "need HOST:PORT or [IPv6]:PORT"


def check(**changes) -> None:
    check_sites(replace(SITES, **changes), global_batch=8, hang_seconds=0)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"global_batches": [8, -8]}, "sites.global_batches: [8, -8], need at least 1 for each"),
        ({"global_batches": [8, 0]}, "sites.global_batches: [8, 0], need at least 1 for each"),
        ({"addresses": ["a:1", "A:01"]}, f"sites.addresses: A:01, {TWICE}"),
        ({"addresses": ["[::1]:1", "[0::1]:1"]}, f"sites.addresses: [0::1]:1, {TWICE}"),
        ({"addresses": ["a:1", "fd00::1:1"]}, f"sites.addresses: fd00::1:1, {FORM}"),
        ({"addresses": ["a:1", "[b]:1"]}, f"sites.addresses: [b]:1, {FORM}"),
    ],
)
def test_batches_and_addresses_that_do_not_fit_are_refused(changes, line) -> None:
    with pytest.raises(UserError) as error:
        check(**changes)
    assert str(error.value).startswith(line)


def test_addresses_are_names_ipv4_or_ipv6_in_brackets() -> None:
    check(addresses=["a.example.org:7001", "10.0.0.1:7001", "[FD00::1]:7001"])
    assert split_address("[FD00::1]:7001") == ("fd00::1", 7001)
    assert split_address("a:7001") == ("a", 7001)
