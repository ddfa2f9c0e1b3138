"""`megafrontier checkpoint average` makes one checkpoint of several."""

from dataclasses import asdict
from functools import partial
from math import sqrt

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.sets import shard_path
from megafrontier.cli import main
from megafrontier.commands import average
from megafrontier.common.errors import INTERRUPTED
from megafrontier.config import ModelConfig
from tests import runs
from tests.checkpoint.helpers import (
    ALL_IN_ONE,
    BY_BLOCK,
    EACH_ALONE,
    SHAPES,
    STATES,
    contents,
    flip,
    make_tensors,
    save_all,
)

WITH_EMA = STATES | {"ema": torch.float32}
SENT = {"published": torch.bfloat16, "error": torch.bfloat16}
SLICE = 100


def attach(folder):
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "words").write_text("a b c")


@pytest.fixture
def saved(tmp_path):
    """A run whose checkpoints were written by 1, 4 and 2 ranks, with other units and slices."""
    root = tmp_path / "run" / "checkpoints"
    for step, ranks, groups, states, elements in (
        (1, 1, BY_BLOCK, WITH_EMA, SLICE),
        (2, 4, EACH_ALONE, WITH_EMA | SENT, 37),
        (3, 2, ALL_IN_ONE, WITH_EMA | SENT, SLICE),
    ):
        more = {"slice_elements": elements, "extra": {"data": [step, 0]}, "attach": attach}
        save_all(root, step, ranks, groups, make_tensors(step, states), **more)
    return tmp_path / "run"


def run_average(run, *words, code=0):
    out = run.parent / "average"
    assert main(["checkpoint", "average", str(run), "--out", str(out), *words]) == code
    return out


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (("--last", "3"), (1, 1, 1)),
        (("--last", "2", "--weights", "linear"), (0, 1, 2)),
        (("--steps", "3", "1", "2", "--weights", "sqrt"), (1, sqrt(2), sqrt(3))),
    ],
)
def test_the_average_of_checkpoints_of_different_layouts_is_torchs_to_the_bit(
    saved, capsys, words, weights
):
    """In memory is no more than a slice. All but masters and their averages is of the newest."""
    with LargestTensor() as largest:
        out = run_average(saved, *words)
    assert largest.nbytes == SLICE * torch.float64.itemsize
    (path,) = out.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    found, sources = open_checkpoint(path), [make_tensors(i, WITH_EMA) for i in (1, 2, 3)]
    assert set(found.manifest.states) == set(WITH_EMA)
    factors = torch.tensor(weights, dtype=torch.float64)
    for state in WITH_EMA:
        for name in SHAPES:
            stack = torch.stack([tensors[state][name] for tensors in sources]).double()
            expected = torch.tensordot(factors, stack, 1) / sum(weights)
            if state not in ("weight", "ema"):
                expected = stack[-1]
            assert torch.equal(found.tensor(state, name), expected.float()), (state, name)
    assert verify(path).whole
    newest = open_checkpoint(saved / "checkpoints" / "step-00000003").manifest
    assert (found.manifest.step, found.manifest.num_shards) == (3, newest.num_shards)
    used = [step for step in (1, 2, 3) if weights[step - 1]]
    about = {"steps": used, "weights": words[-1] if "--weights" in words else "mean"}
    assert found.manifest.extra == {"data": [3, 0], "average": about}
    assert (path / "tokenizer" / "words").read_text() == "a b c"


def test_checkpoints_that_are_equal_have_themselves_as_average(tmp_path):
    for step in (1, 2, 3):
        save_all(tmp_path / "run", step, 1, tensors=make_tensors(9))
    for weights in ("mean", "linear", "sqrt"):
        out = average.average_command(
            tmp_path / "run", tmp_path / weights, last=3, steps=None, weights=weights
        )
        for name, values in make_tensors(9)["weight"].items():
            assert torch.equal(open_checkpoint(out).tensor("weight", name), values)


def test_without_a_moving_average_in_all_of_them_the_average_has_none(tmp_path):
    save_all(tmp_path / "run", 1, 1)
    save_all(tmp_path / "run", 2, 1, tensors=make_tensors(2, WITH_EMA))
    out = run_average(tmp_path / "run", "--last", "2")
    assert set(open_checkpoint(out / "step-00000002").manifest.states) == set(STATES)


def test_an_average_of_other_layouts_evaluates_exports_and_trains_on(config_file, tmp_path, capfd):
    """The oldest was trained with tensor parallelism, the others with delta wires and errors."""
    low = ("machine.levels.pair.size=1", "machine.levels.node.size=2", "partition.wires=low",
           "partition.error_feedback=true", "evaluate.batches=0")  # fmt: skip
    every = ("checkpoint.every=1", "checkpoint.keep=0", "optimizer.ema=0.5")
    runs.run(config_file, 2, *runs.ONE, *every, "parallel.tensor=2", "train.stop_at=1")
    runs.run(config_file, 2, *low, *every, "train.stop_at=3")
    run = tmp_path / "run"
    newest = open_checkpoint(run / "checkpoints" / "step-00000003").manifest
    assert newest.states.keys() >= {"published", "error", "ema"}
    out = run_average(run, "--last", "3", "--weights", "linear")
    (path,) = out.iterdir()
    kept = newest.states.keys() - {"published", "error"}
    assert open_checkpoint(path).manifest.states.keys() == kept
    for weights in ("weight", "ema"):
        assert main(["evaluate", str(out), "--weights", weights, "evaluate.batches=1"]) == 0
        hf = tmp_path / weights
        assert main(["export", str(out), "--weights", weights, "--out", str(hf)]) == 0
        exported = load_file(hf / "model.safetensors")["model.embed_tokens.weight"]
        expected = open_checkpoint(path).tensor(weights, "embedding.tokens.weight")
        assert torch.equal(exported, expected[: len(exported)])  # without padding of the vocabulary
    capfd.readouterr()
    other = (f"run.directory={tmp_path}/other", f"checkpoint.resume={out}", "train.stop_at=5")
    lines = runs.run(config_file, 2, *low, *every, *other)
    assert [line["step"] for line in lines if "loss" in line] == [4, 5]
    assert runs.losses(lines)[-1] < runs.losses(runs.metrics(run))[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--last, --steps: neither, need one of them"),
        (("--last", "2", "--steps", "1", "2"), "--last, --steps: both, need one of them"),
        (("--last", "1"), "--last: 1, need at least 2, and {run} has 3"),
        (
            ("--last", "4"),
            "--last: 4, need at least 2, and {run} has 3 (checkpoint.keep: how many stay)",
        ),
        (("--steps", "2"), "--steps: 2, need two or more different steps"),
        (("--steps", "2", "2"), "--steps: 2 2, need two or more different steps"),
        (("--steps", "2", "7"), "--steps: 7, need steps of {run}: [1, 2, 3]"),
        (("--last", "2", "--out", "{run}"), "--out: {run}, which exists, need a new folder"),
        (("--last", "2", "--out", "{run}/step-00000009"), "need a folder, such as {run}/average"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_line(saved, capsys, words, problem):
    before = contents(saved.parent)
    run_average(saved, *(word.format(run=saved) for word in words), code=2)
    error = capsys.readouterr().err
    assert problem.format(run=saved) in error
    assert error.count("\n") == 1
    assert contents(saved.parent) == before


def test_checkpoints_of_different_models_are_refused_in_one_line(tmp_path, capsys):
    save = partial(save_all, tmp_path / "run", num_shards=1)
    save(step=1, groups=BY_BLOCK[:1], tensors={s: {n: t[n] for n in list(SHAPES)[:1]}
                                               for s, t in make_tensors().items()})  # fmt: skip
    for step, heads in ((2, 2), (3, 4)):
        model = asdict(ModelConfig(hidden=24, heads=heads))
        save(step=step, config={"model": model})
    for steps, problem in (
        (("1", "2"), "step-00000001: other parameters, need those of"),
        (("2", "3"), "model.heads: 4, but"),
    ):
        out = run_average(tmp_path / "run", "--steps", *steps, code=2)
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1
        assert not out.exists()


def test_an_average_that_is_interrupted_or_meets_damage_leaves_nothing(saved, capsys, monkeypatch):
    read, calls = average._read, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return read(*args)

    monkeypatch.setattr(average, "_read", interrupted)
    assert not run_average(saved, "--last", "3", code=INTERRUPTED).exists()
    monkeypatch.undo()
    damaged = saved / "checkpoints" / "step-00000002" / shard_path(1)
    flip(damaged, damaged.stat().st_size // 2)
    assert not run_average(saved, "--last", "3", code=2).exists()
    error = capsys.readouterr().err
    assert f"checkpoint not saved: {damaged}: checksum does not match" in error
    assert error.count("\n") == 1
