"""What tests of codecs share: messages there and back, and the rotation in an order of its own."""

import torch


def turn(values, scale):
    """fp32 [rows, n], each whole block of 128 by the rotation's matrix of ±`scale`: by sums and
    differences of pairs, an order of additions that no library chooses."""
    whole = values.shape[1] // 128 * 128
    turned = values[:, :whole].clone()
    half = 1
    while half < 128:
        pairs = turned.view(values.shape[0], whole // (2 * half), 2, half)
        first, second = pairs[:, :, 0].clone(), pairs[:, :, 1].clone()
        pairs[:, :, 0], pairs[:, :, 1] = first + second, first - second
        half *= 2
    reversed_bits = turned.view(-1, *[2] * 7).permute(0, 7, 6, 5, 4, 3, 2, 1)
    turned = reversed_bits.reshape(turned.shape)
    return torch.cat([turned * scale, values[:, whole:]], 1)


def write(codec, values, errors=None, by=None):
    """Messages [rows, m] of `values` [rows, n] by a codec, or `by` kernels of it."""
    shape = values.shape[0], codec.message_bytes(values.shape[1])
    messages = torch.full(shape, 0xA5, dtype=codec.dtype, device=values.device)
    if by is None:
        codec.encode(values, messages, errors)
    else:
        by.encode(codec, values, messages, errors)
    return messages


def read(codec, messages, count, dtype=torch.float32):
    """Values [rows, count] of messages [rows, m]."""
    values = torch.empty(messages.shape[0], count, dtype=dtype, device=messages.device)
    codec.decode(messages, values)
    return values
