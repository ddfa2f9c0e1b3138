"""All blocks share one compilation, the loss has another, and nothing is recompiled."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.lowering import lowerings

from megafrontier.commands.generate import generate
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.recompute import compile
from megafrontier.parallel.mesh import Splits
from tests.model.moe.shapes import LOSS
from tests.model.recompute.test_checkpointing import Counting
from tests.model.small_models import DELTA, GEMMA, SHAPES, small_config
from tests.model.test_gpt_sharded import losses_alone, losses_sharded
from tests.ranks import run_mesh, run_ranks
from tests.splits.matrix import Case, assert_equal, train_alone, train_split

LLAMA = SHAPES["llama grouped, tied, longer texts"]
LOSSES = 1
"""Graphs of the head."""
MODES = ("none", "block", "selective")
BY_MODE = pytest.mark.parametrize(
    "mode", ["selective", *(pytest.param(m, marks=pytest.mark.exhaustive) for m in MODES[:2])]
)
DOCUMENTS = [[0, 5, 24, 48], [0, 24, 48], [0, 24, 25, 26, 27, 30, 48]]


def documents(starts):
    return torch.tensor(starts, dtype=torch.int32)


def gradients(model, *inputs):
    return torch.autograd.grad(model(*inputs), list(model.parameters()))


def assert_near(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@BY_MODE
def test_blocks_with_experts_share_a_graph_whatever_tokens_the_experts_get(mode, compiler):
    config = small_config(**LOSS)
    plain, model = (GPT(config, checkpointing=mode, compile_blocks=c) for c in (False, True))
    initialise(plain, 1)
    model.load_state_dict(plain.state_dict())
    for step in range(3):
        tokens = torch.arange(step, step + 48).view(2, 24) % 50
        assert_near(gradients(model, tokens, tokens), gradients(plain, tokens, tokens))
    assert compiler.frame_count == 2 + LOSSES  # attention, and the activation of experts
    assert not counters["graph_break"]


@BY_MODE
def test_one_graph_serves_all_blocks_and_any_number_of_documents(
    mode, compiler, make_model, tokens
):
    config = small_config(**{**LLAMA, "layers": 3})
    plain, model = make_model(config), make_model(config, checkpointing=mode, compile_blocks=True)
    for starts in DOCUMENTS:
        inputs = (tokens, tokens, documents(starts))
        assert_near(gradients(model, *inputs), gradients(plain, *inputs))
    assert compiler.frame_count == 1 + LOSSES
    assert not counters["graph_break"]


def test_blocks_of_each_mode_share_a_graph(compiler, make_model, tokens, monkeypatch):
    """Kinds of blocks times modes may be more graphs than torch compiles by default."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    config = small_config(**{**LLAMA, "layers": 4})
    modes = ["block", "selective", "selective", "none"]
    plain, model = make_model(config), make_model(config, checkpointing=modes, compile_blocks=True)
    inputs = (tokens, tokens, documents(DOCUMENTS[0]))
    assert_near(gradients(model, *inputs), gradients(plain, *inputs))
    with torch.no_grad():
        model.eval()(*inputs)
    assert compiler.frame_count == 3 + 1 + 2 * LOSSES
    assert not counters["graph_break"]


@pytest.mark.parametrize("shape", [GEMMA, DELTA], ids=["windows", "delta"])
def test_each_kind_of_block_has_a_graph(compiler, make_model, tokens, shape):
    config = small_config(**shape)
    plain, model = make_model(config), make_model(config, compile_blocks=True)
    for starts in DOCUMENTS[: 2 if shape is DELTA else 1]:
        inputs = (tokens, tokens, documents(starts))
        assert_near(gradients(model, *inputs), gradients(plain, *inputs))
    assert compiler.frame_count == 2 + LOSSES
    assert not counters["graph_break"]


@BY_MODE
def test_compiled_and_recomputed_blocks_keep_the_largest_log_sums(
    mode, compiler, make_model, tokens
):
    config, kept = small_config(**{**LLAMA, "layers": 3}), []
    for options in ({}, {"checkpointing": mode, "compile_blocks": True}):
        model = make_model(config, **options).train()
        largest = torch.zeros(config.layers, config.heads)
        for block, row in zip(model.blocks, largest, strict=True):
            block.attention.largest = row
        gradients(model, tokens, tokens)
        kept.append(largest)
    assert_near(*kept)
    assert kept[0].min() > 0
    assert compiler.frame_count == 1 + LOSSES
    assert not counters["graph_break"]


def test_training_and_evaluation_are_one_graph_each(compiler, make_config, make_model, tokens):
    model = make_model(make_config(**LLAMA), compile_blocks=True)
    for _ in range(3):
        model.train()(tokens, tokens).backward()
        with torch.no_grad():
            model.eval()(tokens, tokens)
    assert compiler.frame_count == 2 * (1 + LOSSES)


def test_text_is_generated_without_compiling(compiler, make_config, make_model):
    config = make_config(**LLAMA)
    plain, model = make_model(config), make_model(config, compile_blocks=True)
    found = list(generate(model, [1, 2, 3], max_new_tokens=5, temperature=0))
    assert found == list(generate(plain, [1, 2, 3], max_new_tokens=5, temperature=0))
    assert compiler.frame_count == 0


def test_compiled_ranks_train_as_one_process_does(compiler):
    """Hooks unshard and reshard the weights outside the graph."""
    config = small_config(**LLAMA)

    def body(hierarchy):
        options = {"checkpointing": "selective", "compile_blocks": True}
        return losses_sharded(config, "zero3", hierarchy, **options), compiler.frame_count

    alone = losses_alone(config)
    for losses, graphs in run_ranks((2,), body):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert graphs == 1 + 2 * LOSSES  # the last chunk of the loss is shorter than the others


def test_compiled_parts_of_sequences_train_as_one_process_does(compiler):
    """One graph serves any documents, of which a rank keeps any number of keys for backward."""
    built = {"checkpointing": "block", "compile_blocks": True}
    case = Case(LLAMA, accumulation=2, documents=True, steps=2, built=built)

    def body(mesh):
        return train_split(case, "zero3", mesh), compiler.frame_count

    found = run_mesh((2,), body, splits=Splits(context=2))
    assert_equal([steps for steps, _ in found], train_alone(case))
    assert {graphs for _, graphs in found} == {1 + LOSSES}


def test_activation_checkpointing_changes_no_bit_of_the_losses():
    config = small_config(**LLAMA)

    def body(hierarchy):
        return [losses_sharded(config, "zero3", hierarchy, checkpointing=m) for m in modes]

    modes = (*MODES, ["block", "none"])
    for rank in run_ranks((2, 2), body):
        assert rank == [rank[0]] * len(modes)


@inductor.patch("cpp.vec_isa_ok", True)  # or it compiles and runs something for each set first
def test_real_machine_code_gives_the_losses_and_gradients(make_config, make_model, tokens):
    torch._dynamo.reset()
    config = make_config(**LLAMA)
    plain = make_model(config)
    model = make_model(config, checkpointing="selective", compile_blocks=True)
    inputs = (tokens, tokens, documents(DOCUMENTS[0]))
    assert_near([model(*inputs)], [plain(*inputs)])
    assert_near(gradients(model, *inputs), gradients(plain, *inputs))


@pytest.mark.parametrize("starts", [None, DOCUMENTS[0]], ids=["plain", "documents"])
@pytest.mark.parametrize("family", ["gpt2", "llama grouped, tied, longer texts"])
def test_selective_recomputes_no_product_and_no_attention(family, starts, make_model, tokens):
    def in_backward(mode):
        model = make_model(small_config(**SHAPES[family]), checkpointing=mode)
        given = None if starts is None else documents(starts)
        loss = model(tokens, tokens, given)
        with Counting() as counting:
            loss.backward()
        calls = counting.calls
        attention = [n for o, n in calls.items() if "attention" in o and "backward" not in o]
        return sum(calls[name] for name in ("mm", "addmm", "bmm")), sum(attention)

    plain, block = in_backward("none"), in_backward("block")
    assert in_backward("selective") == plain
    assert (plain[1], block[1]) == (0, 2)
    assert block[0] > plain[0]


def test_a_missing_compiler_is_found():
    cpu = torch.device("cpu")
    assert compile.missing_compiler(cpu) is None
    with inductor.patch("cpp.cxx", ("no-such-compiler",)):
        assert compile.missing_compiler(cpu) == "no working C++ compiler (CXX or g++)"


def test_the_compiled_backward_recomputes_no_product_with_selective(monkeypatch, make_model):
    """A block has 4 products in forward and 8 in backward. Mode block recomputes 3 of the first.
    Backward joins the gradients of gate and up, which the compiler computes where they belong."""
    seen, joined = [], []
    join = torch.ops.megafrontier.join_halves.default

    def compile_graph(graph, _inputs):
        targets = [node.target for node in graph.graph.nodes]
        if torch.ops.aten.mm.default in targets:  # otherwise it is the loss
            seen.append(targets.count(torch.ops.aten.mm.default))
            joined.append(targets.count(join))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph, partition_fn=min_cut_rematerialization_partition
    )
    monkeypatch.setattr(compile, "BACKEND", backend)
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    for mode in ("selective", "block"):
        torch._dynamo.reset()
        model = make_model(small_config(**LLAMA), checkpointing=mode, compile_blocks=True)
        model(tokens, tokens).backward()
    assert seen == [4, 8, 4, 11]
    assert joined == [0, 1, 0, 1]
    assert join in lowerings
