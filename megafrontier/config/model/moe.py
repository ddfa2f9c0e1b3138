"""The options of a mixture of experts."""

from dataclasses import dataclass, field
from typing import Literal

from megafrontier.common.errors import need
from megafrontier.config.fields import bounded, count, marked


@dataclass
class ExpertGroupsConfig:
    """Node-limited routing (DeepSeek-V3): a token's experts are in few groups of neighbours, so
    that it crosses to few nodes."""

    number: int = count(1)
    """Groups of equally many experts, in the order of their numbers. Must divide
    `model.moe.experts`."""
    active: int = count(1)
    """Groups that the experts of a token come from: those with the largest sum of their `best`
    scores."""
    best: int = count(2)
    """Scores of a group that are summed: its best 2 (DeepSeek-V3) or 1 (DeepSeek-V2)."""


@dataclass
class MoEConfig:
    """A mixture of experts in place of the MLP. No token is dropped."""

    experts: int = count(8, at_most=2**16)
    """Experts of a block."""
    active: int = count(2)
    """Experts that process a token. At most `experts`."""
    ffn_hidden: int | None = count(None, at_most=2**22)
    """Width inside an expert. Default: `model.ffn_hidden`, or its default."""
    bias: bool = False
    """Biases in the linear layers of experts (gpt-oss). Those of shared experts are the MLP's."""
    every: int = count(1)
    """Every how many blocks one has experts, the last of so many: 2 means blocks 1, 3, 5, …
    counted from 0. The others keep the MLP."""
    first: int = bounded(0, at_least=0)
    """Blocks at the beginning that keep the MLP (DeepSeek's first_k_dense_replace). `every` counts
    from there."""
    shared_experts: int = bounded(0, at_least=0, at_most=2**10)
    """Experts that process every token: one MLP of this many times `ffn_hidden`."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by a sigmoid of the token (Qwen2-MoE)."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts for a token, computed in fp32."""
    router_bias: bool = False
    """A learned bias of each expert's logit (gpt-oss)."""
    normalise: bool = True
    """Divide the scores of a token's experts by their sum."""
    scale: float = bounded(1.0, above=0)
    """Multiplies the scores of a token's experts, after `normalise`."""
    groups: ExpertGroupsConfig = field(default_factory=ExpertGroupsConfig)
    """Node-limited routing."""
    balance: Literal["bias", "loss", "none"] = marked("bias", "report")
    """How experts get equally many tokens. bias: after each step, a bias that only the choice of
    experts sees moves by `bias_rate` up for experts with fewer tokens than the mean of the global
    batch, and down for those with more (Wang et al. 2024, arXiv:2408.15664). loss: the
    load-balancing loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), with the shares
    of tokens of the previous step's global batch."""
    bias_rate: float = bounded(0.001, "report", above=0)
    """`balance: bias`: how far a bias moves in a step."""
    loss_coefficient: float = bounded(0.01, "report", above=0)
    """`balance: loss`: factor of the loss."""
    z_loss: float = bounded(0.0, "report", at_least=0)
    """Factor of the router's z-loss, the mean square of the log of the sum of the exponentials of
    its logits (Zoph et al. 2022, arXiv:2202.08906). 0: none."""

    def blocks(self, layers: int) -> int:
        """How many of the first `layers` blocks have experts."""
        return max(0, layers - self.first) // self.every


def check_moe(moe: MoEConfig, layers: int) -> None:
    """Check how the values fit each other. Raises UserError with key, value and fix."""
    experts, active, groups = moe.experts, moe.active, moe.groups
    fits = f"need at most model.moe.experts ({experts})"
    need(active <= experts, "model.moe.active", active, fits)
    rest, fits = layers - moe.every, f"need at most model.layers ({layers})"
    need(moe.every <= layers, "model.moe.every", moe.every, fits)
    fits = f"need at most model.layers - model.moe.every ({rest})"
    need(moe.first <= rest, "model.moe.first", moe.first, fits)
    divisors = ", ".join(str(n) for n in range(1, experts + 1) if not experts % n)
    fits = f"does not divide model.moe.experts ({experts}), need one of {divisors}"
    need(experts % groups.number == 0, "model.moe.groups.number", groups.number, fits)
    key, fits = "model.moe.groups.active", f"need at most model.moe.groups.number ({groups.number})"
    need(groups.active <= groups.number, key, groups.active, fits)
    size = experts // groups.number
    fits = f"need groups with at least model.moe.active ({active}) experts, these have {size} each"
    need(groups.active * size >= active, key, groups.active, fits)
    fits = "need false, or model.moe.shared_experts above 0"
    need(not moe.shared_gate or moe.shared_experts > 0, "model.moe.shared_gate", True, fits)
