"""gpt-oss: experts with biases and a clipped gate, sinks, and windows in every other layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megafrontier.config import AttentionConfig, ModelConfig, MoEConfig
from megafrontier.families.base import (
    FULL,
    SLIDING,
    Constraint,
    HFConfigReader,
    ParamMapping,
    Rope,
    layer_types,
    same,
)
from megafrontier.families.llama import Activation, attention_names
from megafrontier.families.mixtures.experts import (
    LlamaExperts,
    expert_biases,
    experts_of,
    plain_routing,
)
from megafrontier.model.kernels.gates import LIMIT, SLOPE


class GptOss(LlamaExperts):
    """`GptOssForCausalLM`. Experts in MXFP4, as in the published files, are read as bf16."""

    architecture = "GptOssForCausalLM"
    model_type = "gpt_oss"
    width_key, count_key = "intermediate_size", "num_local_experts"
    activations: ClassVar[dict[Activation, tuple[str, ...]]] = {"swiglu_clipped": ("silu", "swish")}
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 128,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "attention.sinks": (True,),
        "attention.window": None,
        "attention.global_every": None,
        "moe": None,
    }

    def matches(self, config: ModelConfig) -> bool:
        """Experts with biases, or sinks."""
        moe = config.moe
        return config.attention.sinks or (moe is not None and (moe.bias or moe.router_bias))

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Biases of all projections of attention, or of none."""
        moe = experts_of(config)
        return [
            *self._constraints(config, {}),
            *plain_routing(moe),
            *expert_biases(moe, True),
            Constraint("moe.normalise", moe.normalise, (True,)),
            Constraint("moe.every", moe.every, (1,)),
            Constraint("moe.shared_experts", moe.shared_experts, (0,)),
        ]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Also the windows. transformers makes a mask of windows even if no layer has one."""
        return super().write_config(config) | {
            "sliding_window": config.attention.window or self.defaults["sliding_window"],
            "layer_types": layer_types(config),
            "swiglu_alpha": SLOPE,
            "swiglu_limit": LIMIT,
        }

    def rope(self, reader: HFConfigReader) -> Rope:
        """As Llama's, but needed."""
        reader.need_rope()
        return super().rope(reader)

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """Biases, sinks and windows, and weights that are plain or in MXFP4."""
        packed = reader.inner("quantization_config")
        if packed is not None:
            packed.one_of("quant_method", None, "mxfp4")
        reader.one_of("swiglu_alpha", SLOPE, SLOPE)
        reader.one_of("swiglu_limit", LIMIT, LIMIT)
        bias = reader.flag("attention_bias", True)
        moe = replace(moe, normalise=True, bias=True, router_bias=True)
        attention = AttentionConfig(sinks=True)
        model = replace(model, bias=bias, attention=attention, moe=moe)
        types = [FULL if i % 2 else SLIDING for i in range(model.layers)]
        window = reader.optional("sliding_window", self.defaults["sliding_window"])
        reader.set_windows(model, window, *types)
        return model

    def attention_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Also the sinks."""
        name, hf_name = attention_names(block)
        sinks = same(f"{name}.sinks", f"{hf_name}.sinks")
        return [*super().attention_mappings(config, block), sinks]

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of experts. Theirs have a row for each input, and the columns of gate and up in
        turn."""
        name, hf_name = f"blocks.{block}.mlp", f"layers.{block}.mlp"
        ours, theirs = f"{name}.experts", f"{hf_name}.experts"
        return [
            same(f"{name}.router.weight", f"{hf_name}.router.weight"),
            same(f"{name}.router.logit_bias", f"{hf_name}.router.bias"),
            _mapping(f"{ours}.up", f"{theirs}.gate_up_proj", _in_turn, _apart),
            same(f"{ours}.down_bias", f"{theirs}.down_proj_bias"),
            _mapping(f"{ours}.down", f"{theirs}.down_proj", _transposed, _transposed),
            ParamMapping(
                f"{ours}.up_bias",
                (f"{theirs}.gate_up_proj_bias",),
                lambda t: (_in_turn(t[..., None])[:, 0],),
                lambda ts: _apart(ts[0][:, None])[..., 0],
            ),
        ]


def _mapping(
    name: str, hf_name: str, export: Callable[[Tensor], Tensor], load: Callable[[Tensor], Tensor]
) -> ParamMapping:
    return ParamMapping(name, (hf_name,), lambda t: (export(t),), lambda ts: load(ts[0]))


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _in_turn(tensor: Tensor) -> Tensor:
    """Rows of gates, then of ups [experts, 2 · width, hidden] → columns in turn [experts, hidden,
    2 · width]."""
    return torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2).transpose(1, 2)


def _apart(tensor: Tensor) -> Tensor:
    """The inverse of `_in_turn`."""
    rows = tensor.transpose(1, 2)
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
