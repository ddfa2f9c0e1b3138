"""The codecs' benchmark counts a pass's bytes, and holds the fused passes to their bar alone."""

from typing import Any

import codec as benchmark
import pytest
import torch

VALUES = torch.linspace(-1, 1, 3 * 1000).reshape(3, 1000)


def row(**changed: Any) -> benchmark.Row:
    values = {"codec": "int8", "what": "encode bf16", "elements": 1 << 20, "seconds": 1.0}
    return benchmark.Row(**values | {"gigabytes_per_second": 1.0, "of_copy": 0.5} | changed)


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


def test_the_bar_is_of_the_fused_passes_at_the_largest_size() -> None:
    failed = row(elements=1 << 24)
    passed = row(elements=1 << 24, what="encode fp32", of_copy=0.7)
    without_bar = [
        row(),
        row(elements=1 << 24, what="decode"),
        row(elements=1 << 24, codec="int8 rotated"),
    ]
    assert benchmark.missed([failed, passed, *without_bar]) == [failed]


def test_another_message_than_the_reference_s_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    benchmark.check_against_reference(cpu)
    messages = iter([torch.zeros(4), torch.ones(4)])
    monkeypatch.setattr(benchmark, "encoded", lambda *_: next(messages))
    with pytest.raises(SystemExit, match="does not write the reference's messages"):
        benchmark.check_against_reference(cpu)
