"""The model that Megatron's arguments describe. Checkpoints keep the arguments of their run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError, print_error
from megafrontier.config import (
    Config,
    ExpertGroupsConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RotaryScalingConfig,
    check,
)
from megafrontier.config.model.gpt import MOST_LAYERS
from megafrontier.families.base import HFConfigReader
from megafrontier.model.moe.layer import has_experts

FIXED: dict[str, Sequence[Any]] = {
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "use_legacy_models": (False,),
}
"""Arguments with which a model computes what GPT or this import lacks, and the values that can be
imported. The first is Megatron's default."""

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
_SINKS = {"vanilla": False, "learnable": True}
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing losses, all of which become `balance: loss`."""


class ArgumentReader(HFConfigReader):
    """Reads Megatron's arguments, and refuses each bad value by place, key and value."""

    def __init__(self, place: str, values: dict[str, Any]) -> None:
        super().__init__(Path(place), values)
        self.place = place

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, or `default` if it is missing or None."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise self.error(key, value, "need a whole number above 0")
        return int(value)

    def optional_count(self, key: str) -> int | None:
        """As `count`; None if it is missing or None."""
        return None if self._get(key, None) is None else self.count(key)

    def fraction(self, key: str, default: float) -> float:
        """A number, or `default` if it is missing or None."""
        return float(self.number(key, default))

    def chosen(self, key: str, names: dict[str, Any]) -> Any:
        """What we have for a value. Megatron's default is the first."""
        return names[self.one_of(key, next(iter(names)), *names)]

    def is_list(self, key: str) -> bool:
        """Whether the value is a list."""
        return isinstance(self._get(key, None), list | tuple)


def read_model(reader: ArgumentReader, vocab_size: int) -> ModelConfig:
    """The model of these arguments. Raises UserError by argument for what GPT cannot express."""
    for key, (default, *others) in FIXED.items():
        reader.one_of(key, default, default, *others)
    layers = reader.count("num_layers")
    if layers > MOST_LAYERS:  # before a list has an item for each layer
        raise reader.error("num_layers", layers, f"need at most {MOST_LAYERS}")
    is_grouped = reader.flag("group_query_attention", False)
    model = ModelConfig(
        layers=layers,
        hidden=reader.count("hidden_size"),
        heads=reader.count("num_attention_heads"),
        kv_heads=reader.count("num_query_groups", 1) if is_grouped else None,
        head_size=reader.optional_count("kv_channels"),
        ffn_hidden=reader.count("ffn_hidden_size"),
        vocab_size=vocab_size,
        norm=reader.chosen("normalization", _NORMS),
        norm_eps=reader.fraction("norm_epsilon", 1e-5),
        activation=_activation(reader),
        tie_embeddings=not reader.flag("untie_embeddings_and_output_weights", False),
        bias=reader.flag("add_bias_linear", True),
        qkv_bias=True if reader.flag("add_qkv_bias", False) else None,
        dropout=_dropout(reader),
        init_std=reader.fraction("init_method_std", 0.02),
    )
    _set_norms(reader, model)
    _set_positions(reader, model)
    _set_attention(reader, model)
    if reader.number("num_experts", 0):
        model.moe = _experts(reader, model)
    return _checked(reader, model)


def read_optimizer(reader: ArgumentReader) -> OptimizerConfig:
    """The optimizer of these arguments, of which a run logs what it changes. Raises UserError for
    another than Adam."""
    reader.one_of("optimizer", "adam", "adam")
    betas = (reader.fraction("adam_beta1", 0.9), reader.fraction("adam_beta2", 0.999))
    return OptimizerConfig(
        lr=reader.fraction("lr", 0.0),
        betas=betas,
        eps=reader.fraction("adam_eps", 1e-8),
        weight_decay=reader.fraction("weight_decay", 0.01),
    )


def _checked(reader: ArgumentReader, model: ModelConfig) -> ModelConfig:
    try:
        check(Config(model=model))
    except UserError as error:
        raise UserError(f"{reader.place}: {error}") from error
    return model


def _activation(reader: ArgumentReader) -> Any:
    """Megatron's fused GELU, which is its default, is the approximation with tanh."""
    gated, squared, is_openai = (
        reader.flag(key, False) for key in ("swiglu", "squared_relu", "openai_gelu")
    )
    if gated or squared:
        return "swiglu" if gated else "relu2"
    is_fused = reader.flag("bias_gelu_fusion", True) and reader.flag("add_bias_linear", True)
    return "gelu_tanh" if is_openai or is_fused else "gelu"


def _dropout(reader: ArgumentReader) -> float:
    """The one rate that we have, with a warning if there are two."""
    hidden, attention = (
        reader.fraction(key, 0.1) for key in ("hidden_dropout", "attention_dropout")
    )
    if hidden != attention:
        print_error(
            f"warning: attention_dropout: {attention}, imported as hidden_dropout, {hidden}, "
            "because model.dropout is one value for both"
        )
    return hidden


def _set_norms(reader: ArgumentReader, model: ModelConfig) -> None:
    is_rms = model.norm == "rmsnorm"
    for key in ("apply_layernorm_1p", "qk_layernorm"):
        if reader.flag(key, False) and not is_rms:
            raise reader.error(key, True, "need false, or normalization RMSNorm")
    model.norm_unit_offset = reader.flag("apply_layernorm_1p", False)
    model.qk_norm = "head" if reader.flag("qk_layernorm", False) else "none"


def _set_positions(reader: ArgumentReader, model: ModelConfig) -> None:
    is_rotary = reader.flag("use_rotary_position_embeddings", False)
    kind = reader.chosen("position_embedding_type", _POSITIONS)
    model.position = "rotary" if is_rotary else kind
    length = "max_position_embeddings" if model.position == "learned" else "seq_length"
    model.sequence_length = reader.count(length)
    if model.position == "learned":
        return
    model.rotary_fraction = reader.fraction("rotary_percent", 1.0)
    model.rotary_base = reader.fraction("rotary_base", 10000)
    model.rotary_scaling = _rotary_scaling(reader)
    model.attention.no_rotary_every = reader.optional_count("no_rope_freq")


def _rotary_scaling(reader: ArgumentReader) -> RotaryScalingConfig | None:
    """Llama 3.1's scaling, or linear interpolation."""
    linear = reader.optional("rotary_seq_len_interpolation_factor", None)
    if reader.flag("use_rope_scaling", False):
        if linear is not None:
            key, fits = "rotary_seq_len_interpolation_factor", "need null with use_rope_scaling"
            raise reader.error(key, linear, fits)
        return RotaryScalingConfig(factor=reader.fraction("rope_scaling_factor", 8.0))
    return None if linear is None else RotaryScalingConfig(factor=float(linear), kind="linear")


def _set_attention(reader: ArgumentReader, model: ModelConfig) -> None:
    model.attention.sinks = reader.chosen("softmax_type", _SINKS)
    window = reader.sequence("window_size", ())
    if window:
        before, after = window if len(window) == 2 else (None, None)
        if type(before) is not int or before < 0 or after != 0:
            raise reader.error("window_size", window, "need (tokens before, 0)")
        model.attention.window = before + 1
        model.attention.global_every = reader.optional_count("window_attn_skip_freq")


def _experts(reader: ArgumentReader, model: ModelConfig) -> MoEConfig:
    active = reader.count("moe_router_topk", 2)
    width = reader.count("moe_ffn_hidden_size", model.mlp_hidden)
    moe = MoEConfig(
        experts=reader.count("num_experts"),
        active=active,
        ffn_hidden=width,
        bias=model.bias,
        router=reader.one_of("moe_router_score_function", "softmax", "softmax", "sigmoid"),
        scale=reader.fraction("moe_router_topk_scaling_factor", 1.0),
        z_loss=reader.fraction("moe_z_loss_coeff", 0.0),
    )
    is_early = reader.flag("moe_router_pre_softmax", False)
    moe.normalise = active > 1 if moe.router == "sigmoid" else not is_early
    _set_blocks(reader, model.layers, moe)
    _set_shared(reader, width, moe)
    _set_groups(reader, is_early, moe)
    _set_balance(reader, moe)
    return moe


def _set_blocks(reader: ArgumentReader, layers: int, moe: MoEConfig) -> None:
    """Set `first` and `every` to those with the blocks of `moe_layer_freq`: a 1 for each block with
    experts, or a period, which begins with one."""
    key = "moe_layer_freq"
    if reader.is_list(key):
        pattern = reader.sequence(key, ())
    else:
        every = reader.count(key, 1)
        pattern = [int(i % every == 0) for i in range(layers)]
    blocks = [i for i, has in enumerate(pattern) if has]
    if blocks:
        moe.every = blocks[1] - blocks[0] if len(blocks) > 1 else layers - blocks[0]
        moe.first = max(0, blocks[0] - moe.every + 1)
    known = [int(has_experts(ModelConfig(layers=layers, moe=moe), i)) for i in range(layers)]
    if not blocks or pattern != known:
        fits = "need dense blocks first, and then experts in the last of every n"
        raise reader.error(key, pattern, fits)


def _set_shared(reader: ArgumentReader, width: int, moe: MoEConfig) -> None:
    key = "moe_shared_expert_intermediate_size"
    shared = reader.number(key, 0)
    if shared % width:
        raise reader.error(key, shared, f"need a multiple of moe_ffn_hidden_size ({width})")
    moe.shared_experts = shared // width
    moe.shared_gate = reader.flag("moe_shared_expert_gate", False)


def _set_groups(reader: ArgumentReader, is_early: bool, moe: MoEConfig) -> None:
    number = reader.number("moe_router_num_groups", 0)
    if not number:
        return
    if moe.router == "softmax" and not is_early:
        # Megatron then sums logits of a group, not scores.
        fits = "need null, moe_router_pre_softmax or the score function sigmoid"
        raise reader.error("moe_router_num_groups", number, fits)
    active = reader.count("moe_router_group_topk", 1)
    moe.groups = ExpertGroupsConfig(number, active, best=max(1, moe.active // active))


def _set_balance(reader: ArgumentReader, moe: MoEConfig) -> None:
    """The bias, or else the loss."""
    kind = reader.one_of("moe_router_load_balancing_type", "aux_loss", "none", *_LOSSES)
    coefficient = reader.fraction("moe_aux_loss_coeff", 0.0)
    moe.balance = "loss" if kind in _LOSSES and coefficient else "none"
    if moe.balance == "loss":
        moe.loss_coefficient = coefficient
    if reader.flag("moe_router_enable_expert_bias", False):
        moe.balance = "bias"
        moe.bias_rate = reader.fraction("moe_router_bias_update_rate", 0.001)
