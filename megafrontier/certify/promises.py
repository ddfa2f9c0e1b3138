"""The promises of a layout, and the runs of a miniature that try them."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from megafrontier.certify.certificate import Finding
from megafrontier.certify.compare import (
    Gap,
    assembled,
    gap_of_numbers,
    gap_of_tensors,
    largest,
    relative_error,
)
from megafrontier.certify.miniature import BAD, SAVED, STEPS, Miniature
from megafrontier.certify.plain import (
    gap_of_samples,
    gap_of_slopes,
    gap_of_updates,
    initial_weights,
    initial_zeros,
    losses_of_export,
    plain_gradients,
    why_no_plain_gradient,
    why_no_plain_update,
)
from megafrontier.certify.runs import Tensors, TrainedRun, run_apart, run_training
from megafrontier.commands.convert import export_command
from megafrontier.common.checkpoints import candidates, checkpoints_of
from megafrontier.common.errors import UserError
from megafrontier.config import Config
from megafrontier.families import family_for
from megafrontier.plan.resolve import resolve_plan

LAST_BIT = 2.0**-23
"""Of fp32, relative to the value."""
BOUND = 1e-5
"""Of relative gaps to one process, where sums have another order."""
TIMES_ROUNDING = 4
"""A layout's gap was up to 2.5 times the rounding of one process, with 20 models that have gaps
above `BOUND` (docs/trust.md)."""
MOST_ROUNDING = 1e-4
"""A larger bound would hide faults."""
LIMIT_SECONDS = 600.0
"""Of a run. A run that takes longer hangs."""
WIRE_ERRORS = {"int4": 0.25, "int8": 0.02, "topk": 1.0, "bf16": 0.01, "fp16": 0.002}
"""The relative error of a gradient that crosses one level in a format. Half a step of int4 is 1/14
of the largest of a block, which for a normal distribution is about 3 deviations: 0.12."""
ROUTING_ERROR = 0.3
"""Of a mixture besides, in relative norm: rounding brings some tokens to other experts. With bf16
the gradient of one process was off by 0.06 to 0.25 (moe-8x7b's miniature, six seeds)."""
PRECISION_ERRORS = {"bf16": 0.1, "fp16": 0.02, "fp32": 0.0}
"""The relative error of the gradient of a small model that computes in a type."""

EXPORT_BOUND = 1e-4
SLOPE_BOUND = 0.02
DROPOUT = 0.2

GRADIENT, RESUME = "every gradient", "resume, to the bit"


@dataclass
class Laboratory:
    """Makes the runs of a certificate, each once. `folder`: gets them, and is removed by the
    caller. `progress`: called with a line before each run."""

    folder: Path
    progress: Callable[[str], None] = lambda line: None
    _alone: dict[str, TrainedRun] = field(default_factory=dict)
    _rounding: dict[str, float] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self, config: Config, ranks: int, what: str) -> TrainedRun:
        """Raises TrialFailed."""
        self.progress(what)
        directory = self.folder / "runs" / str(next(self._numbers))
        return run_training(config, ranks, directory, LIMIT_SECONDS)

    def alone(self, config: Config) -> TrainedRun:
        """The run of one process, which several miniatures may share. Raises TrialFailed."""
        if (key := repr(config)) not in self._alone:
            self._alone[key] = self.run(config, 1, "one process")
        return self._alone[key]

    def rounding(self, config: Config) -> float:
        """The largest gap of one process to itself with perturbed initial weights (Note
        [Rounding]). Raises TrialFailed."""
        if (key := repr(config)) not in self._rounding:
            perturbed = deepcopy(config)
            perturbed.model.init_std *= 1 + LAST_BIT
            run = self.run(perturbed, 1, "rounding of one process")
            self._rounding[key] = largest_gap(compare_runs(run, self.alone(config)))
            self.forget(run)
        return self._rounding[key]

    def forget(self, run: TrainedRun) -> None:
        """Free the room of a run."""
        shutil.rmtree(run.directory, ignore_errors=True)


Trial = Callable[[Laboratory, Miniature], Iterator[Finding]]


def try_reference(laboratory: Laboratory, miniature: Miniature) -> Iterator[Finding]:
    """Whether one process computes what plain PyTorch does."""
    config = miniature.alone
    yield _within("samples: an epoch of each corpus, once", gap_of_samples(config), 0.0)
    like = initial_weights(config)
    zeros, promise = initial_zeros(config), "initial values: no matrix is 0"
    yield Finding.within(promise, float(len(zeros)), 0.0, ", ".join(zeros[:3]))
    run = laboratory.alone(config)
    yield _each_is_evaluated(run, config)
    promise, reason = "one process: loss, gradient of plain PyTorch", why_no_plain_gradient(config)
    if reason is None:
        loss, gradients = plain_gradients(config)
        found, _ = assembled(run.parts(1, "gradients"), like)
        numbers = {name: _number(run.steps[1][name]) for name in ("loss", "grad_norm")}
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        gaps = gap_of_numbers(numbers, {"loss": loss, "grad_norm": norm})
        yield _within(promise, largest([gaps, gap_of_tensors(found, gradients)]))
    else:
        yield Finding(promise, "open", where=f"no plain formula of {reason}")
    yield _within("one process: gradients are slopes", gap_of_slopes(config), SLOPE_BOUND)
    promise, reason = "one process: updates of torch's optimizers", why_no_plain_update(config)
    if reason is None:
        yield _within(promise, gap_of_updates(run, config))
    else:
        yield Finding(promise, "open", where=f"no plain formula of {reason}")


def _each_is_evaluated(run: TrainedRun, config: Config) -> Finding:
    """Whether an evaluation has a loss for each name in `data.valid`, and one of all."""
    names = {corpus.name for corpus in config.data.valid if corpus.name}
    expected = {"valid_loss", *(f"valid_loss/{name}" for name in names)}
    differing = expected ^ run.valid_losses.get(SAVED, {}).keys()
    where = ", ".join(sorted(differing))
    return Finding.within("evaluation: a loss for each name", float(len(differing)), 0.0, where)


def try_equality(laboratory: Laboratory, miniature: Miniature) -> Iterator[Finding]:
    """Whether the layout computes what one process does, in fp32 over exact wires."""
    alone = laboratory.alone(miniature.alone)
    run = laboratory.run(miniature.exact, miniature.mesh.ranks, "exact wires")
    found = compare_runs(run, alone)
    for finding in chain(found, _try_move(laboratory, miniature, alone)):
        is_small = finding.figure is not None and finding.figure <= MOST_ROUNDING
        if is_small and may_be_rounding(finding):
            yield beside_rounding(finding, laboratory.rounding(miniature.alone), MOST_ROUNDING)
        else:
            yield finding
    laboratory.forget(run)


def may_be_rounding(finding: Finding) -> bool:
    """Whether a model that amplifies rounding could have such a gap. Equality has no bound.

    Note [Rounding]
    Sums in another order differ by rounding, and some models amplify it. How much they do shows in
    one process whose initial weights are all `1 + LAST_BIT` times as large, because everything that
    it computes has other rounding errors then. The bound of a gap is `TIMES_ROUNDING` times the
    largest difference between the two runs, if this is more than `BOUND`.
    """
    return finding.status == "broken" and finding.figure is not None and bool(finding.bound)


def beside_rounding(finding: Finding, rounding: float, most: float) -> Finding:
    """A finding that may be rounding, judged by the gap `rounding` of one process to itself. `most`
    is the largest bound."""
    bound = max(finding.bound or 0.0, min(most, TIMES_ROUNDING * rounding))
    return Finding.within(finding.promise, finding.figure or 0.0, bound, finding.where)


def largest_gap(findings: Iterable[Finding]) -> float:
    """Of those that have a bound."""
    return max(finding.figure or 0.0 for finding in findings if finding.bound)


def compare_runs(run: TrainedRun, alone: TrainedRun) -> Iterator[Finding]:
    """Losses, gradients, weights and states of a run beside those of one process."""
    yield _within("losses", _gap_of_metrics(run, alone, "loss", "prediction_loss", "z_loss"))
    yield _within("gradient norm", _gap_of_metrics(run, alone, "grad_norm"))
    yield _within("tokens and learning rates", _gap_of_metrics(run, alone, *_SAME), 0.0)
    if any("expert_tokens" in line for line in alone.steps.values()):
        yield _within("routers: tokens of experts, entropy", _gap_of_metrics(run, alone, *_ROUTERS))
    like = alone.final["weight"]
    gaps, between = [], []
    for step in range(1, STEPS + 1):
        expected, _ = assembled(alone.parts(step, "gradients"), like)
        found, apart = assembled(run.parts(step, "gradients"), like)
        gaps.append(gap_of_tensors(found, expected))
        between += [apart, assembled(run.parts(step, "weights"), like)[1]]
    yield _within(GRADIENT, largest(gaps))
    yield _within("copies on several ranks, to the bit", largest(between), 0.0)
    yield _within("weights and states", _gap_of_states(run.final, alone.final))
    yield _within("evaluation", _gap_of_evaluations(run, alone))
    changed = [name for record in run.records(BAD) for name in record["changed"]]
    was_skipped = all(record["skipped"] for record in run.records(BAD))
    where = ", ".join(changed[:3]) if was_skipped else "the step was not skipped"
    figure = float(len(changed) + (not was_skipped))
    yield Finding.within("a step that is skipped changes nothing", figure, 0.0, where)


_SAME = ("tokens", "lr")
_ROUTERS = ("expert_tokens", "expert_imbalance", "router_entropy")


def _try_move(laboratory: Laboratory, miniature: Miniature, alone: TrainedRun) -> Iterator[Finding]:
    """Whether a checkpoint of one process goes on in the layout, with the same results."""
    config = miniature.exact
    config.checkpoint.resume = str(alone.checkpoint(SAVED))
    run = laboratory.run(config, miniature.mesh.ranks, "resume from another layout")
    yield compare_after_resume("resume on another layout", run, alone)
    laboratory.forget(run)


def compare_after_resume(
    promise: str, run: TrainedRun, whole: TrainedRun, bound: float = BOUND
) -> Finding:
    """Losses and states of a run from step `SAVED` on beside those of a whole run."""
    losses = gap_of_numbers(_losses(run), _losses(whole, after=SAVED))
    gaps = [losses, _gap_of_states(run.final, whole.final)]
    return _within(promise, largest(gaps), bound)


def _gap_of_metrics(run: TrainedRun, other: TrainedRun, *names: str) -> Gap:
    """Of what metrics.jsonl says of the steps. The norm of the spoiled step is not finite."""

    def numbers(of: TrainedRun) -> dict[str, float]:
        return {
            f"{name} of step {step}{place}": value
            for step, line in of.steps.items()
            for name in names
            if name in line and not (step == BAD and name == "grad_norm")
            for place, value in _numbers(line[name])
        }

    return gap_of_numbers(numbers(run), numbers(other))


def _losses(run: TrainedRun, after: int = 0) -> dict[str, float]:
    steps = run.steps.items()
    return {f"step {step}": _number(line["loss"]) for step, line in steps if step > after}


def _numbers(value: Any) -> list[tuple[str, float]]:
    """A metric, or the elements of one that is a list, with their places."""
    if isinstance(value, list):
        return [
            (f" [{at}]{place}", v) for at, one in enumerate(value) for place, v in _numbers(one)
        ]
    return [("", _number(value))]


def _number(value: float | None) -> float:
    """A metric; null stands for one that is not finite."""
    return math.nan if value is None else float(value)


def _gap_of_evaluations(run: TrainedRun, other: TrainedRun) -> Gap:
    def numbers(of: TrainedRun) -> dict[str, float]:
        return {
            f"{name} after step {step}": _number(value)
            for step, losses in of.valid_losses.items()
            for name, value in losses.items()
        }

    return gap_of_numbers(numbers(run), numbers(other))


def _gap_of_states(found: dict[str, Tensors], expected: dict[str, Tensors]) -> Gap:
    """Of all states of two checkpoints."""
    if found.keys() != expected.keys():
        return Gap(float("inf"), f"states {sorted(found.keys() ^ expected.keys())}")
    gaps = [(state, gap_of_tensors(found[state], expected[state])) for state in expected]
    return largest(Gap(gap.value, f"{state} of {gap.where}") for state, gap in gaps)


def _within(promise: str, gap: Gap, bound: float = BOUND) -> Finding:
    return Finding.within(promise, gap.value, bound, gap.where)


def try_configured(laboratory: Laboratory, miniature: Miniature) -> Iterator[Finding]:
    """Whether the layout keeps its bounds with its own precision and wires, and resumes to the
    bit."""
    alone = laboratory.alone(miniature.alone)
    config, ranks = miniature.config, miniature.mesh.ranks
    run = laboratory.run(config, ranks, "as configured")
    like = alone.final["weight"]
    expected, _ = assembled(alone.parts(1, "gradients"), like)
    found, _ = assembled(run.parts(1, "gradients"), like)
    bound = BOUND + bound_of_wires(config, ranks)
    error = relative_error(found, expected)
    yield Finding.within("gradient over the configured wires", error, bound, "relative norm")
    again = deepcopy(config)
    again.checkpoint.resume, again.checkpoint.keep = str(run.checkpoint(SAVED)), 1
    later = laboratory.run(again, ranks, "resume")
    yield compare_after_resume(RESUME, later, run, 0.0)
    old = [path.name for path in candidates(checkpoints_of(later.directory))][1:]
    promise = "checkpoint.keep: older ones are deleted"
    yield Finding.within(promise, float(len(old)), 0.0, ", ".join(old))
    laboratory.forget(later)
    laboratory.forget(run)


def bound_of_wires(config: Config, ranks: int) -> float:
    """The stated bound of the relative error of a gradient: the sum over all levels and formats
    that a message crosses (of activations, over all borders of stages), and of what mixtures have
    besides."""
    plan = resolve_plan(config, ranks)
    formats = [
        wire.codec.name
        for rules in (plan.default, plan.experts)
        for wires in (rules.wires.gather, rules.wires.reduce)
        for wire in wires
        if not wire.is_delta
    ]
    borders = max(plan.division.stages - 1, 1)
    for wires, times in ((plan.activations, borders), (plan.tokens, 1)):
        formats += times * [codec.name for codec in wires.codecs if codec is not None]
    error = PRECISION_ERRORS[config.train.precision]
    error += sum(WIRE_ERRORS.get(name, 0.0) for name in formats)
    return error + (ROUTING_ERROR if error and config.model.moe is not None else 0.0)


def try_dropout(laboratory: Laboratory, miniature: Miniature) -> Iterator[Finding]:
    """Whether each rank drops other values, and a resumed run the same ones again."""
    config, ranks = miniature.exact, miniature.mesh.ranks
    config.model.dropout = DROPOUT
    run = laboratory.run(config, ranks, "dropout")
    drawn = [state for record in run.records(1) for state in record["dropout"]]
    repeated = len(drawn) - len(set(drawn))
    where = "ranks that draw the masks of another" if drawn else "no mask was drawn"
    figure = float(repeated if drawn else 1)
    yield Finding.within("dropout: other masks on each rank", figure, 0.0, where)
    config.checkpoint.resume = str(run.checkpoint(SAVED))
    later = laboratory.run(config, ranks, "dropout, resumed")
    yield compare_after_resume("dropout: resume, to the bit", later, run, 0.0)
    for old in (run, later):
        laboratory.forget(old)


def try_export(laboratory: Laboratory, miniature: Miniature) -> Iterator[Finding]:
    """Whether transformers opens an export, and computes the same loss."""
    promise, run = "export: transformers computes the same loss", laboratory.alone(miniature.alone)
    try:
        family_for(miniature.config.model)
    except UserError as error:
        yield Finding(promise, "open", where=str(error))
        return
    laboratory.progress("export")
    out, result = laboratory.folder / "export", laboratory.folder / "export.json"

    def export() -> None:
        export_command(run.checkpoint(STEPS), out, "fp32")
        result.write_text(json.dumps(losses_of_export(out, run.checkpoint(STEPS))))

    run_apart(export, laboratory.folder / "export.log", LIMIT_SECONDS)
    found, expected = json.loads(result.read_text())
    yield _within(promise, gap_of_numbers({"loss": found}, {"loss": expected}), EXPORT_BOUND)
