"""The benchmark of what LAMMPS and the pair style add to a model's time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "lammps_overhead.py"


def test_runs_on_the_cpu(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--sizes", "xs", "--atoms", "192", "--steps", "1"]
    subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--out", out],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (record,) = json.loads(out.read_text())
    assert (record["model"], record["atoms"], record["mode"]) == ("xs", 192, "fp32")
    assert record["step_ms"] == pytest.approx(record["model_ms"] + record["overhead_ms"])
    assert 0.0 < record["overhead_share"] < 0.5
    # positions and the cell
    assert record["h2d_bytes_per_atom"] == pytest.approx(24 + 72 / 192, abs=0.01)
