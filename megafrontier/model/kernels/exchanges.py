"""How attention gets the keys and values, or the states, of other parts of a document, such as
those of other ranks."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megafrontier.model.kernels.delta import Maps


class AttentionPart(NamedTuple):
    """Some consecutive tokens of a document, and what it has before them."""

    tokens: slice
    """Among this process's tokens."""
    past: slice
    """The document's earlier tokens, among those that `Exchange.begin_gather` brings."""


class Exchange(Protocol):
    """Gives a process's parts the keys and values of the others.

    documents: int32 [m + 1], on the host: the start of each document in a micro-batch, and the
    number of all its tokens. A process has n tokens, and needs p earlier ones.
    """

    number: int
    """What `register` returned."""

    def of_window(self, window: int) -> "Exchange":
        """The same for attention whose tokens attend to `window` tokens, 0: all before them."""
        ...

    def parts(self, documents: Tensor) -> Sequence[AttentionPart]:
        """This process's parts, in the order of its tokens."""
        ...

    def bounds(self, documents: Tensor) -> Tensor:
        """The start of each part among this process's tokens, then n: int32, on the device."""
        ...

    def pieces(self, kv_heads: int) -> int:
        """In how many equal pieces the heads of keys and values are sent."""
        ...

    def begin_gather(self, heads: Tensor, documents: Tensor) -> Callable[[], Tensor]:
        """Send the keys and values [n, heads, d] of this process. The result waits for those of
        the earlier tokens [p, heads, d]."""
        ...

    def begin_reduce(
        self, heads: Tensor, documents: Tensor, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        """Send the gradients fp32 [p, heads, d] of the earlier tokens, as `dtype`. The result waits
        for the sum of all processes' gradients of this one's tokens, fp32 [n, heads, d]."""
        ...

    def has_cuts(self, documents: Tensor) -> bool:
        """Whether some document has more than one part."""
        ...

    def cut_parts(self, documents: Tensor) -> Sequence[int]:
        """Which of this process's parts are of documents with more than one."""
        ...

    def scan(self, maps: "Maps", documents: Tensor, backwards: bool = False) -> Tensor:
        """The states before this process's `cut_parts` [p, h, dk, dv], if the state before each
        document is 0. `maps` [p, h, ..] of these parts. All processes call it if there are cuts.
        `backwards`: the last part of a document is the first one."""
        ...


EXCHANGES: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By number, because operators take no Python objects."""
_numbers = count()


def register(exchange: Exchange) -> int:
    """The number by which operators know an exchange. The caller keeps the exchange alive."""
    number = next(_numbers)
    EXCHANGES[number] = exchange
    return number
