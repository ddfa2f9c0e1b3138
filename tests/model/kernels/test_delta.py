"""The gated delta rule in chunks gives what one token after another gives."""

import pytest
import torch
import torch.nn.functional as F

from megafrontier.model.kernels.delta import (
    CHUNK,
    DeltaTokens,
    composed,
    delta_chunks,
    states_between,
)

HEADS, KEY, VALUE = 3, 8, 6
STATE = HEADS, KEY, VALUE


def draw(rows, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(rows, length, *shape, generator=generator, dtype=dtype)

    query, key = (F.normalize(normal(HEADS, KEY), dim=-1) for _ in range(2))
    gates = -normal(HEADS).abs(), normal(HEADS).sigmoid()
    return DeltaTokens(query, key, normal(HEADS, VALUE), *gates)


def one_by_one(tokens, documents=None, states=None):
    """The results, and the last states."""
    rows, length = tokens.decay.shape[:2]
    states = tokens.value.new_zeros(rows, *STATE) if states is None else states
    found = []
    for i in range(length):
        query, key, value, decay, strength = (part[:, i] for part in tokens)
        if documents is not None:
            goes_on = documents[:, i] == documents[:, i - 1] if i else torch.zeros(rows).bool()
            states = states * goes_on[:, None, None, None]
        states = states * decay.exp()[..., None, None]
        error = value - torch.einsum("bhkv,bhk->bhv", states, key)
        states = states + key[..., None] * (strength[..., None] * error)[..., None, :]
        found.append(torch.einsum("bhkv,bhk->bhv", states, query))
    return torch.stack(found, 1), states


def in_chunks(tokens, documents=None, states=None):
    chunks = delta_chunks(tokens, documents)
    before, last = states_between(chunks.maps, states)
    return chunks.outputs(before), last


def gradients(run, tokens, *states):
    leaves = [part.clone().requires_grad_() for part in (*tokens, *states)]
    generator = torch.Generator().manual_seed(1)
    found = run(DeltaTokens(*leaves[:5]), leaves[5:])
    total = sum((one * torch.randn(one.shape, generator=generator)).sum() for one in found)
    return [*found, *torch.autograd.grad(total, leaves)]


def assert_near(found, expected, bound=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize(("length", "rate"), [(1, 1), (CHUNK, 100), (2 * CHUNK + 22, 1)])
def test_results_states_and_gradients_are_those_of_one_token_after_another(length, rate):
    """Also of heads that forget nearly all with each token."""
    tokens, states = draw(2, length), torch.randn(2, *STATE)
    tokens = tokens._replace(decay=rate * tokens.decay)
    given = [lambda t, s, run=run: run(t, None, *s) for run in (in_chunks, one_by_one)]
    assert_near(*(gradients(run, tokens, states) for run in given))


def test_a_document_that_begins_anywhere_sees_nothing_before_it():
    documents = torch.zeros(2, 150, dtype=torch.int32)
    for row, start in ((0, 10), (0, CHUNK), (0, 70), (0, 71), (1, 100), (1, 2 * CHUNK)):
        documents[row, start:] += 1
    given = [lambda t, _, run=run: run(t, documents) for run in (in_chunks, one_by_one)]
    assert_near(*(gradients(run, draw(2, 150)) for run in given))


def test_all_chunks_together_are_one_map_of_the_state_before_them():
    states = torch.randn(2, *STATE)
    for count in (1, 2, 5):
        chunks = delta_chunks(draw(2, count * CHUNK))
        whole = composed(chunks.maps)
        _, last = states_between(chunks.maps, states)
        assert_near([whole.factor @ states + whole.summand], [last])


@torch.inference_mode()
def test_states_in_fp32_stay_exact_over_16384_tokens():
    tokens = draw(1, 16_384, torch.float64)
    tokens = tokens._replace(decay=tokens.decay * 1e-3)  # as little is forgotten as a head may
    expected = one_by_one(tokens)
    assert_near(in_chunks(tokens), expected)
