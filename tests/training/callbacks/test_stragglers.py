"""A rank that computes longer than the others is named with its host, though a step takes the same
time on all ranks; and garbage is collected at the same steps."""

import gc
import os
import re
import time
from types import SimpleNamespace

from megafrontier.parallel.env import identify
from megafrontier.training import loop
from megafrontier.training.callbacks.stragglers import GarbageCollection, Stragglers
from tests import runs
from tests.ranks import run_ranks


def reported(own_seconds, ranks=4):
    """What rank 0 logs if the ranks' own seconds are these, by rank, in each comparison of two
    steps. A step takes 10 seconds on all ranks."""

    def body(hierarchy):
        lines = []
        stragglers = Stragglers(f"host-{hierarchy.rank}")
        log = SimpleNamespace(stragglers_every=2, straggler=1.5)
        trainer = SimpleNamespace(
            config=SimpleNamespace(log=log),
            world=hierarchy.world,
            run_logger=SimpleNamespace(info=lines.append),
        )
        for seconds in own_seconds:
            for step in (1, 2):
                waited = 10 - seconds[hierarchy.rank]
                result = SimpleNamespace(step=step, seconds=10.0, own_waiting_seconds=waited)
                stragglers.after_step(trainer, result)
        return lines

    return run_ranks((2, ranks // 2), body)[0]


def test_a_slow_rank_is_named_with_its_host_once_until_it_has_recovered():
    even, slow = [2.0, 2.2, 2.0, 1.9], [2.0, 2.2, 3.4, 1.9]
    line = "warning: slow: rank 2 on host-2: 3.4 s of its own a step, the median rank 2 s"
    assert reported([even]) == []
    assert reported([slow, slow, even, even]) == [line]
    assert reported([slow, slow, even, slow]) == [line, line]
    two = [2.0, 2.2, 3.4, 3.5]
    assert reported([two]) == [f"{line.replace('rank 2 s', 'rank 2.2 s')} (and 1 more)"]


def test_a_slow_rank_in_a_real_run_is_found(tmp_path, monkeypatch):
    config_file = runs.make_config_file(tmp_path)
    seed_dropout = loop.seed_dropout

    def dawdle(*arguments):
        is_slow = os.environ["MEGAFRONTIER_LOCAL"].startswith("2/")
        time.sleep(2.0 if is_slow else 0.3)
        seed_dropout(*arguments)

    monkeypatch.setattr(loop, "seed_dropout", dawdle)
    runs.run(
        config_file, 4, "evaluate.batches=0", "machine=laptop", "log.stragglers_every=2",
        "train.global_batch=4", "train.micro_batch=1", "train.steps=2",
    )  # fmt: skip
    log = runs.log(tmp_path / "run")
    # Three of four ranks wait for the slow one: 1.7 of 2 seconds.
    (waits,) = re.findall(r"  wait (\d+)%  ", log)
    assert 30 <= int(waits) <= 90
    (line,) = [line for line in log.splitlines() if line.startswith("warning: slow: ")]
    assert f"rank 2 on {identify({}).host}: " in line


def test_garbage_is_collected_when_it_is_due_and_not_between(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    for every, collections in ((3, 2), (0, 0)):
        garbage = GarbageCollection(every)
        garbage.at_start(None)
        assert gc.isenabled() == (every == 0)
        del collected[:]
        for step in range(1, 8):
            garbage.after_step(None, SimpleNamespace(step=step))
        assert len(collected) == collections
        garbage.at_end(None)
        assert gc.isenabled()
