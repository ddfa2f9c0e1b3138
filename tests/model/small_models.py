"""Small models of each family, with weights far enough from 0 for differences to show."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megafrontier.config import (
    AttentionConfig,
    DeltaConfig,
    LatentConfig,
    MLPConfig,
    ModelConfig,
    PredictionConfig,
    RotaryScalingConfig,
)
from megafrontier.model.gpt import GPT

SMALL = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "sequence_length": 24,
    "vocab_size": 50,
    "vocab_multiple": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "tie_embeddings": True},
    "gpt2 untied, exact gelu, odd width": {"ffn_hidden": 40, "norm_eps": 0.01},
    "neox": {
        "position": "rotary",
        "rotary_fraction": 0.25,
        "parallel_residual": True,
        "norm_eps": 0.01,
    },
    "neox sequential, tied, half rotary": {
        "position": "rotary",
        "rotary_fraction": 0.5,
        "tie_embeddings": True,
        "activation": "gelu_tanh",
    },
    "llama": {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False},
    "llama grouped, tied, longer texts": {
        "position": "rotary",
        "rotary_scaling": RotaryScalingConfig(8.0, 1.0, 4.0, 32),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "kv_heads": 2,
        "tie_embeddings": True,
    },
    "llama one kv head, biases, wide heads, other base": {
        "position": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "kv_heads": 1,
        "head_size": 16,
        "rotary_base": 500000.0,
        "norm_eps": 0.1,
        "vocab_multiple": 1,
    },
}
GEMMA: dict[str, Any] = {
    "layers": 3,
    "position": "rotary",
    "norm": "rmsnorm",
    "norm_position": "both",
    "norm_unit_offset": True,
    "activation": "geglu_tanh",
    "bias": False,
    "kv_heads": 2,
    "qk_norm": "head",
    "tie_embeddings": True,
    "scale_embedding": True,
    "logit_softcap": 5.0,
    "attention": AttentionConfig(
        window=7, global_every=2, window_rotary_base=100.0, softcap=3.0, scale=0.3, sinks=True
    ),
}
"""What Gemma 2, Gemma 3 and gpt-oss have, in one model."""
OLMO: dict[str, Any] = {
    "layers": 3,
    "position": "rotary",
    "norm": "layernorm",
    "norm_position": "after",
    "norm_bias": False,
    "kv_heads": 2,
    "qk_norm": "full",
    "activation": "geglu",
    "bias": False,
    "rotary_scaling": RotaryScalingConfig(
        4.0, original_length=8, kind="yarn", query_growth=0.4, truncate=False
    ),
    "attention": AttentionConfig(window=5, no_rotary_every=2, sinks=True, out_bias=True),
    "mlp": MLPConfig(bias=True),
}
"""Norms after attention and MLP as in OLMo-2, layers without rotary positions, and YaRN with
queries that grow as in Ministral 3."""

LATENT: dict[str, Any] = SHAPES["llama"] | {
    "attention": AttentionConfig(latent=LatentConfig(None, 12, 4, 6, 8))
}
"""Multi-head latent attention as in DeepSeek-V2-Lite."""
LATENT_QUERIES: dict[str, Any] = SHAPES["llama"] | {
    "attention": AttentionConfig(latent=LatentConfig(16, 12, 4, 6, 8))
}
"""The same as in DeepSeek-V2 and V3."""

DELTA: dict[str, Any] = SHAPES["llama"] | {
    "attention": AttentionConfig(
        pattern=["delta", "full"],
        delta=DeltaConfig(
            2, 4, 8, 6, negative_eigenvalues=True, norm_position="after", norm_eps=0.01
        ),
        output_gate=True,
    )
}
"""A hybrid of gated delta attention and softmax attention, with what Qwen3-Next and Olmo Hybrid
have."""
DELTA_WINDOWS: dict[str, Any] = GEMMA | {
    "layers": 4,
    "attention": replace(
        GEMMA["attention"], pattern=["delta", "full", "full"], delta=DELTA["attention"].delta
    ),
}
"""Gated delta attention, attention to all tokens and within a window, in blocks of one model."""

PREDICTION: dict[str, Any] = {"prediction": PredictionConfig(0.5)}


def small_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def filled(config: ModelConfig, seed: int = 0, **options: Any) -> GPT:
    """A model in eval mode whose every parameter, biases and norms too, is random."""
    model = GPT(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model.eval()


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    return small_config


@pytest.fixture
def make_model() -> Callable[..., GPT]:
    return filled


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> ModelConfig:
    """One configuration after another of every family."""
    return small_config(**request.param)


@pytest.fixture
def tokens() -> torch.Tensor:
    """Token ids [2, 24]."""
    return torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(1))
