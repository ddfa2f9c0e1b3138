"""What a rank is doing now, which others are told once nothing moves any more."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What a rank is doing alone, or with one peer (a rank); empty during work of a whole group."""

    what: str = ""
    peer: int | None = None


class RankStatus:
    """One rank's `Place`, written by the thread that works and read by those that watch it."""

    def __init__(self) -> None:
        self._place = Place()

    @contextmanager
    def at(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Meanwhile the rank is at this; for good where it fails, for then the others wait."""
        self._place = Place(what, peer)
        yield
        self._place = Place()

    def encode(self) -> str:
        """The place as JSON, for `decode` on another rank."""
        return json.dumps([self._place.what, self._place.peer])


def decode(text: bytes) -> Place:
    """The place that `RankStatus.encode` has written."""
    return Place(*json.loads(text))


def blockers(places: Mapping[int, Place]) -> dict[int, str]:
    """By rank, in rank order, what it is stuck in for whom the others wait: something that it does
    alone, or with a peer that is at the same with it. One whose peer is elsewhere waits as well."""

    def holds_up(rank: int, place: Place) -> bool:
        if place.peer is None:
            return bool(place.what)
        return places.get(place.peer) == Place(place.what, rank)

    return {rank: place.what for rank, place in sorted(places.items()) if holds_up(rank, place)}
