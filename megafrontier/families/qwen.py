"""Qwen2, Qwen2.5 and Qwen3, dense."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megafrontier.config import ModelConfig
from megafrontier.families.base import FULL, SLIDING, Constraint, HFConfigReader, layer_types
from megafrontier.families.llama import Llama


class Qwen2(Llama):
    """`Qwen2ForCausalLM`, of Qwen2 and Qwen2.5: biases of queries, keys and values alone."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "mlp.bias": (False,),
        "attention.window": None,
        "attention.global_every": None,
    }

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Its biases, and heads that together have the hidden width."""
        plain = (config.hidden / config.heads,)
        own = {"qkv_bias": (True,), "attention.out_bias": (False,), "head_size": plain}
        return self._constraints(config, {**own})

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The windows."""
        window = config.attention.window
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": config.layers if window is None else 0,
            "layer_types": layer_types(config),
        }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The windows and biases."""
        model.bias, model.qkv_bias = False, True
        return self._with_windows(reader, model)

    def _with_windows(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        reader.one_of("mlp_bias", False, False)
        if reader.flag("use_sliding_window", False):
            first = reader.number("max_window_layers", 28)
            default = [SLIDING if i >= first else FULL for i in range(model.layers)]
            window = reader.optional("sliding_window", 4096)
            reader.set_windows(model, window, *default)
        return model


class Qwen3(Qwen2):
    """`Qwen3ForCausalLM`: norms of each head's queries and keys."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    defaults: ClassVar[dict[str, float]] = Qwen2.defaults | {"head_dim": 128}
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = Qwen2.allowed | {"qk_norm": ("head",)}

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Its norms. Biases of all projections of attention, or of none."""
        return self._constraints(config, {})

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The windows and norms."""
        model.qk_norm = "head"
        return self._with_windows(reader, model)
