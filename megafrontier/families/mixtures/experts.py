"""Mixtures of experts with Llama's blocks: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.families.base import Constraint, HFConfigReader, ParamMapping, same
from megafrontier.families.llama import Llama, gated_mlp
from megafrontier.model.moe.layer import has_experts


class LlamaExperts(Llama):
    """What the families have in common. They differ in attention and in names."""

    qk_norm: Literal["none", "head", "full"] = "none"
    has_shared = has_qkv_bias = False
    normalises_scores = False
    """The default of `norm_topk_prob`."""
    width_key, count_key = "moe_intermediate_size", "num_experts"
    """Keys of config.json: the width and the number of experts."""
    module, projections = "mlp", ("gate_proj", "up_proj", "down_proj")
    """Names of tensors: the mixture in a block, and the matrices of an expert."""

    def matches(self, config: ModelConfig) -> bool:
        """Its norm of queries and keys, and shared experts if it has them."""
        moe = config.moe
        if moe is None or self.has_shared or moe.shared_experts:
            return moe is not None and self.has_shared and moe.shared_experts > 0
        return config.qk_norm == self.qk_norm

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Routing by softmax, without biases or groups."""
        moe, no = experts_of(config), (False,)
        more: dict[str, Sequence[Any] | None] = {
            "qk_norm": (self.qk_norm,),
            "qkv_bias": None if self.has_qkv_bias else no,
            "attention.out_bias": no,
            "mlp.bias": no,
            "moe": None,
        }
        return [
            *self._constraints(config, more),
            *plain_routing(moe),
            *expert_biases(moe, False),
            Constraint("moe.shared_experts", moe.shared_experts > 0, (self.has_shared,)),
            Constraint("moe.shared_gate", moe.shared_gate, (self.has_shared,)),
            *self.own_constraints(moe),
        ]

    def own_constraints(self, moe: MoEConfig) -> list[Constraint]:
        """Those of this family alone."""
        return []

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of Llama and of the experts."""
        moe, keys = experts_of(config), super().write_config(config)
        del keys["mlp_bias"]
        return keys | {
            self.width_key: expert_width(config),
            self.count_key: moe.experts,
            "num_experts_per_tok": moe.active,
            "norm_topk_prob": moe.normalise,
            "router_aux_loss_coef": moe.loss_coefficient if moe.balance == "loss" else 0.0,
            "sliding_window": None,
        }

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read the keys, with the family's defaults. Mixtures are balanced by the loss."""
        reader.one_of("use_sliding_window", False, False)
        model = self._read_common(reader, bias=False)
        own = self.defaults
        coefficient = self.number(reader, "router_aux_loss_coef")
        moe = MoEConfig(
            experts=reader.number(
                self.count_key, reader.number("num_local_experts", own["experts"])
            ),
            active=self.number(reader, "num_experts_per_tok"),
            ffn_hidden=reader.number(self.width_key, own.get(self.width_key)),
            normalise=reader.flag("norm_topk_prob", self.normalises_scores),
            balance="loss" if coefficient else "none",
            loss_coefficient=coefficient or 0.01,
        )
        return self.mixture(reader, replace(model, qk_norm=self.qk_norm, moe=moe), moe)

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """The model with what this family alone has. Raises UserError for what GPT lacks."""
        reader.one_of("attention_bias", False, False)
        return model

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's experts, or of its MLP."""
        if not has_experts(config, block):
            return super().mlp_mappings(config, block)
        name, hf_name = f"blocks.{block}.mlp", f"layers.{block}.{self.module}"
        count = experts_of(config).experts
        gate, up, down = (
            tuple(f"{hf_name}.experts.{i}.{part}.weight" for i in range(count))
            for part in self.projections
        )
        stacks = (f"{hf_name}.experts.gate_up_proj", f"{hf_name}.experts.down_proj")
        return [
            same(f"{name}.router.weight", f"{hf_name}.gate.weight"),
            _stacked_pairs(f"{name}.experts.up", gate, up, stacks[0]),
            _stacked(f"{name}.experts.down", down, stacks[1]),
        ]


class Mixtral(LlamaExperts):
    """`MixtralForCausalLM`."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    width_key, count_key = "intermediate_size", "num_local_experts"
    module, projections = "block_sparse_moe", ("w1", "w3", "w2")
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    }

    def own_constraints(self, moe: MoEConfig) -> list[Constraint]:
        """Experts in every block, with scores that add up to 1."""
        return [
            Constraint("moe.normalise", moe.normalise, (True,)),
            Constraint("moe.every", moe.every, (1,)),
        ]

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """No window, and no noise in the router."""
        length = model.sequence_length
        if reader.number("sliding_window", length) < length:
            window = reader.number("sliding_window")
            raise reader.error("sliding_window", window, f"need null, or at least {length}")
        reader.one_of("router_jitter_noise", 0.0, 0.0)
        return replace(model, moe=replace(moe, normalise=True))


class OLMoE(LlamaExperts):
    """`OlmoeForCausalLM`."""

    architecture = "OlmoeForCausalLM"
    model_type = "olmoe"
    qk_norm: Literal["none", "head", "full"] = "full"
    width_key = "intermediate_size"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
    }

    def own_constraints(self, moe: MoEConfig) -> list[Constraint]:
        """Experts in every block."""
        return [Constraint("moe.every", moe.every, (1,))]

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """Queries and keys that are not clipped."""
        reader.one_of("clip_qkv", None, None)
        return super().mixture(reader, model, moe)


class Qwen3MoE(LlamaExperts):
    """`Qwen3MoeForCausalLM`."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    qk_norm: Literal["none", "head", "full"] = "head"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    }

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Which blocks have experts."""
        return {
            "decoder_sparse_step": experts_of(config).every,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """Experts in the last of every `decoder_sparse_step` blocks."""
        reader.one_of("mlp_only_layers", [], [])
        every = reader.number("decoder_sparse_step", 1)
        return super().mixture(reader, replace(model, moe=replace(moe, every=every)), moe)


class Qwen2MoE(Qwen3MoE):
    """`Qwen2MoeForCausalLM`: shared experts with a gate, biases of queries, keys and values."""

    architecture = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    qk_norm: Literal["none", "head", "full"] = "none"
    has_shared = has_qkv_bias = True
    defaults: ClassVar[dict[str, float]] = Qwen3MoE.defaults | {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "experts": 60,
        "num_experts_per_tok": 4,
    }

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The width of the shared experts, and biases."""
        width = experts_of(config).shared_experts * expert_width(config)
        return super().own_keys(config) | {
            "shared_expert_intermediate_size": width,
            "qkv_bias": config.has_qkv_bias,
        }

    def mixture(self, reader: HFConfigReader, model: ModelConfig, moe: MoEConfig) -> ModelConfig:
        """A shared width that is a multiple of an expert's."""
        shared = self.number(reader, "shared_expert_intermediate_size")
        if shared % moe.ffn_hidden or not shared:
            fits = f"need a multiple of moe_intermediate_size ({moe.ffn_hidden})"
            raise reader.error("shared_expert_intermediate_size", shared, fits)
        count = shared // moe.ffn_hidden
        if self.has_qkv_bias:
            model = replace(model, qkv_bias=reader.flag("qkv_bias", True))
        return super().mixture(reader, model, replace(moe, shared_experts=count, shared_gate=True))

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of experts, and of the shared ones."""
        found = super().mlp_mappings(config, block)
        if has_experts(config, block):
            name, hf_name = f"blocks.{block}.mlp", f"layers.{block}.mlp"
            width = experts_of(config).shared_experts * expert_width(config)
            found += gated_mlp(f"{name}.shared", f"{hf_name}.shared_expert", width)
            found.append(same(f"{name}.shared_gate", f"{hf_name}.shared_expert_gate.weight"))
        return found


def plain_routing(moe: MoEConfig) -> list[Constraint]:
    """Routing by softmax, among all experts, from the first block on."""
    return [
        Constraint("moe.router", moe.router, ("softmax",)),
        Constraint("moe.balance", moe.balance, ("loss", "none")),
        Constraint("moe.scale", moe.scale, (1.0,)),
        Constraint("moe.groups.active", moe.groups.active, (moe.groups.number,)),
        Constraint("moe.first", moe.first, (0,)),
    ]


def expert_biases(moe: MoEConfig, has_biases: bool) -> list[Constraint]:
    """Biases in experts and routers, or none."""
    return [
        Constraint("moe.bias", moe.bias, (has_biases,)),
        Constraint("moe.router_bias", moe.router_bias, (has_biases,)),
    ]


def experts_of(config: ModelConfig) -> MoEConfig:
    """The options of the experts."""
    assert config.moe is not None
    return config.moe


def expert_width(config: ModelConfig) -> int:
    """The width inside an expert."""
    return experts_of(config).ffn_hidden or config.mlp_hidden


def _stacked(name: str, hf_names: tuple[str, ...], stack: str) -> ParamMapping:
    """A tensor of all experts, of which the family has one each, or `stack`."""

    def load(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors)) if tensors[0].dim() == 2 else tensors[0]

    return ParamMapping(name, hf_names, lambda t: t.unbind(), load, (stack,))


def _stacked_pairs(
    name: str, gate: tuple[str, ...], up: tuple[str, ...], stack: str
) -> ParamMapping:
    """`_stacked`, with the rows of two of the family's tensors for each expert."""

    def export(tensor: Tensor) -> Sequence[Tensor]:
        gates, ups = tensor.chunk(2, 1)
        return [*gates.unbind(), *ups.unbind()]

    def load(tensors: Sequence[Tensor]) -> Tensor:
        if tensors[0].dim() == 3:
            return tensors[0]
        gates, ups = tensors[: len(gate)], tensors[len(gate) :]
        return torch.cat([torch.stack(list(gates)), torch.stack(list(ups))], 1)

    return ParamMapping(name, (*gate, *up), export, load, (stack,))
