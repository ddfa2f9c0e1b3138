"""The options of muP and CompleteP."""

from dataclasses import dataclass
from typing import Literal

from megafrontier.common.errors import need
from megafrontier.config.fields import bounded, count


@dataclass
class ScalingConfig:
    """See `docs/scaling.md`."""

    name: Literal["mup", "completep"] = "completep"
    """completep: `optimizer.lr` and `optimizer.weight_decay` that are good for the base model are
    good for every width and depth (Dey et al. 2025, arXiv:2505.01618). mup: for every width (Yang
    et al. 2022, arXiv:2203.03466)."""
    base_hidden: int | None = count(None)
    """Width (`model.hidden`) of the base model. Always needed."""
    base_layers: int | None = count(None)
    """completep: depth (`model.layers`) of the base model. Always needed."""
    base_head_size: int | None = count(None)
    """Width of one head of the base model. Default: that of this model, so that wider models have
    more heads."""
    embedding_multiplier: float = bounded(1.0, above=0)
    """Factor of the embedding's output, the same for every size."""
    output_multiplier: float = bounded(1.0, above=0)
    """Factor of the logits, the same for every size."""


def check_scaling(scaling: ScalingConfig) -> None:
    """Raises UserError for a base model that the scaling's name does not fit."""
    key, layers = "model.scaling", scaling.base_layers
    fits = "need model.{} of the base model"
    hidden = scaling.base_hidden
    need(hidden is not None, f"{key}.base_hidden", "null", fits.format("hidden"))
    if scaling.name == "mup":
        need(layers is None, f"{key}.base_layers", layers, f"need null, or {key}.name=completep")
    else:
        need(
            layers is not None, f"{key}.base_layers", "null", "need model.layers of the base model"
        )
