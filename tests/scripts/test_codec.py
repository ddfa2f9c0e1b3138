"""The codecs' benchmark counts a pass's bytes, and holds the fused passes to their bar alone."""

import pytest
import torch

from scripts.benchmarks import codec as benchmark

VALUES = torch.linspace(-1, 1, 3 * 1000).reshape(3, 1000)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_pass_moves_its_values_its_message_and_its_errors_once(name: str) -> None:
    codec = benchmark.CODECS[name]
    message = benchmark.encoded(codec, VALUES).numel()
    moved = {what: count for what, (_, count) in benchmark.passes(codec, VALUES).items()}
    assert moved == {
        "encode bf16": 3000 * 2 + message,
        "encode fp32": 3000 * 4 + message,
        "fed back": 3000 * (4 + 2 + 2) + message,
        "decode_sum": message + 1000 * 4,
        "decode": message + 3000 * 4,
    }


def test_every_codec_has_every_pass_at_every_size() -> None:
    table = benchmark.measure(torch.device("cpu"), rows=2, log2_sizes=[10, 11], copy=1e9)
    cases = {(r.codec, r.what, r.elements) for r in table}
    codecs = {*benchmark.CODECS, *benchmark.ROTATING}
    assert len(table) == len(cases) == len(codecs) * len(benchmark.GPU_ROWS) * 2
    for r in table:
        assert r.seconds > 0
        assert r.of_copy == pytest.approx(r.gigabytes_per_second)
