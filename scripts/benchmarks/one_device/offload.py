"""The optimizer's state in host memory, on one device: step time, peak memory, and what fits.

    python -m scripts.benchmarks.one_device.offload OUT [--presets 1.3B 3B 7B 10B 13B]
        [--device-gib 24] [--rounds 1]

Trains each size with and without `partition.offload.optimizer=cpu`, beside torch's FSDP2 with and
without its CPUOffloadPolicy, each in a process of its own: the same GPT, block checkpointing, fused
AdamW and clipping. A size that does not fit is a row without figures, so the last line names the
largest model that trains in each way. `--device-gib` limits the device's memory, to try a smaller
card. On a CPU, which has no other memory to offload to, the rows show what the way there costs.
"""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megafrontier.model.flops import parameter_count
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.training.device import OutOfMemory
from scripts.benchmarks.one_device.ours import ours
from scripts.benchmarks.one_device.setting import (
    BETAS,
    CLIP,
    LR,
    PRESETS,
    WEIGHT_DECAY,
    Feed,
    Setting,
    make_setting,
    write_corpora,
)
from scripts.benchmarks.shared.child import Clock, Finished, Unable, device
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.rounds import Results, Task, add_options, group_tables, measure
from scripts.benchmarks.shared.tables import gib, middle_of, spread

MODULE = "scripts.benchmarks.one_device.offload"
ON_GPU = torch.cuda.is_available()
CONTENDERS = {
    "ours, offloaded": ("ours", True),
    "ours": ("ours", False),
    "FSDP2, CPUOffloadPolicy": ("fsdp2", True),
    "FSDP2": ("fsdp2", False),
}


def train(
    setting: dict[str, Any], contender: str, offloaded: bool, device_gib: float | None = None
) -> dict[str, float]:
    """The figures of one contender. Raises Unable if it does not fit."""
    if ON_GPU and device_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, device_gib * 2**30 / total))
    try:
        if contender == "ours":
            return ours(setting, ON_GPU, "block", offloaded=offloaded)
        return fsdp2(Setting(**setting), offloaded)
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        raise Unable(f"out of memory: {str(error).splitlines()[0]}") from error


def fsdp2(setting: Setting, offloaded: bool) -> dict[str, float]:
    """A loop by hand around our GPT, sharded by torch over one rank, as its documents say."""
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"  # norms of offloaded gradients need gloo
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    clock = Clock(setting.warm_up, setting.steps)
    model = GPT(setting.model, checkpointing="block", compile_blocks=ON_GPU)
    initialise(model, 0)
    dtype = torch.bfloat16 if setting.mixed else torch.float32
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device().type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    if offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ON_GPU)
    for _, block in model.units():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    with suppress(Finished):
        for rows in Feed(setting, clock):
            tokens = rows.to(device(), non_blocking=True)
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / setting.tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return clock.figures() | {"loss": loss.item()}


def group_of(setting: Setting) -> str:
    """The name of a setting."""
    parameters = parameter_count(setting.model) / 1e9
    return f"{setting.preset}: {parameters:.2f}B, {setting.batch} x {setting.sequence_length}"


def table(results: Results) -> str:
    """A table for each size, and the largest that each contender trains."""
    head = ["", "step s", "over FSDP2 with CPUOffloadPolicy", "peak GiB", "loss"]
    largest = dict.fromkeys(CONTENDERS, "none of these")
    for group in results.groups():
        trained = [n for n in results.variants(group) if not results.skipped(group, n)]
        largest |= dict.fromkeys(trained, group)

    def cells(group: str, name: str) -> list[str]:
        ratios = results.ratios(group, name, "FSDP2, CPUOffloadPolicy", "step_seconds")
        return [
            spread(results.values(group, name, "step_seconds"), ".3f"),
            middle_of(ratios, ".2f"),
            gib(results.values(group, name, "peak_bytes")),
            middle_of(results.values(group, name, "loss"), ".3f"),
        ]

    found = "; ".join(f"{name}: {group}" for name, group in largest.items())
    return f"{group_tables(results, head, cells)}\n\nLargest that trains: {found}."


def main() -> None:
    """Compare, and print the tables."""
    parser = make_parser(__doc__)
    add_options(parser)
    sizes = ["1.3B", "3B", "7B", "10B", "13B"] if ON_GPU else ["10M"]
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=sizes)
    parser.add_argument("--device-gib", type=float, help="limit of the device's memory, in GiB")
    parser.add_argument("--batch", type=at_least(1), help="sequences of a step")
    parser.add_argument("--steps", type=at_least(1), default=5, help="steps that are timed")
    parser.set_defaults(rounds=1)
    arguments = parser.parse_args()
    precision = "bf16" if ON_GPU else "fp32"
    settings = [
        make_setting(arguments.out, name, precision, 2, arguments.steps, arguments.batch)
        for name in arguments.presets
    ]
    write_corpora(settings)
    tasks = []
    for setting in settings:
        common = {"setting": asdict(setting), "device_gib": arguments.device_gib}
        for variant, (contender, offloaded) in CONTENDERS.items():
            task = common | {"contender": contender, "offloaded": offloaded}
            tasks.append(Task(group_of(setting), variant, f"{MODULE}:train", task))
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
