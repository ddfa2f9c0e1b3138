"""What a rank has to do with other sites: its server, and its connections."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megafrontier.comm.ledger import Ledger
from megafrontier.config.sites import SitesConfig, split_address
from megafrontier.parallel.world import World
from megafrontier.sites.directory import (
    Holding,
    RankEntry,
    own_holdings,
    own_host,
    range_of,
)
from megafrontier.sites.fetch import Fetcher, Part, Site
from megafrontier.sites.outer import Outer, common_rows, message_bytes
from megafrontier.sites.rounds import Rounds
from megafrontier.sites.transport import Client, Header, Server, SiteUnreachable, read_secret

LEVEL = "site"
"""Name of the level between sites in the ledger."""
TIMEOUT_SECONDS = 5.0


class Endpoint:
    """A rank's messages to and from the ranks of other sites that hold the same parameters.

    rounds: decides with the other sites; only the first rank's is used. fetcher: has the messages
    of other sites. outer: what is exchanged. lock: held while the state of `outer` and this site's
    place change, so that other sites see both whole.
    """

    def __init__(
        self,
        config: SitesConfig,
        world: World,
        ledger: Ledger,
        outer: Outer,
        place: Callable[[], Header],
    ) -> None:
        """All ranks make one. place: what this site trains, and where it is. Raises UserError on
        all ranks for a secret that cannot be read, and for a port in use."""
        secret = world.run_on_all(partial(read_secret, config.secret))
        own, addresses = config.number, [split_address(text) for text in config.addresses]
        held = own_holdings(outer.units)
        self.keys = {i: holding.key for holding, members in held.items() for i in members}
        """By the index of a unit, which units and which part of a split."""
        units = {holding: [outer.units[i] for i in held[holding]] for holding in held}
        counted = {holding: of for holding, of in units.items() if of[0].counts}
        self.outer, self._place, self._ledger = outer, place, ledger
        self._level = ledger.add_level(LEVEL)
        self._sent: dict[int, Sequence[Tensor]] = {}
        self._kept = 2 * config.fragments
        self.lock = threading.Lock()
        others = [number for number in range(len(addresses)) if number != own]
        connect = partial(Client, secret=secret, timeout=TIMEOUT_SECONDS)
        self.rounds = Rounds(
            own, {n: connect(addresses[n]) for n in others}, config.deadline_seconds
        )
        port = addresses[own][1] if world.rank == 0 else 0
        self._server = world.run_on_all(lambda: Server(secret, self._answer, port))
        host = own_host(addresses[others[0]]) if others else "127.0.0.1"
        row = RankEntry(host, self._server.port, tuple(counted)).as_row().to(world.device)
        self._directory = [RankEntry.from_row(found) for found in world.gather(row).tolist()]
        held_by = [(rank, held) for rank, e in enumerate(self._directory) for held in e.holdings]
        self._shards = {held.key: held.shards for _, held in held_by}
        self._holders = {(held.key, held.index): rank for rank, held in held_by}
        self._sites = {
            n: Site(connect(addresses[n]), counted, secret, TIMEOUT_SECONDS) for n in others
        }
        self.fetcher = Fetcher(self._sites)
        self._server.start()

    @property
    def others(self) -> list[int]:
        """The numbers of the other sites."""
        return list(self._sites)

    def publish(self, event: int, messages: Sequence[Tensor]) -> None:
        """Let other sites fetch this rank's messages of an exchange, one for each unit."""
        with self.lock:
            self._sent[event] = messages
            for old in [found for found in self._sent if found < event - self._kept]:
                del self._sent[old]

    def fetch_state(self, site: int, fragment: int) -> list[Part] | None:
        """The state of a fragment at another site, as far as this rank holds it; None if the site
        does not answer."""
        try:
            return self._sites[site].fetch({"ask": "state", "fragment": fragment})
        except SiteUnreachable:
            return None

    def covering(self, index: int, parts: Sequence[Part]) -> Iterator[tuple[Part, tuple[int, int]]]:
        """The parts that are about a unit, and the range of each."""
        unit, key = self.outer.units[index], self.keys[index]
        for part in parts:
            for holding in part.holdings:
                if holding.key == key:
                    yield part, range_of(unit, holding)

    def close(self) -> None:
        """End all threads and connections."""
        self.fetcher.close()
        self.rounds.close()
        self._server.close()
        for site in self._sites.values():
            site.close()

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """The answer to a request of another site, on a thread of the server."""
        ask = header["ask"]
        if ask == "offer":
            return self._answer_offer(int(header["event"]), header["holdings"])
        if ask == "state":
            return self._answer_state(int(header["fragment"]))
        if ask == "shards":
            return {"shards": [self._shards[key] for key in header["keys"]]}, b""
        if ask == "ranks":
            met = {self._holders[key, index] for key, index in header["holdings"]}
            rows = (self._directory[rank].as_row() for rank in sorted(met))
            return {}, b"".join(row.numpy().tobytes() for row in rows)
        with self.lock:
            place = self._place()
        return (
            place if ask == "hello" else self.rounds.answer(header, sum(place["versions"]))
        ), b""

    def _answer_offer(self, event: int, holdings: list[list[int]]) -> tuple[Header, bytes]:
        """The rows of this rank's messages that a rank with these holdings needs."""
        with self.lock:
            messages = self._sent.get(event)
        if messages is None:
            return {}, b""
        theirs = {key: Holding(key, index, shards) for key, index, shards in holdings}
        members = self.outer.fragments[self.outer.fragment_of(event)]
        rows = [
            self._rows(index, message, theirs.get(self.keys[index]))
            for index, message in zip(members, messages, strict=True)
        ]
        payload = b"".join(row.numpy().tobytes() for row in rows)
        self._ledger.count(self._level, "gradients", len(payload))
        return {"sizes": [row.numel() for row in rows]}, payload

    def _rows(self, index: int, message: Tensor, theirs: Holding | None) -> Tensor:
        unit = self.outer.units[index]
        if theirs is None:
            return message[:0]
        start, stop = (at - unit.range[0] for at in common_rows(unit.range, range_of(unit, theirs)))
        size = partial(message_bytes, self.outer.codec)
        return message[size(start) : size(stop)]

    def _answer_state(self, fragment: int) -> tuple[Header, bytes]:
        with self.lock:
            outer, version = self.outer, self._place()["versions"][fragment]
            states = [
                torch.cat([outer.weights[index], outer.momentum[index]]).cpu().numpy().tobytes()
                for index in outer.fragments[fragment]
            ]
        return {"sizes": [len(state) for state in states], "version": version}, b"".join(states)
