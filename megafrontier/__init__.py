"""megafrontier: train models with every state sharded to its own level of the machine.

For any nn.Module: `init_mesh`, `shard` (whose docstring has all that one needs to know), `AdamW`,
`Muon` or `Optimizer`, `no_sync`, `clip_grad_norm_`, `save` and `load`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from megafrontier.api.checkpoint import load as load
    from megafrontier.api.checkpoint import save as save
    from megafrontier.api.mesh import init_mesh as init_mesh
    from megafrontier.api.model import clip_grad_norm_ as clip_grad_norm_
    from megafrontier.api.model import no_sync as no_sync
    from megafrontier.api.model import shard as shard
    from megafrontier.api.muon import Muon as Muon
    from megafrontier.api.optimizer import AdamW as AdamW
    from megafrontier.api.optimizer import Optimizer as Optimizer
else:  # a type checker would take every name for one of the module's

    def __getattr__(name: str) -> Any:
        """Import the library's surface when it is first used, because torch takes seconds."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"megafrontier.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
