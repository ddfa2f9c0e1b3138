"""GPT: loss, causality, documents, dropout, checkpointing, numerics."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.model.flops import parameter_shapes
from megafrontier.model.gpt import GPT, Embedding
from megafrontier.model.kernels import backends
from megafrontier.model.norms import make_norm
from tests.model.small_models import PREDICTION, SHAPES, small_config


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_loss_is_the_sum_of_cross_entropies_of_the_logits(shape, make_model, tokens):
    model = make_model(shape, loss_chunk_tokens=7)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    logits = model(tokens)
    assert logits.shape == (2, 24, shape.vocab_size)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, expected)
    assert_same(gradients(model, loss), gradients(model, expected), rtol=1e-4, atol=1e-4)


def test_repeated_keys_and_values_are_those_of_grouped_heads(
    make_config, make_model, tokens, monkeypatch
):
    """As on a GPU in fp32, whose fused kernels have no grouped heads."""
    model = make_model(make_config(kv_heads=2))
    grouped = model(tokens)
    monkeypatch.setattr(backends, "supports_gqa", lambda *_: False)
    torch.testing.assert_close(model(tokens), grouped)


def test_no_token_sees_the_future(shape, make_model, tokens):
    model = make_model(shape)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % shape.vocab_size
    torch.testing.assert_close(model(tokens)[:, :12], model(changed)[:, :12])
    assert not torch.allclose(model(tokens)[:, 12:], model(changed)[:, 12:])


def test_documents_in_one_row_are_like_separate_documents(shape, make_model, tokens):
    """Lengths 5, 11 and 8 in one row: same loss and gradients as in three rows."""
    model = make_model(shape)
    row, lengths = tokens[:1], [5, 11, 8]
    documents = torch.tensor([0, 5, 16, 24], dtype=torch.int32)
    targets = row.roll(-1, 1)
    targets[:, [4, 15, 23]] = -100
    run_on_all = model(row, targets, documents)
    parts = zip(row.split(lengths, 1), targets.split(lengths, 1), strict=True)
    apart = sum(model(part, goal) for part, goal in parts)
    torch.testing.assert_close(run_on_all, apart, rtol=1e-5, atol=1e-5)
    assert_same(gradients(model, run_on_all), gradients(model, apart), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run_on_all, model(row, targets))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient(shape, dropout, make_model, tokens):
    shape.dropout = dropout
    results = []
    for checkpointing in ("none", "block", "selective"):
        model = make_model(shape, checkpointing=checkpointing).train()
        torch.manual_seed(5)
        loss = model(tokens, tokens)
        results.append([loss, *gradients(model, loss)])
    for other in results[1:]:
        assert_same(results[0], other, rtol=0, atol=0)


def test_checkpointing_keeps_only_the_inputs_of_blocks_and_runs_hooks_once(
    make_config, make_model, tokens
):
    def saved(checkpointing):
        sizes = []
        model = make_model(make_config(), checkpointing=checkpointing).train()
        owned = {p.data_ptr() for p in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.data_ptr() in owned or sizes.append(t.numel()), t)[1], lambda t: t
        )
        model.blocks[0].register_forward_hook(lambda *_: calls.append(checkpointing))
        with hooks:
            loss = model(tokens, tokens)
        loss.backward()
        return sum(sizes)

    calls = []
    assert saved("block") < saved("none") / 5
    assert calls == ["block", "none"], "a hook ran again in backward"


def test_dropout_follows_the_seed_and_only_training_drops(make_config, make_model, tokens):
    model = make_model(make_config(dropout=0.2))

    def loss(seed):
        torch.manual_seed(seed)
        return model(tokens, tokens).item()

    assert loss(1) == loss(2)
    model.train()
    assert loss(1) == loss(1) != loss(2)


def test_builds_on_the_meta_device_and_computes_after_filling(shape, make_model, tokens):
    with torch.device("meta"):
        model = GPT(shape)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers()), "a buffer would be lost on the meta device"
    model.to_empty(device="cpu")
    real = make_model(shape)
    model.load_state_dict(real.state_dict())
    torch.testing.assert_close(model.eval()(tokens), real(tokens), rtol=0, atol=0)


def test_units_hold_every_parameter_once_and_tied_ones_belong_to_the_root(shape):
    model = GPT(shape)
    units = model.units()
    held = [f"{name}.{p}" for name, unit in units for p, _ in unit.named_parameters()]
    rest = [name for name in parameter_shapes(shape) if name not in held]
    assert len(held) == len(set(held))
    assert all(dict(model.named_modules())[name] is unit for name, unit in units)
    if shape.tie_embeddings:
        assert [n.split(".")[0] for n, _ in units] == ["blocks"] * shape.layers
        assert all(name.startswith(("embedding.", "head.norm.")) for name in rest)
        assert "head.output.weight" not in rest
    else:
        assert not rest


def test_a_unit_touches_its_parameters_only_inside_its_own_forward(shape, make_model, tokens):
    """The engine unshards a unit only while its forward or backward runs."""
    model = make_model(shape)
    expected = model(tokens, tokens)
    running = []
    owner = {id(p): name for name, unit in model.units() for p in unit.parameters()}

    class OwnerCheck(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            for argument in args:
                assert owner.get(id(argument)) in (None, *running)
            return func(*args, **(kwargs or {}))

    for name, unit in model.units():
        unit.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        unit.register_forward_hook(lambda *_: running.pop() and None)
    with OwnerCheck():
        torch.testing.assert_close(model(tokens, tokens), expected)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_compute_in_fp32_and_return_their_inputs_type(norm, make_config):
    """Large and nearly equal values, whose statistics bf16 cannot represent."""
    config = make_config(norm=norm, hidden=512, heads=4)
    values = (torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * 3 + 200).bfloat16()
    low = make_norm(config).bfloat16()(values)
    exact = make_norm(config)(values.float())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, exact.bfloat16(), rtol=2**-7, atol=0)


def test_bf16_model_is_near_the_fp32_one(shape, make_model, tokens):
    model = make_model(shape)
    exact = model(tokens, tokens)
    low = model.bfloat16()(tokens, tokens)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, rtol=3e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["tokens", "positions"])
def test_the_gradient_of_a_frequent_id_is_summed_in_fp32(part, dtype, make_config):
    """torch's own embedding loses a fifth of a sum of about 1000 numbers. The first positions are
    frequent with short documents."""
    torch.manual_seed(0)
    embedding = Embedding(make_config()).to(dtype)
    ids = {"tokens": torch.randint(50, (8, 512)), "positions": torch.arange(512).expand(8, -1) % 8}
    ids[part] = torch.randint(4, (8, 512))
    weights = 1 + torch.rand(8, 512, 1).to(dtype)
    (embedding(**ids) * weights).sum().backward()
    expected = torch.stack([weights[ids[part] == i].double().sum() for i in range(4)])
    grad = getattr(embedding, part).weight.grad
    assert grad.dtype == dtype
    torch.testing.assert_close(grad[:4].double().mean(1), expected, rtol=0.005, atol=0)


def test_prediction_adds_the_loss_of_the_tokens_after_the_next_ones(make_model, tokens):
    """By hand, on two documents and one row without any target."""
    model = make_model(small_config(**SHAPES["llama"], **PREDICTION)).train()
    documents = torch.tensor([0, 9, 24, 48], dtype=torch.int32)
    targets = tokens.roll(-1, 1)
    targets[1] = -100
    seen = []
    hooked = model.blocks[-1].register_forward_hook(lambda _, *found: seen.append(found))
    loss = model(tokens, targets, documents)
    hooked.remove()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    model.eval()
    plain, module = model(tokens, targets, documents), model.prediction
    assert loss.item() == plain.item()
    (_, context, *_), hidden = seen[0]
    following = model.embedding.tokens(tokens.roll(-1, 1))
    both = torch.cat([module.hidden_norm(hidden), module.token_norm(following)], -1)
    logits = model.head.output(module.norm(module.block(module.projection(both), context)))
    places = [*range(8), *range(9, 23)]  # not the last of a document
    found = [F.cross_entropy(logits[0, i, :50], tokens[0, (i + 2) % 24]) for i in places]
    counted = model.head.prediction.take(loss.device)
    assert counted.tolist() == pytest.approx([sum(found).item(), 22])
    (plain + 0.5 * sum(found)).backward()
    assert_same([p.grad for p in model.parameters()], expected, rtol=1e-4, atol=1e-5)


def test_more_tokens_than_the_sequence_length_are_refused(make_config, make_model):
    with pytest.raises(ValueError, match="25 tokens, the model has room for 24"):
        make_model(make_config())(torch.zeros(1, 25, dtype=torch.int64))


def test_default_sizes(make_config):
    assert make_config(vocab_size=50257, vocab_multiple=128).padded_vocab_size == 50304
    assert make_config(hidden=4096, activation="swiglu").mlp_hidden == 10944
    assert make_config(hidden=768).mlp_hidden == 3072
