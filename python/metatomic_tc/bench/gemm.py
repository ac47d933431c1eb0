"""
``metatomic-tc bench gemm``: time and accuracy of the matrix products of PET's linear layers.

All implementations of a product are measured in one run and take turns, so that a change of the
clock or of the load meets them all. A product is computed for random data of three kinds:

- ``normal``: N(0, 1)
- ``same-sign``: uniform in [0, 1), where errors of one sign add up
- ``wide``: N(0, 1) times 2^u, with u uniform in [-15, 15] for each element, and in [-30, 30] for
  each row of A and each row of the layer's weight

Errors against FP64, of up to 4,096 rows of C, are in units of 2⁻²⁴·Σ|a·b| with the sum that belongs
to the element of C. One unit is the most that a single rounding of that sum to FP32 can cost.
"""

import contextlib
import datetime
import itertools
import json
import math
import statistics
from pathlib import Path

import torch

from .. import modes
from ..files import result_path, write_atomically
from ..info import versions
from ..model_files import first_line
from ..progress import Steps
from . import report
from .cases import Case, pet_cases, shape_cases
from .implementations import Implementations, Product
from .timing import Timer

DATA = ["normal", "same-sign", "wide"]
#: Rows of C that are compared with FP64
MOST_ROWS = 4096
#: Different weights that a short product goes through. Models have tens of layers, and what an
#: operator keeps about weights that it has seen need not suffice for thousands of them.
MOST_WEIGHTS = 32
MOST_BUFFERS = 2048


def run(arguments) -> int:
    """The command; ``arguments`` are those of the command line."""
    device = modes.usable_device(arguments.device)
    modes.expect_supported(arguments.modes or [], device)
    implementations = Implementations(device, arguments.modes or modes.supported_modes(device))
    if arguments.shapes:
        cases = shape_cases(arguments.shapes, arguments.directions)
    else:
        cases = pet_cases(arguments.sizes, arguments.atoms, arguments.directions)

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    path = result_path("gemm", gpu, arguments.output or ".")
    guard = torch.cuda.device(device) if gpu else contextlib.nullcontext()
    records: list[dict] = []
    try:
        with torch.no_grad(), full_fp32(), guard:
            timer = Timer(device)
            bandwidth = timer.copy_bandwidth(device)
            # A product costs a time of its own, and one in proportion to its operations.
            steps = Steps(len(cases), [case.operations + 1e11 for case in cases])
            for case in cases:
                sizes = "/".join(case.models).upper()
                with steps(f"PET-{sizes}, {case.atoms} atoms, {case}" if sizes else str(case)):
                    records += measure(case, implementations, device, timer, arguments.rounds)
                write(records, path, gpu)
    finally:
        if records:
            print(report.table(records, implementations.baseline))
            print(f"\nwritten to {path}")
    if not arguments.no_plot:
        picture = path.with_suffix(".png")
        try:
            report.roofline(records, gpu, bandwidth, picture)
            print(f"written to {picture}")
        except ImportError as error:
            print(
                f"No plot: it needs matplotlib ({error}). "
                "Install it with: pip install 'metatomic-tc[bench]'"
            )
    return 0


def measure(
    case: Case, implementations: Implementations, device: torch.device, timer: Timer, rounds: int
) -> list[dict]:
    """The records of a product: one for each implementation and kind of data."""
    records = {
        (name, data): {
            "M": case.M, "N": case.N, "K": case.K, "direction": case.direction,
            "implementation": name, "ms": None, "tflops": None, "ratio": None,
            "error_rms": None, "error_max": None, "error_mean": None, "data": data, "kernel": None,
            "model": case.models, "atoms": case.atoms,
        }
        for name in implementations.names
        for data in DATA
    }  # fmt: skip

    def failed(name, error, kinds=DATA):
        for data in kinds:
            records[name, data]["error"] = first_line(f"{type(error).__name__}: {error}")[:300]

    products: dict[str, Product] = {}
    try:
        generator = torch.Generator(device).manual_seed(0)
        a, w = operands(case, "normal", generator)
        for name in implementations.names:
            try:
                products[name] = implementations.prepare(name, case, a, w)
                for data in DATA:
                    records[name, data]["kernel"] = products[name].kernel
            except Exception as error:
                failed(name, error)
        for data in DATA:
            if data != "normal":
                a = w = None  # before there are new ones
                a, w = operands(case, data, generator)
            compare = Comparison(a, w, case.direction, generator)
            for name, product in list(products.items()):
                try:
                    records[name, data] |= compare(product.function(a, w))
                except Exception as error:
                    failed(name, error, [data])
                    if data == "normal":  # it does not work at all
                        failed(name, error)
                        del products[name]
            compare = None
        a = w = None

        times = time_in_turns(case, products, device, generator, timer, rounds, failed)
    except Exception as error:  # e.g. the matrices do not fit into memory
        times = {}
        for name in implementations.names:
            failed(name, error)

    for (name, _), record in records.items():
        if name in times:
            record["ms"] = _rounded(1e3 * times[name])
            record["tflops"] = _rounded(1e-12 * case.operations / times[name])
            if implementations.baseline in times:
                record["ratio"] = _rounded(times[implementations.baseline] / times[name])
    return list(records.values())


def time_in_turns(case, products, device, generator, timer, rounds, failed) -> dict[str, float]:
    """Median times of the implementations in seconds; ``failed(name, error)`` is told of others."""
    copies = buffers_for(case, device)
    buffers = [operands(case, "normal", generator) for _ in range(min(copies, MOST_WEIGHTS))]
    weights = [w for _, w in buffers]
    inputs = [a for a, _ in buffers] + [
        operands(case, "normal", generator)[0] for _ in range(copies - len(buffers))
    ]
    pairs = itertools.cycle(
        [(inputs[i], weights[i % len(weights)]) for i in range(copies)],
    )
    # The outputs are kept for a turn of all buffers, so that they are in different places, too.
    outputs = [None] * copies
    places = itertools.cycle(range(copies))

    def launcher(product):
        def launch():
            outputs[next(places)] = product.function(*next(pairs))

        def launch_single():
            product.function(*next(pairs))

        return launch if copies > 1 else launch_single

    launchers, plans = {}, {}
    for name, product in products.items():
        launch = launcher(product)
        try:
            for _ in range(max(len(weights), 2)):
                launch()
            plans[name] = timer.plan(launch)
            launchers[name] = launch
        except Exception as error:
            failed(name, error)
    times = {name: [] for name in launchers}
    for _ in range(rounds):
        for name, launch in launchers.items():
            if name in times:
                try:
                    launch()  # the first one after a change of the kernel
                    times[name].append(timer(launch, *plans[name]))
                except Exception as error:
                    failed(name, error)
                    del times[name]
    return {name: statistics.median(values) for name, values in times.items()}


def buffers_for(case: Case, device: torch.device) -> int:
    """How many sets of matrices exceed the L2 cache three times: one, if a single set does."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(1, math.ceil(3 * cache / case.bytes))
    if copies > MOST_WEIGHTS:  # any MOST_WEIGHTS in succession have different weights
        copies = min(MOST_BUFFERS, MOST_WEIGHTS * math.ceil(copies / MOST_WEIGHTS))
    return copies


def operands(
    case: Case, data: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random A and W, made on the device."""
    return tuple(
        random_matrix(shape, data, generator) for shape in [(case.M, case.K), case.weight_shape]
    )


def random_matrix(shape: tuple[int, int], data: str, generator: torch.Generator) -> torch.Tensor:
    """A random matrix of one of the kinds in ``DATA``."""
    options = {"generator": generator, "device": generator.device}
    if data == "same-sign":
        return torch.rand(shape, **options)
    matrix = torch.randn(shape, **options)
    if data == "wide":
        matrix *= torch.rand(shape, **options).mul_(30).sub_(15).exp2_()
        matrix *= torch.rand((shape[0], 1), **options).mul_(60).sub_(30).exp2_()
    return matrix


class Comparison:
    """
    Compares products with FP64.

    :param a: the matrix A
    :param w: the weight, see :class:`Case`
    :param direction: of ``DIRECTIONS``
    :param generator: chooses the rows that are compared
    """

    def __init__(
        self, a: torch.Tensor, w: torch.Tensor, direction: str, generator: torch.Generator
    ):
        M = a.shape[0]
        self._rows = torch.arange(M, device=a.device)
        if M > MOST_ROWS:
            # the first and last tiles, and what chance takes in between
            ends = MOST_ROWS // 16
            chosen = torch.randint(
                0, M, (MOST_ROWS - 2 * ends,), generator=generator, device=a.device
            )
            self._rows = torch.cat([self._rows[:ends], chosen, self._rows[-ends:]]).unique()
        w = w.double()
        if direction == "forward":
            w = w.t()
        a = a[self._rows].double()
        self._exact = a @ w
        self._unit = (a.abs_() @ w.abs()).mul_(2.0**-24)

    def __call__(self, result: torch.Tensor) -> dict:
        """``error_rms``, ``error_max`` and ``error_mean`` of a product."""
        error = (result[self._rows].double() - self._exact).div_(self._unit)
        statistics = [error.square().mean().sqrt(), error.abs().max(), error.mean()]
        found = torch.stack(statistics).tolist()
        if not all(map(math.isfinite, found)):
            wrong = error.numel() - int(error.isfinite().sum())
            raise ArithmeticError(f"{wrong} of {error.numel()} compared elements are not finite")
        return {
            f"error_{name}": _rounded(value)
            for name, value in zip(["rms", "max", "mean"], found, strict=True)
        }


@contextlib.contextmanager
def full_fp32():
    """Turns off PyTorch's process-wide TF32 flag, for the sake of the baseline."""
    flag = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = flag


def write(records: list[dict], path: Path, gpu: str | None) -> None:
    """Write the results, one record in a line; an older file is replaced as a whole."""
    common = {"gpu": gpu, "versions": versions(["triton"]), "date": str(datetime.date.today())}
    lines = [json.dumps(record | common, allow_nan=False) for record in records]
    write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
