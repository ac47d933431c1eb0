"""Measures which tiling of the kernels for compute capability 9.0 is fastest, writes the table.

    python benchmarks/tune_wgmma.py          (writes cpp/product/wgmma/tilings.inc; then rebuild)

A product is cut into tiles of 128 x tile_n, and K into `splits` parts, so that small products have
work for all multiprocessors. What is best depends on how many tiles of 128 x 128 there are and how
many steps of 32 K has, so the table has one row for every mode and range of the two. Every
candidate is timed as a user meets it: the weight is packed in each call. The candidates take turns,
and the plainer one is kept unless another is faster by more than 3 %.
"""

import argparse
import datetime
import itertools
import pathlib
import statistics
import sys

import torch
from metatomic_tc.bench.timing import Timer

MODES = ["tf32x3", "fp16x3", "bf16x6", "bf16x9"]
TILES = [1, 2, 4, 8, 16, 32, 66, 99, 132, 198, 264, 396, 528, 1056]
STEPS = [2, 4, 8, 16, 32, 64, 128]
#: from the plainest on
CANDIDATES = [(128, 1), (64, 1), (64, 2), (128, 2), (64, 4), (128, 4), (64, 8), (128, 8)]
GAIN = 0.97
#: Seconds the host takes for the launches of a turn, about
HOST_TIME = 1.5e-4
TABLE = pathlib.Path(__file__).resolve().parents[1] / "cpp" / "product" / "wgmma" / "tilings.inc"


def shape_of(tiles, steps):
    """M, N, K of a product with about this number of tiles: N is 512 where it can be."""
    columns = min(tiles, 4)
    return 128 * max(tiles // columns, 1), 128 * columns, 32 * steps


def best_candidate(mode, tiles, steps, rounds, launches):
    """The tiling to use, and {tiling: seconds}."""
    M, N, K = shape_of(tiles, steps)
    rows, weight = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda")
    name = f"wgmma-{mode}"
    functions = {
        (tile_n, splits): lambda tile_n=tile_n, splits=splits: torch.ops.metatomic_tc.gemm(
            rows, weight, None, True, name, tile_n, splits
        )
        for tile_n, splits in CANDIDATES
        if splits == 1 or (splits * 2 <= steps and tiles * splits <= 2 * 132)
    }
    timer = Timer(rows.device)
    times = {candidate: [] for candidate in functions}
    for _ in range(rounds):
        for candidate, function in functions.items():
            times[candidate].append(timer(function, launches, HOST_TIME))
    medians = {candidate: statistics.median(values) for candidate, values in times.items()}
    choice = None
    for candidate, time in medians.items():
        if choice is None or time < GAIN * medians[choice]:
            choice = candidate
    return choice, medians


def main(arguments):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("tune_wgmma.py needs a GPU of compute capability 9.0, e.g. an H100 or H200")
    lines = [
        "// How products are cut into tiles of 128 x tile_n and K into parts. Written by",
        f"// benchmarks/tune_wgmma.py on {datetime.date.today()}, {torch.cuda.get_device_name()}.",
        "// kernel, tiles of 128 x 128 up to, steps of K up to, tile_n, parts of K",
    ]
    for mode in MODES:
        for tiles, steps in itertools.product(TILES, STEPS):
            choice, times = best_candidate(mode, tiles, steps, arguments.rounds, arguments.launches)
            last_tiles = "no_limit" if tiles == TILES[-1] else tiles
            last_steps = "no_limit" if steps == STEPS[-1] else steps
            lines.append(
                f"{{Kernel::wgmma_{mode}, {last_tiles}, {last_steps}, {choice[0]}, {choice[1]}}},"
            )
            shown = ", ".join(f"{n}/{s}: {1e6 * time:.1f}" for (n, s), time in times.items())
            print(f"{mode} {tiles} tiles, {steps} steps: {choice} of {shown} us")
    pathlib.Path(arguments.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every tiling (default 5)")
    parser.add_argument("--launches", type=int, default=10, help="launches per turn (default 10)")
    parser.add_argument("--output", default=TABLE, help=f"file to write (default {TABLE.name})")
    main(parser.parse_args())
