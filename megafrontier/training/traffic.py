"""Bytes that the splits of a configuration send."""

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.splits.traffic import tensor_bytes, token_bytes
from megafrontier.training.plan import RunPlan


def tensor_traffic(config: Config, plan: RunPlan) -> list[int]:
    """Bytes that a rank sends over each level in a micro-batch to those that share its matrices."""
    train = config.train
    return tensor_bytes(
        config.model,
        plan.shape.over(("tensor",)),
        train.micro_batch * config.model.sequence_length // plan.shape.splits.context,
        DTYPES[train.precision],
        plan.activations,
        overlaps=config.partition.overlap != "none",
        chunk_tokens=train.loss_chunk_tokens,
        checkpointing=config.checkpointing,
        late_weights=plan.division.splits_backward,
    )


def token_traffic(config: Config, plan: RunPlan) -> list[int]:
    """Bytes that a rank sends over each level in a micro-batch to the experts of other ranks, in
    the mean."""
    train, splits = config.train, plan.shape.splits
    return token_bytes(
        config.model,
        plan.shape.over(("expert",)),
        train.micro_batch * config.model.sequence_length // (splits.context * splits.tensor),
        DTYPES[train.precision],
        plan.tokens,
        config.checkpointing,
    )
