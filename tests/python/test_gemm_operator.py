"""The operator `metatomic_tc::gemm`, by which benchmarks and these tests choose a kernel."""

import json

import metatomic_tc  # noqa: F401  (loads the operators)
import pytest
import torch
from metatomic_tc.bench.cases import DIRECTIONS, Case
from metatomic_tc.bench.gemm import DATA, Comparison, operands

MODES = ["tf32x3", "fp16x3", "bf16x6", "bf16x9"]
#: what other GPUs use, and runs on compute capability 9.0 too
MMA_SYNC = [
    "cutlass-3xtf32-128x64",
    "cutlass-3xtf32-128x64-sliced-k",
    "cutlass-3xtf32-64x64-sliced-k",
    "cutlass-3xtf32-64x64-sliced-k-unaligned",
    "mma-bf16x6-128x64",
    "mma-bf16x6-64x64",
    "mma-bf16x6-64x64-unaligned",
    "mma-bf16x9-128x64",
    "mma-bf16x9-64x64",
    "mma-bf16x9-64x64-unaligned",
]
#: what compute capability 9.0 uses
WGMMA = [
    "wgmma-tf32x3",
    "wgmma-tf32x3-two-parts",
    "wgmma-fp16x3",
    "wgmma-fp16x3-shared-slices",
    "wgmma-bf16x6",
    "wgmma-bf16x6-two-parts",
    "wgmma-bf16x9",
    "wgmma-bf16x9-two-parts",
]
#: width of the tiles and parts of K
TILINGS = [(64, 1), (64, 2), (64, 5), (128, 1), (128, 2), (128, 5)]
#: M, N, K: tails everywhere, one row, long K (sums kept apart), more tiles than multiprocessors,
#: rows for each multiprocessor (fp16x3 keeps their slices)
SHAPES = [
    (1, 1, 1),
    (129, 65, 33),
    (300, 130, 257),
    (64, 128, 1500),
    (20000, 200, 96),
    (17003, 392, 250),
    (33001, 130, 256),
]


def gemm(a, b, bias=None, transpose_b=True, kernel="cublas-fp32", tile_n=0, splits=0):
    return torch.ops.metatomic_tc.gemm(a, b, bias, transpose_b, kernel, tile_n, splits)


def tilings_of(kernel, K):
    """Those that a wgmma kernel has for products with this K."""
    if kernel != "wgmma-fp16x3-shared-slices":
        return TILINGS
    return [(128, 1)] if K <= 256 else []


def test_every_kernel_of_the_table_is_tested_here():
    names = {row["kernel"] for row in json.loads(torch.ops.metatomic_tc.kernel_table())}
    assert {name for name in names if name.startswith("wgmma")} == set(WGMMA)
    assert {name for name in names if name.startswith(("cutlass", "mma"))} == set(MMA_SYNC)


def test_it_is_for_cuda_devices():
    with pytest.raises(NotImplementedError, match="gemm"):
        gemm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture
def hopper(cuda):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return cuda


def assert_right_and_reproducible(device, shape, transpose_b, kernel, tilings):
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(M, K, device=device, generator=generator)
    b = torch.randn(N, K, device=device, generator=generator)
    b = b if transpose_b else b.T.contiguous()
    bias = torch.randn(N, device=device, generator=generator)
    wide = b.double().T if transpose_b else b.double()
    exact = a.double() @ wide + bias
    scale = (a.double().abs() @ wide.abs() + bias.abs()) * 2.0**-24
    for tile_n, splits in tilings:
        arguments = (a, b, bias, transpose_b, kernel, tile_n, splits)
        result = gemm(*arguments)
        assert ((result - exact).abs() / scale).max() < 8, (tile_n, splits)
        for _ in range(4):
            assert torch.equal(gemm(*arguments), result), (tile_n, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", WGMMA)
def test_all_tilings_are_right_and_reproducible(kernel, shape, transpose_b, hopper):
    tilings = tilings_of(kernel, shape[2])
    assert_right_and_reproducible(hopper, shape, transpose_b, kernel, tilings)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 128, 256)])
@pytest.mark.parametrize("kernel", MMA_SYNC)
def test_kernels_of_other_gpus_are_right_and_reproducible(kernel, shape, transpose_b, hopper):
    M, N, K = shape
    if (N % 4 or K % 4) and not kernel.endswith("unaligned"):
        a, b = torch.ones(M, K, device=hopper), torch.ones(N, K, device=hopper)
        with pytest.raises(ValueError, match="vectors of 16 bytes.*unaligned"):
            gemm(a, b, kernel=kernel)
        return
    assert_right_and_reproducible(hopper, shape, transpose_b, kernel, [(0, 0)])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [200, 17003])
@pytest.mark.parametrize("N", [150, 256])
@pytest.mark.parametrize("kernel", WGMMA)
def test_infinite_elements_are_those_of_fp32_in_all_tilings(kernel, N, M, hopper):
    a, b = torch.randn(M, 96, device=hopper), torch.randn(N, 96, device=hopper)
    a[3, 5] = float("inf")
    a[150, 7] = float("nan")
    b[140, 90] = -float("inf")
    expected = gemm(a, b)
    for tile_n, splits in tilings_of(kernel, 96):
        result = gemm(a, b, kernel=kernel, tile_n=tile_n, splits=splits)
        assert torch.equal(result.isnan(), expected.isnan())
        infinite = expected.isinf()
        assert torch.equal(result[infinite], expected[infinite])
        assert result[~infinite & ~expected.isnan()].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("K", [32, 48, 64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_short_sums_are_as_accurate_as_those_of_fp32(direction, K, data, hopper):
    generator = torch.Generator(hopper).manual_seed(0)
    a, w = operands(Case(17280, 256, K, direction, None, []), data, generator)
    compare = Comparison(a, w, direction, generator)

    def errors(mode):
        if direction == "forward":
            return compare(torch.ops.metatomic_tc.linear(a, w, None, mode))
        return compare(torch.ops.metatomic_tc.linear_input_gradient(a, w, mode))

    native = errors("fp32")
    for mode in MODES:
        found = errors(mode)
        assert found["error_rms"] <= native["error_rms"], mode
        # the largest of a million, which is up to chance
        assert found["error_max"] <= 1.2 * native["error_max"], mode


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change, message",
    [
        ({"kernel": "wgmma-fp8"}, "wgmma-fp8.*metatomic-tc info"),
        ({"tile_n": 32, "splits": 1}, "tile_n 64 or 128.*found 32"),
        ({"tile_n": 64}, "splits of 1 or more"),
        ({"b": torch.ones(3, 4)}, "can be multiplied"),
        ({"bias": torch.ones(7)}, r"bias of shape \[3\]"),
    ],
)
def test_wrong_arguments_are_errors(change, message, cuda):
    arguments = {"a": torch.ones(2, 5, device=cuda), "b": torch.ones(3, 5, device=cuda)} | change
    with pytest.raises((ValueError, RuntimeError), match=message):
        gemm(**arguments)
