"""What the engine itself costs: one rank, which crosses nothing, beside plain PyTorch.

    python -m scripts.benchmarks.one_device.one_rank CONFIG [--pairs 30] [key=value …]

Both train the same GPT on the same batches in this process, in turns of one step, with fused AdamW
and clipping; `--pairs` steps each after 3 to warm up. Prints the median of the ratios of a pair's
seconds, and their quartiles: the machine's speed drifts, but little within a pair.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config, load_config
from megafrontier.data.sampling.loader import open_loader
from megafrontier.launch.context import join_machine
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.param_spec import spec_of
from megafrontier.plan.refuse import check_layout
from megafrontier.planner.checks import check_files
from megafrontier.training.loop import train_step
from megafrontier.training.trainer import Trainer, build_trainer

WARM_UP = 3


class Plain:
    """The training loop a user would write: gradients add up in the parameters' own type, and
    AdamW updates the very weights that compute (with bf16 that is less work than masters)."""

    def __init__(self, trainer: Trainer) -> None:
        config = self._config = trainer.config
        mesh = trainer.mesh
        loader = open_loader(config, "train", mesh.data_rank, mesh.data_size, mesh.device)
        assert loader is not None
        self._loader, self._step = loader, 0
        self._model = GPT(
            config.model,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
            checkpointing=config.checkpointing,
            compile_blocks=trainer.model.is_compiled,
        )
        initialise(self._model, config.run.seed)
        self._model.to(mesh.device, DTYPES[config.train.precision])
        self._optimizer = self._make_optimizer(config)

    def _make_optimizer(self, config: Config) -> torch.optim.Optimizer:
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, parameter in self._model.named_parameters():
            kind = spec_of(name, parameter).kind
            groups[kind not in config.optimizer.no_decay].append(parameter)
        decays = {True: config.optimizer.weight_decay, False: 0.0}
        return torch.optim.AdamW(
            [{"params": group, "weight_decay": decays[kind]} for kind, group in groups.items()],
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            eps=config.optimizer.eps,
            fused=True,
        )

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()

    def step(self) -> float:
        """One optimizer step; the mean loss."""
        config = self._config
        # Added up on the device, so that the host reads them once, at the step's end.
        loss_sum, tokens = torch.zeros(2, device=next(self._model.parameters()).device)
        for batch in self._loader.step(self._step):
            loss = self._model(batch.tokens, batch.targets, batch.documents)
            loss.backward()
            loss_sum += loss.detach()
            tokens += (batch.targets >= 0).sum()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, tokens)
        if config.train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.train.clip_grad_norm)
        lr = learning_rate(self._step, config.train.steps, config.optimizer, config.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        return (loss_sum / tokens).item()


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """(seconds, loss) of a step."""
    begin = time.perf_counter()
    loss = step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, loss


def compare(trainer: Trainer, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of the engine's steps and of plain PyTorch's, pair by pair. Raises RuntimeError when
    the two do not learn the same."""
    plain = Plain(trainer)
    sides = [lambda: train_step(trainer).loss, plain.step]
    seconds: list[list[float]] = [[], []]
    for number in range(WARM_UP + pairs):
        losses = [0.0, 0.0]
        # Whoever goes first finds the caches as the other left them: take turns.
        for side in (0, 1) if number % 2 else (1, 0):
            taken, losses[side] = timed(sides[side])
            if number >= WARM_UP:
                seconds[side].append(taken)
        if abs(losses[0] - losses[1]) > 0.05 * losses[1]:
            raise RuntimeError(f"step {number}: losses {losses[0]:.4f} and {losses[1]:.4f}")
    plain.close()
    return seconds[0], seconds[1]


def report(ours: Sequence[float], plain: Sequence[float]) -> str:
    """One line."""
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"engine {statistics.median(ours) * 1e3:.1f} ms a step, plain PyTorch "
        f"{statistics.median(plain) * 1e3:.1f} ms; ratio {middle:.3f} (quartiles {low:.3f} – "
        f"{high:.3f}, {len(ratios)} pairs)"
    )


def main() -> None:
    """Compare, and print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_intermixed_args()
    if arguments.pairs < 2:  # which have no quartiles
        parser.error(f"--pairs {arguments.pairs}: need at least 2")
    with exit_on_fatal_error("one_rank"):
        config = load_config(arguments.config, [*arguments.overrides, "machine=laptop"])
        check_files(config, check_layout(config, 1))
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        try:
            print(report(*compare(trainer, arguments.pairs)))
        finally:
            trainer.close()


if __name__ == "__main__":
    main()
