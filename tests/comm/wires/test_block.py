"""Messages of the block codecs: their bytes, their errors, and the ends of the range."""

from dataclasses import replace

import pytest
import torch

from megafrontier.comm.wires import block
from megafrontier.comm.wires.block import (
    INT4,
    INT8,
    MESSAGE_ALIGNMENT,
    ROTATE_BACK_SCALE,
    SMALLEST_SCALE,
    TOO_LARGE,
    rotate,
    rotate_back,
)
from tests.partition.codecs import read, rotate_by_hand, write

CODECS = [INT8, INT4]
ROTATING_CODECS = [codec.with_rotation() for codec in CODECS]
LENGTHS = [1, 2, 127, 128, 129, 256, 1000]


def random(rows, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-20, 20, (rows, 1), generator=generator).float().exp2()
    return (torch.randn(rows, count, generator=generator) * scale).to(dtype)


def steps(codec, values):
    """Each element's quantisation step, fp32 [rows, n]: its block's largest magnitude over q."""
    rows, count = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -count % codec.block))
    largest = padded.view(rows, -1, codec.block).abs().amax(-1, keepdim=True)
    step = (largest / codec.largest).bfloat16().float()
    return step.expand(-1, -1, codec.block).reshape(rows, -1)[:, :count]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_element_is_off_by_more_than_half_a_step(codec, count, dtype):
    values = random(7, count, dtype=dtype)
    decoded = read(codec, write(codec, values), count)
    assert ((decoded - values.float()).abs() <= steps(codec, values) / 2 * (1 + 5e-5)).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_value_of_a_block_is_neither_clipped_nor_biased(codec, sign):
    values = random(4000, codec.block)
    values[:, 3] = sign * values.abs().amax(1) * 1.5
    ratio = read(codec, write(codec, values), codec.block)[:, 3] / values[:, 3]
    assert ((ratio - 1).abs() <= 2**-8).all()
    assert abs(ratio.mean().item() - 1) < 2e-4


@pytest.mark.parametrize("codec", CODECS)
def test_gain_is_one_and_errors_have_no_bias(codec):
    values = torch.randn(64, 64 * codec.block, generator=torch.Generator().manual_seed(1))
    errors = read(codec, write(codec, values), values.shape[1]) - values
    deviation = errors.std().item()
    count = values.numel()
    assert abs(errors.mean().item()) < 5 * deviation / count**0.5
    gain = 1 + (errors * values).sum().item() / values.square().sum().item()
    assert gain == pytest.approx(1.0, abs=3e-3 if codec is INT4 else 3e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_stay_zeros_and_small_blocks_do_not_suffer_from_large_neighbours(codec):
    values = torch.zeros(1, 3 * codec.block)
    values[0, : codec.block] = 1e6
    values[0, -codec.block :] = 1e-6
    decoded = read(codec, write(codec, values), values.shape[1])[0]
    assert (decoded[codec.block : -codec.block] == 0).all()
    torch.testing.assert_close(
        decoded[-codec.block :], values[0, -codec.block :], rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -TOO_LARGE])
def test_a_non_finite_value_shows_in_its_block_and_nowhere_else(codec, bad):
    values = random(2, 3 * codec.block)
    values[1, codec.block + 5] = bad
    decoded = read(codec, write(codec, values), values.shape[1])
    hit = decoded.isnan()
    assert hit[1, codec.block : 2 * codec.block].all()
    assert hit.sum() == codec.block


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_too_small_for_a_normal_scale_are_sent_as_zeros(codec):
    """Their largest code would not fit: -128 instead of +190 gives a gradient of the wrong sign."""
    values = torch.full((1, codec.block), codec.largest * SMALLEST_SCALE * 0.99)
    assert torch.equal(read(codec, write(codec, values), codec.block), torch.zeros_like(values))
    values = torch.full((1, codec.block), codec.largest * SMALLEST_SCALE)
    assert torch.equal(read(codec, write(codec, values), codec.block), values)


@pytest.mark.parametrize("codec", CODECS)
def test_a_code_times_its_scale_is_exact_up_to_the_largest_block(codec):
    """A device may therefore fuse it with a sum."""
    largest = torch.nextafter(torch.tensor(TOO_LARGE), torch.tensor(0.0)).item()
    values = random(1, 4 * codec.block).clamp_(-1, 1) * largest
    values[0, :: codec.block] = largest
    decoded = read(codec, write(codec, values), values.shape[1])
    assert decoded.isfinite().all()
    blocks = decoded.double().view(-1, codec.block)
    steps = (blocks[:, :1] / codec.largest).bfloat16().double()
    codes = blocks / steps
    assert torch.equal(codes, codes.round())
    assert (codes[:, 0] == codec.largest).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", LENGTHS)
def test_a_message_has_the_bytes_of_the_formula(codec, count):
    blocks = -(-count // codec.block)
    used = 2 * blocks + -(-count * codec.bits // 8)
    message = write(codec, random(3, count))
    assert message.dtype == torch.uint8
    assert message.shape == (3, codec.message_bytes(count))
    assert 0 <= codec.message_bytes(count) - used < MESSAGE_ALIGNMENT
    assert codec.message_bytes(count) % MESSAGE_ALIGNMENT == 0


@pytest.mark.parametrize("codec", [*CODECS, *ROTATING_CODECS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_added_and_replaced_by_the_new_errors(codec, dtype):
    values, errors = random(3, 1000).to(dtype), random(3, 1000).bfloat16()
    total = values.float() + errors.float()
    messages = write(codec, values, errors)
    assert torch.equal(messages, write(codec, total))
    assert torch.equal(errors, (total - read(codec, messages, 1000)).bfloat16())


@pytest.mark.parametrize("codec", [*CODECS, *ROTATING_CODECS])
def test_errors_that_are_not_finite_become_zero(codec):
    values, errors = random(3, 1000), torch.ones(3, 1000, dtype=torch.bfloat16)
    values[0, 5], values[1, 300] = float("inf"), float("nan")
    values[2] = 1.0  # the errors are those of rounding, which are finite
    messages = write(codec, values, errors)
    bad = ~read(codec, messages, 1000).isfinite()
    assert bad[0, 5]
    assert bad[1, 300]
    assert errors.isfinite().all()
    assert not errors[bad].any()


@pytest.mark.parametrize("codec", [*CODECS, *ROTATING_CODECS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_rounds_once(codec, dtype):
    messages, old = write(codec, random(3, 1000)), random(3, 1000).to(dtype)
    out = old.clone()
    codec.decode(messages, out, accumulate=True)
    assert torch.equal(out, (old.float() + read(codec, messages, 1000)).to(dtype))
    total, onto = torch.empty(1000), random(1, 1000)[0]
    codec.decode_sum(messages, total)
    out = onto.clone()
    codec.decode_sum(messages, out, accumulate=True)
    assert torch.equal(out, onto + total)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [4096, 5001])
def test_a_long_message_is_the_same_in_slabs_and_whole(codec, count, monkeypatch):
    def everything():
        errors = values.bfloat16()
        messages = write(codec, values, errors)
        total = torch.ones(count)
        codec.decode_sum(messages, total, accumulate=True)
        return messages, errors, read(codec, messages, count), total

    values = random(3, count)
    whole = everything()
    monkeypatch.setattr("megafrontier.comm.wires.block._SLAB", {"cpu": 3 * 512})
    assert all(map(torch.equal, everything(), whole))


@pytest.mark.parametrize("codec", CODECS)
def test_sums_are_fp32_in_the_order_of_the_rows(codec):
    values = random(5, 1000)
    messages = write(codec, values)
    out = torch.empty(1000)
    codec.decode_sum(messages, out)
    expected = torch.zeros(1000)
    for row in read(codec, messages, 1000):
        expected = expected + row
    assert torch.equal(out, expected)


def test_a_rotation_can_be_undone_and_spreads_outliers():
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    values[:, 17] = 100
    turned = rotate(values)
    torch.testing.assert_close(rotate_back(turned), values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned[:, :896].norm(), 2**0.5 * values[:, :896].norm())
    assert torch.equal(turned[:, 896:], values[:, 896:])  # a tail shorter than a block

    def error(x, back):
        decoded = back(read(INT4, write(INT4, x), 1000))
        return (decoded - values)[:, :128].norm()  # the outlier's block

    assert error(turned, rotate_back) < 0.5 * error(values, lambda x: x)


def test_a_rotation_and_its_inverse_are_exact_if_the_sums_are():
    """The matrices are powers of two, so TF32 and bf16 add no factor."""
    values = torch.randint(-100, 100, (2, 256)).float()
    assert torch.equal(rotate_back(rotate(values)), values)


ROTATING = pytest.mark.parametrize("codec", ROTATING_CODECS)


@ROTATING
@pytest.mark.parametrize("count", [1, 127, 128, 300, 1024, 5001])
@pytest.mark.parametrize("slab", [1 << 19, 512])
def test_a_rotating_message_holds_the_rotated_values(codec, count, slab, monkeypatch):
    monkeypatch.setattr("megafrontier.comm.wires.block._SLAB", {"cpu": slab})
    plain = replace(codec, rotates=False)
    values = torch.randint(-100, 100, (3, count)).float()  # whose sums are exact
    messages = write(codec, values)
    assert torch.equal(messages, write(plain, rotate(values)))
    total, turned = torch.empty(count), torch.empty(count)
    codec.decode_sum(messages, total)
    plain.decode_sum(messages, turned)
    torch.testing.assert_close(total, rotate_back(turned.view(1, -1))[0])


@ROTATING
@pytest.mark.parametrize("count", [128, 300, 1024])
def test_a_message_is_rotated_back_with_the_same_bits_on_every_device(codec, count):
    """In whatever order a library adds: these are the bits of sums of pairs."""
    messages = write(codec, random(3, count))
    by_hand = rotate_by_hand(
        read(replace(codec, rotates=False), messages, count), ROTATE_BACK_SCALE
    )
    assert torch.equal(read(codec, messages, count), by_hand)


def test_rotations_are_fp32_whatever_the_default_type_is():
    values = random(3, 256)
    expected = rotate(values)
    block._sylvester.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rotate(values), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_rotations_are_fp32_inside_autocast():
    values = random(2, 256)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotate(values), rotate_back(values)
    assert torch.equal(inside[0], rotate(values))
    assert torch.equal(inside[1], rotate_back(values))
