"""Times the matrix products of PET's linear layers, see `metatomic-tc bench gemm --help`.

    python benchmarks/gemm.py --sizes s

Options and results are those of the command, which this calls. Only the default of --output
differs: it is benchmarks/results.
"""

import pathlib
import sys

from metatomic_tc.cli import main

if __name__ == "__main__":
    results = pathlib.Path(__file__).resolve().parent / "results"
    sys.exit(main(["bench", "gemm", "--output", str(results), *sys.argv[1:]]))
