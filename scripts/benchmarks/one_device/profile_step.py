"""Where the time of a training step on one device goes: kernel time by kind, beside its floor.

    python -m scripts.benchmarks.one_device.profile_step OUT [--presets 125M 350M 1.3B] [--eager]

Runs on any GPU that torch.profiler supports, NVIDIA's or AMD's, and on a CPU, where operators stand
in for kernels. Each size trains in a process of its own: warm-up, steps that are timed without the
profiler, and 3 profiled ones. The floor is the time of the kernels of matrix products and
attention; the busy share is the part of a step during which any kernel runs.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megafrontier.launch.context import join_machine
from megafrontier.model.flops import flops_per_token
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.loop import run
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.one_device.kernels import FLOOR, KINDS, kind_of
from scripts.benchmarks.one_device.ours import our_config
from scripts.benchmarks.one_device.setting import Setting, add_setting_options, chosen_settings
from scripts.benchmarks.shared.child import Clock, Finished, synchronise
from scripts.benchmarks.shared.measuring import make_parser
from scripts.benchmarks.shared.rounds import Results, Task, add_options, measure
from scripts.benchmarks.shared.tables import markdown, spread

PROFILED = 3
"""Steps under the profiler."""
BARS = {"1.3B": 1.22, "350M": 1.25, "125M": 1.35}
"""The largest ratio of a step to its floor that we aim at, on an H100."""
UNKNOWN = "unknown: "
ON_GPU = torch.cuda.is_available()
FUNCTION = "scripts.benchmarks.one_device.profile_step:profiled"


def profiled(setting: dict[str, Any], compiled: bool) -> dict[str, float]:
    """Figures of the framework's own loop on one rank. Seconds are those of a step."""
    chosen = Setting(**setting)
    config = our_config(chosen, compiled)
    with join_machine(config) as (plan, mesh):
        recorder = Recorder(Clock(chosen.warm_up, chosen.steps), chosen.warm_up + chosen.steps)
        trainer = build_trainer(config, plan, mesh)
        with suppress(Finished), closing(trainer):
            run(trainer, [recorder])
    spans = {name: seconds / PROFILED for name, seconds in kernel_seconds(recorder.events).items()}
    found = {"busy_seconds": busy_seconds(recorder.events) / PROFILED, **dict.fromkeys(KINDS, 0.0)}
    for name, seconds in spans.items():
        kind = kind_of(name)
        found[kind or "others"] += seconds
        if kind is None:
            found[UNKNOWN + name[:80]] = seconds
    return recorder.clock.figures() | found


class Recorder(Callback):
    """Times steps, then records some of them, then ends the loop."""

    def __init__(self, clock: Clock, timed: int) -> None:
        """`timed`: steps before those that are recorded."""
        self.clock, self.events = clock, list[Any]()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + ON_GPU]
        self._profile, self._timed, self._left = profile(activities=activities), timed, PROFILED

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        """No step may be under way when the profiler starts or stops."""
        return step in (self._timed, self._timed + PROFILED)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if not self.clock.done:
            self.clock.tick()
            if self.clock.done:
                self._profile.start()
            return
        self._left -= 1
        if not self._left:
            synchronise()
            self._profile.stop()
            self.events = [*self._profile.events()]
            raise Finished


def kernel_seconds(events: Iterable[Any]) -> Counter[str]:
    """Seconds by the name of a kernel, or on a CPU of an operator, without those it calls."""
    found: Counter[str] = Counter()
    for event in _kernels(events):
        micros = event.time_range.elapsed_us() if ON_GPU else event.self_cpu_time_total
        found[event.name] += micros / 1e6
    return found


def busy_seconds(events: Iterable[Any]) -> float:
    """Seconds in which at least one kernel runs."""
    total, end = 0.0, float("-inf")
    for span in sorted((e.time_range for e in _kernels(events)), key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total / 1e6


def _kernels(events: Iterable[Any]) -> list[Any]:
    if ON_GPU:
        on_device = (e for e in events if e.device_type == DeviceType.CUDA)
        return [e for e in on_device if not e.is_user_annotation]
    # Others are nodes of autograd, the profiler's own, and functions in Python.
    nodes = ("autograd::", "torch::")
    return [e for e in events if "::" in e.name and not e.name.startswith(nodes)]


def table(results: Results) -> str:
    """A table for each size."""
    return "\n\n".join(_group_table(results, group) for group in results.groups())


def _group_table(results: Results, group: str) -> str:
    (variant,) = results.variants(group)
    skipped = results.skipped(group, variant)
    if skipped:
        return f"## {group}\n\n{skipped}"
    turns = [turn for turn in results.turns if turn.group == group and turn.values]
    step = _middle(turns, "step_seconds")
    rows = [[kind, _spread(turns, kind), f"{_middle(turns, kind) / step:.1%}"] for kind in KINDS]
    body = markdown(["kernels, " + variant, "ms a step", "of the step"], rows)
    return f"## {group}\n\n{_summary(turns)}\n\n{body}{_unknown(turns)}"


def _summary(turns: list[Any]) -> str:
    setting = Setting(**turns[0].arguments["setting"])
    step, bar = _middle(turns, "step_seconds"), BARS.get(setting.preset)
    floor = sum(_middle(turns, kind) for kind in FLOOR)
    rate = setting.tokens / step
    return (
        f"Step {1e3 * step:.1f} ms, floor {1e3 * floor:.1f} ms: {step / floor:.2f} x the floor"
        f"{f' (bar {bar} x)' if bar else ''}; device busy "
        f"{_middle(turns, 'busy_seconds') / step:.0%}; {rate:,.0f} tokens/s, "
        f"{rate * flops_per_token(setting.model) / 1e12:.3g} TF/s; peak "
        f"{_middle(turns, 'peak_bytes') / 2**30:.2f} GiB."
    )


def _unknown(turns: list[Any]) -> str:
    names = sorted({name for turn in turns for name in turn.values if name.startswith(UNKNOWN)})
    return "".join(f"\n\nIn others, {name}: {_spread(turns, name)} ms" for name in names)


def _spread(turns: list[Any], name: str) -> str:
    return spread([1e3 * turn.values[name] for turn in turns if name in turn.values], ".2f")


def _middle(turns: list[Any], name: str) -> float:
    return statistics.median_high(turn.values[name] for turn in turns)


def main() -> None:
    """Profile, and print the tables."""
    parser = make_parser(__doc__)
    add_options(parser)
    parser.set_defaults(rounds=1)
    add_setting_options(parser, ["125M", "350M", "1.3B"])
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    arguments = parser.parse_args()
    # On a CPU the profiler does not see into compiled code.
    compiled = ON_GPU and not arguments.eager
    variant = "compiled" if compiled else "eager"
    tasks = [
        Task(each.group, variant, FUNCTION, {"setting": asdict(each), "compiled": compiled})
        for each in chosen_settings(arguments)
    ]
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
