"""Fetch the messages of other sites beside training."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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


class Part(NamedTuple):
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
            _, rows = self._first.request({"ask": "ranks", "holdings": sorted(met)})
            self._ranks = [
                (entry, Client((entry.host, entry.port), self._secret, self._timeout))
                for entry in entries_of(rows)
            ]
        return self._ranks

    def fetch(self, header: Mapping[str, object]) -> list[Part] | None:
        """What all these ranks answer; None if one has nothing yet. Raises SiteUnreachable."""
        found, own = [], [[h.key, h.index, h.shards] for h in self._held]
        try:
            for entry, client in self.ranks():
                answer, payload = client.request({**header, "holdings": own})
                if not answer:
                    return None
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                messages = list(data.split(answer["sizes"])) if answer["sizes"] else []
                found.append(Part(entry.holdings, messages, answer.get("version", 0)))
        except SiteUnreachable:
            self.close()  # it may have started again, at another address
            raise
        return found

    def close(self) -> None:
        """Close all connections."""
        for _, client in self._ranks or ():
            client.close()
        self._ranks = None


class Fetcher:
    """A thread that fetches the messages of the exchanges `wanted` from all other sites."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self._sites = sites
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._found: dict[tuple[int, int], list[Part]] = {}
        self._first_seen: dict[int, float] = {}
        self._patience = {site: Patience() for site in sites}
        self._is_closed, self._is_hurried = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True, name="sites").start()

    def want(self, events: set[int]) -> None:
        """Fetch these exchanges, and forget all others."""
        with self._lock:
            self._wanted = set(events)
            for old in [key for key in self._found if key[0] not in events]:
                del self._found[old]
            for late in [event for event in self._first_seen if event not in events]:
                del self._first_seen[late]

    def held(self, event: int) -> list[int]:
        """The sites whose messages are here."""
        with self._lock:
            return [site for found, site in self._found if found == event]

    def parts(self, event: int, site: int) -> list[Part]:
        """The messages of a site that is in `held`."""
        with self._lock:
            return self._found[event, site]

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
                    if (event, site) not in self._found
                ]
            for event, site in missing:
                self._try(event, site)

    def _try(self, event: int, site: int) -> None:
        fetch = partial(self._sites[site].fetch, {"ask": "offer", "event": event})
        if (parts := self._patience[site].ask(fetch)) is None:
            return
        with self._lock:
            if event in self._wanted:
                self._found[event, site] = parts
                self._first_seen.setdefault(event, time.monotonic())
