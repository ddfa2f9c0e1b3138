"""What a rank has to do with other sites: its server, and its connections."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address

import torch
from torch import Tensor

from megafrontier.comm.ledger import Ledger
from megafrontier.config.sites import SitesConfig, split_address
from megafrontier.parallel.world import World
from megafrontier.sites.directory import (
    Holding,
    RankEntry,
    copy_overlap,
    listening_host,
    own_holdings,
    own_host,
    range_of,
)
from megafrontier.sites.fetch import Fetcher, MessagePart, MessageRefused, Site
from megafrontier.sites.outer import Outer, common_rows, is_bounded, message_bytes
from megafrontier.sites.rounds import Rounds
from megafrontier.sites.transport import (
    TIMEOUT_SECONDS,
    Client,
    Header,
    Server,
    SiteUnreachable,
    read_secret,
)

LEVEL = "site"
"""Name of the level between sites in the ledger."""


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
        all ranks for a secret that cannot be read, and where they cannot listen."""
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
        self._server, host = world.run_on_all(
            partial(self._listen, config, world.rank == 0, addresses, secret)
        )
        row = RankEntry(host, self._server.port, tuple(counted)).as_row().to(world.device)
        self._directory = [RankEntry.from_row(found) for found in world.gather(row).tolist()]
        held_by = [(rank, held) for rank, e in enumerate(self._directory) for held in e.holdings]
        self._shards = {held.key: held.shards for _, held in held_by}
        self._holders = {(held.key, held.index): rank for rank, held in held_by}
        self._sites = {
            n: Site(connect(addresses[n]), counted, secret, TIMEOUT_SECONDS) for n in others
        }
        self.fetcher = Fetcher(others, self._fetch_offer)
        self._server.start()

    def _listen(
        self,
        config: SitesConfig,
        is_first: bool,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
    ) -> tuple[Server, str]:
        """This rank's server, and the host that others are told. Raises UserError."""
        own = addresses[config.number]
        towards = [*(address for address in addresses if address != own), own]
        if is_first:
            host = config.listen or listening_host(own, towards)
        else:
            host = config.listen or own_host(towards)
        server = Server(secret, self._answer, host, own[1] if is_first else 0)
        is_any = ip_address(server.host).is_unspecified
        return server, own_host(towards) if is_any else server.host

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

    def fetch_state(self, site: int, fragment: int) -> list[MessagePart] | None:
        """The state of a fragment at another site, as far as this rank holds it; None if the site
        does not answer, or gives no finite state."""
        sizes = partial(self._state_sizes, fragment)
        try:
            parts = self._sites[site].fetch({"ask": "state", "fragment": fragment}, sizes)
        except (SiteUnreachable, MessageRefused):
            return None
        states = (message.view(torch.float32) for part in parts or () for message in part.messages)
        return parts if all(is_bounded(state) for state in states) else None

    def _fetch_offer(self, site: int, event: int) -> list[MessagePart] | None:
        """The messages of another site about an exchange; None if it has none yet. Raises
        SiteUnreachable, and MessageRefused for messages that are misshapen or not finite."""
        fragment = self.outer.fragment_of(event)
        sizes = partial(self._offer_sizes, fragment)
        parts = self._sites[site].fetch({"ask": "offer", "event": event}, sizes)
        for place, index in enumerate(self.outer.fragments[fragment] if parts else ()):
            try:
                change = self.change(index, place, parts or (), torch.device("cpu"))
            except RuntimeError as error:  # torch's error for an index out of range
                raise MessageRefused from error
            if not is_bounded(change):
                raise MessageRefused
        return parts

    def change(
        self, index: int, place: int, parts: Sequence[MessagePart], device: torch.device
    ) -> Tensor:
        """Another site's change of this rank's shard of a unit, the `place`th of its fragment, as
        fp32 [n] on the device."""
        unit = self.outer.units[index]
        change = torch.zeros(len(self.outer.weights[index]), device=device)
        for part, theirs in self.covering(index, parts):
            start, stop = common_rows(theirs, unit.range)
            if start < stop:
                rows = self.outer.decode(part.messages[place], stop - start, device)
                copy_overlap(change, unit.range[0], rows, start)
        return change

    def covering(
        self, index: int, parts: Sequence[MessagePart]
    ) -> Iterator[tuple[MessagePart, tuple[int, int]]]:
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

    def _answer(self, header: Header) -> tuple[Header, bytes]:
        """The answer to a request of another site, on a thread of the server."""
        ask = header["ask"]
        if ask == "offer":
            return self._answer_offer(int(header["event"]), _holdings(header))
        if ask == "state":
            return self._answer_state(int(header["fragment"]), _holdings(header))
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

    def _answer_offer(self, event: int, holdings: Sequence[Holding]) -> tuple[Header, bytes]:
        """The rows of this rank's messages that a rank with these holdings needs."""
        with self.lock:
            messages = self._sent.get(event)
        if messages is None:
            return {}, b""
        members = self.outer.fragments[self.outer.fragment_of(event)]
        rows = []
        for index, message in zip(members, messages, strict=True):
            own, theirs = self.outer.units[index].range, self._range_of(index, holdings)
            rows.append(message[self._row_bytes(own, theirs)])
        payload = b"".join(row.numpy().tobytes() for row in rows)
        self._ledger.count(self._level, "gradients", len(payload))
        return {"sizes": [row.numel() for row in rows]}, payload

    def _offer_sizes(self, fragment: int, holdings: Sequence[Holding]) -> list[int]:
        """The bytes that a rank with these holdings answers for each unit."""
        sizes = []
        for index in self.outer.fragments[fragment]:
            own, theirs = self.outer.units[index].range, self._range_of(index, holdings)
            rows = self._row_bytes(theirs, own)
            sizes.append(rows.stop - rows.start)
        return sizes

    def _answer_state(self, fragment: int, holdings: Sequence[Holding]) -> tuple[Header, bytes]:
        with self.lock:
            outer, version = self.outer, self._place()["versions"][fragment]
            states = [
                torch.cat([outer.weights[index], outer.momentum[index]]).cpu().numpy().tobytes()
                if any(self._range_of(index, holdings))
                else b""
                for index in outer.fragments[fragment]
            ]
        return {"sizes": [len(state) for state in states], "version": version}, b"".join(states)

    def _state_sizes(self, fragment: int, holdings: Sequence[Holding]) -> list[int]:
        ranges = (self._range_of(i, holdings) for i in self.outer.fragments[fragment])
        return [2 * 4 * (stop - start) for start, stop in ranges]

    def _range_of(self, index: int, holdings: Sequence[Holding]) -> tuple[int, int]:
        """[start, stop) of a unit that a rank with these holdings has; (0, 0) unless both ranks
        answer for the unit."""
        unit = self.outer.units[index]
        ranges = (range_of(unit, held) for held in holdings if held.key == self.keys[index])
        return next(ranges, (0, 0)) if unit.counts else (0, 0)

    def _row_bytes(self, sender: tuple[int, int], receiver: tuple[int, int]) -> slice:
        """Where the rows that a receiver needs lie in the sender's message."""
        start, stop = (at - sender[0] for at in common_rows(sender, receiver))
        return slice(*(message_bytes(self.outer.codec, count) for count in (start, stop)))


def _holdings(header: Header) -> list[Holding]:
    return [Holding(*numbers) for numbers in header["holdings"]]
