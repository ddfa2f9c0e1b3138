"""The options of optimizers, and of the learning rate's schedule."""

from dataclasses import dataclass, field
from typing import Literal

from megafrontier.config.fields import bounded, count

OptimizerName = Literal["adamw", "sgd", "muon", "lsp"]
"""The names in `optim.groups.OPTIMIZERS`."""


@dataclass
class OptimizerGroupConfig:
    """Parameters that have an optimizer, or values of it, of their own."""

    match: str = ""
    """The parameters: a kind (matrix, norm, bias, embedding, expert, router), a glob pattern of
    names, or both as `KIND:PATTERN`. `matrix:blocks.*` is all matrices but the head."""
    name: OptimizerName | None = None
    """Their optimizer. Default for this and the keys below: the key of `optimizer`."""
    lr: float | None = bounded(None, at_least=0)
    """Learning rate at the end of the warm-up. The schedule, `min_lr` too, is that of
    `optimizer.lr` in proportion."""
    betas: tuple[float, float] | None = bounded(None, at_least=0, below=1)
    """adamw: decay of the first and second moment."""
    eps: float | None = bounded(None, above=0)
    """adamw: added to the square root of the second moment."""
    momentum: float | None = bounded(None, at_least=0, below=1)
    """sgd, muon: decay of the momentum."""
    weight_decay: float | None = bounded(None, at_least=0)
    """Weight decay, also of the kinds in `no_decay`."""
    split_heads: bool | None = None
    """muon: orthogonalize each head of `attention.qkv` by itself."""


@dataclass
class SubspaceConfig:
    """Settings of parameters with `name: lsp`."""

    compression: float = bounded(4.0, at_least=1)
    """How many times fewer bytes cross between device and host than if the fp32 gradient and the
    16-bit weights did."""
    nonzeros: int = count(4)
    """Nonzeros in each row of the projectors."""
    refit_every: int = count(100)
    """Steps after which the projectors are fitted to the gradient, if its error exceeds `bias`."""
    bias: float = bounded(0.3, at_least=0)
    """Bound of the relative error of a gradient that is projected to the subspace and back."""


@dataclass
class OptimizerConfig:
    name: OptimizerName = "adamw"
    """adamw: AdamW with decoupled weight decay. sgd: SGD with momentum, weight decay as a part of
    the gradient. muon: Muon, of matrices only, each expert's too. lsp: AdamW on the host in a
    subspace of each matrix (`optimizer.subspace`), on one rank."""
    lr: float = bounded(3e-4, at_least=0)
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] = bounded((0.9, 0.95), at_least=0, below=1)
    """adamw: decay of the first and second moment."""
    eps: float = bounded(1e-8, above=0)
    """adamw: added to the square root of the second moment."""
    momentum: float = bounded(0.95, at_least=0, below=1)
    """sgd, muon: decay of the momentum."""
    weight_decay: float = bounded(0.1, at_least=0)
    """Weight decay."""
    no_decay: list[Literal["norm", "bias", "embedding"]] = field(
        default_factory=lambda: ["norm", "bias", "embedding"]
    )
    """Kinds of parameters without weight decay."""
    split_heads: bool = False
    """muon: orthogonalize each head of `attention.qkv` (of queries, keys and values) by itself,
    not the three as one matrix."""
    qk_clip: float = bounded(0.0, at_least=0)
    """QK-clip (Kimi Team 2025, arXiv:2507.20534: 100), with any optimizer: if the largest logit of
    an attention head in a step exceeds this, its queries and keys are scaled after the update, so
    that their logits shrink to it. What is measured is a log-sum-exp of logits, which is up to
    log(keys) more. 0: none."""
    ema: float = bounded(0.0, at_least=0, below=1)
    """Also keep an exponential moving average of the weights, average = ema · average + (1 - ema) ·
    weights after each step, in fp32 and sharded as the optimizer's state. It is in the checkpoints:
    the commands `evaluate`, `generate` and `export` take it with `--weights ema`. 0: none."""
    fused: Literal["torch", "apex", "none"] = "torch"
    """Fused AdamW: torch's, apex's (NVIDIA's or ROCm's, on an accelerator), or none."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    """The subspaces of parameters with `name: lsp`."""
    groups: list[OptimizerGroupConfig] = field(default_factory=list)
    """Parameters with another optimizer or other values. Those in no group have the ones above."""


@dataclass
class WeightDecayScheduleConfig:
    """Weight decay that changes over the run, of all groups in proportion."""

    start: float = bounded(1.0, at_least=0)
    """Weight decay at the first step, as a multiple of `optimizer.weight_decay`."""
    end: float = bounded(1.0, at_least=0)
    """The same after the last of `train.steps`."""
    name: Literal["linear", "cosine"] = "linear"
    """Between the two."""


@dataclass
class ScheduleConfig:
    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up. All but constant decay to `min_lr` by the end."""
    warmup_steps: int = bounded(0, at_least=0)
    """Steps of linear warm-up. With fewer `train.steps`, all of them, unless `decay_steps` is
    given."""
    warmup_fraction: float = bounded(0.0, at_least=0, at_most=1)
    """The warm-up as a fraction of all steps (of `decay_steps`, if given), rounded to whole steps.
    Needs `warmup_steps: 0`."""
    decay_steps: int | None = count(None)
    """Steps from the first one of the run to the end of the decay. Later steps have `min_lr`; with
    a number above `train.steps` the run ends before `min_lr`. null: `train.steps`."""
    min_lr: float = bounded(0.0, at_least=0)
    """Learning rate at the end of the decay."""
    decay_fraction: float = bounded(0.2, at_least=0, at_most=1)
    """wsd: fraction of all steps (of `decay_steps`, if given), at the end, in which the learning
    rate decays linearly."""
    weight_decay: WeightDecayScheduleConfig = field(default_factory=WeightDecayScheduleConfig)
    """How weight decay changes. It is multiplied by the learning rate all the same."""
    by: Literal["steps", "tokens"] = "steps"
    """What both follow: the steps, or the tokens that they read. With tokens, a step
    of a small batch (`train.batch_warmup`) moves the rate less: it climbs to `optimizer.lr` by the
    tokens of the first `warmup_steps`, and decays by the tokens of all steps."""

    def decay_end(self, steps: int) -> int:
        """`decay_steps`, or its default for a run of `steps`."""
        return steps if self.decay_steps is None else self.decay_steps

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of `steps`."""
        end = self.decay_end(steps)
        return min(self.warmup_steps, end) or round(self.warmup_fraction * end)
