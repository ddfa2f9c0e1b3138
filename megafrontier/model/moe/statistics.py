"""What a router counts during a step."""

import torch
from torch import Tensor


class RouterStatistics:
    """Tokens of each expert, and the sum of the entropies of the tokens' probabilities, over the
    forwards of a step. Forwards without gradients, and those that backward repeats, do not count.
    Nor do tokens that are not `counted`.
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._entropy: Tensor | None = None

    def add(self, experts: Tensor, probabilities: Tensor, counted: Tensor | None = None) -> None:
        """Count a forward's tokens: experts int64 [n, active], probabilities fp32 [n, experts],
        counted bool [n]; None: all."""
        is_repeated = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks
        if is_repeated or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            ones = torch.ones_like(experts)
            if counted is not None:
                ones = ones * counted[:, None]
                probabilities = probabilities.where(counted[:, None], 0.0)  # of entropy 0
            ones = ones.flatten()
            new = ones.new_zeros(probabilities.shape[1])
            new = new.scatter_add_(0, experts.flatten(), ones)
            entropy = torch.special.entr(probabilities).sum(dtype=torch.float64)
        if self._tokens is not None and self._entropy is not None:
            new, entropy = self._tokens + new, self._entropy + entropy
        self._tokens, self._entropy = new, entropy

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Tokens int64 [experts] and entropies float64 [] since the last call, None without any."""
        found = self._tokens, self._entropy
        self._tokens = self._entropy = None
        return found
