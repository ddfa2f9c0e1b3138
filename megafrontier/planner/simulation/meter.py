"""What an operation on the meta device would cost: seconds on the clock, and bytes of memory.

The meter sees every operation that the training code dispatches, in forward, backward and on comm
streams. So there is no second description of a step. Collectives run on torch's `fake` backend.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from functools import cache
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megafrontier.planner.simulation.attention import attention_flops
from megafrontier.planner.simulation.clock import Clock
from megafrontier.planner.simulation.rates import DeviceRates, LinkRates

ROUNDING = {True: 512, False: 64}
"""Bytes to which torch rounds the size of a block up, on an accelerator and on a CPU."""
Groups = Mapping[str, tuple[str, bool]]
_running: ContextVar["Meter"] = ContextVar("meter")


def running_meter() -> "Meter":
    """The meter that counts operations now."""
    return _running.get()


class Memory:
    """Bytes of the tensors that are alive, and their peak."""

    def __init__(self, rounding: int) -> None:
        self.now = self.peak = 0
        self._rounding = rounding
        self._alive: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                size = -(-storage.nbytes() // self._rounding) * self._rounding
                weakref.finalize(storage, self._free, storage._cdata, size).atexit = False
                self.now += size
                self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is counted already."""
        return tensor.untyped_storage()._cdata in self._alive


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
        levels_of_groups: Callable[[], Groups],
    ) -> None:
        """`levels_of_groups`: what `Mesh.levels_of_groups` says."""
        super().__init__()
        self.clock, self.device, self.links, self.memory = clock, device, links, memory
        self.sent: defaultdict[str, float] = defaultdict(float)
        self._levels_of_groups = levels_of_groups
        self._levels: Groups = {}
        self._host = 0.0
        self._tokens: list[Token[Meter]] = []
        self._shapes = ShapeCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        own = OPDEFS.get(func._schema.name)
        if own is not None:  # its parts move and compute, which its shape function does not show
            with self:
                return own._init_fn(*args, **kwargs)
        if _has_parts(func) and not _is_view(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = self._shapes.run(func, args, kwargs)
        self._charge(func, args, kwargs, out)
        return out

    def _charge(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = _tensors(out)
        is_view = all(self.memory.has(o) for o in outputs) and not func._schema.is_mutable
        self.memory.add(outputs)
        flops = _flops(func, args, kwargs, out)
        if (is_view and not flops) or func in _FREE:
            return
        inputs = [] if func.overloadpacket in _CREATE else _tensors((args, kwargs))
        moved = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        if flops:
            seconds = self.device.product_seconds(flops, moved, inputs[0].itemsize)
        else:
            seconds = moved / self.device.memory_bytes
        self.compute(seconds)

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
            self.clock.communicate(self.links[level].seconds(sent, group.size() - 1), level)
        return out


class ShapeCache:
    """Results of operations on meta by the shapes of their inputs: torch finds the shape of a
    result in Python, which takes longer than all else here."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns."""
        if not _is_plain(func):
            return func(*args, **kwargs)
        key = func, _key(args), _key(tuple(kwargs.items()))
        if key not in self._found:
            out = func(*args, **kwargs)
            if not isinstance(out, torch.Tensor) or not out.is_meta:
                return out
            self._found[key] = out.shape, out.stride(), out.dtype
            return out
        shape, stride, dtype = self._found[key]
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
    """Operations of a product or of attention; None for other operations."""
    attention = attention_flops(func, args, kwargs)
    if attention is not None:
        return attention
    counted = flop_registry.get(func.overloadpacket)
    return None if counted is None else counted(*args, **kwargs, out_val=out)


@cache
def _has_parts(func: Any) -> bool:
    """Whether an operation is made of others, which are counted in its place."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


@cache
def _is_plain(func: Any) -> bool:
    """Whether an operation returns one new tensor."""
    schema = func._schema
    aliases = any(r.alias_info is not None for r in schema.returns)
    is_single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    # The schema of _unsafe_view does not say that its result shares the memory of its input.
    is_view = aliases or func is aten._unsafe_view.default
    return is_single and not is_view and not schema.is_mutable


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested sequences and mappings."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in _tensors(item)]
    return []


def _bytes(tensor: torch.Tensor) -> int:
    read = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(read) * tensor.itemsize


def _group(script: Any) -> Any:
    return dist.ProcessGroup.unbox(script)


aten = torch.ops.aten
_CREATE = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.new_empty, aten.new_full}
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
