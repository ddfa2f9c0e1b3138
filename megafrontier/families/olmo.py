"""OLMo-2 and OLMo-3: norms after attention and MLP, and of all queries and all keys."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    FULL,
    SLIDING,
    HFConfigReader,
    Rope,
    layer_types,
    written_layer_ropes,
)
from megafrontier.families.llama import SCALINGS, Llama


class OLMo2(Llama):
    """`Olmo2ForCausalLM`."""

    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "norm_position": ("after",),
        "qk_norm": ("full",),
        "mlp.bias": (False,),
    }
    norms: ClassVar[dict[str, str]] = {
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Its norms."""
        reader.one_of("mlp_bias", False, False)
        model.norm_position, model.qk_norm = "after", "full"
        return model


class OLMo3(OLMo2):
    """`Olmo3ForCausalLM`: windows in three of four layers, whose frequencies are not scaled."""

    architecture = "Olmo3ForCausalLM"
    model_type = "olmo3"
    defaults: ClassVar[dict[str, float]] = OLMo2.defaults | {
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = OLMo2.allowed | {
        "attention.window": None,
        "attention.global_every": None,
        "attention.window_rotary_base": None,
    }
    period = 4
    """The default of every how many layers one has no window."""

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The windows, and the rotary settings of both types of layers."""
        return {
            # transformers makes a mask of windows even if no layer has one, and needs a number.
            "sliding_window": config.attention.window or self.defaults["sliding_window"],
            "layer_types": layer_types(config),
            "rope_parameters": written_layer_ropes(config),
        }

    def rope(self, reader: HFConfigReader) -> Rope:
        """Those of layers without a window."""
        base = self.defaults["rope_theta"]
        return reader.rope(
            "rope_theta", "partial_rotary_factor", 1.0, *SCALINGS, base=base, layers=FULL
        )

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Also the windows."""
        model = super().own_model(reader, model)
        types = [SLIDING if (i + 1) % self.period else FULL for i in range(model.layers)]
        window = reader.optional("sliding_window", self.defaults["sliding_window"])
        reader.set_windows(model, window, *types)
        reader.set_window_rope(model, "rope_theta", self.defaults["rope_theta"], *SCALINGS)
        return model
