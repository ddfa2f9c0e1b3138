"""The codecs' benchmark times every pass of every codec."""

import torch

from scripts.benchmarks import codec as benchmark


def test_every_codec_has_every_pass_at_every_size() -> None:
    table = benchmark.measure(torch.device("cpu"), rows=2, log2_sizes=[10, 11], copy=1e9)
    cases = {(r.codec, r.what, r.elements) for r in table}
    codecs = {*benchmark.CODECS, *benchmark.ROTATING}
    assert len(table) == len(cases) == len(codecs) * len(benchmark.GPU_ROWS) * 2
    assert all(row.seconds > 0 for row in table)
