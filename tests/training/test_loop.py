"""The host hands the device its work without looking at it, and reads what came of it later."""

import gc
import signal
import time
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from measuring import tensor_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.common import async_copy as deferred
from megafrontier.common.errors import RunFailed
from megafrontier.optim import loss_scale
from megafrontier.training import loop
from megafrontier.training import step as verdict
from megafrontier.training import trainer as trainer_module
from megafrontier.training.callbacks import evaluate as evaluation
from megafrontier.training.callbacks import save as saving
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.callbacks.evaluate import Evaluate
from megafrontier.training.callbacks.garbage_collection import collect_garbage_every
from megafrontier.training.logging.sinks import JsonLines
from megafrontier.training.plan import resolve_plan
from megafrontier.training.trainer import build_trainer
from tests import runs
from tests.ranks import run_ranks

LOOKS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"}
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__")


class Looking(TorchDispatchMode):
    """Names the operators that bring a tensor's values to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in LOOKS:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def spying(found):
    """Have each method that reads a tensor say so."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            method = getattr(torch.Tensor, name)

            def noting(self, *arguments, name=name, method=method, **options):
                found.append(name)
                return method(self, *arguments, **options)

            patch.setattr(torch.Tensor, name, noting)
        yield


@pytest.mark.parametrize("wires", ["exact", "low"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_host_looks_at_nothing_before_the_step_is_handed_over(config_file, wires, precision):
    chosen = f"partition.wires={wires}", f"train.precision={precision}", "partition.overlap=none"
    config = runs.load(config_file, *chosen, "train.spike_loss=2", "train.spike_window=1")

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
        loop.train_step(trainer)
        found = []
        with spying(found), Looking() as looking:
            pending = loop.start_step(trainer)
            handed_over = [*found, *looking.found]
            pending.read()
        trainer.close()
        return handed_over, found

    for handed_over, found in run_ranks((2, 2, 1), body):
        assert handed_over == []
        assert found == ["tolist"], "reading the step is what the host waits for"


class Collect(Callback):
    """Keeps the results, and at which step the trainer stood."""

    def __init__(self, every):
        self._every = every
        self.seen = []

    def needs_settled_state(self, trainer, step):
        return step % self._every == 0

    def after_step(self, trainer, result):
        numbers = result.loss, result.grad_norm, result.tokens, result.total_tokens, result.lr
        self.seen.append((result.step, trainer.step, numbers))


def test_results_that_are_read_late_are_the_same_and_a_callback_can_have_one_at_once(config_file):
    config = runs.load(config_file)

    def body(hierarchy):
        found = []
        for read_late in (False, True):
            trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
            collect = Collect(every=3)
            loop.run(trainer, [collect], read_late=read_late)
            trainer.close()
            found.append(collect.seen)
        return found

    for at_once, late in run_ranks((2, 2, 1), body):
        assert [step for step, _, _ in at_once] == list(range(1, 9))
        assert [(step, numbers) for step, _, numbers in late] == [
            (step, numbers) for step, _, numbers in at_once
        ]
        assert [at for _, at, _ in at_once] == list(range(1, 9))
        assert [at for _, at, _ in late] == [2, 3, 3, 5, 6, 6, 8, 8]


def test_each_step_has_its_own_seconds_however_late_its_results_are_read(config_file, monkeypatch):
    """A host that is slower than its device has begun the next step when it reads one."""
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
    monkeypatch.setattr(deferred, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def body(hierarchy):
        found = []
        for read_late in (False, True):
            trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
            note = Note(every=6)
            loop.run(trainer, [note], read_late=read_late)
            trainer.close()
            found.append(note.seen)
        return found

    [(at_once, late)] = run_ranks((1,), body)
    assert at_once == [10, 10, 10, 1000, 10, 10, 10, 10]
    # What callbacks do between two steps that follow at once is part of the second.
    assert late == [10, 10, 11, 1001, 11, 11, 10, 10]


def test_the_engine_hears_which_micro_batch_is_the_steps_last(config_file):
    config = runs.load(config_file, "machine=laptop", "train.global_batch=3")

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        heard, backward = [], trainer.engine.backward
        trainer.engine.backward = lambda loss, is_last: (
            heard.append(is_last),
            backward(loss, is_last),
        )
        loop.train_step(trainer)
        trainer.close()
        return heard

    assert run_ranks((1,), body) == [[False, False, True]]


def test_the_engine_is_as_the_configuration_has_it(config_file, monkeypatch):
    """Of its defaults, none."""
    given = {}

    def shard(*arguments, **options):
        given.update(options)
        return real(*arguments, **options)

    real = trainer_module.shard
    monkeypatch.setattr(trainer_module, "shard", shard)
    config = runs.load(
        config_file, "train.precision=bf16", "partition.wires=low", "partition.overlap=full",
        "partition.prefetch=2", "partition.check_order=true", "optimizer.no_decay=[]",
    )  # fmt: skip

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, 8), hierarchy)
        levels = [set(unit.feedback.errors) for unit in trainer.engine.units]
        before = runs.load(config_file).partition  # nothing above is by chance what it would be
        loop.train_step(trainer)
        trainer.close()
        keys = ("dtype", "error_feedback", "overlap", "prefetch", "check_order")
        defaults = (before.overlap, before.prefetch, before.check_order)
        return [given[key] for key in keys], defaults, given["decay"]("norm"), levels

    for found, defaults, decays, levels in run_ranks((2, 2, 2), body):
        assert found == [torch.bfloat16, True, "full", 2, True]
        assert defaults == ("safe", 1, False)
        assert decays
        assert levels == [{2}] * len(levels)


def test_what_compiles_is_started_with_the_jobs_signals_held_back(config_file, monkeypatch):
    """A scheduler sends them to all of its processes."""
    held_back = []
    monkeypatch.setattr(trainer_module, "reason_not_compiled", lambda *_: None)
    monkeypatch.setattr(
        trainer_module,
        "start_workers",
        lambda device: held_back.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    )

    def body(hierarchy):
        for compiles in ("false", "true"):
            config = runs.load(config_file, "machine=laptop", f"train.compile={compiles}")
            build_trainer(config, resolve_plan(config, 1), hierarchy).close()
        return held_back

    (((*blocked,),),) = run_ranks((1,), body)
    assert {signal.SIGUSR1, signal.SIGTERM} <= {*blocked}


def test_a_run_that_is_to_stop_before_its_first_step_does_nothing_but_end(config_file, monkeypatch):
    class Note(Callback):
        def at_start(self, trainer):
            seen.append("start")

        def at_end(self, trainer):
            seen.append("end")

    def body(hierarchy):
        config = runs.load(config_file, "machine=laptop", "evaluate.batches=1")
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        monkeypatch.setattr(Evaluate, "_run", lambda *_: seen.append("evaluation"))
        for stops in (True, False):
            monkeypatch.setattr(loop, "stop_requested", lambda stops=stops: stops)
            trainer.config.train.stop_at = 0 if stops else 1
            loop.run(trainer, [Note(), Evaluate(None, is_owed=True)])
        trainer.close()
        return seen

    seen = []
    assert run_ranks((1,), body) == [["end", "start", "evaluation", "end", "evaluation"]]


def test_who_watches_hears_of_every_micro_batch(config_file):
    """A step of many may take longer than a run may stand still."""
    config = runs.load(config_file, "machine=laptop", "train.steps=2", "evaluate.batches=0")

    def body(hierarchy):
        heard = []
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        loop.run(trainer, [], heard.append)
        trainer.close()
        return heard

    assert run_ranks((1,), body) == [[*[None] * 16, 1, *[None] * 16, 2]]


def test_who_watches_hears_of_every_micro_batch_of_an_evaluation(config_file):
    config = runs.load(config_file, "machine=laptop", "evaluate.batches=3")

    def body(hierarchy):
        heard = []
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        books = SimpleNamespace(write=lambda line: heard.append(sorted(line)))
        Evaluate(books, lambda: heard.append("batch"), is_owed=True).at_start(trainer)
        trainer.close()
        return heard

    found = ["batch"] * 3 * 16 + [["step", "tokens", "valid_loss"]]
    assert run_ranks((1,), body) == [found]


def test_errors_of_messages_grow_with_the_loss_scale(config_file, monkeypatch):
    """They are in its units, and it may double in the midst of a run."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 1)
    chosen = ("partition.wires=low", "train.precision=fp16", "train.global_batch=8")
    config = runs.load(config_file, *chosen)

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
        scale_errors, factors, scales = trainer.engine.scale_errors, [], []
        trainer.engine.scale_errors = lambda f: (factors.append(float(f)), scale_errors(f))
        for _ in range(2):
            scales.append(float(trainer.loss_scale.scale))
            loop.train_step(trainer)
        scales.append(float(trainer.loss_scale.scale))
        trainer.close()
        return factors, scales

    for factors, scales in run_ranks((2, 2, 2), body):
        # A step that overflows forgets them, and halves the scale.
        assert factors == [b / a if b > a else 0 for a, b in pairwise(scales)]
        assert len({*scales}) > 1


def test_garbage_is_collected_when_it_is_due_and_not_between(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    with collect_garbage_every(every=3) as garbage:
        assert not gc.isenabled()
        del collected[:]
        for step in range(1, 8):
            garbage.after_step(None, SimpleNamespace(step=step))
        assert len(collected) == 2
    assert gc.isenabled()
    with collect_garbage_every(every=0) as garbage:
        assert gc.isenabled()
        garbage.after_step(None, SimpleNamespace(step=6))
        assert len(collected) == 2


def test_what_is_asked_to_be_deterministic_is(config_file):
    def body(hierarchy):
        found = []
        for word in ("false", "true"):
            config = runs.load(config_file, "machine=laptop", f"train.deterministic={word}")
            build_trainer(config, resolve_plan(config, 1), hierarchy).close()
            found.append(torch.are_deterministic_algorithms_enabled())
        return found

    assert run_ranks((1,), body) == [[False, True]]


def test_metrics_are_on_the_disk_before_a_checkpoint_that_goes_on_after_them(
    config_file, monkeypatch
):
    order = []
    sync, save_trainer = JsonLines.sync, saving.save_trainer
    monkeypatch.setattr(JsonLines, "sync", lambda self: (order.append("sync"), sync(self)))
    monkeypatch.setattr(
        saving, "save_trainer", lambda trainer: (order.append("save"), save_trainer(trainer))[1]
    )
    chosen = ("train.steps=2", "checkpoint.every=1")
    runs.run(config_file, None, *runs.ONE, *chosen)
    assert order == ["sync", "save"] * 2


class GiveUp(Callback):
    """Raises on all ranks what all leave with; one rank is late. `at`: when."""

    def after_step(self, trainer, result):
        if trainer.hierarchy.rank == 1:
            time.sleep(0.5)
        self.at = time.monotonic()
        raise RunFailed("enough")


@pytest.mark.parametrize("policy", ["safe", "full"])
def test_what_all_ranks_raise_leaves_nothing_of_the_next_step_under_way(config_file, policy):
    """A rank that gives up its groups first would end the others with an error of theirs."""
    config = runs.load(config_file, f"partition.overlap={policy}")

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
        give_up = GiveUp()
        with pytest.raises(RunFailed, match="enough"):
            loop.run(trainer, [give_up], read_late=True)
        left_at = time.monotonic()
        trainer.close()
        return trainer.step, len(trainer.engine._lanes._newest), give_up.at, left_at

    steps, under_way, raised_at, left_at = zip(*run_ranks((2, 2, 1), body), strict=True)
    assert steps == (2,) * 4, "the next step had begun"
    assert under_way == (0,) * 4
    assert min(left_at) >= max(raised_at), "nobody leaves before the last one"


@pytest.mark.parametrize(
    ("device", "micro_batches", "is_late"),
    [("cuda", 8, True), ("cuda", 9, False), ("cpu", 1, False)],
)
def test_only_short_steps_on_a_device_are_read_late(device, micro_batches, is_late):
    """After a request to stop the step in hand is finished, and not a long one more."""
    trainer = SimpleNamespace(
        hierarchy=SimpleNamespace(device=torch.device(device)),
        loader=SimpleNamespace(micro_batches=micro_batches),
    )
    assert loop.reads_late(trainer) is is_late


def test_a_request_to_stop_is_heard_one_step_later_where_results_are_read_late(
    config_file, monkeypatch
):
    config = runs.load(config_file, "machine=laptop")

    def body(hierarchy):
        reached = []
        for read_late in (False, True):
            trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
            monkeypatch.setattr(verdict, "stop_requested", lambda t=trainer: t.step == 3)
            loop.run(trainer, [], read_late=read_late)
            trainer.close()
            reached.append(trainer.step)
        return reached

    assert run_ranks((1,), body) == [[4, 5]]


def test_a_request_to_stop_breaks_off_an_evaluation_and_no_step_follows(config_file, monkeypatch):
    """Near the time limit there may be room for neither; the next start makes up for it."""
    config = runs.load(
        config_file, "machine=laptop", "evaluate.every=2", "evaluate.batches=5", "train.steps=6"
    )
    read, lines = [], []
    read_step = evaluation.read_step

    def read_and_count(*arguments):
        read.append(1)
        return read_step(*arguments)

    monkeypatch.setattr(evaluation, "read_step", read_and_count)
    run_logger = SimpleNamespace(write=lines.append)

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        monkeypatch.setattr(loop, "stop_requested", lambda: len(read) >= 2)
        loop.run(trainer, [evaluation.Evaluate(run_logger)], read_late=True)
        trainer.close()
        return trainer.step, len(read), len(lines), trainer.model.training

    assert run_ranks((1,), body) == [(2, 2, 0, True)]


def least_tensor_bytes():
    """Threads that read ahead, and gloo's own, hold some a moment longer."""
    found = []
    for _ in range(5):
        time.sleep(0.02)
        found.append(tensor_bytes())
    return min(found)


@pytest.mark.parametrize("overlap", ["none", "full"])
def test_memory_is_flat_after_the_second_step_without_pythons_collector(config_file, overlap):
    config = runs.load(config_file, f"partition.overlap={overlap}", "partition.wires=low")

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
        held = []
        with collect_garbage_every(every=100):
            for _ in range(6):
                loop.train_step(trainer)
                trainer.engine.finish_publishing()
                held.append(least_tensor_bytes())
        trainer.close()
        return held[1:]

    for held in run_ranks((2, 2, 1), body):
        assert len(set(held)) == 1
