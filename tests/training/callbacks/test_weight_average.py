"""The average of the newest weights is evaluated in the run, which computes with the same bits
afterwards."""

import re
from pathlib import Path

import pytest

from megafrontier.commands.average import average_command
from megafrontier.commands.evaluate import evaluate_command
from tests import runs

EVERY = ("train.steps=6", "evaluate.every=2", "checkpoint.every=2", "checkpoint.keep=0")
LAYOUTS = {
    "deltas and a tensor split": (
        4, "partition.wires=low", "train.precision=bf16", "parallel.tensor=2",
        "partition.overlap=full",
    ),
    "offloaded": (
        2, "machine=laptop", "partition.strategy=zero2", "partition.offload.optimizer=cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_is_that_of_the_checkpoints_and_the_run_goes_on_as_without_it(
    folder, capfd, name
):
    ranks, *layout = LAYOUTS[name]

    def run(average: int):
        directory = folder / f"{ranks}-{average}"
        chosen = (*EVERY, *layout, f"evaluate.average={average}", f"run.directory={directory}")
        return directory, runs.run(folder / "config.yaml", ranks, *chosen)

    directory, lines = run(2)
    _, plain = run(0)
    assert runs.losses(lines) == runs.losses(plain)
    assert runs.valid_losses(lines) == runs.valid_losses(plain)
    found = {line["step"]: line for line in lines if "average_valid_loss" in line}
    assert {step: line["averaged"] for step, line in found.items()} == {4: 2, 6: 2}
    for steps in ((2, 4), (4, 6)):
        out = Path(f"{directory}-{steps[0]}")
        average_command(directory, out, None, steps, "mean")
        found_there = found[steps[1]]["average_valid_loss"]
        assert found_there == pytest.approx(
            _evaluated(out, capfd), rel=1e-3 if ranks == 4 else 1e-5
        )


def _evaluated(out: Path, capfd) -> float:
    """The loss that `evaluate` shows, in fp32."""
    capfd.readouterr()
    assert evaluate_command(out, ["train.precision=fp32"], 1, print) == 0
    shown = re.search(r"loss (\d\S+)", capfd.readouterr().out)
    return float(shown[1])
