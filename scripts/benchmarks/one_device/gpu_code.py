"""What torch.compile makes of a block and of the loss for a GPU, on a machine without one.

    python -m scripts.benchmarks.one_device.gpu_code [--preset 1.3B] [--checkpointing selective]
    python -m scripts.benchmarks.one_device.gpu_code --loss

Prints each kernel of a block's forward and backward that is no matrix product and no attention, or
of the loss of a chunk of tokens, and the bytes that it must move: each of its inputs once, and each
of its outputs. A kernel that reads a value twice gets it from a cache the second time, at best.
`--code FILE` also writes the kernels. The last line says what keeps them from being one CUDA graph.

The graphs are traced on the CPU and lowered for a device that has the properties of an H100 or
MI250X and is never asked for anything else. They are those of the installed torch.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import device_interface
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, scheduler
from torch._inductor import config as inductor
from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from megafrontier.model.attention import Attention
from megafrontier.model.block import Block
from megafrontier.model.loss import chunk_losses
from megafrontier.model.positions import AttentionContext, rotary_tables
from megafrontier.model.recompute import compile
from megafrontier.model.recompute.checkpointing import Mode
from scripts.benchmarks.one_device.setting import PRESETS, Setting
from scripts.benchmarks.shared.rounds import markdown

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="H100",
    gcnArchName="gfx90a",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=228 << 10,
)


class Kernel(NamedTuple):
    """One kernel."""

    name: str
    moved: int
    """Bytes of its inputs and outputs."""


class Made(Exception):
    """Ends the call of the compiled block, which has nothing to run on."""


class Lowering:
    """A backend of torch.compile that lowers graphs for a GPU and runs nothing."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[Kernel]] = {}
        self.code = ""
        self.obstacles: list[str] = []
        """Why a graph could not be recorded as a CUDA graph (`train.cuda_graphs`)."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        aot_module_simplified(
            graph,
            inputs,
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            partition_fn=_partition,
            decompositions=select_decomp_table(),
        )
        raise Made

    def _compiler(self, direction: str) -> Callable[..., Any]:
        def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            fake = torch._guards.detect_fake_mode(inputs)
            assert fake is not None
            with V.set_fake_mode(fake):
                view_to_reshape(graph)
                FakeTensorProp(graph, mode=fake).propagate_dont_convert_inputs(*inputs)
                compile_fx._recursive_post_grad_passes(graph, is_inference=False)
                self._lower(graph, [_on_gpu(each, fake) for each in inputs], fake, direction)
            return make_boxed_func(graph.forward)

        return lower

    def _lower(
        self, graph: torch.fx.GraphModule, inputs: list[Any], fake: Any, direction: str
    ) -> None:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
        with torch.no_grad():
            FakeTensorProp(graph, mode=fake).propagate_dont_convert_inputs(*inputs)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=fake.shape_env,
            is_backward=direction == "backward",
        )
        with (
            V.set_debug_handler(DebugContext()),
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
        ):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
            self.kernels[direction] = [
                Kernel(_operations(node), node.get_read_write_buffers_sizes())
                for node in lowering.scheduler.nodes
                if isinstance(node, SchedulerNode | FusedSchedulerNode)
            ]
        self.code += code.value
        self.obstacles += _obstacles(graph, lowering)


def _obstacles(graph: torch.fx.GraphModule, lowering: GraphLowering) -> list[str]:
    """Those for which inductor leaves out CUDA graphs."""
    node = get_first_incompatible_cudagraph_node(graph)
    found = [
        check_multiple_devices_or_any_cpu_nodes(lowering.device_node_mapping),
        None if node is None else f"operator {node.target}",
        "changes its inputs" if lowering.mutated_inputs else None,
    ]
    return [each for each in found if each is not None]


def _partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    compile_fx._recursive_joint_graph_passes(graph)
    options["compiler"] = "inductor"
    return min_cut_rematerialization_partition(graph, inputs, **options)


def _on_gpu(value: Any, fake: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with fake:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def _operations(node: Any) -> str:
    """What it was before it was lowered, the most telling ones first."""
    origins = {o for part in node.get_nodes() for o in part.node.get_origins()}
    names = {str(getattr(o.target, "overloadpacket", o.target)).split(".")[-1] for o in origins}
    plain = {"view", "reshape", "_unsafe_view", "permute", "convert_element_type", "split"}
    return " ".join(sorted(names - plain))


def _flash(self: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention as on a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]


def block(setting: Setting, checkpointing: Mode) -> Lowering:
    """The kernels of a block of the setting's model, in bf16."""
    shape = setting.batch, setting.sequence_length
    module = Block(setting.model, checkpointing=checkpointing).bfloat16()
    hidden = torch.empty(*shape, setting.model.hidden, dtype=torch.bfloat16, requires_grad=True)
    tables = rotary_tables(torch.arange(shape[1])[None], setting.model.rotary_dims, 1e4)
    context = AttentionContext(tables, None, None, shape)
    return _lowered(Block.forward_recomputed, module, hidden, context)


def loss(setting: Setting) -> Lowering:
    """The kernels of the loss of 1,024 tokens and its gradient, in bf16."""
    ids = setting.model.vocab_size
    logits, targets = torch.empty(1024, ids, dtype=torch.bfloat16), torch.zeros(1024).long()
    with torch.no_grad():
        return _lowered(chunk_losses, logits, targets, ids, 1.0, True)


def _lowered(function: Callable[..., Any], *inputs: Any) -> Lowering:
    backend, interface = Lowering(), device_interface.CudaInterface
    with ExitStack() as stack:
        patches: list[tuple[Any, str, Any]] = [
            (Attention, "_attend", _flash),
            (torch.cuda, "get_device_properties", lambda *_: H100),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device_count", lambda: 1),
            (interface, "get_device_properties", staticmethod(lambda *_: H100)),
            (interface, "get_compute_capability", staticmethod(lambda *_: 90)),
            (interface, "is_available", staticmethod(lambda: True)),
            (interface, "current_device", staticmethod(lambda: 0)),
            (interface, "raise_if_triton_unavailable", staticmethod(lambda *_: None)),
            (interface.Worker, "get_device_properties", staticmethod(lambda *_: H100)),
            (torch.utils._triton, "triton_hash_with_backend", lambda *_: ""),
            (scheduler, "has_triton", lambda: True),
            (compile, "BACKEND", backend),
        ]
        for holder, name, value in patches:
            stack.enter_context(mock.patch.object(holder, name, value))
        stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(inductor.patch(comprehensive_padding=False))
        try:
            compile.compiled(function)(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            if not isinstance(failed.inner_exception, Made):
                raise
    return backend


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="1.3B")
    parser.add_argument("--checkpointing", choices=get_args(Mode), default="none")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--code", type=Path)
    arguments = parser.parse_args()
    size = PRESETS[arguments.preset]
    setting = Setting(arguments.preset, "bf16", size.batch, size.sequence_length, 0, 0, "no corpus")
    found = loss(setting) if arguments.loss else block(setting, arguments.checkpointing)
    kernels = [(way, kernel) for way, some in found.kernels.items() for kernel in some]
    rows = [[way, kernel.name, f"{kernel.moved / 2**20:,.1f}"] for way, kernel in kernels]
    total = sum(kernel.moved for _, kernel in kernels) / 2**20
    rows.append(["all", f"{len(kernels)} kernels", f"{total:,.1f}"])
    print(markdown(["", "kernel", "MiB"], rows))
    print(f"\nCUDA graphs: {', '.join(found.obstacles) or 'nothing in their way'}")
    if arguments.code is not None:
        arguments.code.write_text(found.code)


if __name__ == "__main__":
    main()
