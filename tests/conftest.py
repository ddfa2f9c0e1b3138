"""Settings and fixtures of all tests.

The parent process and every process that it starts have one thread. So the parent may fork ranks at
any time, and no thread waits for another that has no core.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command sets it
# Asking whether there is a GPU must not initialise CUDA, or ranks forked later could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch

from megafrontier.launch import main as launch
from megafrontier.model.recompute import compile
from tests import runs

torch.set_num_threads(1)

pytest_plugins = ["tests.model.small_models", "tests.tiers"]


@pytest.fixture
def unused_gpus():
    """For ranks that are forked from this process, which must not have used a GPU before."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if torch.cuda.is_initialized():
        pytest.skip("a GPU was used in this process: give this file a pytest of its own")


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with such a config, for all runs of a module."""
    path = tmp_path_factory.mktemp("runs")
    runs.make_config_file(path)
    return path


@pytest.fixture
def imported(config_file, tmp_path):
    """A checkpoint of another run, from which this one is to begin."""
    chosen = (*runs.ONE, "train.micro_batch=16", "train.stop_at=2")
    runs.run(config_file, 1, *chosen, f"run.directory={tmp_path}/other")
    return f"checkpoint.resume={tmp_path}/other/checkpoints/step-00000002"


@pytest.fixture
def no_training(monkeypatch):
    """Let a run end after its pre-flight."""
    monkeypatch.setattr(launch, "_run", lambda *_: 0)


@pytest.fixture
def compiler(monkeypatch):
    """Compiles all but the machine code; `frame_count` is the number of graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds for those that compile
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compile, "BACKEND", counter)
    yield counter
    torch._dynamo.reset()
