"""Tensor and sequence parallelism of a GPT, applied from outside.

Each rank of the split has some heads, some columns of the MLP and some rows of the vocabulary.
Between the matrices it has some of the tokens: they are gathered before a matrix that is cut by its
output, and summed and cut again after one that is cut by its input (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198). Norms, biases after a sum, and
positions are whole on each rank, which sees some of their tokens.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import kinds_of
from megafrontier.model.gpt import GPT
from megafrontier.model.loss import IGNORE_INDEX, ChunkLosses
from megafrontier.model.ranks import DividedModule
from megafrontier.parallel.mesh import DATA_PARALLEL
from megafrontier.parallel.param_spec import set_spec, spec_of
from megafrontier.splits.cut import cut_parameters
from megafrontier.splits.tokens import (
    TokenGroup,
    gather_linear,
    gather_tokens,
    linear_reduce,
    reduce_tokens,
)


def check_tensor_split(config: ModelConfig, size: int, key: str = "parallel.tensor") -> None:
    """Raises UserError for a model that `size` ranks cannot divide."""
    counts = {
        "model.heads": config.heads,
        "the width of keys (model.kv_heads)": config.num_kv_heads * config.head_dim,
        **_mlp_widths(config),
        **{k: n for kind in kinds_of(config).values() for k, n in kind.divided(config).items()},
        "the padded vocabulary (model.vocab_multiple)": config.padded_vocab_size,
    }
    for name, count in counts.items():
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if not count % n)
            raise UserError(f"{key}: {size}, does not divide {name} ({count}), need one of {fits}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise UserError(
            f"{key}: {size}, need a divisor or a multiple of model.kv_heads ({kv_heads})"
        )


def _mlp_widths(config: ModelConfig) -> dict[str, int]:
    """The widths of MLPs that are cut. Experts are not."""
    moe, found = config.moe, {}
    if moe is None or moe.every > 1 or moe.first:
        found["model.ffn_hidden"] = config.mlp_hidden
    if moe is not None and moe.shared_experts:
        width = moe.ffn_hidden or config.mlp_hidden
        found["the width of model.moe.shared_experts"] = moe.shared_experts * width
    return found


def split_tensors(model: GPT, index: int, size: int) -> "TensorGroup":
    """Cut the matrices of a GPT, which may be on the meta device, for the `index`-th of `size`
    ranks, as the specs of parameters say (`ParamSpec.cut`).

    Call it before `shard`, and connect the result to the engine after that. The model's forward
    then takes the whole micro-batch on each tensor rank and returns the same loss on each. Raises
    UserError as `check_tensor_split` does.
    """
    check_tensor_split(model.config, size)
    group = TensorGroup(index, size)
    cut_parameters(model, ("columns", "rows", "heads", "vocabulary"), "tensor", index, size)
    for module in model.modules():
        if isinstance(module, DividedModule):
            module.ranks = group
    _move_to_root(model.parameters())
    return group


def _move_to_root(parameters: Iterable[nn.Parameter]) -> None:
    """Move the norms, biases and routers that each tensor rank has whole to the root's unit. They
    are few, and in units of their own each block would have more and tiny messages."""
    for parameter in parameters:
        spec = spec_of("", parameter)
        is_small = len(spec.shape) == 1 or spec.kind == "router"
        if spec.axes == DATA_PARALLEL and is_small:
            set_spec(parameter, replace(spec, in_root=True))


class TensorGroup(TokenGroup):
    """The ranks of a tensor split, as the modules of a model use them (`TensorRanks`)."""

    def gather_tokens(self, values: Tensor) -> Tensor:
        return gather_tokens(values, self.number)

    def reduce_tokens(self, values: Tensor) -> Tensor:
        return reduce_tokens(values, self.number)

    def gather_linear(
        self, part: Tensor, weights: list[Tensor], biases: list[Tensor], float8: int | None
    ) -> Tensor:
        return gather_linear(part, weights, biases, self.number, float8)

    def linear_reduce(self, inputs: Tensor, weight: Tensor, float8: int | None) -> Tensor:
        return linear_reduce(inputs, weight, self.number, float8)

    def chunk_losses(
        self,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        scale: float,
        with_gradient: bool,
        z_loss: float,
    ) -> ChunkLosses:
        """`loss.chunk_losses` of logits [c, rows] of which this rank has some columns: the losses
        over all columns, and the gradient of these."""
        start = self.index * logits.shape[1]
        values = logits.float()
        values[:, max(0, vocab_size - start) :] = -torch.inf
        ids = targets - start
        is_here = (ids >= 0) & (ids < logits.shape[1])
        ids = ids.where(is_here, 0)[:, None]
        most = values.amax(1).clamp(min=torch.finfo(torch.float32).min)  # all may be padding
        total = (values - most[:, None]).exp().sum(1)
        target = values.gather(1, ids)[:, 0].where(is_here, 0.0)
        numbers = torch.stack([most, total, target])
        maxima, totals, found = self.gather(numbers[None], is_exact=True).unbind(1)
        most = maxima.amax(0)
        total = (totals * (maxima - most).exp()).sum(0)
        log_z, has_loss = total.log() + most, targets != IGNORE_INDEX
        losses = (log_z - found.sum(0)).where(has_loss, 0.0)
        if not with_gradient:
            return ChunkLosses(losses, None, None)
        gradient = (values - most[:, None]).exp_() / total[:, None]
        squares = None
        if z_loss:
            gradient *= (1 + 2 * z_loss * log_z)[:, None]
            squares = log_z.where(has_loss, 0.0).square().sum()
        gradient.scatter_add_(1, ids, -is_here[:, None].float())
        gradient = (gradient if scale == 1 else gradient.mul_(scale)).to(logits.dtype)
        return ChunkLosses(losses, gradient, squares)

    def chunk_scores(self, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        """`scores.chunk_scores` of logits [c, rows] of which this rank has some columns."""
        start = self.index * logits.shape[1]
        values = logits.float()
        values[:, max(0, vocab_size - start) :] = torch.finfo(torch.float32).min
        ids = targets - start
        is_here = (ids >= 0) & (ids < logits.shape[1])
        target = values.gather(1, ids.where(is_here, 0)[:, None])[:, 0].where(is_here, 0.0)
        most, best = values.max(1)
        numbers = torch.stack([most, values.logsumexp(1), target, (best + start).float()])
        maxima, sums, found, ids = self.gather(numbers[None], is_exact=True).unbind(1)
        likeliest = ids.gather(0, maxima.argmax(0, keepdim=True))[0]
        return torch.stack([found.sum(0) - sums.logsumexp(0), likeliest], 1).double()
