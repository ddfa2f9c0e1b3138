"""Qwen3-Next and Qwen3.5 (text): gated delta attention in most blocks, and softmax attention with
an output gate in the others."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megafrontier.config import DeltaConfig, ModelConfig, MoEConfig
from megafrontier.families.base import (
    FULL,
    HFConfigReader,
    ParamMapping,
    same,
    written_part_rope,
)
from megafrontier.families.llama import Llama, attention_names, packed
from megafrontier.families.mixtures.experts import Qwen2MoE

LINEAR = "linear_attention"
"""The type of layers with gated delta attention."""
_DELTA_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "convolution": "linear_conv_kernel_dim",
}
"""Our keys of `model.attention.delta`, and those of config.json."""
_QWEN: dict[str, float] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


class Hybrid(Llama):
    """What families with gated delta attention have in common."""

    ignored: tuple[str, ...] = (
        "mtp.",
    )  # a block with softmax attention that predicts the token after the next
    has_gate = True
    """Whether softmax attention has an output gate, whose rows lie after those of the head."""
    delta_names: ClassVar[dict[str, str]] = {
        "norm.weight": "norm.weight",
        "out.weight": "out_proj.weight",
    }

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The types of layers, and the sizes of delta attention."""
        attention = config.attention
        kinds = [attention.kind_of(i) for i in range(config.layers)]
        found = {"layer_types": [LINEAR if kind == "delta" else FULL for kind in kinds]}
        if attention.delta is not None:
            found |= {key: getattr(attention.delta, ours) for ours, key in _DELTA_KEYS.items()}
        return super().own_keys(config) | found

    def set_pattern(self, reader: HFConfigReader, model: ModelConfig) -> None:
        """Set the kinds of attention of the blocks. Raises UserError for other types of layers."""
        interval = reader.number("full_attention_interval", 4)
        default = [LINEAR if (i + 1) % interval else FULL for i in range(model.layers)]
        types = reader.sequence("layer_types", default)
        if len(types) != model.layers or not set(types) <= {LINEAR, FULL}:
            fits = f"need {LINEAR} or {FULL} for each of {model.layers} layers"
            raise reader.error("layer_types", types, fits)
        if LINEAR not in types:
            return
        periods = range(1, len(types) + 1)
        period = next(n for n in periods if all(t == types[i % n] for i, t in enumerate(types)))
        model.attention.pattern = ["delta" if t == LINEAR else "full" for t in types[:period]]
        model.attention.delta = self.delta_sizes(reader, model)

    def delta_sizes(self, reader: HFConfigReader, model: ModelConfig) -> DeltaConfig:
        """The sizes of delta attention."""
        return DeltaConfig(**{ours: self.number(reader, key) for ours, key in _DELTA_KEYS.items()})

    def attention_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's attention, of either kind."""
        name, hf_name = attention_names(block)
        if config.attention.kind_of(block) != "delta":
            found = super().attention_mappings(config, block)
            return [_gated_queries(config, block), *found[2:]] if self.has_gate else found
        assert config.attention.delta is not None
        hf_name = hf_name.replace("self_attn", "linear_attn")
        return [
            *self.delta_inputs(config.attention.delta, f"{name}.inputs", hf_name),
            self.convolution(config.attention.delta, f"{name}.convolution", hf_name),
            same(f"{name}.log_decay", f"{hf_name}.A_log"),
            same(f"{name}.step_bias", f"{hf_name}.dt_bias"),
            *(same(f"{name}.{our}", f"{hf_name}.{hf}") for our, hf in self.delta_names.items()),
        ]

    def delta_inputs(self, delta: DeltaConfig, name: str, hf_name: str) -> list[ParamMapping]:
        """Those of the projections before delta attention."""
        rows = {"qkv": sum(delta.mixed), "z": delta.mixed[-1], "b": delta.value_heads}
        rows["a"] = delta.value_heads
        return packed(name, {f"{hf_name}.in_proj_{part}": n for part, n in rows.items()})

    def convolution(self, delta: DeltaConfig, name: str, hf_name: str) -> ParamMapping:
        """That of the convolution."""
        weight = f"{hf_name}.conv1d.weight"
        return ParamMapping(name, (weight,), lambda t: (t[:, None],), lambda ts: ts[0].squeeze(1))


class Qwen35(Hybrid):
    """`Qwen3_5ForCausalLM`, the text model of Qwen3.5, dense."""

    ignored: tuple[str, ...] = (*Hybrid.ignored, "visual.")
    architecture = "Qwen3_5ForCausalLM"
    model_type = "qwen3_5_text"
    rotating = 0.25
    defaults: ClassVar[dict[str, float]] = _QWEN | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "vocab_size": 248320,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "qk_norm": ("head",),
        "norm_unit_offset": (True,),
        "rotary_fraction": None,
        "attention.output_gate": (True,),
        "attention.pattern": None,
        "attention.delta": None,
        "qkv_bias": (False,),
        "attention.out_bias": (False,),
        "mlp.bias": (False,),
    }

    def matches(self, config: ModelConfig) -> bool:
        """An output gate, or delta attention."""
        attention = config.attention
        return attention.output_gate or attention.delta is not None

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Also the rotating fraction."""
        return super().own_keys(config) | written_part_rope(config)

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Its norms, the output gate and the kinds of attention."""
        for key in ("attention_bias", "mlp_bias"):
            reader.one_of(key, False, False)
        reader.one_of("attn_output_gate", True, True)
        model.qk_norm, model.norm_unit_offset = "head", True
        model.attention.output_gate = True
        self.set_pattern(reader, model)
        return model


class Qwen3Next(Qwen35, Qwen2MoE):
    """`Qwen3NextForCausalLM`: experts, and projections before delta attention with their rows by
    heads of keys."""

    architecture = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    qk_norm: Literal["none", "head", "full"] = "head"
    has_qkv_bias = False
    normalises_scores = True
    defaults: ClassVar[dict[str, float]] = _QWEN | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
        "experts": 512,
        "num_experts_per_tok": 10,
        "router_aux_loss_coef": 0.001,
    }

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """As Qwen2-MoE, and what Qwen3.5 has."""
        return self.own_model(reader, super().mixture(reader, model, moe))

    def delta_inputs(self, delta: DeltaConfig, name: str, hf_name: str) -> list[ParamMapping]:
        """One of queries, keys, values and output gates, and one of strengths and steps."""
        order, back = _by_kind(delta), _by_kind(delta).argsort()
        wide = len(order) - 2 * delta.value_heads

        def load(tensors: Sequence[Tensor]) -> Tensor:
            rows = torch.cat(list(tensors))
            if len(rows) != len(order):
                raise ValueError(f"{len(rows)} rows, not {len(order)}")
            return rows[order]

        names = tuple(f"{hf_name}.in_proj_{part}.weight" for part in ("qkvz", "ba"))
        sizes = [wide, len(order) - wide]
        return [ParamMapping(f"{name}.weight", names, lambda t: t[back].split(sizes), load)]


class Qwen35MoE(Qwen3Next):
    """`Qwen3_5MoeForCausalLM`, the text model of Qwen3.5 with experts. It is a Qwen3-Next with
    other names and layouts of tensors, and is exported as one."""

    architecture = "Qwen3_5MoeForCausalLM"
    model_type = "qwen3_5_moe_text"
    defaults: ClassVar[dict[str, float]] = Qwen3Next.defaults | {
        "num_hidden_layers": 40,
        "vocab_size": 248320,
        "experts": 256,
        "num_experts_per_tok": 8,
    }

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """Experts in every block, with scores that add up to 1."""
        reader.one_of("norm_topk_prob", True, True)
        reader.one_of("decoder_sparse_step", 1, 1)
        return super().mixture(reader, model, moe)

    def delta_inputs(self, delta: DeltaConfig, name: str, hf_name: str) -> list[ParamMapping]:
        """Those of the dense model."""
        return Hybrid.delta_inputs(self, delta, name, hf_name)


def _gated_queries(config: ModelConfig, block: int) -> ParamMapping:
    """Queries, keys and values. Behind the rows of each head of queries, the family has those of
    its output gate."""
    (name, hf_name), shape = attention_names(block), (config.heads, 2, config.head_dim)
    inner, kv_inner = (count * config.head_dim for count in (config.heads, config.num_kv_heads))

    def export(tensor: Tensor) -> Sequence[Tensor]:
        query, key, value, gate = tensor.split([inner, kv_inner, kv_inner, inner])
        heads = (part.unflatten(0, (config.heads, -1)) for part in (query, gate))
        return torch.stack(list(heads), 1).flatten(0, 2), key, value

    def load(tensors: Sequence[Tensor]) -> Tensor:
        query, gate = tensors[0].unflatten(0, shape).unbind(1)
        return torch.cat([query.flatten(0, 1), *tensors[1:], gate.flatten(0, 1)])

    names = tuple(f"{hf_name}.{part}_proj.weight" for part in "qkv")
    return ParamMapping(f"{name}.qkv.weight", names, export, load)


def _by_kind(delta: DeltaConfig) -> Tensor:
    """The row of the family's two matrices, one below the other, for each of our rows: theirs have
    a part of each kind for each head of keys."""
    sharing = delta.value_heads // delta.key_heads
    values = sharing * delta.value_size
    wide = [delta.key_size, delta.key_size, values, values]
    rows = torch.arange(delta.key_heads * sum(wide)).view(delta.key_heads, -1)
    gates = rows.numel() + torch.arange(2 * delta.value_heads).view(delta.key_heads, -1)
    parts = (*rows.split(wide, 1), *gates.split(sharing, 1))
    return torch.cat([part.flatten() for part in parts])
