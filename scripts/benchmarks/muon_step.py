"""What Muon's update costs beside forward and backward, on one rank.

    python -m scripts.benchmarks.muon_step CONFIG [--accumulation 8] [--repeats 3] [key=value …]

Trains CONFIG on this process with AdamW, and with Muon for the matrices of blocks. Prints the
median CPU seconds of a micro-batch's forward and backward and of the update, and the ratio of a
step of `--accumulation` micro-batches. CPU seconds depend little on other work on the machine. A
single rank computes all matrices; of N ranks each computes 1/N.
"""

import argparse
import time
from statistics import median

import torch

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config, load_config
from megafrontier.launch.context import join_machine
from megafrontier.optim.schedule import learning_rate
from megafrontier.training.loop import forward_backward
from megafrontier.training.step import finish_step
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.wire_quality.optimizers import VARIANTS


def measure(config: Config, repeats: int) -> tuple[float, float]:
    """Median CPU seconds of forward and backward of a micro-batch, and of the update."""
    computing, updating = [], []
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        for step in range(repeats + 1):
            begin = time.process_time()
            totals = forward_backward(trainer, lambda step: None)
            gradients = trainer.engine.finish_gradients()
            middle = time.process_time()
            stats = finish_step(trainer, totals, gradients)
            lr = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
            trainer.optimizer.step(gradients, lr, stats.divisor, stats.skip)
            end = time.process_time()
            trainer.engine.finish_step(stats.skip)
            trainer.step += 1
            computing.append(middle - begin)
            updating.append(end - middle)
        trainer.close()
    return median(computing[1:]), median(updating[1:])


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(prog="muon_step", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    computing, update = {}, {}
    with exit_on_fatal_error("muon_step"):
        for name, chosen in VARIANTS.items():
            config = load_config(given.config, [*given.overrides, *chosen])
            one = f"train.global_batch={config.train.micro_batch}"
            config = load_config(given.config, [*given.overrides, *chosen, one])
            computing[name], update[name] = measure(config, given.repeats)
            print(f"{name}: micro-batch {computing[name]:.3f} s, update {update[name]:.3f} s")
        # Forward and backward are the same, and other work only adds to them.
        common = given.accumulation * min(computing.values())
        ratio = (common + update["muon"]) / (common + update["adamw"])
        print(f"a step of {given.accumulation} micro-batches: ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
