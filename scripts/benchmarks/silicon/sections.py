"""What an accelerator is asked, in order of worth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A command, and where its table is."""

    name: str
    least_seconds: int
    """Less time than this is of no use to it."""
    command: str
    """After `python -m`. OUT is the folder of the script, MINUTES are those that are left, and
    PACKAGES is the folder of other frameworks."""
    small: str
    """The same in its smallest form, on a CPU."""
    folder: str = ""
    """Within OUT, the folder with table.md, if it is not the section's name."""


def one_device(name: str, least_seconds: int, presets: str, *variants: str) -> Section:
    """Contenders beside ours. All these sections have one folder, so that none is trained twice."""
    command = "scripts.benchmarks.one_device OUT/one_device --rounds 1 --minutes MINUTES "
    chosen = " ".join(f"'{variant}'" for variant in ("ours, compiled", *variants))
    return Section(
        name,
        least_seconds,
        f"{command} --packages PACKAGES --presets {presets} --variants {chosen}",
        f"{command} --presets 1M --precision bf16 --steps 1 --warm-up 1 --variants 'ours, eager'",
        "one_device",
    )


def benchmark(name: str, least_seconds: int, command: str, small: str) -> Section:
    """Another benchmark that makes its turns in rounds."""
    module, _, options = command.partition(" ")
    begin = f"{module} OUT/{name} --rounds 1 --minutes MINUTES"
    return Section(name, least_seconds, f"{begin} {options}", f"{begin} {small}")


FOLDER = "scripts.benchmarks.silicon"
DEVICE = "scripts.benchmarks.one_device"
SMALL = "--presets 1M --steps 1"
GRAPHS, UPDATE = "ours, compiled, CUDA graphs", "ours, compiled, update under the forward"
LITGPT, TITAN, RATE = "litgpt, compiled", "torchtitan, compiled", "matrix product"
SECTIONS = (
    Section(
        "equal", 60, f"{FOLDER}.equal OUT/equal", f"{FOLDER}.equal OUT/equal --features window"
    ),
    Section("tests", 60, "pytest -q -m gpu", "pytest -q -m gpu tests/comm/test_streams.py"),
    one_device("peers", 120, "1.3B", TITAN, LITGPT, RATE),
    benchmark(
        "floor",
        60,
        f"{DEVICE}.profile_step --presets 1.3B 350M 125M",
        f"{SMALL} --warm-up 1",
    ),
    one_device("options", 60, "1.3B 125M", UPDATE, GRAPHS),
    one_device("fp8", 60, "1.3B 7B-block", "ours, compiled, fp8", RATE),
    benchmark(
        "planned", 60, f"{FOLDER}.planned --presets 1.3B 350M mixture", f"{SMALL} --warm-up 1"
    ),
    benchmark("parts", 45, f"{DEVICE}.parts --groups gate: rotary: product:", "--groups gate:"),
    Section("contention", 30, *[f"{FOLDER}.contention OUT/contention"] * 2),
    one_device("sizes", 90, "350M 125M", TITAN, LITGPT, RATE),
    benchmark(
        "offload", 90, f"{DEVICE}.offload --presets 3B 7B --device-gib 80", f"{SMALL} --batch 1"
    ),
    Section(
        "sites",
        240,
        f"{FOLDER}.text_sites OUT/sites",
        f"{FOLDER}.text_sites OUT/sites --every 1 --megabytes 1 train.precision=fp32 "
        "train.compile=false model.layers=1 model.hidden=32 model.heads=2 model.sequence_length=16 "
        "train.steps=2 train.global_batch=4 train.micro_batch=1 evaluate.every=2 "
        "evaluate.batches=1",
    ),
)
"""The first ones say whether features run at all. What fails there is mended before the rest."""
