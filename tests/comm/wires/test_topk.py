"""The sparse format of the exchange between sites."""

import pytest
import torch

from megafrontier.comm.wires.topk import TOPK


def encode(values: torch.Tensor, errors: torch.Tensor | None = None) -> torch.Tensor:
    messages = torch.empty(len(values), TOPK.message_bytes(values.shape[1]), dtype=torch.uint8)
    TOPK.encode(values, messages, errors)
    return messages


def test_a_message_has_the_largest_elements_of_each_chunk_and_errors_have_the_rest() -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 2 * 4096 + 128)
    errors = torch.zeros_like(values, dtype=torch.bfloat16)
    messages = encode(values, errors)
    found = torch.empty_like(values)
    TOPK.decode(messages, found)
    assert (found != 0).sum(1).tolist() == [3 * 64] * 2
    assert torch.allclose(found + errors.float(), values, atol=0.02)
    kept = values[0, :4096].abs().topk(64)
    assert set(found[0, :4096].nonzero().flatten().tolist()) == set(kept.indices.tolist())
    assert found.abs().amax() == values.abs().amax()


def test_what_was_decoded_encodes_to_the_same_message() -> None:
    torch.manual_seed(1)
    messages = encode(torch.randn(1, 4096))
    found = torch.empty(1, 4096)
    TOPK.decode(messages, found)
    assert torch.equal(encode(found), messages)


@pytest.mark.parametrize("nonzeros", [0, 1, 5, 63])
def test_zeros_stay_zeros_where_a_chunk_has_fewer_nonzero_elements_than_are_sent(nonzeros) -> None:
    torch.manual_seed(3)
    values = torch.zeros(2, 5000)  # the last chunk is padded
    for row in values:
        row[torch.randperm(4096)[:nonzeros]] = torch.randn(nonzeros)
        row[4096 + torch.randperm(904)[:nonzeros]] = torch.randn(nonzeros)
    errors = torch.zeros_like(values, dtype=torch.bfloat16)
    messages, found = encode(values, errors), torch.empty_like(values)
    TOPK.decode(messages, found)
    assert torch.equal(found != 0, values != 0)
    assert torch.equal(found.abs().amax(1), values.abs().amax(1))
    assert torch.equal(errors != 0, (found != values))
    assert torch.equal(encode(found), messages)


def test_the_sum_of_messages_is_the_sum_of_their_values() -> None:
    torch.manual_seed(2)
    messages = encode(torch.randn(3, 5000))
    found, total = torch.empty(3, 5000), torch.empty(5000)
    TOPK.decode(messages, found)
    TOPK.decode_sum(messages, total)
    assert torch.allclose(total, found.sum(0), atol=1e-6)


def test_a_message_is_a_hundredth_of_fp32() -> None:
    assert 4 * 2**20 / TOPK.message_bytes(2**20) == pytest.approx(110, rel=0.02)
