"""A step on this device beside the one that the planner predicts from the device's own rates.

    python -m scripts.benchmarks.silicon.planned OUT [--presets 1.3B 350M mixture] [--rounds 1]

The prediction takes the rates that `megafrontier probe` would write for this device, measured just
before. It is of a step that is not compiled: a compiler keeps fewer activations. The aim is 5 % of
the seconds of a step and 3 % of the peak memory.
"""

from dataclasses import asdict
from typing import Any

import torch

from megafrontier.config import MachineConfig
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.rates import DeviceRates, Rates
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.probe.device import measure_device
from scripts.benchmarks.one_device.ours import our_config
from scripts.benchmarks.one_device.setting import PRESETS, Setting, make_setting, write_corpora
from scripts.benchmarks.shared.child import device
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.rounds import Results, Task, add_options, group_tables, measure
from scripts.benchmarks.shared.tables import gib, middle_of

ON_GPU = torch.cuda.is_available()
PREDICTED, EAGER, COMPILED = "predicted", "not compiled", "compiled"
OURS = "scripts.benchmarks.one_device.ours:ours"
VARIANTS: dict[str, tuple[str, dict[str, bool]]] = {
    PREDICTED: ("scripts.benchmarks.silicon.planned:predicted", {}),
    EAGER: (OURS, {"compiled": False}),
    COMPILED: (OURS, {"compiled": True}),
}
HEAD = ["", "step s", "over predicted", "peak GiB", "over predicted"]


def predicted(setting: dict[str, Any]) -> dict[str, float]:
    """Seconds and peak bytes of a step, from the rates of this device."""
    config = our_config(Setting(**setting), compiled=False)
    found, _ = measure_device(device(), MachineConfig().device)
    machine = MachineConfig(device=found)
    step = simulate(config, resolve_plan(config, 1), Rates(DeviceRates.of(machine), {}))
    return {
        "step_seconds": step.seconds,
        "peak_bytes": step.gib * 2**30,
        "matrix_tflops": found.matrix_tflops or 0.0,
        "memory_gigabytes_per_second": found.memory_gigabytes_per_second or 0.0,
        "launch_microseconds": found.launch_microseconds,
    }


def table(results: Results) -> str:
    """A table for each size."""

    def cells(group: str, name: str) -> list[str]:
        step, peak = (
            middle_of(results.ratios(group, name, PREDICTED, key), ".3f")
            for key in ("step_seconds", "peak_bytes")
        )
        seconds = middle_of(results.values(group, name, "step_seconds"), ".4f")
        return [seconds, step, gib(results.values(group, name, "peak_bytes")), peak]

    return group_tables(results, HEAD, cells)


def main() -> None:
    """Measure, predict, and print the tables."""
    parser = make_parser(__doc__)
    add_options(parser)
    parser.set_defaults(rounds=1)
    default = ["1.3B", "350M", "mixture"] if ON_GPU else ["10M"]
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=default)
    parser.add_argument("--warm-up", type=at_least(1), default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=at_least(1), default=20 if ON_GPU else 4, help="timed")
    arguments = parser.parse_args()
    precision = "bf16" if ON_GPU else "fp32"
    settings = [
        make_setting(arguments.out, name, precision, arguments.warm_up, arguments.steps)
        for name in arguments.presets
    ]
    write_corpora(settings)
    tasks = [
        Task(each.group, name, function, {"setting": asdict(each), **options})
        for each in settings
        for name, (function, options) in VARIANTS.items()
        if ON_GPU or name != COMPILED
    ]
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
