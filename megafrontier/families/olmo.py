"""OLMo-2: norms after attention and MLP, and of all queries and all keys."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megafrontier.config import ModelConfig
from megafrontier.families.base import HFConfigReader
from megafrontier.families.llama import Llama


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
