"""The progress line describes a step in one line, on standard output and in a file."""

import io

from megafrontier.training.logging.progress import ProgressLine, format_line

STEP = {
    "step": 120,
    "loss": 3.2141,
    "grad_norm": 0.812,
    "lr": 2.9e-4,
    "tokens": 983040,
    "step_seconds": 0.1,
    "tokens_per_second": 12345.0,
    "tflops_per_device": 0.412,
    "mfu": 0.312,
    "memory_gib": 1.34,
    "comm": {"pair": {"bytes": 8, "seconds": 0.1}},
}


def steps(last: int) -> list[dict]:
    return [STEP | {"step": step} for step in range(1, last + 1)]


def test_a_line_holds_every_known_metric_with_its_unit():
    assert format_line(STEP | {"waiting": 0.123}, 2000, 192) == (
        "step 120/2000  loss 3.214  grad 0.81  lr 2.9e-04  12,345 tok/s  0.412 TF/s  MFU 31.2%"
        "  wait 12%  1.3 GiB  ETA 0:03:12"
    )
    assert "MFU" not in format_line(STEP | {"mfu": None}, 2000, None)
    assert format_line({"step": 5, "valid_loss": 2.5}, 10, None) == "step 5/10  valid loss 2.500"


def test_a_skipped_step_says_why():
    skipped = STEP | {"skipped": True}
    line = format_line(skipped | {"loss": None, "grad_norm": None}, 2000, 1)
    assert "skipped: loss or gradient not finite" in line
    assert "grad 0" not in line
    line = format_line(skipped | {"grad_norm": float("inf"), "loss_scale": 512.0}, 2000, 1)
    assert "skipped: gradient too large for fp16, loss scale lowered to 512" in line


def test_a_file_gets_every_nth_step_and_the_last():
    stream, log = io.StringIO(), io.StringIO()
    progress = ProgressLine(7, stream, every=3, log=log)
    for values in steps(7):
        progress.update(values)
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["3/7", "6/7", "7/7"]
    assert log.getvalue() == stream.getvalue()


def test_a_stream_that_cannot_be_written_costs_lines_not_the_run():
    """As standard output on a full disk."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = io.StringIO()
    progress = ProgressLine(2, Full(), every=1, log=log)
    for values in steps(2):
        progress.update(values)
    assert len(log.getvalue().splitlines()) == 2


def test_evaluations_skipped_steps_and_notes_are_always_printed():
    log = io.StringIO()
    progress = ProgressLine(100, io.StringIO(), every=50, log=log)
    progress.update(STEP | {"step": 1})
    progress.update(STEP | {"step": 2, "loss": None, "skipped": True})
    progress.update({"step": 2, "valid_loss": 3.5})
    progress.note("saved step 2")
    skipped, valid, note = log.getvalue().splitlines()
    assert "skipped" in skipped
    assert "valid loss 3.500" in valid
    assert note == "saved step 2"


def test_the_remaining_time_ignores_one_slow_step():
    stream = io.StringIO()
    progress = ProgressLine(110, stream, every=10)
    for values in steps(10):
        progress.update(values | {"step_seconds": 60.0 if values["step"] == 1 else 0.5})
    assert stream.getvalue().rstrip().endswith("ETA 0:00:50")
