"""A mixture of experts in place of a block's MLP."""

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.model.init import matrix_std
from megafrontier.model.mlp import MLP, activate
from megafrontier.model.moe.dispatch import Dispatch, local_dispatch
from megafrontier.model.moe.experts import Experts
from megafrontier.model.moe.router import Router
from megafrontier.model.ranks import DividedModule
from megafrontier.model.recompute.compile import compiled_rows
from megafrontier.parallel.param_spec import ParamSpec, set_spec


def has_experts(config: ModelConfig, block: int) -> bool:
    """Whether the block of this number has experts."""
    moe = config.moe
    return moe is not None and moe.blocks(block + 1) > moe.blocks(block)


def compile_activations(model: nn.Module) -> None:
    """Compile the activations of experts and shared experts, which no compiled block contains."""
    run = compiled_rows(activate)
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts.activate = run
            if module.shared is not None:
                module.shared.activate = run


class MoE(DividedModule):
    """Router, experts and shared experts.

    `dispatch` brings tokens to their experts and back. Expert parallelism replaces it.
    With `ranks` each rank routes the tokens that it has between the matrices.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, number: int = 0) -> None:
        """`number`: of the block, from 0."""
        super().__init__()
        self.number = number
        self.router = Router(config, moe)
        self.experts = Experts(config, moe)
        self.dispatch: Dispatch = local_dispatch
        self.shared: MLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if moe.shared_experts:
            width = moe.shared_experts * (moe.ffn_hidden or config.mlp_hidden)
            self.shared = MLP(config, width)
            if moe.shared_gate:
                shape = 1, config.hidden
                self.shared_gate = nn.Parameter(torch.empty(shape))
                spec = ParamSpec("", shape, "router", init_std=matrix_std(config))
                set_spec(self.shared_gate, spec)

    def forward(self, hidden: Tensor, counted: Tensor | None = None) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]. `counted`: as in `AttentionContext`."""
        tokens = hidden.flatten(0, -2)
        if counted is not None:
            counted = (
                counted.flatten() if self.ranks is None else self.ranks.part(counted.flatten())
            )
        chosen, weights = self.router(tokens, counted)
        finish = self.dispatch(tokens, chosen, weights, self.experts)
        shared = self._share(hidden)  # while tokens move
        out = finish().view_as(hidden)
        return out if shared is None else out + shared

    def _share(self, hidden: Tensor) -> Tensor | None:
        """The output of the shared experts, if there are any."""
        if self.shared is None:
            return None
        shared: Tensor = self.shared(hidden)
        if self.shared_gate is not None:
            shared = shared * (hidden @ self.shared_gate.t()).sigmoid()
        return shared
