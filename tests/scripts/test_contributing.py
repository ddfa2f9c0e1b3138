"""The examples in CONTRIBUTING.md run."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch

from megafrontier.comm.wires import registry
from megafrontier.comm.wires.wire import Wire
from megafrontier.common.buffers import Workspace
from megafrontier.training.callbacks.base import Callback
from tests.ranks import run_ranks

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def example(word, **names):
    exec(next(block for block in BLOCKS if word in block), names)
    return names


def test_the_example_of_a_family_undoes_itself():
    names = example("def export", size=2, config=SimpleNamespace(heads=3))
    ours = torch.randn(18, 4)
    (theirs,) = names["export"](ours)
    assert not torch.equal(theirs, ours)
    assert torch.equal(names["load"]([theirs]), ours)


def test_the_example_of_a_wire_sums_over_ranks(monkeypatch):
    monkeypatch.setattr(registry, "FORMATS", dict(registry.FORMATS))
    codec = example("class Float8")["Float8"]()
    assert registry.FORMATS["e5m2"][0].name == codec.name

    def body(hierarchy):
        values = torch.arange(1.0, 9.0) * (hierarchy.rank + 1)
        out, sent = Wire(codec).reduce(values, hierarchy.groups[0], Workspace(values.device))
        return out.tolist(), sent

    found = run_ranks((2,), body)
    assert [sent for _, sent in found] == [4, 4]
    total = torch.tensor([value for part, _ in found for value in part])
    assert torch.allclose(total, torch.arange(1.0, 9.0) * 3, rtol=0.125)


def test_the_example_of_a_callback_is_one():
    assert issubclass(example("class GradientShare")["GradientShare"], Callback)
