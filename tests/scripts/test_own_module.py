"""The example of an own nn.Module does what it says."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import own_module
import pytest
import torch

from megafrontier.launch.local import fork_ranks


@pytest.mark.parametrize("ranks", [1, 3, 9, 48, 100])
def test_every_sample_of_a_batch_is_some_ranks(ranks: int) -> None:
    device = torch.device("cpu")
    seen = [
        own_module.batch(5, SimpleNamespace(size=ranks, rank=rank, device=device))[0]
        for rank in range(ranks)
    ]
    assert torch.cat(seen).shape == (own_module.GLOBAL_BATCH, own_module.WIDTH)


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "0 arguments, need OUT or OUT MACHINE"), (["{out}", "cray"], "machine: cray, need the ")],
)
def test_what_an_own_module_cannot_begin_with_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["own_module.py", *(w.format(out=tmp_path) for w in words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(own_module.__file__), run_name="__main__")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"own_module.py: {said}")


def test_an_own_module_learns_and_goes_on_with_another_number_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(ranks: int, steps: int) -> dict[int, float]:
        monkeypatch.setattr(own_module, "STEPS", steps)
        assert fork_ranks(ranks, lambda: own_module.main(tmp_path, "laptop") or 0) == 0
        found = re.findall(r"step (\d+)/\d+  loss ([\d.]+)", capfd.readouterr().out)
        return {int(step): float(loss) for step, loss in found}

    first, second = train(4, 40), train(2, 60)
    assert list(first) == [10, 20, 30, 40]
    assert list(second) == [50, 60]
    assert second[50] < 0.7 * first[10]
