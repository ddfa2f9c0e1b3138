"""DiLoCo at two sites in plain PyTorch."""

import torch

from megafrontier.data.sampling.loader import open_loader
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.param_spec import spec_of

EVERY = 2
BATCHES = (12, 4)
OUTER = {"lr": 0.7, "momentum": 0.9}


class Site:
    """A site's weights and inner optimizer, without an engine."""

    def __init__(self, config, first: int, size: int) -> None:
        self.model = GPT(config.model)
        initialise(self.model, config.run.seed)
        self._config, self._first, self._size = config, first, size
        self._samples = open_loader(config, "train", 0, 1).samples
        free = config.optimizer.no_decay
        kinds = [(spec_of(n, p).kind in free, p) for n, p in self.model.named_parameters()]
        decay = config.optimizer.weight_decay
        groups = [
            {"params": [p for is_free, p in kinds if not is_free], "weight_decay": decay},
            {"params": [p for is_free, p in kinds if is_free], "weight_decay": 0.0},
        ]
        options = config.optimizer
        self._optimizer = torch.optim.AdamW(groups, betas=tuple(options.betas), eps=options.eps)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.model.parameters()]

    def step(self, step: int) -> float:
        """Make an inner step; its loss."""
        config = self._config
        batch = self._samples.batch(sum(BATCHES) * step + self._first, self._size)
        loss = self.model(batch.tokens, batch.targets, batch.documents) / batch.targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.train.clip_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def plain_losses(config) -> list[list[float]]:
    """The losses of each site."""
    sites = [Site(config, first, size) for first, size in zip((0, 12), BATCHES, strict=True)]
    common = [weight.clone().requires_grad_() for weight in sites[0].weights]
    outer = torch.optim.SGD(common, nesterov=True, **OUTER)
    losses = [[], []]
    for step in range(config.train.steps):
        for site, found in zip(sites, losses, strict=True):
            found.append(site.step(step))
        if (step + 1) % EVERY == 0:
            for weight, *own in zip(common, *(site.weights for site in sites), strict=True):
                parts = zip(own, BATCHES, strict=True)
                weight.grad = sum(size / 16 * (weight.data - w) for w, size in parts)
            outer.step()
            for site in sites:
                for weight, shared in zip(site.weights, common, strict=True):
                    weight.copy_(shared.data)
    return losses
