"""Hugging Face folders are written and read whole, or refused by file and tensor."""

import json
import re
from collections.abc import Mapping

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megafrontier.common import progress
from megafrontier.common.errors import UserError
from megafrontier.families import hf_io
from megafrontier.families.hf_io import described_model, export_model, import_model
from tests.families.conftest import (
    assert_same_logits,
    change_tensors,
    load_reference,
    loaded,
)


def test_large_models_are_split_and_indexed(
    make_config, make_model, tokens, tmp_path, monkeypatch, capsys
):
    shape = make_config()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(hf_io, "SHARD_BYTES", 20_000)
    model = make_model(shape)
    export_model(shape, model.state_dict(), tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    assert_same_logits(model, load_reference(tmp_path / "out"), tokens)
    assert_same_logits(
        loaded(*import_model(tmp_path / "out")), load_reference(tmp_path / "out"), tokens
    )
    shown = capsys.readouterr().err
    for work in ("export", "import"):
        assert re.search(rf"^{work}: 1 of \d+ parameters, \d:\d\d:\d\d left$", shown, re.M)


def test_base_models_and_stored_masks_are_imported(exported, make_config, tokens):
    """The files of `openai-community/gpt2` have no prefix, and causal masks among the weights."""
    path = exported / "model.safetensors"
    before = loaded(*import_model(exported))
    stored = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 24, 24)}, path)
    after = loaded(*import_model(exported))
    torch.testing.assert_close(after(tokens), before(tokens), rtol=0, atol=0)


def test_weights_are_read_one_at_a_time(make_config, make_model, tmp_path):
    """A checkpoint larger than memory can be exported."""
    config = make_config()
    stored = make_model(config).state_dict()
    asked = []

    class Lazy(Mapping):
        def __getitem__(self, name):
            asked.append(name)
            return stored[name]

        def __iter__(self):
            raise AssertionError("the names are not listed")

        def __len__(self):
            return len(stored)

    export_model(config, Lazy(), tmp_path / "out")
    assert sorted(asked) == sorted(stored)


def test_the_type_the_tokenizer_and_its_ids_are_written(make_config, make_model, tmp_path):
    class Tokenizer:
        bos, eod = 5, 7

        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    config = make_config()
    weights = make_model(config).state_dict()
    export_model(config, weights, tmp_path / "out", Tokenizer(), torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (5, 7)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16


def test_an_occupied_folder_is_not_overwritten(exported, make_config):
    before = (exported / "config.json").read_bytes()
    with pytest.raises(UserError, match="not an empty folder"):
        export_model(make_config(), {}, exported)
    assert (exported / "config.json").read_bytes() == before


def test_a_tied_head_that_differs_from_the_embedding_is_refused(make_config, make_model, tmp_path):
    """transformers keeps the two apart, as after a training that untied them."""
    config = make_config(tie_embeddings=True)
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    head = load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"].clone()
    change_tensors(tmp_path / "out", **{"lm_head.weight": head})
    import_model(tmp_path / "out")
    change_tensors(tmp_path / "out", **{"lm_head.weight": head + 1})
    with pytest.raises(UserError, match=r"lm_head.weight: not the embedding's values, though"):
        import_model(tmp_path / "out")


def test_of_two_saves_in_one_folder_the_one_of_transformers_is_read(
    make_config, make_model, tmp_path
):
    """transformers leaves the index or the single file of an earlier save."""
    config, out = make_config(), tmp_path / "out"
    export_model(config, make_model(config).state_dict(), out)
    whole = load_reference(out)
    other = transformers.GPT2LMHeadModel(whole.config)
    other.save_pretrained(tmp_path / "split", max_shard_size="10KB")
    for path in (tmp_path / "split").glob("*.safetensors*"):
        path.rename(out / path.name)
    expected = load_reference(out).transformer.wpe.weight
    assert torch.equal(expected, whole.transformer.wpe.weight)
    assert torch.equal(import_model(out)[1]["embedding.positions.weight"], expected)
    for path in out.glob("model-*"):
        path.unlink()
    assert torch.equal(import_model(out)[1]["embedding.positions.weight"], expected)


def test_damaged_folders_are_refused_by_file(exported, tmp_path):
    weights = exported / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model.safetensors: not a complete safetensors file"):
        import_model(exported)
    weights.unlink()
    (exported / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="weights are read from safetensors only"):
        import_model(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: not valid JSON"):
        import_model(exported)
    with pytest.raises(UserError, match=r"config.json: cannot read: No such file"):
        import_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("extra", "[" * 2000 + "]" * 2000, "not valid JSON: nested more than 50 deep, need less"),
        ("extra", "[" * 60 + "]" * 60, "not valid JSON: nested more than 50 deep, need less"),
        ("n_layer", "1000000000", "n_layer: 1000000000, need at most 10000"),
        ("n_embd", "1000000000", "model.hidden: 1000000000, need at most 1048576"),
        ("n_layer", "1.5", "n_layer: 1.5, need a whole number"),
        ("n_layer", "NaN", "n_layer: nan, need a number"),
        ("n_head", "0", "n_head: 0, need more than 0"),
        ("vocab_size", "1e400", "vocab_size: inf, need a number"),
    ],
)
def test_a_config_json_of_absurd_depth_or_sizes_is_refused_by_key(exported, key, value, reason):
    path = exported / "config.json"
    text = path.read_text().rstrip().removesuffix("}")
    path.write_text(f'{text}, "{key}": {value}}}')
    with pytest.raises(UserError) as caught:
        described_model(exported)
    assert str(caught.value) == f"{path}: {reason}"
