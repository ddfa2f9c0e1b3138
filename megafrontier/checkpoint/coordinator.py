"""How the ranks of one save or load agree, without this package starting any process group."""

from typing import Protocol


class Coordinator(Protocol):
    """All ranks that save or load together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_true(self, ok: bool) -> bool:
        """Whether `ok` holds on every rank. Returns on no rank before all have called."""
        ...

    def first_error(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one, None where no rank has. Returns on no rank
        before all have called."""
        ...


class SingleProcess:
    """A crowd of one process."""

    rank = 0
    size = 1

    def all_true(self, ok: bool) -> bool:
        return ok

    def first_error(self, message: str | None) -> str | None:
        return message


def from_rank_0(coordinator: Coordinator, text: str) -> str:
    """Rank 0's `text`, on every rank.

    Where rank 0 alone has a message, the lowest rank's message is a broadcast; that spares every
    implementation of Coordinator a third method.
    """
    told = coordinator.first_error(text if coordinator.rank == 0 else None)
    assert told is not None
    return told
