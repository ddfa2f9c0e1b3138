"""The host hands the device its work without waiting for it, and reads the results later."""

import time
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.common import async_copy
from megafrontier.common.errors import RunFailed
from megafrontier.optim import gradients
from megafrontier.plan import assemble
from megafrontier.training import loop, step
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.callbacks.stragglers import GarbageCollection
from tests import runs
from tests.memory import tensor_bytes
from tests.ranks import run_mesh

READING_OPERATORS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal",
}  # fmt: skip
READING_METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__")


class ReadingOperators(TorchDispatchMode):
    """Lists the operators that bring a tensor's values to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in READING_OPERATORS:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def list_reads(found):
    """Append the name of each method that reads a tensor when it is called."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READING_METHODS:
            method = getattr(torch.Tensor, name)

            def noting(self, *arguments, name=name, method=method, **options):
                found.append(name)
                return method(self, *arguments, **options)

            patch.setattr(torch.Tensor, name, noting)
        yield


@pytest.mark.parametrize(("wires", "precision"), [("exact", "fp32"), ("low", "fp16")])
def test_a_step_is_handed_over_without_reading_a_tensor(config_file, wires, precision):
    chosen = f"partition.wires={wires}", f"train.precision={precision}", "partition.overlap=none"
    config = runs.load(config_file, *chosen, "train.spike_loss=2", "train.spike_window=1")

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            loop.train_step(trainer)
            found = []
            trainer.metrics.record("custom", torch.ones(2))
            with list_reads(found), ReadingOperators() as operators:
                started = loop.start_step(trainer)
                handed_over = [*found, *operators.found]
                started.read()
            return handed_over, found

    for handed_over, found in run_mesh((2, 2, 1), body):
        assert handed_over == []
        assert found == ["tolist"], "the host waits only when it reads the result"


class Collect(Callback):
    """Keeps the results, and the trainer's step when they come."""

    def __init__(self, every):
        self._every = every
        self.seen = []

    def needs_settled_state(self, trainer, step):
        return step % self._every == 0

    def after_step(self, trainer, result):
        numbers = result.loss, result.grad_norm, result.tokens, result.total_tokens, result.lr
        self.seen.append((result.step, trainer.step, numbers))


def test_late_results_are_the_same_and_a_callback_can_have_the_settled_state(config_file):
    config = runs.load(config_file)

    def body(mesh):
        found = []
        for depth in (0, 1):
            collect = Collect(every=3)
            with runs.open_trainer(config, mesh) as trainer:
                loop.run(trainer, [collect], depth=depth)
            found.append(collect.seen)
        return found

    for at_once, late in run_mesh((2, 2, 1), body):
        assert [step for step, _, _ in at_once] == list(range(1, 9))
        assert [(step, numbers) for step, _, numbers in late] == [
            (step, numbers) for step, _, numbers in at_once
        ]
        assert [at for _, at, _ in at_once] == list(range(1, 9))
        assert [at for _, at, _ in late] == [2, 3, 3, 5, 6, 6, 8, 8]


def test_each_step_has_its_own_seconds_however_late_its_result_is_read(config_file, monkeypatch):
    """A host that is slower than its device has begun the next step when it reads a result."""
    config = runs.load(config_file, "machine=laptop")
    clock, read_step = SimpleNamespace(now=0.0), loop.read_step

    def read_slowly(loader, step, rank):
        clock.now += 1000.0 if step == 3 else 10.0
        return read_step(loader, step, rank)

    class Note(Collect):
        def after_step(self, trainer, result):
            self.seen.append(result.seconds)
            clock.now += 1.0

    monkeypatch.setattr(loop, "read_step", read_slowly)
    monkeypatch.setattr(async_copy, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def body(mesh):
        found = []
        for depth in (0, 1):
            note = Note(every=6)
            with runs.open_trainer(config, mesh) as trainer:
                loop.run(trainer, [note], depth=depth)
            found.append(note.seen)
        return found

    [(at_once, late)] = run_mesh((1,), body)
    assert at_once == [10, 10, 10, 1000, 10, 10, 10, 10]
    # The time of callbacks between two steps counts with the second one.
    assert late == [10, 10, 11, 1001, 11, 11, 10, 10]


def test_the_engine_gets_every_option_of_the_configuration(config_file, monkeypatch):
    given = {}

    def shard(model, blocks, rules, mesh, **options):
        given.update(options, rules=rules.default)
        return real(model, blocks, rules, mesh, **options)

    real = assemble.shard
    monkeypatch.setattr(assemble, "shard", shard)
    config = runs.load(
        config_file, "train.precision=bf16", "partition.wires=low", "partition.overlap=full",
        "partition.prefetch=2", "partition.check_order=true", "optimizer.no_decay=[]",
    )  # fmt: skip

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            levels = [set(unit.feedback.errors) for unit in trainer.engine.units]
            loop.train_step(trainer)
        specs = [spec for unit in trainer.engine.units for spec in unit.specs.values()]
        groups = {given["groups"](spec) for spec in specs}
        rules = given["rules"]
        return [rules.dtype, rules.error_feedback, *given["overlap"]], groups, levels

    for found, groups, levels in run_mesh((2, 2, 2), body):
        assert found == [torch.bfloat16, True, "full", 2, True]
        assert groups == {("adamw", 0)}  # all have weight decay
        assert levels == [{2}] * len(levels)


def test_the_heartbeat_comes_with_every_micro_batch(config_file):
    """A step of many micro-batches may take longer than a run may stand still."""
    config = runs.load(config_file, "machine=laptop", "train.steps=2", "evaluate.batches=0")

    def body(mesh):
        beats = []
        with runs.open_trainer(config, mesh) as trainer:
            loop.run(trainer, [], beats.append)
        return beats

    assert run_mesh((1,), body) == [[*[None] * 8, 1, *[None] * 8, 2]]


def test_errors_of_messages_are_scaled_with_the_loss(config_file, monkeypatch):
    """They are in units of the loss scale, which changes in the course of a run."""
    monkeypatch.setattr(gradients, "GROWTH_INTERVAL", 1)
    chosen = (
        "partition.wires=low", "train.precision=fp16", "train.global_batch=8",
        "train.micro_batch=1",
    )  # fmt: skip
    config = runs.load(config_file, *chosen)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            scale_errors, factors, scales = trainer.engine.scale_errors, [], []
            trainer.engine.scale_errors = lambda f: (factors.append(float(f)), scale_errors(f))
            for _ in range(2):
                scales.append(float(trainer.loss_scale.scale))
                loop.train_step(trainer)
            scales.append(float(trainer.loss_scale.scale))
            return factors, scales

    for factors, scales in run_mesh((2, 2, 2), body):
        # A step that overflows drops them, and halves the scale.
        assert factors == [b / a if b > a else 0 for a, b in pairwise(scales)]
        assert len({*scales}) > 1


def test_train_deterministic_makes_torch_deterministic(config_file):
    def body(mesh):
        found = []
        for word in ("false", "true"):
            config = runs.load(config_file, "machine=laptop", f"train.deterministic={word}")
            with runs.open_trainer(config, mesh):
                found.append(torch.are_deterministic_algorithms_enabled())
        return found

    assert run_mesh((1,), body) == [[False, True]]


class GiveUp(Callback):
    """Raises on all ranks an error with which all leave; one rank is late. `at`: when."""

    def after_step(self, trainer, result):
        if trainer.mesh.rank == 1:
            time.sleep(0.5)
        self.at = time.monotonic()
        raise RunFailed("enough")


def test_an_error_of_all_ranks_leaves_nothing_of_the_next_step_in_progress(config_file):
    """A rank that destroyed its groups first would end the others with an error about these."""
    config = runs.load(config_file, "partition.overlap=full")

    def body(mesh):
        give_up = GiveUp()
        with runs.open_trainer(config, mesh) as trainer:
            with pytest.raises(RunFailed, match="enough"):
                loop.run(trainer, [give_up], depth=1)
            left_at = time.monotonic()
        return trainer.step, len(trainer.engine._streams._newest), give_up.at, left_at

    steps, in_progress, raised_at, left_at = zip(*run_mesh((2, 2, 1), body), strict=True)
    assert steps == (2,) * 4, "the next step had begun"
    assert in_progress == (0,) * 4
    assert min(left_at) >= max(raised_at), "no rank leaves before the last one"


@pytest.mark.parametrize(
    ("device", "micro_batches", "depth"), [("cuda", 8, 1), ("cuda", 9, 0), ("cpu", 1, 0)]
)
def test_only_short_steps_on_a_device_are_read_late(device, micro_batches, depth):
    """After a request to stop, the step in progress is finished, and not another long one."""
    trainer = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device(device)),
        loader=SimpleNamespace(micro_batches=micro_batches),
    )
    assert loop.queue_depth(trainer) == depth


def test_a_request_to_stop_takes_effect_a_step_later_if_results_are_late(config_file, monkeypatch):
    config = runs.load(config_file, "machine=laptop")

    def body(mesh):
        reached = []
        for depth in (0, 1):
            with runs.open_trainer(config, mesh) as trainer:
                monkeypatch.setattr(step, "stop_requested", lambda t=trainer: t.step == 3)
                loop.run(trainer, [], depth=depth)
                reached.append(trainer.step)
        return reached

    assert run_mesh((1,), body) == [[4, 5]]


def least_tensor_bytes():
    """The least of several readings: threads that read ahead, and gloo's, hold some a while."""
    found = []
    for _ in range(5):
        time.sleep(0.02)
        found.append(tensor_bytes())
    return min(found)


def test_memory_is_flat_after_the_second_step_without_pythons_collector(config_file):
    config = runs.load(config_file, "partition.overlap=full", "partition.wires=low")

    def body(mesh):
        held = []
        with runs.open_trainer(config, mesh) as trainer:
            GarbageCollection(100).at_start(trainer)
            for _ in range(6):
                loop.train_step(trainer)
                trainer.engine.finish_publishing()
                held.append(least_tensor_bytes())
        return held[1:]

    for held in run_mesh((2, 2, 1), body):
        assert len(set(held)) == 1
