"""What an operation on the meta device would cost: seconds on the clock, and bytes of memory.

The meter sees every operation that the training code dispatches, in forward, backward and on comm
streams. So there is no second description of a step. Collectives run on torch's `fake` backend.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from enum import Enum
from functools import cache
from math import prod
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megafrontier.planner.simulation.attention import PRODUCTS, attention_flops
from megafrontier.planner.simulation.clock import Clock
from megafrontier.planner.simulation.memory import Memory
from megafrontier.planner.simulation.rates import DeviceRates, LinkRates

LevelGroups = Mapping[str, tuple[str, bool]]
_running: ContextVar["Meter"] = ContextVar("meter")


def running_meter() -> "Meter":
    """The meter that counts operations now."""
    return _running.get()


class Meter(TorchDispatchMode):
    """Puts the cost of each operation on a clock.

    sent: bytes by level that this rank sent, without those of the control plane.
    """

    def __init__(
        self,
        clock: Clock,
        device: DeviceRates,
        links: Mapping[str, LinkRates],
        memory: Memory,
        levels_of_groups: Callable[[], LevelGroups],
    ) -> None:
        """`levels_of_groups`: what `Mesh.levels_of_groups` says."""
        super().__init__()
        self.clock, self.device, self.links, self.memory = clock, device, links, memory
        self.sent: defaultdict[str, float] = defaultdict(float)
        self._levels_of_groups = levels_of_groups
        self._levels: LevelGroups = {}
        self._host = 0.0
        self._tokens: list[Token[Meter]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips it takes longer than most operations here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        way = operation.way
        if way is _Way.COMMUNICATES:
            return self._communicate(func, args, kwargs)
        if way is _Way.CUSTOM:  # its parts move and compute, which its shape function does not show
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if way is _Way.HAS_PARTS:
            with self:
                return func.decompose(*args, **kwargs)
        out, cost = operation.run(args, kwargs)
        outputs = _tensors(out)
        is_view = way is _Way.OTHER and all(map(self.memory.has, outputs))
        if is_view and not operation.multiplies:
            return out
        self.memory.add(outputs)
        if not operation.is_free:
            cost = cost or _cost_of(func, args, kwargs, out)
            if self.memory.has_host_tensors and self._charge_to_host(_tensors((args, out)), cost):
                return out
            self._charge(cost)
        return out

    def _charge_to_host(self, tensors: Sequence[torch.Tensor], cost: "_Cost") -> bool:
        """Whether an operation moves data in, from or to host memory, which then has its time."""
        on_host = [self.memory.is_on_host(tensor) for tensor in tensors]
        if not any(on_host):
            return False
        if all(on_host):
            self.move_on_host(cost.moved)
        else:  # a copy, of as many bytes as the smaller side has
            self.clock.advance(min(t.nbytes for t in tensors) / self.device.host_link_bytes)
        return True

    def move_on_host(self, moved: int) -> None:
        """The host reads and writes `moved` bytes of its memory."""
        self.clock.advance(moved / self.device.host_memory_bytes)

    def _charge(self, cost: "_Cost") -> None:
        if cost.flops:
            self.compute(self.device.product_seconds(*cost))
        else:
            self.move(cost.moved)

    def __enter__(self) -> Self:
        self._tokens.append(_running.set(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _running.reset(self._tokens.pop())

    def move(self, moved: int) -> None:
        """An operation that reads and writes `moved` bytes in all."""
        self.compute(moved / self.device.memory_bytes)

    def synchronize(self) -> None:
        """The host waits until the device has done what it was given."""
        self._host = max(self._host, self.clock.now)

    def compute(self, seconds: float) -> None:
        """An operation of the device, which begins when the host has started it."""
        if self.device.is_host:
            return self.clock.advance(self.device.launch_seconds + seconds)
        self._host = max(self._host, 0.0) + self.device.launch_seconds
        if self.clock.now < self._host:
            self.clock.wait_until(self._host, "")
        self.clock.advance(seconds)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        group = next(_group(value) for value in args if isinstance(value, torch.ScriptObject))
        if group.group_name not in self._levels:
            self._levels = self._levels_of_groups()
        level, is_control = self._levels[group.group_name]
        self.memory.add(_tensors(args))
        name = func.overloadpacket.__name__
        sent = _SENT[name](args, group.size())
        if not is_control:
            self.sent[level] += sent
        if name not in _BETWEEN_TWO:  # their time depends on the other one
            link = self.links[level]
            seconds = link.seconds(sent, group.size() - 1)
            self.clock.communicate(seconds, level, link.slows_compute)
        return out


class _Cost(NamedTuple):
    """Operations of matrix products, bytes read and written, and bytes of an element."""

    flops: float
    moved: int
    itemsize: int


class _Way(Enum):
    """How the meter treats an operation."""

    COMMUNICATES = 1
    CUSTOM = 2
    HAS_PARTS = 3
    """It is made of others, which are counted in its place."""
    NEW = 4
    """It returns new tensors."""
    IN_PLACE = 5
    """It returns what it changes."""
    OTHER = 6


class _Operation:
    """How an operation on meta is treated, and its results and costs by the shapes of its inputs:
    torch finds the shape of a result in Python, which takes longer than all else here."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.way = _way_of(func)
        self.is_free = func in _FREE
        self.multiplies = func.overloadpacket in {aten._grouped_mm, *PRODUCTS, *flop_registry}
        self._found: dict[Any, tuple[Any, _Cost]] = {}

    def run(self, args: Any, kwargs: Any) -> tuple[Any, _Cost | None]:
        """What the operation returns, and its cost if it is known."""
        func = self._func
        if self.way is _Way.OTHER:
            return func(*args, **kwargs), None
        key = _key(args), _key(tuple(kwargs.items()))
        known = self._found.get(key)
        if known is None:
            out = func(*args, **kwargs)
            cost = _cost_of(func, args, kwargs, out)
            if all(tensor.is_meta for tensor in _tensors((args, kwargs, out))):
                self._found[key] = _shapes(out), cost
            return out, cost
        shapes, cost = known
        out = _changed(func, args, kwargs) if self.way is _Way.IN_PLACE else _new(shapes)
        return out, cost


_operation = cache(_Operation)


class _Shape(NamedTuple):
    """Of a tensor."""

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _shapes(out: Any) -> Any:
    """What an operation returns, with shapes in place of tensors."""
    if isinstance(out, torch.Tensor):
        return _Shape(out.shape, out.stride(), out.dtype)
    return [_shapes(each) for each in out] if isinstance(out, tuple | list) else out


def _new(shapes: Any) -> Any:
    """New tensors of the shapes."""
    if isinstance(shapes, _Shape):
        return torch.empty_strided(*shapes[:2], dtype=shapes.dtype, device="meta")
    return tuple(map(_new, shapes)) if isinstance(shapes, list) else shapes


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operation in place returns."""
    places = _returned(func)
    found = [args[at] if at < len(args) else kwargs[name] for at, name in places]
    return tuple(found) if len(found) > 1 else found[0] if found else None


@cache
def _returned(func: Any) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operation in place returns, in the order in
    which it does."""
    arguments = {
        tuple(argument.alias_info.before_set): (at, argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
    }
    return [arguments[tuple(r.alias_info.before_set)] for r in func._schema.returns]


def _way_of(func: Any) -> _Way:
    schema = func._schema
    if func.namespace == "c10d":
        return _Way.COMMUNICATES
    if schema.name in OPDEFS:
        return _Way.CUSTOM
    aliases = [r.alias_info for r in schema.returns]
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    if has_parts and not any(aliases):
        return _Way.HAS_PARTS
    if schema.is_mutable:
        writes = all(alias is not None and alias.is_write for alias in aliases)
        keeps = torch.Tag.inplace_view not in func.tags and func.overloadpacket not in _REPLACES
        return _Way.IN_PLACE if writes and keeps else _Way.OTHER
    if func is aten._unsafe_view.default:
        # Its result shares the memory of its input, which its schema does not say.
        return _Way.OTHER
    has_lists = any("[]" in str(r.type) for r in schema.returns)
    is_plain = schema.returns and not any(aliases) and not has_lists
    return _Way.NEW if is_plain else _Way.OTHER


def _cost_of(func: Any, args: Any, kwargs: Any, out: Any) -> _Cost:
    inputs = [] if func.overloadpacket in _CREATE else _tensors((args, kwargs))
    moved = sum(_bytes(tensor) for tensor in (*inputs, *_tensors(out)))
    flops = _flops(func, args, kwargs, out) or 0.0
    return _Cost(flops, moved, inputs[0].itemsize if inputs else 0)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
    """Operations of a product or of attention; None for other operations."""
    attention = attention_flops(func, args, kwargs)
    if attention is not None:
        return attention
    if func.overloadpacket is aten._grouped_mm:
        return 2.0 * args[0].numel() * args[1].shape[-1]
    counted = flop_registry.get(func.overloadpacket)
    return None if counted is None else counted(*args, **kwargs, out_val=out)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _SEQUENCES):
        return tuple([_key(each) for each in value])
    return value


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested sequences and mappings."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, _SEQUENCES):
        return []
    found = []
    for item in tree:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, _NESTED):
            found += _tensors(item)
    return found


def _bytes(tensor: torch.Tensor) -> int:
    read = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(read) * tensor.itemsize


def _group(script: Any) -> Any:
    return dist.ProcessGroup.unbox(script)


aten = torch.ops.aten
_SEQUENCES = list, tuple
_NESTED = list, tuple, dict
_CREATE = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.new_empty, aten.new_full}
_REPLACES = {aten.set_}
"""Operations that give a tensor another storage."""
_FREE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


def _gathered(args: Any, size: int) -> float:
    """(out, shard, group, …): the shard goes to each peer."""
    return args[1].nbytes * (size - 1)


def _exchanged(args: Any, size: int) -> float:
    """(received, sent, group, sizes, sizes): all but the own chunk."""
    sent, sizes = args[1], args[4]
    own = 1 / size if not sizes else sizes[0] / max(sum(sizes), 1)
    return sent.nbytes * (1 - own)


def _whole(args: Any, size: int) -> float:
    return _tensors(args)[0].nbytes


def _reduced(args: Any, size: int) -> float:
    return 2 * _tensors(args)[0].nbytes * (size - 1) / size


_BETWEEN_TWO = {"send", "recv_"}
_SENT: dict[str, Callable[[Any, int], float]] = {
    "_allgather_base_": _gathered,
    "alltoall_base_": _exchanged,
    "broadcast_": _whole,
    "allreduce_": _reduced,
    "send": _whole,
    "recv_": lambda args, size: 0.0,
}
COLLECTIVES = tuple(_SENT)
"""The operators of c10d that a step uses, by name."""
