"""The Triton kernels give the results of plain torch, to the last bit.

On a machine with a GPU, the kernels run on it. Elsewhere, Triton's interpreter runs them on a CPU.
It must be chosen before Triton is imported, so pytest runs this file again in a process of its own.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from megafrontier.comm.wires import registry
from megafrontier.comm.wires.block import (
    INT4,
    INT8,
    ROTATE_BACK_SCALE,
    ROTATE_SCALE,
    TOO_LARGE,
)
from megafrontier.comm.wires.registry import DTYPES as DTYPES_BY_NAME
from tests.partition.codecs import read, rotate_by_hand, write
from tests.partition.tiny import build, engine_step, preset
from tests.ranks import make_levels, run_ranks

if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)

HAS_GPU = torch.cuda.is_available()
RUNS_KERNELS = HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
SWEEP = () if HAS_GPU else pytest.mark.exhaustive  # the interpreter takes seconds for a case
ROTATING = [replace(codec, rotates=True) for codec in (INT8, INT4)]
CODECS = pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
ALL = pytest.mark.parametrize(
    "codec",
    [INT8, INT4, ROTATING[1], pytest.param(ROTATING[0], marks=SWEEP)],
    ids=["int8", "int4", "int4 rotating", "int8 rotating"],
)
DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float32, marks=SWEEP),
        pytest.param(torch.float16, marks=SWEEP),
    ],
)
CASES = [(torch.float32, 129), (torch.bfloat16, 4097)]
RARE = [(torch.float32, n) for n in (1, 1000, 4096, 4097)] + [
    (dtype, n) for dtype in (torch.bfloat16, torch.float16) for n in (1, 4097)
]
SUMS = torch.float32, torch.bfloat16, torch.float16
ONTO = (
    [*product(SUMS, (False, True))] if HAS_GPU else [*zip(SUMS, (True, False, True), strict=True)]
)
"""Types of decoded values, and whether they are added to others."""
needs_kernels = pytest.mark.skipif(
    not RUNS_KERNELS, reason="run by test_all_of_this_file_under_the_interpreter in its process"
)


@pytest.mark.skipif(RUNS_KERNELS, reason="the kernels run in this process")
def test_all_of_this_file_under_the_interpreter(pytestconfig):
    more = ["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *more],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def random(rows, count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-10, 5, (rows, count), generator=generator).float().exp2()
    return (torch.randn(rows, count, generator=generator) * spread).to(dtype)


def same_bits(a, b):
    """Whether bits are equal, but for those of a NaN, which may differ between processors."""
    a, b = a.cpu(), b.cpu()
    integers = {4: torch.int32, 2: torch.int16}[a.itemsize]
    equal = a.view(integers) == b.view(integers)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_same_as_reference(codec, values):
    """Compare messages, decoded values and sums of `values` [rows, n]. If the codec rotates, the
    reference adds in the kernels' order."""
    from megafrontier.comm.wires import block_triton as kernels

    count = values.shape[1]
    plain = replace(codec, rotates=False)
    expected = write(
        plain, rotate_by_hand(values.float(), ROTATE_SCALE) if codec.rotates else values
    )
    messages = write(codec, values.to(DEVICE), kernels=kernels)
    assert torch.equal(messages.cpu(), expected)
    assert_same_errors(codec, values)
    for out, accumulate in ONTO:
        found, expected_out = (torch.ones(*values.shape, dtype=out) for _ in range(2))
        found = found.to(DEVICE)
        kernels.decode(codec, messages, found, accumulate)
        codec.decode(expected, expected_out, accumulate)
        assert same_bits(found, expected_out)
    total, expected_total = torch.empty(count, device=DEVICE), torch.empty(count)
    kernels.decode_sum(codec, messages, total)
    plain.decode_sum(expected, expected_total)
    if codec.rotates:
        expected_total = rotate_by_hand(expected_total.view(1, -1), ROTATE_BACK_SCALE)[0]
    assert same_bits(total, expected_total)
    onto = torch.full_like(total, 0.5)
    kernels.decode_sum(codec, messages, onto, accumulate=True)
    assert same_bits(onto, total + 0.5)


def assert_same_errors(codec, values):
    """Compare messages of `values` [rows, n] with errors, and the new errors."""
    from megafrontier.comm.wires import block_triton as kernels

    old = random(*values.shape, torch.bfloat16, seed=7)
    errors = old.clone().to(DEVICE)
    messages = write(codec, values.to(DEVICE), errors, kernels=kernels).cpu()
    total = values.float() + old.float()
    rotated = rotate_by_hand(total, ROTATE_SCALE) if codec.rotates else total
    assert torch.equal(messages, write(replace(codec, rotates=False), rotated))
    left = (total - read(codec, messages, values.shape[1])).bfloat16()
    assert same_bits(errors, left.nan_to_num(0.0, 0.0, 0.0))


@needs_kernels
@ALL
@pytest.mark.parametrize(
    ("dtype", "count"),
    [*CASES, *(pytest.param(*case, marks=SWEEP) for case in RARE if case not in CASES)],
)
def test_messages_values_and_sums_equal_the_reference(codec, dtype, count):
    assert_same_as_reference(codec, random(3, count, dtype))


@needs_kernels
@ALL
@pytest.mark.parametrize("rows", [1, 9])
def test_any_number_of_rows(codec, rows):
    """Kernels sum four at a time."""
    assert_same_as_reference(codec, random(rows, 700, seed=rows))


@needs_kernels
@CODECS
@DTYPES
def test_halves_round_to_even(codec, dtype):
    """With a largest value of q the scale is 1, and every half is a tie."""
    q = codec.largest
    halves = torch.arange(-2 * q, 2 * q + 1).float() / 2
    values = torch.zeros(2, -(-halves.numel() // (codec.block - 1)) * codec.block)
    for first in range(0, halves.numel(), codec.block - 1):
        block = first // (codec.block - 1) * codec.block
        part = halves[first : first + codec.block - 1]
        values[:, block] = q
        if block + 1 + part.numel() <= values.shape[1]:
            values[:, block + 1 : block + 1 + part.numel()] = part
    assert_same_as_reference(codec, values.to(dtype))
    decoded = read(codec, write(codec, values), values.shape[1])
    assert torch.equal(decoded, values.round())


@needs_kernels
@ALL
@DTYPES
def test_non_finite_values(codec, dtype):
    """Each in a block of its own, and two whose sum is NaN."""
    values = random(2, 5 * codec.block + 7, dtype)
    values[0, 3], values[1, codec.block + 5], values[1, -1] = (
        float(bad) for bad in ("nan", "inf", "-inf")
    )
    values[:, 2 * codec.block + 1] = torch.tensor([float("inf"), float("-inf")])
    assert_same_as_reference(codec, values)


@needs_kernels
@ALL
def test_zeros_of_either_sign(codec):
    values = random(2, 3 * codec.block + 1)
    values[:, : codec.block] = 0.0
    values[:, codec.block : 2 * codec.block] = -0.0
    assert_same_as_reference(codec, values)


@needs_kernels
@CODECS
@DTYPES
def test_magnitudes_down_to_the_subnormal_and_up_to_the_largest(codec, dtype):
    """A row from 2^-149, or below the smallest number of the type, to 2^127, or infinity; each
    block of its own magnitude."""
    least, most = (-28, 18) if dtype == torch.float16 else (-149, 128)
    exponents = torch.arange(least, most).double()
    values = random(1, exponents.numel() * codec.block, seed=5).double()
    values = values.view(1, -1, codec.block) * exponents.exp2()[:, None]
    assert_same_as_reference(codec, values.view(1, -1).to(dtype))
    assert_same_as_reference(codec, torch.full((2, 300), torch.finfo(dtype).max, dtype=dtype))


@needs_kernels
@CODECS
def test_the_largest_finite_block_and_the_smallest_that_is_not(codec):
    values = torch.full((2, 2 * codec.block), TOO_LARGE)
    values[:, : codec.block] = torch.nextafter(values[0, 0], torch.tensor(0.0))
    values[1] *= -1
    assert_same_as_reference(codec, values)


@needs_kernels
@CODECS
def test_scales_at_ties_of_bf16(codec):
    """Largest magnitudes whose scale lies on, or next to, the middle of two bf16 numbers."""
    middles = (torch.arange(0x3F800000, 0x3F900000, 0x10000) + 0x8000).to(torch.int32)
    largest = torch.cat([(middles + by).view(torch.float32) for by in (-1, 0, 1)]) * codec.largest
    values = random(1, largest.numel() * codec.block).clamp(-1, 1).view(-1, codec.block)
    values[:, 0] = largest
    assert_same_as_reference(codec, values.view(1, -1))


@needs_kernels
@CODECS
def test_strided_rows_and_empty_messages(codec):
    from megafrontier.comm.wires import block_triton as kernels

    values = random(4, 1000)
    for view in (values[:, 100:777], values[::2], values.t()[:9, :3]):
        messages = write(codec, view.to(DEVICE) if HAS_GPU else view, kernels=kernels)
        assert torch.equal(messages.cpu(), write(codec, view))
    empty = torch.empty(2, 0, device=DEVICE)
    kernels.decode(codec, write(codec, empty, kernels=kernels), empty)


@needs_kernels
@pytest.mark.parametrize(
    "codec",
    [
        INT8,
        ROTATING[1],
        pytest.param(INT4, marks=pytest.mark.exhaustive),
        pytest.param(ROTATING[0], marks=pytest.mark.exhaustive),
    ],
    ids=["int8", "int4 rotating", "int4", "int8 rotating"],
)
def test_the_check_before_a_run_finds_no_difference(codec):
    from megafrontier.comm.wires import block_triton as kernels
    from megafrontier.comm.wires.block import _difference

    assert _difference(kernels, codec, DEVICE) is None


class Launches:
    """Replaces a kernel. Computes nothing, and notes for which patterns of arguments Triton would
    compile it."""

    def __init__(self, kernel):
        self._kernel, self.patterns = kernel, set()

    def __getitem__(self, _grid):
        def launch(*arguments, **constants):
            found = [
                self._pattern(parameter, argument)
                for parameter, argument in zip(self._kernel.params, arguments, strict=False)
            ]
            self.patterns.add((*found, *sorted(constants.items())))

        return launch

    def _pattern(self, parameter, argument):
        if isinstance(argument, torch.Tensor):
            return argument.dtype, argument.data_ptr() % 16 == 0
        if parameter.do_not_specialize:
            return "any"
        if argument == 1:
            return "1"
        is_aligned = argument % 16 == 0 and not parameter.do_not_specialize_on_alignment
        return "aligned" if is_aligned else "any"


@pytest.mark.skipif(RUNS_KERNELS, reason="nothing is launched here")
@pytest.mark.parametrize(
    ("strategy", "name", "sizes", "precision"),
    [
        ("topo", "low", (2, 2, 2), "bf16"),
        ("hpz", "zero++", (2, 2), "fp16"),
        pytest.param("topo", "low", (2, 2), "fp32", marks=SWEEP),
        pytest.param("zero3", "low", (2, 3), "bf16", marks=SWEEP),
    ],
)
def test_training_launches_only_kernels_that_the_check_before_it_has_compared(
    strategy, name, sizes, precision, monkeypatch
):
    """If the check used lengths that no shard has, Triton would compile and compare others."""
    from megafrontier.comm.wires import block as module
    from megafrontier.comm.wires import block_triton as kernels

    levels = make_levels(sizes)
    wires = preset(name, strategy, levels, precision)
    launches = {k: Launches(getattr(kernels, k)) for k in ("_encode", "_decode_sum")}
    for kernel, launched in launches.items():
        monkeypatch.setattr(kernels, kernel, launched)

    def patterns():
        found = {kernel: launched.patterns for kernel, launched in launches.items()}
        for launched in launches.values():
            launched.patterns = set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "allclose", lambda *_, **__: True)
        for codec in {w.codec for w in (*wires.gather, *wires.reduce) if w.codec.is_quantized}:
            assert module._difference(kernels, codec, "cpu") is None
    compared = patterns()
    monkeypatch.setattr(module, "find_kernels", lambda *_: kernels)

    def body(hierarchy):
        feeds_back = name == "low"
        model, engine, optimizer = build(
            hierarchy, wires, strategy, feeds_back, dtype=DTYPES_BY_NAME[precision]
        )
        for step in range(2):
            engine_step(engine, model, optimizer, step, 2)
        engine.finish_publishing()
        return patterns()

    for launched in run_ranks(sizes, body):
        for kernel, found in launched.items():
            assert found
            assert found <= compared[kernel]


@needs_kernels
def test_memory_of_another_type_or_layout_is_refused():
    from megafrontier.comm.wires import block_triton as kernels

    messages = write(INT8, random(2, 64)).to(DEVICE)
    with pytest.raises(ValueError, match=r"sums: torch.bfloat16, need fp32"):
        kernels.decode_sum(INT8, messages, torch.empty(64, dtype=torch.bfloat16, device=DEVICE))
    apart = torch.empty(64, 2, device=DEVICE)
    with pytest.raises(ValueError, match=r"values: .* need contiguous memory"):
        kernels.decode(INT8, messages, apart.t())
    with pytest.raises(ValueError, match=r"sums: .* need contiguous memory"):
        kernels.decode_sum(INT8, messages, apart[:, 0])
    values = torch.empty(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"errors: .* need contiguous memory"):
        kernels.encode(INT8, values, messages, apart.bfloat16().t())
    with pytest.raises(ValueError, match=r"messages: .* need contiguous memory"):
        kernels.encode(INT8, values[:1], messages[:, ::2])


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@ALL
def test_a_gpu_uses_the_kernels_and_its_plain_torch_agrees_with_them(codec, monkeypatch):
    from megafrontier.comm.wires import block as module
    from megafrontier.comm.wires import block_triton as kernels

    values = random(8, 100_003, torch.bfloat16).cuda()
    assert registry.find_kernels(codec, "cuda") is kernels
    messages = write(codec, values)
    by_kernels = read(codec, messages, 100_003)
    monkeypatch.setattr(module, "find_kernels", lambda *_: None)
    if not codec.rotates:
        assert torch.equal(write(codec, values), messages)
    assert same_bits(read(codec, messages, 100_003), by_kernels)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize(("codec", "count"), [(INT8, 2**28 + 5), (INT4, 2**29 + 5)])
def test_rows_whose_bits_cannot_be_counted_in_32_bits(codec, count):
    """Such as an embedding of 128k tokens over two ranks."""
    values = torch.zeros(1, count, device="cuda")
    values[0, ::1001] = codec.largest  # so that the scale is 1, and exact
    values[0, -3:] = -codec.largest
    assert torch.equal(read(codec, write(codec, values), count), values)
