"""Recorded metrics are reduced over the ranks by name, in one message."""

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.training.recorder import MetricRecorder
from tests.ranks import run_ranks


def test_each_metric_is_reduced_in_its_own_way_over_ranks_and_records():
    def body(hierarchy):
        recorder, rank = MetricRecorder(hierarchy.device), hierarchy.rank
        recorder.record("mean", torch.tensor(float(rank)))
        recorder.record("total", [1.0, float(rank)], "sum")
        recorder.record("largest", 10 * rank, "max")
        for value in (rank, rank + 2.0):
            recorder.record("twice mean", value)
            recorder.record("twice total", value, "sum")
            recorder.record("twice largest", -value, "max")
        found = {name: value.tolist() for name, value in recorder.reduce(hierarchy.world).items()}
        return found, list(recorder.reduce(hierarchy.world))

    for found, rest in run_ranks((2, 2), body):
        assert found == {
            "mean": 1.5, "total": [4, 6], "largest": 30,
            "twice mean": 2.5, "twice total": 20, "twice largest": 0,
        }  # fmt: skip
        assert rest == [], "each step begins anew"


def test_ranks_that_record_different_metrics_are_named():
    """As with `if trainer.is_first`: their messages would not fit together."""

    def body(hierarchy):
        recorder = MetricRecorder(hierarchy.device)
        recorder.record("x", 1.0)
        if hierarchy.rank < 2:
            recorder.record("y", 1.0)
        with pytest.raises(UserError) as caught:
            recorder.reduce(hierarchy.world)
        return str(caught.value)

    for message in run_ranks((2, 2), body):
        assert message.startswith("metrics: ranks 0 and 2 recorded different ones, need the same ")


def test_a_value_is_the_one_at_the_time_of_recording():
    recorder, value = MetricRecorder(torch.device("cpu")), torch.ones(2, requires_grad=True)
    recorder.record("x", value, "max")
    with torch.no_grad():
        value.zero_()
    assert recorder._entries["x"].value.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "value", "reduce", "message"),
    [
        ("loss", 1.0, "mean", "metric loss: a field of every step, need another name"),
        ("y", 1.0, "median", "metric y: reduce 'median', need mean, sum or max"),
        (
            "x",
            1.0,
            "sum",
            r"metric x: sum of shape \[\], need mean of shape \[\] as recorded before",
        ),
        ("x", [1.0], "mean", r"metric x: mean of shape \[1\], need mean of shape \[\]"),
    ],
)
def test_records_that_do_not_fit_are_refused(name, value, reduce, message):
    recorder = MetricRecorder(torch.device("cpu"))
    recorder.record("x", 1.0)
    with pytest.raises(ValueError, match=message):
        recorder.record(name, value, reduce)
