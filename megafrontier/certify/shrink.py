"""A small model with the structure of a large one: each kind of block, head and loss stays."""

from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from math import lcm, prod

from megafrontier.certify.segments import Segment
from megafrontier.config import Config, ModelConfig, MoEConfig

LENGTH = 32
"""Tokens of a sequence."""
HEAD = 8
"""Width of a head."""
WIDTH = 40
"""Width inside an MLP, which 2, 4 and 8 ranks divide."""
VOCABULARY = 64


@dataclass(frozen=True)
class SmallSplits:
    """The most ranks that a split has in any small mesh of a layout, and what it has in full."""

    tensor: int
    expert: int
    stages: int
    full_tensor: int
    full_stages: int

    @classmethod
    def of(cls, segments: list[Segment], stages_per_rank: int) -> "SmallSplits":
        """Of the segments of a whole layout."""

        def ranks(axis: str) -> int:
            return 2 ** sum(s.axis == axis for s in segments)

        def full(axis: str) -> int:
            return prod(s.size for s in segments if s.axis == axis)

        expert = 2 ** sum(s.has_experts for s in segments)
        stages = ranks("pipeline") * min(stages_per_rank, 2)
        full_stages = full("pipeline") * stages_per_rank
        return cls(ranks("tensor"), expert, stages, full("tensor"), full_stages)


def shrink_model(config: Config, splits: SmallSplits) -> ModelConfig:
    """The small model. Dropout is 0, because another layout draws other masks."""
    given, model = config.model, deepcopy(config.model)
    _shrink_attention(model, given)
    _shrink_delta(model, splits)
    _shrink_heads(model, given, splits)
    _shrink_mixture(model, given.moe, splits)
    model.layers = _layers(config, model, splits)
    model.sequence_length = LENGTH
    is_padded = given.padded_vocab_size > given.vocab_size
    model.vocab_size, model.vocab_multiple = VOCABULARY - 3 * is_padded, 4
    model.ffn_hidden = WIDTH
    model.dropout = 0.0
    # With little width, the usual deviation would leave attention without a gradient to compare.
    model.init, model.init_std = "gpt2", 0.2
    if model.rotary_scaling is not None:
        length = model.rotary_scaling.original_length
        model.rotary_scaling.original_length = max(1, length * LENGTH // given.sequence_length)
    return model


def _shrink_attention(model: ModelConfig, given: ModelConfig) -> None:
    attention = model.attention
    if attention.window is not None and attention.window < given.sequence_length:
        attention.window = max(3, attention.window * LENGTH // given.sequence_length)
    elif attention.window is not None:
        attention.window = LENGTH
    if attention.global_every is not None:
        attention.global_every = min(attention.global_every, 2)
    if attention.no_rotary_every is not None:
        attention.no_rotary_every = min(attention.no_rotary_every, 3)
    if attention.latent is not None:
        latent = attention.latent
        latent.query = None if latent.query is None else 12
        latent.key_value, latent.rope_size, latent.nope_size, latent.value_size = 8, 4, 4, 6


def _shrink_delta(model: ModelConfig, splits: SmallSplits) -> None:
    """Of blocks of the same kind that follow each other in the pattern one stays."""
    delta, pattern = model.attention.delta, model.attention.pattern
    model.attention.pattern = [kind for kind, _ in groupby(pattern)]
    if delta is None:
        return
    is_shared, is_narrow = delta.value_heads > delta.key_heads, delta.value_size < delta.key_size
    delta.key_heads = max(2, splits.tensor)
    delta.value_heads = delta.key_heads * (2 if is_shared else 1)
    delta.key_size, delta.value_size = HEAD, HEAD - 2 if is_narrow else HEAD
    delta.convolution = min(delta.convolution, 4)
    # A result that is near 0, because a query is orthogonal to the keys, is normalized: this
    # amplifies rounding.
    model.norm_eps = max(model.norm_eps, 0.01)


def _shrink_heads(model: ModelConfig, given: ModelConfig, splits: SmallSplits) -> None:
    """Key heads stay as many as query heads, fewer, one, or fewer than tensor ranks."""
    tensor, kv_heads = splits.tensor, given.num_kv_heads
    model.heads = max(4, 2 * tensor)
    if kv_heads == given.heads:
        model.kv_heads = None if given.kv_heads is None else model.heads
    elif kv_heads < splits.full_tensor:
        model.kv_heads = max(1, tensor // 2)
    else:
        model.kv_heads = 1 if kv_heads == 1 else max(2, tensor)
    own = given.head_size is not None and given.head_size * given.heads != given.hidden
    model.hidden = HEAD * model.heads
    if given.attention.latent is None and own:
        model.head_size, model.hidden = HEAD, model.hidden - HEAD
    elif given.head_size is not None:
        model.head_size = HEAD
    scaling = model.scaling
    if scaling is not None:
        scaling.base_hidden = model.hidden // 2
        scaling.base_layers = None if scaling.base_layers is None else 2
        scaling.base_head_size = None if scaling.base_head_size is None else HEAD


def _shrink_mixture(model: ModelConfig, given: MoEConfig | None, splits: SmallSplits) -> None:
    moe = model.moe
    if moe is None or given is None:
        return
    moe.experts = max(8, 2 * splits.expert)
    moe.active = min(given.active, 3)
    moe.ffn_hidden = 24
    moe.every, moe.first = min(given.every, 2), min(given.first, 1)
    moe.shared_experts = min(given.shared_experts, 2)
    groups = moe.groups
    if given.groups.number > 1:
        groups.number = 4
        groups.active = min(given.groups.active, 2) if given.groups.active < groups.number else 4
        groups.active = max(groups.active, -(-moe.active * groups.number // moe.experts))
        groups.best = min(given.groups.best, moe.experts // groups.number)
    # Large enough that an error of a loss is far above the rounding of the gradient.
    moe.loss_coefficient = max(moe.loss_coefficient, 0.02)
    moe.z_loss = max(moe.z_loss, 0.01) if moe.z_loss else 0.0
    moe.bias_rate = max(moe.bias_rate, 0.01)


def _layers(config: Config, model: ModelConfig, splits: SmallSplits) -> int:
    """Blocks: one period of all kinds, at least one for each stage, uneven stages if they were."""
    if splits.stages > 1 and config.parallel.layers:
        return sum(small_stages(config.parallel.layers, splits.stages))
    moe, stages = model.moe, splits.stages
    period = lcm(model.attention.period, 1 if moe is None else moe.every)
    layers = max(2, period + (0 if moe is None else moe.first), stages)
    is_uneven = config.model.layers % splits.full_stages != 0
    return layers + (is_uneven and layers % stages == 0)


def small_stages(layers: list[int], stages: int) -> list[int]:
    """Blocks of a few stages: 1 for stages with fewer blocks than the largest, else 2. The first
    and the last one stay what they were."""
    picked = [layers[round(i * (len(layers) - 1) / (stages - 1))] for i in range(stages)]
    return [1 if count < max(layers) else 2 for count in picked]
