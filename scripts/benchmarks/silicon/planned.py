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
from scripts.benchmarks.one_device.setting import Setting, add_setting_options, chosen_settings
from scripts.benchmarks.shared.child import device
from scripts.benchmarks.shared.measuring import make_parser
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
    add_setting_options(parser, ["1.3B", "350M", "mixture"])
    arguments = parser.parse_args()
    tasks = [
        Task(each.group, name, function, {"setting": asdict(each), **options})
        for each in chosen_settings(arguments)
        for name, (function, options) in VARIANTS.items()
        if ON_GPU or name != COMPILED
    ]
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
