"""Let spmd_types judge tensor and context parallelism: which gradients are sums still to be made?

    pip install spmd_types
    python -m scripts.judge_splits

spmd_types gives each tensor a type over the ranks of a split: replicated (R, its gradient is a part
of a sum), invariant (I, the same gradient on all ranks), varying (V) or a part of a sum (P), and
refuses operations that would give wrong gradients. It cannot look into our operators, so each is
replaced by the collectives and the product that it stands for. Nothing is sent: torch's `fake`
backend has one process. Each model takes one step, forward and backward, under each split, with the
parameters typed by the axes of their specs. It must also refuse them if no gradient were summed.
"""

from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import spmd_types.checker  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megafrontier.config import ModelConfig
from megafrontier.model.block import Block
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.kernels import gates
from megafrontier.parallel.param_spec import spec_of
from megafrontier.splits.tensor import split_tensors

RANKS, BATCH, LENGTH = 2, 2, 24
SIZE = {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": LENGTH, "vocab_size": 50}
LLAMA = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "tie_embeddings": True},
    "neox": {"position": "rotary", "parallel_residual": True},
    "llama": {**LLAMA, "bias": False},
    "llama, grouped, tied, biases": {**LLAMA, "kv_heads": 2, "tie_embeddings": True},
}


class Checker:
    """The operators of both splits as spmd_types sees them, over one axis of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.axis = mesh, mesh.get_group()

    def gather(self, part: Tensor, *_: Any) -> Tensor:
        return spmd.all_gather(part, self.axis, src=spmd.S(0), dst=spmd.R)

    def reduce(self, values: Tensor, *_: Any) -> Tensor:
        return spmd.reduce_scatter(self.part_of_sum(values), self.axis, src=spmd.P, dst=spmd.S(0))

    def part_of_sum(self, values: Tensor) -> Tensor:
        return spmd.reinterpret(values, self.axis, src=spmd.V, dst=spmd.P)

    def gather_linear(
        self, part: Tensor, weights: list[Tensor], biases: list[Tensor], *_: Any
    ) -> Tensor:
        tokens = self.gather(part)
        found = [tokens @ weight.t() for weight in weights]
        if biases:
            found = [values + bias for values, bias in zip(found, biases, strict=True)]
        return torch.cat(found, -1)

    def linear_reduce(self, inputs: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return self.reduce(inputs @ weight.t())

    def tensor_loss(self, tokens: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """In place of cross entropy: a sum over all rows of the vocabulary."""
        own = self.part_of_sum((tokens @ weight.t()).exp().sum())
        return spmd.all_reduce(own, self.axis, src=spmd.P, dst=spmd.I)

    def context_loss(self, tokens: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """The losses of this rank's tokens. Those of all ranks are summed."""
        own = F.cross_entropy(tokens @ weight.t(), targets, reduction="sum")
        return self.part_of_sum(own)

    def part(self, values: Tensor, documents: Tensor) -> Tensor:
        return spmd.convert(values.flatten(0, 1), self.axis, src=spmd.R, dst=spmd.S(0))[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        """In place of attention to needed keys: to all of them."""
        heads = self.gather(torch.cat([key, value], 2)[0])[None]
        heads = heads.repeat_interleave(query.shape[2] // key.shape[2], 2)
        key, value = (part.transpose(1, 2) for part in heads.chunk(2, 2))
        return F.scaled_dot_product_attention(query.transpose(1, 2), key, value).transpose(1, 2)

    def check(self, model: GPT, axis: str, replicated: Any) -> None:
        """One step. Parameters that all ranks of the split `axis` hold have the type `replicated`.
        Raises SpmdTypeError."""
        tokens = torch.randint(SIZE["vocab_size"], (BATCH, LENGTH))
        documents = torch.tensor([0, LENGTH, BATCH * LENGTH], dtype=torch.int32)
        with spmd.set_current_mesh(self.mesh), spmd.checker.typecheck():
            for name, parameter in model.named_parameters():
                is_whole = axis in spec_of(name, parameter).axes
                spmd.assert_type(parameter, {self.axis: replicated if is_whole else spmd.V})
            for values in (tokens, documents):
                spmd.assert_type(values, {self.axis: spmd.R})
            model(tokens, tokens, documents if axis == "context" else None).backward()


def built(checker: Checker, axis: str, changes: dict[str, Any]) -> GPT:
    """A model that is divided over the ranks of `axis`."""
    model = GPT(ModelConfig(**{**SIZE, "vocab_multiple": 16, **changes}))
    initialise(model, 0)
    if axis == "tensor":
        split_tensors(model, 0, RANKS)
    else:
        model.part = checker.part
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention.over_chunks = checker.attend
    return model


def main() -> None:
    """Print a line for each model and split, or raise the first error."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    checker = Checker(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ranks",)))
    in_tensor = {
        "gather_tokens": checker.gather,
        "reduce_tokens": checker.reduce,
        "gather_linear": checker.gather_linear,
        "linear_reduce": checker.linear_reduce,
    }
    spmd.register_local_autograd_function(gates._Gated)  # each element by itself
    with (
        patch.multiple("megafrontier.splits.tensor", **in_tensor),
        patch("megafrontier.model.gpt.linear_cross_entropy") as loss,
    ):
        for axis in ("tensor", "context"):
            loss.side_effect = checker.tensor_loss if axis == "tensor" else checker.context_loss
            for name, changes in MODELS.items():
                checker.check(built(checker, axis, changes), axis, spmd.R)
                try:
                    checker.check(built(checker, axis, changes), axis, spmd.I)
                except spmd.SpmdTypeError:
                    print(f"{axis}, {name}: clean, and refused without the sums of gradients")
                else:
                    raise SystemExit(f"{axis}, {name}: accepted without the sums of gradients")


if __name__ == "__main__":
    main()
