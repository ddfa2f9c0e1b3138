"""Small mixtures of experts."""

from typing import Any

from megafrontier.config import AttentionConfig, DeltaConfig, LatentConfig, MoEConfig
from megafrontier.config.model.moe import ExpertGroupsConfig
from tests.model.small_models import PREDICTION, SHAPES

LLAMA = SHAPES["llama"]


def mixture(**changes: Any) -> dict[str, Any]:
    """Changes of `small_config`: a Llama with experts in every block, which route far from evenly
    and whose balance has a large weight, so that differences show."""
    values = {"experts": 8, "active": 2, "ffn_hidden": 24, "bias_rate": 0.05} | changes
    return LLAMA | {"moe": MoEConfig(**values), "init_std": 0.2}


BIAS = mixture()
LOSS = mixture(balance="loss", loss_coefficient=0.5, z_loss=0.1, normalise=False)
SHARED = mixture(
    every=2,
    shared_experts=2,
    shared_gate=True,
    router="sigmoid",
    scale=2.0,
    groups=ExpertGroupsConfig(4, 2),
) | {"qk_norm": "head", "qkv_bias": True, "kv_heads": 2}
EMPTY = mixture(experts=16, active=1, balance="none")
"""Some experts get no token."""
HYBRID = (
    mixture(balance="none")
    | PREDICTION
    | {
        "layers": 3,
        "norm_eps": 0.1,
        "attention": AttentionConfig(
            pattern=["delta", "full", "delta"],
            delta=DeltaConfig(2, 4, 8, 6),
            latent=LatentConfig(16, 12, 4, 6, 8),
        ),
    }
)
"""Gated delta and latent attention, experts and a block of prediction. With a smaller epsilon, tiny
results of the first tokens of documents, once normalized, would be mostly rounding."""
