"""A run says what it computes with, goes on without a compiler, and explains memory that is out."""

import re

import pytest
import torch
from torch._inductor import config as inductor

from megafrontier.model.attention import softmax
from megafrontier.model.recompute import compile
from megafrontier.training.device import OutOfMemory, explain_out_of_memory
from tests import runs


@pytest.fixture
def train(tmp_path):
    """Losses of a run of 2 ranks, and the lines of its log about kernels."""
    path = runs.make_config_file(tmp_path)

    def run(name: str, *overrides: str) -> tuple[list[float], list[str]]:
        chosen = ("train.steps=3", "train.micro_batch=8")
        where = ("machine.levels.node.size=1", f"run.directory={tmp_path}/{name}")
        lines = runs.run(path, 2, *where, *chosen, *overrides)
        log = re.sub(": +", ": ", runs.log(tmp_path / name)).splitlines()
        kernels = [line for line in log if line.startswith(("warning", "attention", "blocks"))]
        return runs.losses(lines), kernels

    return run


def test_without_a_compiler_the_blocks_run_as_they_are_after_a_warning(train):
    plain, lines = train("plain", "model.dropout=0.1")
    assert lines == ["attention: math", "blocks: not compiled"]
    with inductor.patch("cpp.cxx", ("no-such-compiler",)):
        chosen = ("train.compile=true", "train.cuda_graphs=true")
        found, lines = train("asked", "model.dropout=0.1", *chosen)
    assert found == plain
    assert lines == [
        "warning: train.compile: no working C++ compiler (CXX or g++); the blocks run uncompiled",
        "warning: train.cuda_graphs: true, but a CPU has none; blocks run as before",
        "attention: math",
        "blocks: not compiled",
    ]


def test_an_attention_kernel_that_cannot_be_compiled_runs_uncompiled(train, monkeypatch):
    monkeypatch.setattr(softmax, "returns_traced_shape", lambda *_: False)
    _, lines = train("asked", "train.compile=true", "data.document_mask=true")
    assert lines == [
        "warning: train.compile: this GPU's attention within documents (data.document_mask) is of "
        "another shape; the blocks run uncompiled",
        "attention: varlen flash",
        "blocks: not compiled",
    ]


def test_a_compiled_run_with_documents_has_the_losses_of_the_plain_one(train, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    plain, _ = train("plain", "data.document_mask=true")
    chosen = ("data.document_mask=true", "train.compile=true")
    found, lines = train("compiled", *chosen, "train.activation_checkpointing=selective")
    assert found == pytest.approx(plain, rel=1e-5)
    assert lines == ["attention: varlen flash", "blocks: compiled"]


def cpu_allocator_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    return caught.value


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (cpu_allocator_error(), r".*can't allocate memory.*"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("full.\nSee the docs."), "full"),
        # Of page-locked host memory, for example with activation_checkpointing=offload.
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`.\n"),
         "CUDA error: out of memory"),
        (RuntimeError("HIP error: out of memory\nHIP kernel errors might be reported later."),
         "HIP error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
         "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        (torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.28.9\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'"
        ), "Cuda failure 2 'out of memory'"),
    ],
    ids=["cpu", "python", "torch", "pinned", "hip", "cublas", "nccl"],
)  # fmt: skip
def test_memory_that_is_out_is_explained_in_one_line(error, line):
    with (
        pytest.raises(OutOfMemory, match=rf"^rank 3: {line}\. Need less$"),
        explain_out_of_memory("rank 3", "less"),
    ):
        raise error


def test_any_other_error_stays_as_it_is():
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, explain_out_of_memory("rank 3", "less"):
        raise other
    assert caught.value is other
