"""The interface of a wire format, and the registry of formats by their name in a configuration.

To add a format, write a file like `block.py`: subclass `Codec`, `register` an instance of it, and
import the file in `wire.py`. Kernels for a device are optional. They are a module of their own,
which is named at registration and imported when the codec first meets a tensor of that device.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Self, TypeVar

import torch


class Codec(ABC):
    """A format of messages. A message holds n elements; messages are rows of a matrix.

    Codecs are immutable, hashable, and compared by value.
    """

    dtype: torch.dtype
    """Type of a message's elements."""
    is_quantized: bool = False
    """Whether elements are sent as integer codes. Then `encode` takes `errors`, and a reduction
    does not round what stays on the rank. If not, elements are sent as a float type."""
    is_cast: bool = False
    """Whether a message is its values, converted to `dtype`. Then values of this type are sent as
    they are, and messages are used without `decode`."""
    is_sparse: bool = False
    """Whether only some elements are sent. Only the exchange between sites has such a format."""
    rotates: bool = False
    """Whether `encode` rotates the elements first (see `BlockCodec`)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's name in a configuration."""

    @property
    def delta_name(self) -> str | None:
        """The name of the format whose messages are weight deltas, encoded alike; None without."""
        return None

    @abstractmethod
    def message_bytes(self, count: int) -> int:
        """Bytes of a message of `count` elements."""

    def message_length(self, count: int) -> int:
        """Elements of a message of `count` elements, in the codec's type."""
        return self.message_bytes(count) // self.dtype.itemsize

    def sends_unchanged(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` are their own messages."""
        return self.is_cast and dtype == self.dtype

    @abstractmethod
    def encode(
        self, values: torch.Tensor, messages: torch.Tensor, errors: torch.Tensor | None = None
    ) -> None:
        """Write one message per row of `values` [rows, n], any float type, into `messages`
        [rows, m].

        A quantized codec adds `errors` bf16 [rows, n] to the values and leaves there the part of
        the sum that the messages do not carry.
        """

    @abstractmethod
    def decode(self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
        """Write the values of `messages` [rows, m] into `out` [rows, n], any float type, or add
        them to it. The addition is in fp32 and rounds once."""

    @abstractmethod
    def decode_sum(
        self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
    ) -> None:
        """Write the sum of all messages' values, in the order of the rows, into `out` fp32 [n], or
        add it to what is there."""

    def with_rotation(self) -> Self:
        """This codec with rotation, if it can rotate, else this codec."""
        return self

    def check_kernels(self, kernels: ModuleType, device_type: str) -> str | None:
        """How the results of `kernels` differ from this codec's, None if they do not."""
        return None


C = TypeVar("C", bound=Codec)
FORMATS: dict[str, tuple[Codec, bool]] = {}
"""By format name: the codec, and whether its messages are weight deltas."""
_KERNELS: dict[tuple[str, str], str | ModuleType] = {}


def register(codec: C, kernels: Mapping[str, str] | None = None) -> C:
    """Make `codec` known by its name, and as a delta by its `delta_name`.

    `kernels`: by device type, the module with functions `encode`, `decode` and `decode_sum` that
    take the codec and then the arguments of its methods.
    """
    FORMATS[codec.name] = codec, False
    if codec.delta_name is not None:
        FORMATS[codec.delta_name] = codec, True
    for device_type, module in (kernels or {}).items():
        _KERNELS[codec.name, device_type] = module
    return codec


def use_kernels(device_type: str, kernels: ModuleType) -> None:
    """Let all quantized codecs use these kernels on a type of device, without a comparison."""
    for codec, _ in FORMATS.values():
        if codec.is_quantized:
            _KERNELS[codec.name, device_type] = kernels


def find_kernels(codec: Codec, device_type: str) -> ModuleType | None:
    """Kernels for tensors of a device (CUDA and ROCm are both "cuda"); None if plain torch has to
    do. They are compared with plain torch the first time, which takes some seconds."""
    found = _load_kernels(codec, device_type)
    return None if isinstance(found, str) else found


def missing_kernels(device_type: str, codecs: Iterable[Codec]) -> str | None:
    """Why some of the `codecs` run without the kernels that they have for a device, if they do."""
    found = (_load_kernels(codec, device_type) for codec in codecs)
    return next((reason for reason in found if isinstance(reason, str)), None)


@cache
def _load_kernels(codec: Codec, device_type: str) -> ModuleType | str | None:
    """The kernels, or why they cannot be used."""
    module = _KERNELS.get((codec.name, device_type))
    if module is None or isinstance(module, ModuleType):
        return module
    try:
        kernels = import_module(module)
        return codec.check_kernels(kernels, device_type) or kernels
    # Triton may be missing. Its driver, its compiler, and the C compiler that it needs for the
    # first kernel raise errors of their own.
    except Exception as error:
        return " ".join(str(error).split())


@dataclass(frozen=True)
class CastCodec(Codec):
    """Elements sent as `dtype`: exact if that is their own type."""

    dtype: torch.dtype
    is_cast = True

    @property
    def name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def message_bytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def encode(
        self, values: torch.Tensor, messages: torch.Tensor, errors: torch.Tensor | None = None
    ) -> None:
        """As `Codec.encode`. Raises ValueError if `errors` are given."""
        if errors is not None:
            raise ValueError(f"errors: given to the wire format {self.name}, need a quantized one")
        messages.copy_(values)

    def decode(self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
        store(messages, out, accumulate)

    def decode_sum(
        self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
    ) -> None:
        if out.device.type != "cpu" and not accumulate:
            torch.sum(messages, dim=0, dtype=torch.float32, out=out)
            return
        # On a CPU, torch.sum would copy all messages to fp32 first: two to three times the time.
        store(messages[0], out, accumulate)
        for message in messages[1:]:
            out.add_(message)


def store(values: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Copy `values` to `out`, or add them to it; the result is rounded once."""
    if accumulate:
        out.add_(values)
    else:
        out.copy_(values)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
for _dtype in DTYPES.values():
    register(CastCodec(_dtype))
