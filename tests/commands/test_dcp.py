"""torch.distributed.checkpoint reads what is exported, and what it writes is imported."""

import io
import os
import pickle
import zipfile
from dataclasses import replace

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
from tests import runs
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
    step = "optimizer.state.embedding.weight.step"
    wanted[step] = torch.tensor(0.0)
    dcp.load(wanted, checkpoint_id=out, no_dist=True)
    for state, key in states.items():
        for name in SHAPES:
            assert torch.equal(wanted[key.format(name)], tensors[state][name])
    assert wanted["model.seen"] == 9
    assert wanted[step] == 5
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


def torch_folder(path, is_nested=True, updates=3, **saved):
    """A DCP checkpoint of a module and AdamW, as torch writes it. Returns the module and the states
    by parameter."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 3).bfloat16()).sum().backward()
    for _ in range(updates):
        optimizer.step()
    names = [name for name, _ in module.named_parameters()]
    states = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    nested = {"model": module.state_dict(), "optimizer": {"state": states}, **saved}
    dcp.save(nested if is_nested else module.state_dict(), checkpoint_id=path, no_dist=True)
    return module, states


@pytest.mark.parametrize("is_nested", [True, False])
def test_what_torch_writes_is_imported(tmp_path, is_nested):
    module, states = torch_folder(tmp_path / "d", is_nested)
    path = converter.import_dcp(tmp_path / "d", tmp_path / "checkpoints")
    checkpoint = open_checkpoint(path)
    assert checkpoint.manifest.step == 0
    assert checkpoint.manifest.extra == ({"optimizer_steps": 3} if is_nested else {})
    for name, value in module.named_parameters():
        assert torch.equal(checkpoint.tensor("weight", name), value.float())
        if is_nested:
            found = checkpoint.tensor("exp_avg", name)
            assert torch.equal(found, states[name]["exp_avg"])
    assert checkpoint.tensor(BUFFER, "1.num_batches_tracked") == 1


def test_adamw_goes_on_counting_its_updates_after_an_import(config_file, tmp_path):
    """Otherwise bias correction begins again, and the first updates are too large."""
    run = tmp_path / "run"
    runs.run(config_file, 1, *runs.ONE, "train.stop_at=2")
    assert main(["checkpoint", "export", str(run), "--dcp", f"{tmp_path}/dcp"]) == 0
    (tmp_path / "dcp" / converter.PROGRESS).unlink()
    path = converter.import_dcp(tmp_path / "dcp", tmp_path / "imported")
    resume = (f"checkpoint.resume={path}", "train.stop_at=1", f"run.directory={tmp_path}/other")
    runs.run(config_file, 1, *runs.ONE, *resume)
    saved = open_checkpoint(tmp_path / "other" / "checkpoints" / "step-00000001")
    assert saved.manifest.extra["optimizer_steps"] == 3


def refused(folder, out, capsys):
    """The line with which the import of a folder ends, and nothing is left in `out`."""
    assert main(["checkpoint", "import", str(out), "--dcp", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not out.exists()
    return error


def test_moments_without_one_number_of_updates_are_refused_by_name(tmp_path, capsys):
    _, states = torch_folder(tmp_path / "d")
    states["0.bias"]["step"] += 1
    model = {f"model.{name}": value["exp_avg"] for name, value in states.items()}
    others = {f"optimizer.state.{n}.{s}": v for n, of in states.items() for s, v in of.items()}
    dcp.save(model | others, checkpoint_id=tmp_path / "e", no_dist=True)
    error = refused(tmp_path / "e", tmp_path / "out", capsys)
    assert "optimizer.state.0.bias.step: 4, but optimizer.state.0.weight.step is 3; need" in error
    del others["optimizer.state.0.weight.step"]
    dcp.save(model | others, checkpoint_id=tmp_path / "f", no_dist=True)
    error = refused(tmp_path / "f", tmp_path / "out", capsys)
    assert "optimizer.state.0.weight.step: missing, need AdamW's number of updates" in error


def test_states_of_no_parameter_are_named(tmp_path, capsys):
    states = {"0": {"exp_avg": torch.ones(3)}, "1": {"exp_avg": torch.ones(3)}}
    saved = {"model": {"a": torch.ones(3)}, "optim": {"state": states}}
    dcp.save(saved, checkpoint_id=tmp_path / "d", no_dist=True)
    converter.import_dcp(tmp_path / "d", tmp_path / "out")
    warning = "warning: optim.state.0.exp_avg and 1 more: not imported, because no parameter has"
    assert warning in capsys.readouterr().err


def test_a_flipped_byte_of_a_tensor_is_refused(tmp_path, capsys):
    module, _ = torch_folder(tmp_path / "d")
    (path,) = (tmp_path / "d").glob("*.distcp")
    data = path.read_bytes()
    weight = module.state_dict()["0.weight"].view(torch.uint8).numpy().tobytes()
    at = data.index(weight)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    error = refused(tmp_path / "d", tmp_path / "out", capsys)
    assert "model.0.weight: checksum of archive/data/0: does not match" in error


def test_a_flipped_bit_of_a_name_is_refused(tmp_path, capsys):
    torch_folder(tmp_path / "d")
    path = tmp_path / "d" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"model.0.weight", b"model.0.weighu"))
    error = refused(tmp_path / "d", tmp_path / "out", capsys)
    assert ".metadata: model.0.weighu, but its path is" in error


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def with_metadata(change):
    """Damage by a change of what `.metadata` says. `change` may return another object."""

    def damage(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return damage


def with_place(**changes):
    """Damage by a change of where the first tensor is."""

    def change(metadata):
        index = next(index for index in metadata.storage_data if index.offset is not None)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)

    return with_metadata(change)


def with_tensor(**changes):
    """Damage by a change of what `.metadata` says of a weight."""

    def change(metadata):
        entries = metadata.state_dict_metadata
        entries["model.0.weight"] = replace(entries["model.0.weight"], **changes)

    return with_metadata(change)


def cut(name):
    def damage(folder):
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[:-40])

    return damage


def with_archive(folder, data):
    """Append an archive to the data, in place of the first tensor's."""
    (path,) = folder.glob("*.distcp")
    start = path.stat().st_size
    path.write_bytes(path.read_bytes() + data)
    with_place(offset=start, length=len(data))(folder)


def compress(folder):
    """What torch never does, and what may be a bomb."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with_archive(folder, data.getvalue())


def evil_data(folder):
    data = io.BytesIO()
    torch.save(Evil(folder / "ran"), data)
    with_archive(folder, data.getvalue())


def pipe(folder):
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


STRANGE = {
    "code": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil(f / "ran"))), "mkdir, need"),
    "code inside": (
        lambda f: with_metadata(lambda m: replace(m, planner_data=Evil(f / "ran")))(f),
        "mkdir, need classes of torch's DCP metadata alone",
    ),
    "code in data": (evil_data, "UnpicklingError"),
    "cut metadata": (cut(".metadata"), ".metadata: "),
    "other metadata": (with_metadata(lambda m: [1]), "no metadata of a checkpoint"),
    "a pipe": (pipe, "need a DCP checkpoint"),
    "missing file": (lambda f: next(f.glob("*.distcp")).unlink(), "which is missing or no file"),
    "cut file": (cut("*.distcp"), "need at most the "),
    "other shape": (with_tensor(size=torch.Size((5, 4))), "5 elements missing, need all"),
    "no chunks": (with_tensor(chunks=[]), "15 elements missing, need all elements"),
    "huge": (with_tensor(size=torch.Size((10**9, 10**6))), "bytes, need at most the"),
    "a path above": (with_place(relative_path="../d/__0_0.distcp"), "need one in the folder"),
    "an absolute path": (with_place(relative_path="/dev/zero"), "need one in the folder"),
    "other bytes": (with_place(offset=7), "need it as torch wrote it"),
    "negative bytes": (with_place(offset=-1), "need two numbers of at least 0"),
    "compressed": (compress, "archive: compressed, need it as torch wrote it"),
    "transformed": (with_place(transform_descriptors=["zstd"]), "need none, such as no compress"),
    "progress": (lambda f: (f / converter.PROGRESS).write_text("[" * 10**5), "as export wrote it"),
    "other progress": (lambda f: (f / converter.PROGRESS).write_text('{"step": 1}'), "need step"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_folder_of_a_stranger_runs_no_code_and_is_refused_in_one_line(tmp_path, capsys, kind):
    torch_folder(tmp_path / "d")
    damage, problem = STRANGE[kind]
    damage(tmp_path / "d")
    error = refused(tmp_path / "d", tmp_path / "out", capsys)
    assert "--dcp" in error
    assert problem in error
    assert not (tmp_path / "d" / "ran").exists()


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
