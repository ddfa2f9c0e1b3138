"""The address at which a rank listens and answers."""

import socket

import pytest

from megafrontier.common.errors import UserError
from megafrontier.sites import directory
from megafrontier.sites.directory import Holding, RankEntry, listening_host, own_host

HERE = ("127.0.0.1", 7001)


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::1:2", "2001:db8::ffff:1"])
def test_a_rank_s_entry_is_sent_as_numbers_with_an_address_of_either_kind(host) -> None:
    entry = RankEntry(host, 7001, (Holding(2**32 - 1, 3, 4),))
    assert RankEntry.from_row(entry.as_row().tolist()) == entry


def test_an_address_towards_sites_needs_one_that_can_be_looked_up() -> None:
    assert own_host([("no..name", 1), ("name.invalid", 1), HERE]) == "127.0.0.1"
    with pytest.raises(UserError, match=r"sites.addresses: no..name: .*, need"):
        own_host([("no..name", 1)])


def test_the_first_rank_listens_where_others_connect_unless_its_name_is_a_loopback(monkeypatch):
    known = {"own": "127.0.1.1", "far": "192.0.2.1", "real": "192.0.2.7"}
    monkeypatch.setattr(
        directory, "own_host", lambda towards: known.get(towards[0][0], "127.0.0.1")
    )
    monkeypatch.setattr(
        directory, "lookup", lambda host, port: (socket.AF_INET, (known[host], port))
    )
    assert listening_host(("real", 1), [("far", 1)]) == "192.0.2.7"
    assert listening_host(("own", 1), [("far", 1)]) == "192.0.2.1", "a name in /etc/hosts"
    assert listening_host(("own", 1), [("near", 1)]) == "127.0.1.1", "all sites on this host"
