"""What the compiler makes of a block for a GPU can be seen on a machine without one."""

import sys

import pytest

from scripts.benchmarks.one_device import gpu_code


@pytest.mark.parametrize("options", [("--checkpointing", "selective"), ("--loss",)])
def test_a_block_and_the_loss_are_a_few_kernels_that_fit_a_cuda_graph(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_code", "--preset", "1M", *options])
    gpu_code.main()
    *_, total, _, graphs = capsys.readouterr().out.splitlines()
    assert graphs == "CUDA graphs: nothing in their way"
    assert int(total.split("|")[2].split()[0]) <= (2 if options == ("--loss",) else 12)
