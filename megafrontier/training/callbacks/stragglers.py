"""Name the ranks that keep the others waiting."""

import torch

from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class Stragglers(Callback):
    """Compares every so many steps the ranks' own time: what a step took without waiting for
    others. The whole time is no sign, for all ranks wait for the slowest and end together.

    A slow rank is named once, and again only after it has recovered.
    """

    def __init__(self, host: str, run_logger: RunLogger) -> None:
        self._host, self._run_logger = host, run_logger
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._known: set[int] = set()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        self._seconds += result.seconds
        self._waited += result.own_waiting_seconds
        if is_due(trainer.config.log.stragglers_every, result.step):
            self._compare(trainer)
            self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def _compare(self, trainer: Trainer) -> None:
        mine = torch.tensor([self._seconds, self._waited], dtype=torch.float64) / self._steps
        told = trainer.world.gather(mine.to(trainer.world.device)).cpu()
        own = told[:, 0] - told[:, 1]
        limit = trainer.config.log.straggler * float(own.median())
        slow = set(torch.nonzero(own > limit).flatten().tolist())
        fresh = sorted(slow - self._known)
        self._known = slow
        if fresh:
            self._name(trainer, fresh, told)

    def _name(self, trainer: Trainer, slow: list[int], told: torch.Tensor) -> None:
        """`told` [ranks, 2] has seconds and seconds waited of a mean step. Only the rank itself
        knows its host."""
        rank = trainer.world.rank
        line = None
        if rank in slow:
            step_seconds, waited = told[rank].tolist()
            usual = float((told[:, 0] - told[:, 1]).median())
            line = (
                f"warning: slow: rank {rank} on {self._host}: {step_seconds - waited:.3g} s of its "
                f"own in a step of {step_seconds:.3g} s, the median rank {usual:.3g} s"
            )
        heard = trainer.world.first_error(line)
        more = f" (and {_listed(slow[1:])})" if len(slow) > 1 else ""
        self._run_logger.info(f"{heard}{more}")


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
