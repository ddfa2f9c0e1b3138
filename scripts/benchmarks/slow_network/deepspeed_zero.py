"""DeepSpeed's ZeRO-3 and hpZ as a user would set them up: rivals of slow_network.

Must be installed, see slow_network. Its limits on what is gathered ahead and kept are numbers of
elements made for models of billions, under which a small model would stay gathered whole; they are
scaled as this model is to the 20B that the benchmark stands for.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from megafrontier.config import Config
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.resolve import RunPlan
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.measuring import use_packages
from scripts.benchmarks.shared.ranks import Stepper, feed, trains, whole_model
from scripts.benchmarks.slow_network.fsdp2 import adamw

BLOCK_AT_20B = 453e6
"""Parameters of a block of the paper's 20B."""


def prepare() -> Any:
    """The package, for processors. Raises ImportError where it is not installed."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    use_packages()
    return importlib.import_module("deepspeed")


class DeepSpeed:
    """A GPT on DeepSpeed's engine; weights once more inside each node with `mode` hpz."""

    def __init__(
        self, model: GPT, config: Config, mode: str, per_node: int, micro_batches: int
    ) -> None:
        # DeepSpeed's own limits, as they stand to a block: that is what is gathered and reduced.
        small = sum(p.numel() for p in model.blocks[0].parameters()) / BLOCK_AT_20B
        zero = {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": int(5e8 * small),
            "stage3_prefetch_bucket_size": int(5e7 * small),
            "stage3_max_live_parameters": int(1e9 * small),
            "stage3_max_reuse_distance": int(1e9 * small),
            # Norms and biases stay whole.
            "stage3_param_persistence_threshold": 4 * config.model.hidden,
        }
        if mode == "hpz":
            zero["zero_hpz_partition_size"] = per_node
        self._engine, *_ = prepare().initialize(
            model=model,
            optimizer=adamw(model, config),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": config.train.micro_batch,
                "gradient_accumulation_steps": micro_batches,
                "bf16": {"enabled": True},
                "gradient_clipping": config.train.clip_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": zero,
                "steps_per_print": 2**30,
            },
        )

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step; the mean loss of this rank's tokens."""
        total = torch.zeros(())
        for batch in batches:
            # DeepSpeed averages over micro-batches and ranks, which all have as many tokens.
            loss = self._engine(batch.tokens, batch.targets, batch.documents)
            loss = loss / batch.targets.numel()
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach().float() / len(batches)
        return total.item()


@trains
def deepspeed(job: Job, config: Config, _: RunPlan, mesh: Mesh) -> Stepper:
    """DeepSpeed's sharding, `mode` zero3 or hpz."""
    loader, batches = feed(job, config, mesh)
    model = whole_model(job, config)
    parameters = sum(p.numel() for p in model.parameters())
    per_node, mode = int(os.environ["LOCAL_WORLD_SIZE"]), job.options["mode"]
    trained = DeepSpeed(model, config, mode, per_node, loader.micro_batches)
    return Stepper(lambda: trained.step(next(batches)), parameters, lambda: 0)
