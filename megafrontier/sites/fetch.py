"""Fetch the messages of other sites beside training."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megafrontier.partition.unit import Unit
from megafrontier.sites.directory import Holding, RankEntry, entries_of, met_by
from megafrontier.sites.transport import Client, Patience, SiteUnreachable

PAUSE_SECONDS, HURRIED_SECONDS = 0.5, 0.02
"""Between two looks for messages: beside training, which is not to be slowed down by them, and
while training waits for them."""
LARGEST_DIRECTORY = 1 << 22
"""Bytes of the entries of the ranks that one rank meets."""


class MessageRefused(Exception):
    """A message of a site that has the secret, but is misshapen or not finite."""


class MessagePart(NamedTuple):
    """The messages of one rank of another site about a fragment, one for each unit in order."""

    holdings: tuple[Holding, ...]
    messages: list[Tensor]
    version: int
    """Of state: how many exchanges it has seen."""


class Site:
    """The ranks of another site that hold what this rank holds."""

    def __init__(
        self, first: Client, held: Mapping[Holding, Sequence[Unit]], secret: bytes, timeout: float
    ) -> None:
        """first: to the first rank of the site. held: what this rank holds, and of which units."""
        self._first, self._held = first, held
        self._secret, self._timeout = secret, timeout
        self._ranks: list[tuple[RankEntry, Client]] | None = None

    def ranks(self) -> list[tuple[RankEntry, Client]]:
        """The ranks that meet this one, looked up when they are not known. Raises
        SiteUnreachable."""
        if self._ranks is None:
            keys = [holding.key for holding in self._held]
            answer, _ = self._first.request({"ask": "shards", "keys": keys})
            met = {
                (own.key, index)
                for (own, units), shards in zip(self._held.items(), answer["shards"], strict=True)
                for unit in units
                for index in met_by(unit, own, shards)
            }
            request = {"ask": "ranks", "holdings": sorted(met)}
            _, rows = self._first.request(request, LARGEST_DIRECTORY)
            self._first.close()
            self._ranks = [
                (entry, Client((entry.host, entry.port), self._secret, self._timeout))
                for entry in entries_of(rows)
            ]
        return self._ranks

    def fetch(
        self, header: Mapping[str, object], sizes_of: Callable[[Sequence[Holding]], list[int]]
    ) -> list[MessagePart] | None:
        """What all these ranks answer; None if one has nothing yet. Raises SiteUnreachable.

        sizes_of: the bytes that a rank with some holdings answers for each unit. Raises
            MessageRefused for other ones.
        """
        parts, own = [], [[h.key, h.index, h.shards] for h in self._held]
        try:
            for entry, client in self.ranks():
                sizes = sizes_of(entry.holdings)
                answer, payload = client.request({**header, "holdings": own}, sum(sizes))
                if not answer:
                    return None
                if answer.get("sizes") != sizes or len(payload) != sum(sizes):
                    raise MessageRefused
                data = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
                messages = list(data[: len(payload)].split(sizes))
                parts.append(MessagePart(entry.holdings, messages, answer.get("version", 0)))
        except SiteUnreachable:
            self.close()  # it may have started again, at another address
            raise
        return parts

    def close(self) -> None:
        """Close all connections."""
        for _, client in self._ranks or ():
            client.close()
        self._ranks = None


class Fetcher:
    """A thread that fetches the messages of the exchanges `wanted` from all other sites."""

    def __init__(
        self, sites: Sequence[int], fetch: Callable[[int, int], list[MessagePart] | None]
    ) -> None:
        """fetch: from a site and an exchange to its messages; None if there are none yet. May raise
        SiteUnreachable and MessageRefused."""
        self._sites, self._fetch = sites, fetch
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._parts: dict[tuple[int, int], list[MessagePart]] = {}
        """By exchange and site."""
        self._refused: set[tuple[int, int]] = set()
        self._first_seen: dict[int, float] = {}
        self._patience = {site: Patience() for site in sites}
        self._is_closed, self._is_hurried = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True, name="sites").start()

    def want(self, events: set[int]) -> None:
        """Fetch these exchanges, and forget all others."""
        with self._lock:
            self._wanted = set(events)
            self._parts = {key: kept for key, kept in self._parts.items() if key[0] in events}
            self._refused = {key for key in self._refused if key[0] in events}
            for late in [event for event in self._first_seen if event not in events]:
                del self._first_seen[late]

    def held(self, event: int) -> list[int]:
        """The sites whose messages are here."""
        with self._lock:
            return [site for at, site in self._parts if at == event]

    def refused(self, event: int) -> list[int]:
        """The sites whose messages are misshapen or not finite."""
        with self._lock:
            return [site for at, site in self._refused if at == event]

    def parts(self, event: int, site: int) -> list[MessagePart]:
        """The messages of a site that is in `held`."""
        with self._lock:
            return self._parts[event, site]

    def waiting_seconds(self, event: int) -> float:
        """How long a message of another site has been here; 0 without any."""
        with self._lock:
            first = self._first_seen.get(event)
        return 0.0 if first is None else time.monotonic() - first

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Look for messages as often as possible inside."""
        self._is_hurried.set()
        try:
            yield
        finally:
            self._is_hurried.clear()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._is_hurried.set()

    def _run(self) -> None:
        while not self._is_closed.wait(HURRIED_SECONDS):
            self._is_hurried.wait(PAUSE_SECONDS)
            with self._lock:
                missing = [
                    (event, site)
                    for event in sorted(self._wanted)
                    for site in self._sites
                    if (event, site) not in self._parts.keys() | self._refused
                ]
            for event, site in missing:
                self._try(event, site)

    def _try(self, event: int, site: int) -> None:
        try:
            parts = self._patience[site].ask(partial(self._fetch, site, event))
        except MessageRefused:
            with self._lock:
                self._refused.add((event, site))
            return
        with self._lock:
            if parts is not None and event in self._wanted:
                self._parts[event, site] = parts
                self._first_seen.setdefault(event, time.monotonic())
