"""The gated delta rule in chunks of tokens, as matrix products.

Each head has a state S [dk, dv]. A token with key k, value v, decay a in (0, 1] and strength b
changes it to a (I - b k k^T) S + b k v^T, and its query q reads q^T S. Over a chunk of tokens the
state is an affine map of the state before it, S -> A S + B. So there are three steps: the maps of
all chunks, which do not depend on each other; the states between chunks, by one map after another;
and the results, from the states and the tokens of each chunk (Yang et al. 2024, arXiv:2412.06464,
section 3.3, after Yang et al. 2024, arXiv:2406.06484).

All is computed in fp32. Shapes: b rows of s tokens, h heads, n chunks of c tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. More of them mean fewer steps between chunks and more work in each."""


class DeltaTokens(NamedTuple):
    """Tokens of rows, as heads see them."""

    query: Tensor
    """[b, s, h, dk]."""
    key: Tensor
    """[b, s, h, dk], at most of length 1."""
    value: Tensor
    """[b, s, h, dv]."""
    decay: Tensor
    """Its logarithm [b, s, h], at most 0."""
    strength: Tensor
    """In [0, 1]: [b, s, h]."""

    def at(self, tokens: slice) -> "DeltaTokens":
        """Some tokens of each row."""
        return DeltaTokens(*(part[:, tokens] for part in self))


class Maps(NamedTuple):
    """Affine maps of states: `factor` [.., dk, dk] and `summand` [.., dk, dv]."""

    factor: Tensor
    summand: Tensor

    def after(self, other: "Maps") -> "Maps":
        """This map after another one."""
        return Maps(self.factor @ other.factor, self.factor @ other.summand + self.summand)


class DeltaChunks(NamedTuple):
    """What the tokens of each chunk are to the state before it, and to that after it."""

    maps: Maps
    """Of each chunk: [b, h, n, ..]."""
    reads: Tensor
    """Queries for the state before the chunk [b, h, n, c, dk]."""
    scores: Tensor
    """Of queries and the values of the chunk [b, h, n, c, c]."""
    values: Tensor
    """What the tokens add, if the state before the chunk is 0 [b, h, n, c, dv]."""
    keys: Tensor
    """How the state before the chunk changes that [b, h, n, c, dk]."""
    length: int

    def outputs(self, states: Tensor) -> Tensor:
        """The result of each token [b, s, h, dv]. `states` before each chunk [b, h, n, dk, dv]."""
        values = self.values - self.keys @ states
        found = self.reads @ states + self.scores @ values
        return found.flatten(2, 3)[:, :, : self.length].transpose(1, 2)


def delta_chunks(tokens: DeltaTokens, documents: Tensor | None = None) -> DeltaChunks:
    """Cut rows of tokens into chunks.

    documents: a number for each token's document [b, s]; the state is 0 where it changes. Default:
    each row goes on from a state before it.
    """
    length, size = tokens.query.shape[1], min(CHUNK, tokens.query.shape[1])
    padding = -length % size
    query, key, value, decay, strength = (
        _in_chunks(part.float(), size, padding) for part in tokens
    )
    total, between = _decays_between(decay)
    from_start = total.exp()
    within = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    if documents is not None:
        numbers = F.pad(documents, (0, padding), mode="replicate").unflatten(1, (-1, size))[:, None]
        within = within & (numbers[..., :, None] == numbers[..., None, :])
        # The last token before a chunk; none is before the first chunk.
        before = F.pad(numbers[:, :, :-1, -1:], (0, 0, 1, 0), value=-1)
        from_start = from_start * (numbers == before)
    decays = between.masked_fill_(~within, -torch.inf).exp_()
    to_end, whole = decays[..., -1, :], from_start[..., -1]
    strong = key * strength[..., None]
    system = (strong @ key.mT) * decays
    both = torch.cat([value * strength[..., None], strong * from_start[..., None]], -1)
    # torch takes the diagonal as 1, and what is above it as 0.
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    ends = (key * to_end[..., None]).mT
    identity = torch.eye(key.shape[-1], device=key.device) * whole[..., None, None]
    maps = Maps(identity - ends @ keys, ends @ values)
    reads, scores = query * from_start[..., None], (query @ key.mT) * decays
    return DeltaChunks(maps, reads, scores, values, keys, length)


def _decays_between(decay: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of logarithms of decays [.., c] up to each token [.., c], and those after token j up
    to token i [.., c, c]."""
    exact = decay.double().cumsum(-1)
    total = exact.float()
    # A head that forgets fast has large sums, whose rounding would be large in their differences.
    rounding = (exact - total).float().detach()
    between = total[..., :, None] - total[..., None, :]
    between.add_(rounding[..., :, None]).sub_(rounding[..., None, :])
    return total, between


def _in_chunks(part: Tensor, size: int, padding: int) -> Tensor:
    """[b, s, h, ..] -> [b, h, n, c, ..], with zeros at the end, which change no state."""
    if padding:
        part = F.pad(part, (0, 0) * (part.dim() - 2) + (0, padding))
    return part.unflatten(1, (-1, size)).movedim(3, 1).contiguous()


def composed(maps: Maps) -> Maps:
    """All maps of [b, h, n, ..], the first one first, as one: [b, h, ..]."""
    while (count := maps.factor.shape[2]) > 1:
        pairs = Maps(*(part[:, :, 1::2] for part in maps)).after(
            Maps(*(part[:, :, 0 : count - 1 : 2] for part in maps))
        )
        rest = (part[:, :, count - count % 2 :] for part in maps)
        maps = Maps(*(torch.cat(parts, 2) for parts in zip(pairs, rest, strict=True)))
    return Maps(*(part[:, :, 0] for part in maps))


def states_between(maps: Maps, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each map of [b, h, n, ..], [b, h, n, dk, dv], and that after the last one
    [b, h, dk, dv]. `initial`: that before the first one, default 0."""
    factor, summand = (part.flatten(0, 1) for part in maps)
    rows = maps.factor.shape[:2]
    first = summand.new_zeros(summand[:, 0].shape) if initial is None else initial.flatten(0, 1)
    states: Tensor = affine_scan(factor, summand, first).unflatten(0, rows)
    return states[:, :, :-1], states[:, :, -1]


@torch.library.custom_op("megafrontier::affine_scan", mutates_args=())
def affine_scan(factor: Tensor, summand: Tensor, initial: Tensor) -> Tensor:
    """States [r, n + 1, dk, dv]: `initial` [r, dk, dv], then after each of the maps `factor`
    [r, n, dk, dk] and `summand` [r, n, dk, dv]. For the compiler one operator, because its loop has
    as many steps as there are chunks."""
    states = _empty_states(summand)
    states[:, 0] = initial
    for i in range(summand.shape[1]):
        torch.baddbmm(summand[:, i], factor[:, i], states[:, i], out=states[:, i + 1])
    return states


@affine_scan.register_fake
def _(factor: Tensor, summand: Tensor, initial: Tensor) -> Tensor:
    return _empty_states(summand)


def _empty_states(summand: Tensor) -> Tensor:
    """[r, n + 1, dk, dv], in memory the states of all rows at a time one after the other."""
    rows, count, *shape = summand.shape
    return summand.new_empty(count + 1, rows, *shape).transpose(0, 1)


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the states are a scan backwards, with the transposed maps."""
    factor, states = ctx.saved_tensors
    turned = gradient.flip(1)
    found = affine_scan(factor.mT.flip(1), turned[:, 1:], turned[:, 0]).flip(1)
    by_summand = found[:, 1:]
    return by_summand @ states[:, :-1].mT, by_summand, found[:, 0]


affine_scan.register_autograd(_scan_backward, setup_context=_keep_scan)


def convolve(
    tokens: Tensor, taps: Tensor, numbers: Tensor | None, before: Tensor | None = None
) -> Tensor:
    """SiLU of the sum of taps [channels, w] times a token and the w - 1 before it in its document:
    [b, s, channels]. `numbers` of the documents [b, s]; `before`: the tokens before the first ones,
    default none."""
    length, past = tokens.shape[1], taps.shape[1] - 1
    padding = (0, 0, past, 0)
    whole = F.pad(tokens, padding) if before is None else torch.cat([before, tokens], 1)
    known = None if numbers is None else F.pad(numbers, (past, 0), value=-1)
    found = torch.zeros_like(tokens, dtype=torch.float32)
    for i in range(past + 1):
        here = whole[:, i : i + length].float()
        if known is not None and numbers is not None and i < past:
            here = here * (known[:, i : i + length] == numbers)[..., None]
        found = torch.addcmul(found, here, taps[:, i].float())
    return F.silu(found).to(tokens.dtype)
