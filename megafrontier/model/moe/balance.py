"""How many tokens the experts of a model get, and what follows from that after each step."""

import torch
from torch import Tensor

from megafrontier.config import MoEConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.moe.layer import MoE


class Balance:
    """The routers of a model, or of a stage's part of it.

    Each router counts the tokens of this rank's forwards. After a step the counts of all ranks are
    summed, and every rank updates its routers' buffers with the same numbers.
    """

    def __init__(self, model: GPT, moe: MoEConfig, layers: int, ranks: int = 1) -> None:
        """layers: blocks of the whole model. ranks: that share the experts of a block."""
        self._moe, self._layers, self._ranks = moe, moe.blocks(layers), ranks
        self._modules = {
            moe.blocks(module.number): module
            for module in model.modules()
            if isinstance(module, MoE)
        }
        self._predicting = {*(model.prediction.modules() if model.prediction else ())}

    @property
    def has_losses(self) -> bool:
        """Whether the routers have losses."""
        return self._moe.balance == "loss" or self._moe.z_loss > 0

    def scale_losses(self, scale: Tensor, counts: Tensor) -> None:
        """Multiply the losses of the routers by `scale` [], as the model's loss is, and make them
        means over the tokens of the global batch where the step divides by its targets.

        counts: float64 [3], the sums of `pipeline.work.count_routed` over the global batch.
        """
        targets, *tokens = counts.unbind()
        by_blocks, by_prediction = ((scale * targets / n.clamp(min=1)).float() for n in tokens)
        for module in self._modules.values():
            is_predicting = module in self._predicting
            module.router.loss_scale = by_prediction if is_predicting else by_blocks

    def take(self, device: torch.device) -> Tensor:
        """What this rank has counted since the last call, to be summed over all ranks: float64
        [layers · (experts + 1)], for each layer the tokens of each expert and the sum of the
        tokens' entropies. Zeros for the layers of other ranks."""
        counts = torch.zeros(
            self._layers, self._moe.experts + 1, dtype=torch.float64, device=device
        )
        for number, module in self._modules.items():
            tokens, entropy = module.router.statistics.take()
            if tokens is not None and entropy is not None:
                counts[number] = torch.cat([tokens.double(), entropy[None]])
        return counts.flatten()

    def update(self, counts: Tensor, skip: Tensor) -> dict[str, Tensor]:
        """Update the routers' buffers by the sums of `take` over all ranks, unless `skip` [] is 1.

        Returns the step's metrics, of all layers with experts:

        expert_tokens: tokens of each expert, summed over layers [experts].
        expert_imbalance: for each layer, the tokens of the fullest expert over the mean.
        expert_rank_imbalance: the same of the ranks that share the experts.
        router_entropy: for each layer, the mean entropy in nats of a token's probabilities.
        dropped_tokens: 0.
        """
        values = counts.view(self._layers, -1)
        tokens, entropies = values[:, :-1], values[:, -1]
        for number, module in self._modules.items():
            module.router.update(tokens[number], skip)
        total = tokens.sum(-1).clamp(min=1)
        by_rank = tokens.unflatten(-1, (self._ranks, -1)).sum(-1)
        return {
            "expert_tokens": tokens.sum(0),
            "expert_imbalance": tokens.amax(-1) * self._moe.experts / total,
            "expert_rank_imbalance": by_rank.amax(-1) * self._ranks / total,
            "router_entropy": entropies * self._moe.active / total,
            "dropped_tokens": torch.zeros_like(total[0]),
        }
