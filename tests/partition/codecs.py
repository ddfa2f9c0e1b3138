"""Helpers of codec tests: encode and decode with new memory, and a rotation computed by hand."""

import torch


def rotate_by_hand(values, scale):
    """fp32 [rows, n], each whole block of 128 multiplied by the rotation's matrix of ±`scale`: by
    sums and differences of pairs, in an order that does not depend on a library."""
    whole = values.shape[1] // 128 * 128
    rotated = values[:, :whole].clone()
    half = 1
    while half < 128:
        pairs = rotated.view(values.shape[0], whole // (2 * half), 2, half)
        first, second = pairs[:, :, 0].clone(), pairs[:, :, 1].clone()
        pairs[:, :, 0], pairs[:, :, 1] = first + second, first - second
        half *= 2
    reversed_bits = rotated.view(-1, *[2] * 7).permute(0, 7, 6, 5, 4, 3, 2, 1)
    rotated = reversed_bits.reshape(rotated.shape)
    return torch.cat([rotated * scale, values[:, whole:]], 1)


def write(codec, values, errors=None, kernels=None):
    """Messages [rows, m] of `values` [rows, n], by the codec or by `kernels` of it."""
    shape = values.shape[0], codec.message_bytes(values.shape[1])
    messages = torch.full(shape, 0xA5, dtype=codec.dtype, device=values.device)
    if kernels is None:
        codec.encode(values, messages, errors)
    else:
        kernels.encode(codec, values, messages, errors)
    return messages


def read(codec, messages, count, dtype=torch.float32):
    """Values [rows, count] of messages [rows, m]."""
    values = torch.empty(messages.shape[0], count, dtype=dtype, device=messages.device)
    codec.decode(messages, values)
    return values
