"""Steps of a pipeline that are skipped or the last before a stop: all stages decide alike."""

import pytest
import torch

from megafrontier.common.errors import STOPPED
from megafrontier.common.signals import record_stop_requests
from megafrontier.launch.main import train
from megafrontier.parallel.mesh import Splits
from megafrontier.training.loop import train_step
from tests import runs
from tests.ranks import run_mesh

PIPELINE = ("parallel.pipeline=2", "evaluate.batches=0")
FP16 = (*PIPELINE, "train.precision=fp16")


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("zero_bubble", 1)])
def test_an_overflow_on_one_stage_skips_the_step_on_all(config_file, schedule, stage):
    chosen = ("train.loss_scale=8", f"parallel.schedule={schedule}")
    config = runs.load(config_file, *FP16, *chosen)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            masters = [unit.master for unit in trainer.engine.units]
            found = []
            for overflows in (False, True, False):
                before = [master.clone() for master in masters]
                parameter = next(trainer.model.blocks.parameters())
                is_here = mesh.pipeline_rank == stage and mesh.data_rank == 0
                if overflows and is_here:
                    handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
                result = train_step(trainer)
                if overflows and is_here:
                    handle.remove()
                is_same = all(map(torch.equal, before, masters))
                found.append((result.skipped, is_same, result.loss_scale, result.loss))
            return found

    ranks = run_mesh((2, 2, 1), body, splits=Splits(pipeline=2))
    assert [step[:3] for step in ranks[0]] == [
        (False, False, 8),
        (True, True, 4),
        (False, False, 4),
    ]
    assert ranks == [ranks[0]] * 4
    assert all(torch.isfinite(torch.tensor(step[3])) for step in ranks[0])


def test_a_pipeline_in_fp16_finds_the_loss_scale_of_one_rank(config_file, tmp_path):
    chosen = (*FP16[1:], "train.loss_scale=131072", "train.steps=8")
    alone = runs.run(config_file, 1, *chosen, "machine=laptop", f"run.directory={tmp_path}/alone")
    split = runs.run(config_file, 4, *chosen, "parallel.pipeline=2")
    scales, expected = ([line["loss_scale"] for line in lines] for lines in (split, alone))
    assert scales == expected
    assert scales[0] > scales[-1]
    kept = [i for i, line in enumerate(alone) if not line.get("skipped")]
    assert len(kept) > 3
    assert [i for i, line in enumerate(split) if not line.get("skipped")] == kept
    for i in kept:
        assert split[i]["loss"] == pytest.approx(alone[i]["loss"], rel=2e-3)


def test_a_pipeline_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(
    config_file, tmp_path, signalled
):
    """Rank 1 has the last stage. The other one learns of it from the sum that ends each step."""
    chosen = (*PIPELINE, "machine=laptop", "train.micro_batch=4", "checkpoint.every=100")
    unbroken = runs.run(config_file, 2, *chosen, f"run.directory={tmp_path}/unbroken")
    for step, number in ((3, "SIGUSR1"), (6, "SIGTERM")):
        config = runs.load(config_file, *chosen, signalled(f"{step} getpid {number}"))
        with record_stop_requests():
            assert train(config, 2) == STOPPED
        assert runs.metrics(tmp_path / "run")[-1]["step"] == step
        assert f"stopped on request at step {step}; the same" in runs.log(tmp_path / "run")
    assert runs.losses(runs.run(config_file, 2, *chosen)) == runs.losses(unbroken)
