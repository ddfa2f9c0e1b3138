"""Kinds of kernels, by the names that torch.profiler reports on NVIDIA and AMD GPUs and on CPUs."""

import re

FLOOR = ("matrix products", "attention")
"""Kinds whose time a step cannot do without."""
KINDS = (
    *FLOOR,
    "pointwise and norms",
    "optimizer",
    "casts and copies",
    "gradient accumulation",
    "loss",
    "norm reduction",
    "communication",
    "others",
)
_TABLE = [
    ("communication", r"nccl|rccl|^c10d::|^gloo:"),
    # Inductor names a fused kernel after all operations it came from, such as attention's copies.
    ("loss", r"triton_(poi|red|per)_fused.*(softmax|nll_loss)"),
    ("pointwise and norms", r"triton_(poi|red|per|for)_fused"),
    ("attention", r"flash|fmha|sdpa|attn_fwd|bwd_kernel_d[kq]|bwd_kernel_fuse|bwd_preprocess"),
    ("attention", r"attention"),
    ("norm reduction", r"normops|normtwoops|lpnorm|vector_norm|foreach_norm"),
    ("optimizer", r"adam|fusedsgd|fused_sgd"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|gemv|splitkreduce|cijk_|triton_tem"),
    (
        "matrix products",
        r"^aten::(addmm_?|baddbmm|b?mm|_scaled_mm|_(scaled_)?grouped_mm)$|mkl(dnn)?_linear",
    ),
    ("loss", r"soft_?max|nll_loss|_scatter_gather|^aten::(scatter_add_?|gather|where)$"),
    ("gradient accumulation", r"functor(onself|onother)?_add<float>|^aten::add_$"),
    ("casts and copies", r"copy_kernel|memcpy|memset|fillfunctor|catarray|copybuffer|fillbuffer"),
    ("casts and copies", r"^aten::(copy_|_foreach_copy_|fill_|zero_|cat|stack|clone|roll)$"),
    # The embedding and what has no arithmetic.
    ("others", r"embedding|index|compute_grad_weight|krn_partial|sort|scan"),
    ("others", r"distribution|arange|_local_scalar_dense|^aten::(item|is_nonzero|set_|resize_)$"),
    ("others", r"^aten::(empty|new_|zeros|ones|full|scalar_tensor|lift_fresh|detach|alias|split)"),
    ("others", r"^aten::(view|_unsafe_view|reshape|transpose|t$|permute|slice|select|as_strided)"),
    ("others", r"^aten::(expand|unsqueeze|squeeze|narrow|unbind|chunk|flatten|unflatten|_reshape)"),
    ("others", r"^aten::(to|type_as|_to_copy|contiguous|linear|matmul|result_type|resolve_|_has_)"),
    ("pointwise and norms", r"elementwise_kernel|reduce_kernel|layer_norm|rms_norm|dropout"),
    # What is left of the operators of a CPU computes single elements.
    ("pointwise and norms", r"^(aten|megafrontier)::"),
]
_RULES = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _TABLE]


def kind_of(name: str) -> str | None:
    """The first kind in the table whose pattern is in the name of a kernel; None for a name that
    the table does not know."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), None)
