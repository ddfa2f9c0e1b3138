"""What the compiler makes of a block for a GPU can be seen on a machine without one."""

import subprocess
import sys


def test_a_block_is_a_few_kernels_that_fit_a_cuda_graph():
    # In a process of its own, because torch keeps what it finds out about devices.
    command = [sys.executable, "-m", "scripts.benchmarks.one_device.gpu_code", "--preset", "1M"]
    ended = subprocess.run(
        [*command, "--checkpointing", "selective"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    *_, total, _, graphs = ended.stdout.splitlines()
    assert graphs == "CUDA graphs: nothing in their way"
    assert int(total.split("|")[2].split()[0]) <= 12
