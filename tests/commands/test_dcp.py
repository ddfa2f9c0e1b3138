"""torch.distributed.checkpoint reads what is exported, and what it writes is imported."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import BUFFER
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.save import OwnShard, save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.cli import main
from megafrontier.commands import dcp as converter
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout
from tests.checkpoint.helpers import (
    BY_BLOCK,
    SHAPES,
    STATES,
    make_layouts,
    make_manifest,
    make_shards,
    make_tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with a buffer and a frozen parameter."""
    layouts = make_layouts(BY_BLOCK, 1)
    shards = make_shards(layouts, make_tensors(5), 0, 1)
    trained = [StoredUnit.of(layout, STATES) for layout in layouts]
    frozen = StoredUnit.of(
        Layout.build("frozen", [("fixed", (3, 2))], 1), {"weight": torch.float32}
    )
    seen = StoredUnit.of(Layout.build("buffers", [("seen", ())], 1), {BUFFER: torch.int64})
    held = {state: [*tensors, None, None] for state, tensors in shards.items()}
    held["weight"][-2] = torch.arange(128.0)
    held[BUFFER] = [None] * (len(layouts) + 1) + [torch.full((128,), 9)]
    own = OwnShard(ShardSet("", 1, [*trained, frozen, seen]), 0, True, held)
    more = {"config": {"run": {"name": "x"}}, "extra": {"optimizer_steps": 5}}
    return save(tmp_path / "checkpoints", make_manifest(5, **more), [own], World.single())


def test_torch_reads_what_is_exported(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(converter, "CHUNK_ELEMENTS", 50)
    out = tmp_path / "dcp"
    assert main(["checkpoint", "export", str(saved.parent), "--dcp", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    tensors = make_tensors(5)
    states = {"weight": "model.{}", "exp_avg": "optimizer.state.{}.exp_avg"}
    wanted = {
        key.format(name): torch.zeros(s) for key in states.values() for name, s in SHAPES.items()
    }
    wanted |= {"model.seen": torch.tensor(0), "model.fixed": torch.zeros(3, 2)}
    dcp.load(wanted, checkpoint_id=out, no_dist=True)
    for state, key in states.items():
        for name in SHAPES:
            assert torch.equal(wanted[key.format(name)], tensors[state][name])
    assert wanted["model.seen"] == 9
    assert torch.equal(wanted["model.fixed"], torch.arange(6.0).view(3, 2))
    metadata = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert len(metadata["model.embedding.weight"].chunks) == 13
    assert "optimizer.state.fixed.exp_avg" not in metadata


def test_what_was_exported_is_imported_unchanged(saved, tmp_path):
    converter.export_dcp(saved, tmp_path / "dcp")
    assert main(["checkpoint", "import", str(tmp_path / "back"), "--dcp", f"{tmp_path}/dcp"]) == 0
    before, after = open_checkpoint(saved), open_checkpoint(tmp_path / "back" / saved.name)
    assert verify(after.path).whole
    for key in ("step", "tokens", "config", "extra", "states", "buffers"):
        assert getattr(after.manifest, key) == getattr(before.manifest, key)
    assert after.shapes.items() == before.shapes.items()
    for state in STATES:
        names = [
            name for name, boxes in before.manifest.tensors.items() if state in boxes[0].unit.states
        ]
        for name, values in before.tensors(state, names).items():
            assert torch.equal(after.tensor(state, name), values)
    assert after.tensor(BUFFER, "seen") == 9


@pytest.mark.parametrize("is_nested", [True, False])
def test_what_torch_writes_is_imported(tmp_path, is_nested):
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 3).bfloat16()).sum().backward()
    optimizer.step()
    names = [name for name, _ in module.named_parameters()]
    states = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    saved = {"model": module.state_dict(), "optimizer": {"state": states}}
    dcp.save(
        saved if is_nested else module.state_dict(), checkpoint_id=tmp_path / "d", no_dist=True
    )
    path = converter.import_dcp(tmp_path / "d", tmp_path / "checkpoints")
    checkpoint = open_checkpoint(path)
    assert checkpoint.manifest.step == 0
    for name, value in module.named_parameters():
        assert torch.equal(checkpoint.tensor("weight", name), value.float())
        if is_nested:
            found = checkpoint.tensor("exp_avg", name)
            assert torch.equal(found, states[name]["exp_avg"])
    assert checkpoint.tensor(BUFFER, "1.num_batches_tracked") == 1


def test_what_does_not_fit_is_refused_in_one_line(saved, tmp_path, capsys):
    full = str(saved.parent)
    (tmp_path / "empty").mkdir()
    for arguments, problem in [
        (["export", full, "--dcp", full], f"--dcp {full}: not empty"),
        (["export", full], "--dcp: missing"),
        (["import", full, "--dcp", str(tmp_path)], f"{full}: holds checkpoints"),
        (["import", f"{tmp_path}/n", "--dcp", f"{tmp_path}/empty"], "need a DCP checkpoint"),
    ]:
        assert main(["checkpoint", *arguments]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1
