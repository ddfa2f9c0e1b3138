"""The framework's own rows of the comparison on one device, as small as they can be."""

from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.benchmarks.one_device import ours as ours_module
from scripts.benchmarks.one_device import setting as one_device_setting
from scripts.benchmarks.one_device.__main__ import tasks_of
from scripts.benchmarks.one_device.ours import ours
from scripts.benchmarks.one_device.setting import make_setting, write_corpora
from scripts.benchmarks.shared.child import Unable


def test_our_turn_trains_on_the_corpus_that_all_contenders_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_device_setting, "CORPUS_TOKENS", 4096)
    setting = make_setting(tmp_path, "1M", "fp32", 1, 1, batch=1, sequence_length=16)
    write_corpora([setting])
    figures = ours(asdict(setting), compiled=False)
    assert 0 < figures["loss"] < 12
    assert figures["step_seconds"] > 0


def test_fp8_is_a_row_of_its_own_which_says_what_a_device_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tasks_of(make_setting(tmp_path, "7B-block", "bf16", 1, 1))
    (fp8,) = (task for task in tasks if task.variant == "ours, compiled, fp8")
    monkeypatch.setattr(ours_module, "missing_float8", lambda device: "no float8 on this device")
    with pytest.raises(Unable, match="no float8 on this device"):
        ours(**fp8.arguments)
