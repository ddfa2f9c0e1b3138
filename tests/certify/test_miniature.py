"""Small meshes and configurations have what the large ones have."""

from itertools import combinations

import pytest

from megafrontier.certify.miniature import make_miniatures
from megafrontier.certify.segments import Segment, segments_of, small_meshes
from megafrontier.config import load_config
from megafrontier.parallel.mesh import Splits
from megafrontier.plan.refuse import check_layout
from tests import runs

SHIPPED = {
    "gpt-125m": 8,
    "gpt-350m": 8,
    "gpt-1.3b": 16,
    "gpt-10b": 128,
    "gpt-20b": 384,
    "llama-7b": 64,
    "llama-70b": 1024,
    "llama-175b": 512,
    "llama-8b-128k": 256,
    "moe-8x7b": 128,
    "moe-30b-a3b": 128,
    "moe-200b": 512,
    "quickstart": 8,
    "recipe-2m": 8,
    "moe-quickstart": 8,
    "wire-quality": 8,
}


def of_shipped(name, folder, *overrides):
    config = load_config(name, overrides)
    return make_miniatures(config, check_layout(config, SHIPPED[name]), folder, 8)


@pytest.mark.fast
def test_segments_divide_all_ranks_by_axis_level_and_experts():
    config = load_config("moe-200b", ["parallel.expert=16"])
    segments = segments_of(check_layout(config, 512).shape)
    assert segments == [
        Segment("pair", "context", True, 2),
        Segment("node", "data", True, 4),
        Segment("world", "data", True, 2),
        Segment("world", "data", False, 4),
        Segment("world", "pipeline", False, 8),
    ]


@pytest.mark.fast
def test_small_meshes_have_every_three_segments_of_a_layout_on_at_most_8_ranks():
    segments = [
        Segment("pair", "tensor", False, 2),
        Segment("node", "context", False, 4),
        Segment("rack", "data", False, 3),
        Segment("world", "data", False, 5),
        Segment("world", "pipeline", False, 16),
    ]
    meshes = small_meshes(segments)
    assert max(mesh.ranks for mesh in meshes) == 8
    covered = {frozenset((s.level, s.axis) for s in mesh.segments) for mesh in meshes}
    for three in combinations(segments, 3):
        assert {(s.level, s.axis) for s in three} in covered
    assert Splits(tensor=2, context=2, pipeline=2) in [mesh.splits for mesh in meshes]
    assert len({segment.axis for segment in meshes[0].segments}) == 3


@pytest.mark.fast
def test_few_segments_grow_where_the_layout_has_more_or_an_odd_number():
    pair, odd = Segment("pair", "data", False, 2), Segment("world", "data", False, 3)
    assert [s.size for s in small_meshes([pair, odd])[0].segments] == [2, 3]
    (alone,) = small_meshes([])
    assert alone.ranks == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_has_miniatures_that_can_run(name, tmp_path):
    for miniature in of_shipped(name, tmp_path):
        assert miniature.mesh.ranks <= 8


@pytest.mark.fast
def test_key_heads_stay_fewer_than_tensor_ranks_and_blocks_keep_their_kinds(tmp_path):
    few = of_shipped(
        "llama-70b",
        tmp_path,
        "model.kv_heads=4",
        "model.attention.window=1000",
        "model.attention.global_every=6",
        "parallel.pipeline=1",
        "parallel.schedule=1f1b",
    )[0].config
    assert few.model.num_kv_heads < few.parallel.tensor
    windows = {few.model.window_of(block) for block in range(few.model.layers)}
    assert len(windows) == 2, "one block with a window and one without"


@pytest.mark.fast
@pytest.mark.fast
def test_qk_clip_gets_a_limit_that_the_log_sums_of_small_logits_exceed(tmp_path):
    for given, limit in ((100, 2.0), (0, 0.0)):
        found = of_shipped("gpt-125m", tmp_path, f"optimizer.qk_clip={given}")
        assert {miniature.exact.optimizer.qk_clip for miniature in found} == {limit}


def test_uneven_stages_stay_uneven(tmp_path):
    config = of_shipped("llama-175b", tmp_path, "model.layers=90", "parallel.pipeline=8")[0].config
    assert config.model.layers % config.parallel.pipeline == 1


@pytest.mark.fast
def test_wires_of_a_split_that_a_mesh_lacks_are_left_out(tmp_path):
    path = runs.make_config_file(tmp_path)
    wires = "partition.wires={activations: {node: int8}}"
    config = runs.load(path, "parallel.tensor=4", wires, "model.heads=4", "model.hidden=32")
    miniatures = make_miniatures(config, check_layout(config, 16), tmp_path, 4)
    crossed = {len(m.config.partition.wires.activations) for m in miniatures}
    assert crossed == {0, 1}
