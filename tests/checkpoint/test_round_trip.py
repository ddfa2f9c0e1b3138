"""What was saved is loaded, on any number of ranks, and no more than that is read."""

import builtins
import secrets
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megafrontier.checkpoint.boxes import with_boxes
from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import Manifest, crc32_hex
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.save import save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit, shard_path
from megafrontier.checkpoint.shard_file import ShardFile, file_size
from megafrontier.common.checkpoints import MANIFEST
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout
from scripts.benchmarks.shared.measuring import resident_bytes
from tests.checkpoint.helpers import (
    ALL_IN_ONE,
    BY_BLOCK,
    EACH_ALONE,
    SHAPES,
    STATES,
    assert_same,
    load_all,
    make_layouts,
    make_manifest,
    make_shards,
    make_tensors,
    own_shard,
    run_threads,
    save_all,
)
from tests.processes import in_child


def test_a_checkpoint_goes_through_8_4_1_and_8_shards_unchanged(tmp_path):
    tensors = first = make_tensors()
    chain = [(8, BY_BLOCK), (4, ALL_IN_ONE), (1, EACH_ALONE), (8, BY_BLOCK)]
    for step, (num_shards, groups) in enumerate(chain):
        path = save_all(tmp_path, step, num_shards, groups, tensors)
        next_num_shards, next_groups = chain[(step + 1) % len(chain)]
        tensors = load_all(open_checkpoint(path), next_num_shards, next_groups)
        assert_same(tensors, first)


@pytest.mark.parametrize("slice_elements", [1, 7, 128, 10**9])
def test_the_size_of_slices_changes_nothing(tmp_path, slice_elements):
    path = save_all(tmp_path, num_shards=4, slice_elements=slice_elements)
    assert verify(path).problems == []
    assert_same(load_all(open_checkpoint(path), 3, ALL_IN_ONE), make_tensors(100))


def test_fill_converts_to_the_type_of_the_shard(tmp_path):
    path = save_all(tmp_path)
    loaded = load_all(open_checkpoint(path), 2, BY_BLOCK, {"weight": torch.bfloat16})
    need = {n: t.bfloat16() for n, t in make_tensors(100)["weight"].items()}
    assert_same(loaded, {"weight": need})


def test_the_manifest_keeps_all_that_was_given(tmp_path):
    more = {
        "config": {"run": {"seed": 3, "name": "ü"}, "betas": [0.9, 0.95]},
        "rng": {"seed": 3},
        "extra": {"loss_scale": 65536.0, "good_steps": 17, "third": 1 / 3},
    }
    found = open_checkpoint(save_all(tmp_path, 1700, **more)).manifest
    assert (found.step, found.tokens, found.num_shards) == (1700, 1_700_000, 8)
    assert {key: getattr(found, key) for key in more} == more
    assert found.states == STATES
    (only,) = found.sets
    layouts = [with_boxes(layout) for layout in make_layouts(BY_BLOCK, 8)]
    assert [unit.layout for unit in only.units] == layouts
    assert len(found.id) == 16
    assert found.saved_at.endswith("+00:00")


def test_shard_files_are_safetensors_that_others_can_read(tmp_path):
    path = save_all(tmp_path)
    found = {state: {n: torch.zeros(SHAPES[n]) for n in SHAPES} for state in STATES}
    for file in path.glob("pieces/*/*.safetensors"):
        with safe_open(file, "pt") as slices:
            for key in slices.keys():  # noqa: SIM118 (safe_open is no mapping)
                state, name, start = key.split("/")
                part = slices.get_tensor(key)
                found[state][name].view(-1)[int(start) : int(start) + len(part)] = part
    assert_same(found, make_tensors(100))


def test_a_shard_of_only_padding_is_a_valid_file(tmp_path):
    path = save_all(tmp_path, groups=[("norm", ["blocks.0.norm.weight"])])
    with safe_open(path / shard_path(7), "pt") as slices:
        assert list(slices.keys()) == []
    assert verify(path).whole


def test_no_folder_holds_more_than_256_shards():
    assert shard_path(255) == "pieces/00000/00000255.safetensors"
    assert shard_path(256) == "pieces/00001/00000256.safetensors"
    assert shard_path(75_263) == "pieces/00293/00075263.safetensors"


def test_the_size_of_a_file_is_known_without_looking(tmp_path):
    path = save_all(tmp_path)
    manifest = open_checkpoint(path).manifest
    sizes = [(path / shard_path(index)).stat().st_size for index in range(8)]
    assert sizes == [file_size(manifest, manifest.sets[0], index) for index in range(8)]


def test_only_one_replica_writes_and_all_return(tmp_path):
    layouts = make_layouts(BY_BLOCK, 4)

    def body(world):
        index, replica = world.rank % 4, world.rank // 4
        shards = make_shards(layouts, make_tensors(100), index, 4)
        own = [own_shard(layouts, shards, index, 4, replica == 0)]
        return save(tmp_path, make_manifest(100), own, world)

    assert run_threads(8, body) == [tmp_path / "step-00000100"] * 8
    assert verify(tmp_path / "step-00000100").whole


def test_attached_files_are_saved_and_checked(tmp_path):
    def attach(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")

    path = save_all(tmp_path, attach=attach)
    assert (path / "tokenizer" / "vocab.json").read_text() == "{}"
    assert verify(path).whole
    (path / "tokenizer" / "vocab.json").write_text("[]")
    assert "vocab.json: checksum does not match" in verify(path).problems[0]
    (path / "tokenizer" / "vocab.json").unlink()
    with pytest.raises(UserError, match=r"vocab\.json: missing"):
        open_checkpoint(path)


def test_a_rank_opens_only_the_files_that_overlap_its_shard(tmp_path, monkeypatch):
    """Each once."""
    checkpoint = open_checkpoint(save_all(tmp_path, num_shards=8, groups=ALL_IN_ONE))
    layouts = make_layouts(ALL_IN_ONE, 4)
    shards = make_shards(layouts, make_tensors(), 1, 4)
    opened = []
    real_open = builtins.open

    def counting_open(path, *args, **kwargs):
        opened.append(Path(path).name)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counting_open)
    checkpoint.fill(layouts, shards, 1, 4)
    assert opened == ["00000002.safetensors", "00000003.safetensors"]


def test_the_bytes_of_format_version_2_do_not_change(tmp_path, monkeypatch):
    """Other programs read them, and older versions of this one."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0123456789abcdef")
    shapes = [("a.w", (3, 7)), ("b", (5,)), ("c.weight", (40, 33))]
    layouts = [Layout.build("u1", shapes, 2), Layout.build("u2", [("z", (300,))], 2)]
    states = {"weight": torch.float32, "error": torch.bfloat16, "exp_avg": torch.float32}
    manifest = Manifest(
        7, 70, {"run": {"name": "ü"}, "b": [0.9, None]}, {"seed": 3},
        {"x": 1 / 3, "data": (0, 1)}, slice_elements=50,
    )  # fmt: skip

    def body(world):
        shards = {
            state: [torch.arange(u.numel).chunk(2)[world.rank].to(dtype) for u in layouts]
            for state, dtype in states.items()
        }
        return save(tmp_path, manifest, [own_shard(layouts, shards, world.rank, 2)], world)

    path, _ = run_threads(2, body)
    text = (path / MANIFEST).read_text().splitlines()
    crcs = [crc32_hex((path / shard_path(index)).read_bytes()) for index in (0, 1)]
    assert crcs == ["c27ef425", "f9cde083"]
    fixed = [line for line in text if not line.startswith(('"crc32"', '"saved_at"'))]
    assert crc32_hex("\n".join(fixed).encode()) == "5c9e6362"


def _big(elements: int) -> tuple[list[Layout], Manifest, torch.Tensor]:
    layouts = [Layout.build("unit", [("a", (elements // 1024, 1024))], 1)]
    return layouts, Manifest(1, 0, slice_elements=2**16), torch.randn(elements)


def _grown_mib(folder: Path, elements: int) -> float:
    """MiB that saving a tensor and loading half of it add to peak memory."""
    layouts, manifest, tensor = _big(elements)
    # Neither contiguous nor of the same type: what has to be copied, as from and to a GPU.
    spread = torch.stack([tensor, tensor], 1)[:, 0]
    shard = torch.ones(elements // 2, dtype=torch.bfloat16)
    before = resident_bytes("VmHWM")
    own = [own_shard(layouts, {"weight": [spread]})]
    path = save(folder, manifest, own, World.single())
    open_checkpoint(path).fill(layouts, {"weight": [shard]}, 1, 2)
    grown = (resident_bytes("VmHWM") - before) / 2**20
    assert torch.equal(shard, tensor[elements // 2 :].bfloat16())
    return grown


def test_saving_and_filling_hold_one_slice_in_memory_not_a_tensor(tmp_path):
    def child() -> bool:
        _grown_mib(tmp_path, 2**17)  # Brings in the code that the real one will use.
        return _grown_mib(tmp_path, 2**24) < 4  # The tensor has 64.

    assert in_child(child) == 0


def test_filling_a_sixteenth_reads_a_sixteenth(tmp_path, monkeypatch):
    layouts, manifest, tensor = _big(2**22)
    own = [own_shard(layouts, {"weight": [tensor]})]
    path = save(tmp_path, manifest, own, World.single())
    read = []
    real_read_at = ShardFile._read_at
    monkeypatch.setattr(
        ShardFile,
        "_read_at",
        lambda self, at, buffer: (read.append(len(buffer)), real_read_at(self, at, buffer)),
    )
    shard = torch.zeros(2**22 // 16)
    open_checkpoint(path).fill(layouts, {"weight": [shard]}, 3, 16)
    assert torch.equal(shard, tensor.chunk(16)[3])
    assert 4 * len(shard) <= sum(read) < 1.1 * 4 * len(shard)


def test_a_model_that_does_not_fit_is_refused_with_both_shapes(tmp_path):
    checkpoint = open_checkpoint(save_all(tmp_path))
    shapes = SHAPES | {"head.weight": (37, 26)}
    layouts = [Layout.build("all", shapes.items(), 1)]
    shards = {"weight": [torch.zeros(layouts[0].numel)]}
    with pytest.raises(UserError, match=r"head\.weight: shape \[37, 13\] in .* shape \[37, 26\]"):
        checkpoint.fill(layouts, shards, 0, 1)
    layouts = [Layout.build("all", [*SHAPES.items(), ("new", (2,))], 1)]
    with pytest.raises(UserError, match=r"new: missing in the checkpoint, shape \[2\] in the mod"):
        checkpoint.fill(layouts, shards, 0, 1)
    layouts = make_layouts(BY_BLOCK[1:], 1)
    with pytest.raises(UserError, match=r"embedding\.weight: shape .* missing in the model"):
        checkpoint.fill(layouts, shards, 0, 1)
    with pytest.raises(UserError, match=r"no state 'momentum', it has .*'exp_avg'"):
        checkpoint.fill(make_layouts(BY_BLOCK, 1), {"momentum": []}, 0, 1)


def test_a_tensor_is_read_by_its_name(tmp_path):
    checkpoint = open_checkpoint(save_all(tmp_path))
    assert torch.equal(
        checkpoint.tensor("exp_avg", "head.weight"), make_tensors(100)["exp_avg"]["head.weight"]
    )
    with pytest.raises(UserError, match="no tensor 'nose'"):
        checkpoint.tensor("weight", "nose")
    with pytest.raises(UserError, match=r"nowhere: no checkpoint\.json"):
        open_checkpoint(tmp_path / "nowhere")


def test_shards_that_are_not_what_the_manifest_says_are_refused_before_writing(tmp_path):
    layouts = make_layouts(BY_BLOCK, 1)
    shards = make_shards(layouts, make_tensors(), 0, 1)
    shards["exp_avg"][2] = shards["exp_avg"][2][:-1]
    with pytest.raises(ValueError, match="exp_avg of unit block 1"):
        save(tmp_path / "c", make_manifest(1), [own_shard(layouts, shards)], World.single())
    assert not (tmp_path / "c").exists()
    units = [StoredUnit.of(layout, STATES) for layout in layouts]
    with pytest.raises(ValueError, match="do not make 7 shards"):
        make_manifest(1, sets=[ShardSet("", 7, units)])
    with pytest.raises(ValueError, match="twice"):
        make_manifest(1, sets=[ShardSet("", 1, [*units, units[0]])])
