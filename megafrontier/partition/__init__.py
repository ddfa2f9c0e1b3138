"""The placement engine: shard weights, gradients and optimizer state to different levels.

It knows nothing of GPT: `shard` takes any `nn.Module` and the list of its blocks.
"""

from megafrontier.comm.wires.wire import Wires
from megafrontier.partition.engine import Engine, shard
from megafrontier.partition.placement import STRATEGIES, Placement

__all__ = ["STRATEGIES", "Engine", "Placement", "Wires", "shard"]
