"""megafrontier: train models with every state sharded to its own level of the machine.

For any nn.Module: `init_mesh`, `shard` (whose docstring has all that one needs to know), `AdamW`,
`Muon` or `Optimizer`, `no_sync`, `clip_grad_norm_`, `save` and `load`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "init_mesh": "mesh",
    "shard": "model",
    "no_sync": "model",
    "clip_grad_norm_": "model",
    "Optimizer": "optimizer",
    "AdamW": "optimizer",
    "Muon": "muon",
    "save": "checkpoint",
    "load": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import the library's surface when it is first used, because torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megafrontier.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
