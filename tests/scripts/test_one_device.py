"""The framework's own rows of the comparison on one device, as small as they can be."""

from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.benchmarks.one_device import setting as one_device_setting
from scripts.benchmarks.one_device.ours import ours
from scripts.benchmarks.one_device.setting import Setting, write_corpus


def test_our_turn_trains_on_the_corpus_that_all_contenders_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_device_setting, "CORPUS_TOKENS", 4096)
    setting = Setting("1M", "fp32", 1, 16, 1, 1, str(tmp_path / "corpus"))
    write_corpus(Path(setting.corpus), setting.model.vocab_size)
    figures = ours(asdict(setting), compiled=False)
    assert 0 < figures["loss"] < 12
    assert figures["step_seconds"] > 0
