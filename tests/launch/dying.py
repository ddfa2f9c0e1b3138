"""A callback that notes which process each rank of each start is, and kills ranks in a step."""

import json
import os
import signal
from pathlib import Path

import torch

from megafrontier.parallel.env import RESTARTS, ROUND
from megafrontier.training.callbacks.base import Callback

MOMENTS = "MEGAFRONTIER_TEST_MOMENTS"
"""By start: the rank that is killed, the step after which it is, and the moment."""


class Dying(Callback):
    def at_start(self, trainer):
        start = sum(int(os.environ.get(name, "0")) for name in (RESTARTS, ROUND))
        rank = trainer.world.rank
        folder = Path(trainer.config.run.directory)
        (folder / f"pid-{start}-{rank}").write_text(str(os.getpid()))
        self.victim, self.step, self.moment = json.loads(os.environ[MOMENTS])[start]
        self.trainer = trainer
        block = trainer.model.blocks[1]
        block.register_forward_hook(self.in_forward)
        block.register_full_backward_hook(lambda *_: self.die("backward"))

    def in_forward(self, *_):
        self.die("forward" if torch.is_grad_enabled() else "evaluation")

    def die(self, moment):
        now = moment, self.trainer.step, self.trainer.world.rank
        if now == (self.moment, self.step, self.victim):
            os.kill(os.getpid(), signal.SIGKILL)

    def before_optimizer(self, trainer, gradients):
        self.die("optimizer")
