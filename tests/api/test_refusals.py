"""What the library's surface refuses is one line with the reason, and a script's ranks end well."""

import ast
import copy
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import megafrontier
from megafrontier.api.mesh import leave_mesh
from megafrontier.common.errors import UserError
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh, MeshShape, Splits
from megafrontier.parallel.world import World
from scripts.benchmarks.shared.measuring import free_port
from tests.api.modules import Regression, batch, machine, run_script

CPU = torch.device("cpu")
ONE = Levels(("pair", "world"), (1, 1))


def mesh():
    return Mesh.single(ONE, CPU)


def sharded(**options):
    return megafrontier.shard(Regression(), mesh(), **{"blocks": "blocks.*"} | options)


def split_mesh():
    return Mesh(MeshShape(Levels(("world",), (2,)), Splits(tensor=2)), World.single())


SHARD = {
    "blocks: 'layers.*' matches no module of the model, need a pattern such as 'blocks.*'": {
        "blocks": ["blocks.0", "layers.*"]
    },
    "blocks: a Linear matches no module of the model": {"blocks": nn.Linear(2, 2)},
    "blocks: 'blocks' is a ModuleList, which is never called, need 'blocks.*'": {
        "blocks": "blocks"
    },
    "placement: 'best', need one of ddp, zero1": {"placement": "best"},
    "gradients: missing, a placement needs": {
        "placement": {"weights": "pair", "optimizer": "pair"}
    },
    "weights: no level 'rack' on this machine, need one of none, pair, world": {
        "placement": dict.fromkeys(("weights", "gradients", "optimizer"), "rack")
    },
    "wires.preset: best, need one of exact, zero++, low": {"wires": "best"},
    "wires.gather.rack: no such level": {"wires": {"gather": {"rack": "int8"}}},
    "overlap: some, need one of none, safe, full": {"overlap": "some"},
    "dtype: torch.float16, need one of torch.float32, torch.bfloat16": {"dtype": torch.float16},
    "reduce: max, need mean or sum": {"reduce": "max"},
    "placement: offload: True, need keys among weights, backward_weights, gradients, optimizer": {
        "placement": {"strategy": "zero3", "offload": True}
    },
    "weights_copy: False, need true, or weights and optimizer sharded through the same": {
        "weights_copy": False
    },
}


@pytest.mark.parametrize(("line", "options"), SHARD.items())
def test_what_shard_refuses(line, options):
    with pytest.raises(UserError) as refused:
        sharded(**options)
    assert str(refused.value).startswith(line)


def test_splits_are_refused_for_a_module_without_a_plan():
    with pytest.raises(UserError, match=r"tensor=2.*Regression has no plan for splits"):
        megafrontier.shard(Regression(), split_mesh())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.LBFGS, "LBFGS: .*closure.*each rank holds flat slices"),
        (torch.optim.Muon, "Muon: .*2D.*each rank holds flat slices"),
        (torch.optim.Adafactor, "Adafactor: an element's update depends on others"),
    ],
)
def test_optimizers_that_look_at_more_than_one_element_are_refused(make, why):
    with pytest.raises(UserError, match=f"optimizer: {why}"):
        megafrontier.Optimizer(sharded(), make)


def test_what_an_optimizer_refuses():
    model = sharded()
    with pytest.raises(UserError, match="model: a Linear that is not sharded, need one from"):
        megafrontier.AdamW(nn.Linear(2, 2))
    with pytest.raises(UserError, match="params: group 0 has a parameter that is not in the model"):
        megafrontier.AdamW(model, Regression().parameters())
    groups = [{"params": model.parameters()}, {"params": model.head.weight}]
    with pytest.raises(UserError, match=r"params: head.weight is in two groups or twice"):
        megafrontier.AdamW(model, groups)
    with pytest.raises(UserError, match="max_norm: 0, need a positive number"):
        megafrontier.clip_grad_norm_(model, 0)
    first = megafrontier.AdamW(model)
    with pytest.raises(UserError, match="closure: not supported"):
        first.step(lambda: 0.0)
    with pytest.raises(UserError, match="add_param_group: not supported"):
        first.add_param_group({"params": [torch.zeros(2)]})
    megafrontier.AdamW(model)
    model(batch(0)).backward()
    with pytest.raises(UserError, match="optimizer: not the model's newest one"):
        first.step()


def test_gradients_may_be_dropped_and_states_are_those_of_the_same_rank():
    """After a loss that is not finite, say."""
    model, other = sharded(), sharded()
    optimizer = megafrontier.AdamW(model, lr=0.1)
    weights = copy.deepcopy(model.state_dict())
    for is_clipped in (False, True):
        model(batch(0) / 0).backward()
        if is_clipped:
            assert megafrontier.clip_grad_norm_(model, 1.0).isnan()
        optimizer.zero_grad()
    model(batch(0)).backward()
    optimizer.step()
    again = megafrontier.AdamW(other, lr=1.0)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, by in ((model, optimizer), (other, again)):
        one(batch(1)).backward()
        by.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
        assert "calls" in name or not torch.equal(value, weights[name])


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    model = sharded()
    assert megafrontier.load(model, megafrontier.AdamW(model), tmp_path) == 0
    optimizer = megafrontier.Optimizer(model, torch.optim.SGD)
    megafrontier.save(model, optimizer, tmp_path, 3)
    with pytest.raises(
        UserError, match=r"optimizer: AdamW, need SGD as in .*step-00000003, or none"
    ):
        megafrontier.load(model, megafrontier.AdamW(model), tmp_path)
    groups = [{"params": model.head.parameters()}, {"params": model.first.parameters()}]
    with pytest.raises(UserError, match="param groups: 2, need 1 as in"):
        megafrontier.load(model, megafrontier.Optimizer(model, torch.optim.SGD, groups), tmp_path)
    assert megafrontier.load(model, None, tmp_path) == 3


def test_importing_the_package_does_not_import_torch():
    code = "import megafrontier, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'megafrontier' has no attribute 'shards'"):
        megafrontier.shards  # noqa: B018
    assert {"init_mesh", "shard", "AdamW"} <= set(dir(megafrontier))


def test_joining_a_mesh_leaves_the_process_alone_unless_asked():
    def hooks():
        handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        named = sys.excepthook, sys.unraisablehook, threading.excepthook
        return [*named, faulthandler.is_enabled(), *handlers, *settings(), dict(os.environ)]

    def settings():
        yield from (torch.get_num_threads(), torch.get_num_interop_threads())
        yield from (torch.get_default_dtype(), torch.get_default_device())
        yield from (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled())
        yield from (torch.get_float32_matmul_precision(), torch.get_rng_state().tolist())

    def body(_mesh):
        leave_mesh()
        before = hooks()
        megafrontier.init_mesh(machine(1))
        is_alone = hooks() == before
        leave_mesh()
        megafrontier.init_mesh(machine(1), exit_on_error=True)
        return is_alone, hooks()[1:] == before[1:], sys.excepthook is before[0]

    assert run_script((1,), body) == [(True, True, False)]


def test_type_checkers_see_the_names_that_the_package_has():
    source = ast.parse(Path(megafrontier.__file__).read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {name.asname: node.module for node in imports for name in node.names}
    homes = {name: f"megafrontier.api.{home}" for name, home in megafrontier._HOMES.items()}
    assert seen == homes


def test_a_process_has_one_mesh_whose_levels_hold_the_ranks():
    def body(_mesh):
        assert megafrontier.init_mesh(machine(1)) is _mesh
        with pytest.raises(UserError, match="init_mesh: called with other arguments before"):
            megafrontier.init_mesh("frontier")
        leave_mesh()
        assert megafrontier.init_mesh(machine(3)).levels.sizes == (1,)
        leave_mesh()
        with pytest.raises(UserError, match="tensor: 2, does not fill the levels"):
            megafrontier.init_mesh(machine(1), tensor=2)
        with pytest.raises(TypeError, match="tensors"):
            megafrontier.init_mesh(machine(1), tensors=2)

    run_script((1,), body)


SCRIPT = """
import sys, torch, megafrontier
mesh = megafrontier.init_mesh({"levels": {"world": {"size": 2}}}, exit_on_error=EXIT)
model = megafrontier.shard(torch.nn.Linear(4, 4), mesh,
                           initial=lambda spec, start, stop: torch.ones(stop - start))
optimizer = megafrontier.AdamW(model)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    if sys.argv[1] == "bug" and step == 1 and mesh.rank == 1:
        raise ValueError("a bug of rank 1")
    optimizer.step()
print("end", mesh.rank)
"""


@pytest.mark.parametrize(
    ("what", "exits", "code", "lines"),
    [
        ("all well", False, 0, ["end 0", "end 1"]),
        ("bug", False, 1, ["ValueError: a bug of rank 1"]),
        ("bug", True, 1, ["ValueError: a bug of rank 1"]),
    ],
)
def test_a_scripts_ranks_end_soon_and_with_the_right_code(tmp_path, what, exits, code, lines):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("EXIT", str(exits)))
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), what],
            env=os.environ | address | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [code, code]
    for line in lines:
        assert any(line in text for text in said), said
