"""Which of Megatron's tensors hold each of our parameters: tables of names and conversions.

Megatron's names are those of the module tree in its checkpoints, the same with and without
Transformer Engine. The tensors of a block are stacked over all blocks, `decoder.layers.NAME`
[layers, …], or there is one for each, `decoder.layers.3.NAME`, if blocks differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megafrontier.config import ModelConfig

Convert = Callable[[Tensor, ModelConfig], Tensor]


@dataclass(frozen=True)
class TensorRow:
    """One of our parameters, Megatron's tensor of the same elements, and the conversion."""

    name: str
    """Of a block's parameter: without `blocks.N.`."""
    keys: tuple[str, ...]
    """Megatron's names, of which a checkpoint has one. Of a block's: without `decoder.layers.`."""
    convert: Convert = lambda tensor, _: tensor


def _packed(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows [groups][queries|k|v] of heads as [queries of all groups|k of all|v of all]."""
    groups, size = config.num_kv_heads, config.head_dim
    heads = tensor.unflatten(0, (groups, config.heads // groups + 2, size))
    *queries, key, value = heads.unbind(1)
    query = torch.stack(queries, 1).flatten(0, 1)
    return torch.cat([query, key, value]).flatten(0, 1)


def _both(name: str, *keys: str, convert: Convert | None = None) -> Iterator[TensorRow]:
    """Weight and bias, for which names have a `{}`."""
    for part in ("weight", "bias"):
        found = name.format(part), tuple(key.format(part) for key in keys)
        yield TensorRow(*found) if convert is None else TensorRow(*found, convert)


OUTSIDE = (
    TensorRow("embedding.tokens.weight", ("embedding.word_embeddings.weight",)),
    TensorRow("embedding.positions.weight", ("embedding.position_embeddings.weight",)),
    *_both("head.norm.{}", "decoder.final_layernorm.{}"),
    TensorRow("head.output.weight", ("output_layer.weight",)),
)
_NORM1 = ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}")
_NORM2 = ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}")
_EXPERTS, _SHARED = "mlp.experts.experts", "mlp.shared_experts"
BLOCK = (
    *_both("norm1.{}", *_NORM1),
    *_both("attention.qkv.{}", "self_attention.linear_qkv.{}", convert=_packed),
    TensorRow("attention.query_norm.weight", ("self_attention.q_layernorm.weight",)),
    TensorRow("attention.key_norm.weight", ("self_attention.k_layernorm.weight",)),
    TensorRow("attention.sinks", ("self_attention.core_attention.softmax_offset",)),
    *_both("attention.out.{}", "self_attention.linear_proj.{}"),
    *_both("norm2.{}", *_NORM2),
    # With a gate, the halves of all tensor ranks lie together: the gate's rows, then the others.
    *_both("mlp.up.{}", "mlp.linear_fc1.{}"),
    *_both("mlp.down.{}", "mlp.linear_fc2.{}"),
    TensorRow("mlp.router.weight", ("mlp.router.weight",)),
    TensorRow("mlp.router.bias", ("mlp.router.expert_bias",)),
    TensorRow("mlp.experts.up", (f"{_EXPERTS}.linear_fc1.weight",)),
    TensorRow("mlp.experts.up_bias", (f"{_EXPERTS}.linear_fc1.bias",)),
    TensorRow("mlp.experts.down", (f"{_EXPERTS}.linear_fc2.weight",)),
    TensorRow("mlp.experts.down_bias", (f"{_EXPERTS}.linear_fc2.bias",)),
    *_both("mlp.shared.up.{}", f"{_SHARED}.linear_fc1.{{}}"),
    *_both("mlp.shared.down.{}", f"{_SHARED}.linear_fc2.{{}}"),
    TensorRow("mlp.shared_gate", (f"{_SHARED}.gate_weight",)),
)
IGNORED = ("_extra_state", "tokens_per_expert", "ga_steps", "rotary_pos_emb.inv_freq")
"""Ends of the names of tensors that have no place here, and that logits do not need."""
_BY_NAME = {row.name: row for row in (*OUTSIDE, *BLOCK)}
LAYERS = "decoder.layers."


def row_of(name: str) -> tuple[TensorRow, int | None]:
    """The row of one of our parameters or buffers, and the number of its block, if it has one."""
    _, is_block, rest = name.partition("blocks.")
    number, _, inner = rest.partition(".")
    return (_BY_NAME[inner], int(number)) if is_block else (_BY_NAME[name], None)
