"""Benchmarks of gated delta attention beside softmax attention."""
