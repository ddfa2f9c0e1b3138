"""What a run of a certificate records at each step, and the step that it spoils on purpose."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megafrontier.certify.miniature import BAD
from megafrontier.parallel.param_spec import global_ranges
from megafrontier.partition.unit import Unit
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer

FOLDER = "certify"


class Part(NamedTuple):
    """Elements [start, start + len(values)) of a flat global tensor."""

    name: str
    start: int
    values: torch.Tensor


class _DropoutStates(TorchFunctionMode):
    """Collects the state of the random numbers at each dropout: the same state is the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drops = kwargs.get("dropout_p", 0) > 0 or func is F.dropout
        if drops:
            self.found.add(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
        return func(*args, **kwargs)


class Recorder(Callback):
    """Writes RUN/certify/STEP-RANK.pt for each step: this rank's parts of every gradient, per
    token, and of every master after the step, by global names.

    In step `BAD` it makes an element of each unit's gradient NaN, after it has recorded them. The
    step must then change nothing; `changed` in the file names what it has changed. Memory that is
    read before it is written holds NaN.
    """

    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        self._gradients: list[Part] = []
        self._before: dict[str, torch.Tensor] = {}
        self._dropout = _DropoutStates()

    def at_start(self, trainer: Trainer) -> None:
        if trainer.config.model.dropout:
            self._dropout.__enter__()
        self._folder = Path(trainer.config.run.directory) / FOLDER
        self._folder.mkdir(exist_ok=True)

    def before_optimizer(self, trainer: Trainer, gradients: Sequence[torch.Tensor]) -> None:
        units = trainer.engine.trained_units
        scale = trainer.loss_scale.scale.item()
        self._gradients = [
            part._replace(values=part.values / scale) for part in parts_of(units, gradients)
        ]
        if trainer.step + 1 == BAD:
            self._before = {name: value.clone() for name, value in _states(trainer).items()}
            for gradient in gradients:  # on all ranks, because copies of a shard are equal
                gradient[0] = torch.nan

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        return True

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        trainer.engine.finish_publishing()  # updates that are late are made with it
        after = _states(trainer)
        changed = [
            name for name, value in self._before.items() if not torch.equal(value, after[name])
        ]
        self._before = {}
        tokens = max(1, result.tokens)
        units = trainer.engine.trained_units
        found: dict[str, Any] = {
            "gradients": [p._replace(values=p.values / tokens) for p in self._gradients],
            "weights": parts_of(units, [unit.master for unit in units]),
            "lr": result.lr,
            "skipped": result.skipped,
            "changed": changed,
            "dropout": self._dropout.found,
        }
        self._dropout.found = set()
        torch.save(found, self._folder / f"{result.step}-{trainer.world.rank}.pt")


def parts_of(units: Sequence[Unit], shards: Sequence[torch.Tensor]) -> list[Part]:
    """Copies of the elements in this rank's shards, by global name, without padding."""
    found = []
    for unit, shard in zip(units, shards, strict=True):
        for entry, first, last, at in unit.layout.within(*unit.range):
            spec = unit.specs[entry.name]
            for start, stop in global_ranges(spec, first, last):
                count = stop - start
                found.append(Part(spec.name, start, shard[at : at + count].detach().clone().cpu()))
                at += count
    return found


def _states(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a step without effect leaves as it is: masters, states, buffers of the model."""
    units = trainer.engine.trained_units
    found = {f"weights of {unit.name}": unit.master for unit in units}
    for state, shards in trainer.unit_states.items():
        pairs = zip(units, shards, strict=True)
        found |= {f"{state} of {unit.name}": s for unit, s in pairs if s is not None}
    found |= {f"optimizer's {name}": value for name, value in trainer.optimizer.buffers.items()}
    found |= dict(trainer.model.named_buffers())
    return found | {"updates": torch.tensor(trainer.optimizer.steps)}
