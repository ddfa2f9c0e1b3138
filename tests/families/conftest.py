"""Exported models, their config.json and tensors, and what transformers computes with them."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megafrontier.families.hf_io import export_model, import_model
from megafrontier.model.gpt import GPT


def load_reference(folder, ignored="nothing"):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert all(key.startswith(ignored) for key in report["unexpected_keys"])
    return model.eval()


def assert_same_logits(ours, theirs, tokens):
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1, "logits of 0 would agree for any model"


def loaded(config, weights):
    model = GPT(config)
    model.load_state_dict(weights)
    return model.eval()


def assert_same_gradients(ours, theirs, tokens, folder):
    """Those of the loss of the next tokens. Theirs become ours as weights do: by an import.
    Afterwards theirs has its gradients as parameters."""
    theirs.get_input_embeddings().padding_idx = None  # whose gradient would be 0
    for model in (ours, theirs):
        logits = model(tokens) if model is ours else model(tokens).logits
        pairs = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        torch.nn.functional.cross_entropy(*pairs, reduction="sum").backward()
    for parameter in theirs.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    theirs.save_pretrained(folder)
    _, expected = import_model(folder)
    for name, parameter in ours.named_parameters():
        found, scale = parameter.grad, expected[name].abs().max().clamp(min=1)
        torch.testing.assert_close(
            found / scale, expected[name] / scale, rtol=0, atol=1e-4, msg=f"gradient of {name}"
        )


def assert_same_both_ways(reference, tokens, folder):
    """An import of a small random model of transformers, and the export of this import, have its
    logits, and a second import equals the first. The import has its gradients, too. Returns the
    architecture of the export."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(reference).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    theirs.save_pretrained(folder / "theirs")
    config, weights = import_model(folder / "theirs")
    ours = loaded(config, dict(GPT(config).named_buffers()) | weights)
    assert_same_logits(ours, theirs, tokens)
    architecture = export_model(config, weights, folder / "back")
    assert_same_logits(ours, load_reference(folder / "back"), tokens)
    again, same = import_model(folder / "back")
    assert again == config
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    assert_same_gradients(ours, theirs, tokens, folder / "gradients")
    return architecture


@pytest.fixture
def exported(make_config, make_model, tmp_path):
    """A GPT-2 on disk."""
    config = make_config()
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    return tmp_path / "out"


def change_config(folder, **changes):
    """Change keys of a config.json, and drop those whose new value is `...`."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def change_tensors(folder, **changes):
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, {"format": "pt"})
