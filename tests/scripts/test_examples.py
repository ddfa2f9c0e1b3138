"""The examples of the library's surface do what they say, with plain PyTorch's losses."""

import re
import subprocess
import sys

import finetune_hf
import own_module
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megafrontier.api.mesh import leave_mesh
from megafrontier.common.errors import UserError
from megafrontier.launch.local import fork_ranks


def run_example(ranks, example, capfd, **arguments):
    """The losses that an example prints, by step."""

    def body():
        example.main(**arguments)
        leave_mesh()
        return 0

    assert fork_ranks(ranks, body) == 0
    found = re.findall(r"step (\d+)/\d+  loss ([\d.]+)", capfd.readouterr().out)
    return {int(step): float(loss) for step, loss in found}


def train_plainly(model, loss_of, optimizer, schedule, steps):
    """The losses of plain PyTorch, by step."""
    losses = {}
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 10 == 0:
            losses[step + 1] = loss.item()
    return losses


def test_an_own_module_has_plain_losses_and_goes_on_with_another_number_of_ranks(
    tmp_path, capfd, monkeypatch
):
    torch.manual_seed(0)
    model = own_module.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    expected = train_plainly(
        model, lambda step: model(own_module.batch(step)), optimizer, schedule, own_module.STEPS
    )
    found = {}
    for ranks, steps in ((4, 40), (2, 60)):
        monkeypatch.setattr(own_module, "STEPS", steps)
        found |= run_example(ranks, own_module, capfd, out=str(tmp_path), machine="laptop")
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[60] < 0.5 * found[10]


def test_a_hugging_face_model_is_fine_tuned_as_in_plain_pytorch_and_saved(tmp_path, capfd):
    model = finetune_hf.build(None)
    frozen = model.get_input_embeddings().weight.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, finetune_hf.STEPS)

    def loss_of(step):
        tokens = finetune_hf.batch(step)
        return model(input_ids=tokens, labels=tokens).loss

    expected = train_plainly(model, loss_of, optimizer, schedule, finetune_hf.STEPS)
    arguments = {"out": str(tmp_path), "model": None, "machine": "laptop"}
    found = run_example(2, finetune_hf, capfd, **arguments)
    assert found == pytest.approx(expected, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(saved.get_input_embeddings().weight, frozen)
    for name, value in saved.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-4), name


def test_adapters_without_their_package_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"^--lora: 4, but peft is missing, need pip install peft$"):
        finetune_hf.with_adapters(nn.Linear(2, 2), 4)


def test_bad_input_is_one_line_with_code_2(tmp_path):
    command = [sys.executable, str(own_module.__file__), str(tmp_path), "cray"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("own_module.py: machine: cray, need the path")
