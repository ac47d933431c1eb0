"""A C++ host without Python gets energies and forces from a scripted model."""

import subprocess
import sys
from pathlib import Path

import metatomic_tc
import numpy as np
import pytest
import torch

SOURCE = Path(__file__).parent
PACKAGE = Path(metatomic_tc.__file__).parent


class Energy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(24, 64)
        self.second = torch.nn.Linear(64, 64, bias=False)
        self.last = torch.nn.Linear(64, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(positions))))).sum()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = tmp_path_factory.mktemp("cpp")
    for command in (
        [
            *("cmake", "-S", SOURCE, "-B", build, "-DCMAKE_BUILD_TYPE=Release"),
            f"-DCMAKE_PREFIX_PATH={PACKAGE / 'lib' / 'cmake'}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        ["cmake", "--build", build],
    ):
        subprocess.run([str(part) for part in command], check=True)
    return build / "scripted_forces"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    torch.jit.script(Energy().eval()).save(str(directory / "energy.pt"))
    torch.save(torch.randn(50, 24), directory / "positions.pt")
    return directory


def run(program, files, mode, device):
    command = (program, files / "energy.pt", files / "positions.pt", mode, device)
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "replaced 2, left 1" in result.stderr
    values = np.array(result.stdout.split(), dtype=float)
    return values[0], values[1:].reshape(50, 24)


def fp64(files):
    module = torch.jit.load(str(files / "energy.pt")).double()
    positions = torch.load(files / "positions.pt").double().requires_grad_(True)
    energy = module(positions)
    energy.backward()
    return energy.item(), -positions.grad.numpy()


def check_modes(program, files, device):
    energy, forces = fp64(files)
    errors = {}
    for mode in ("fp32", "tf32x3", "tf32"):
        mode_energy, mode_forces = run(program, files, mode, device)
        errors[mode] = np.abs(mode_forces - forces).max()
        assert abs(mode_energy - energy) < (1e-1 if mode == "tf32" else 1e-4)
    assert errors["tf32x3"] < 2 * errors["fp32"]
    assert errors["tf32"] > 20 * errors["tf32x3"]


@pytest.mark.first
def test_forces_on_cpu(program, files):
    check_modes(program, files, "cpu")


@pytest.mark.gpu
def test_forces_on_gpu(program, files):
    check_modes(program, files, "cuda")


def test_library_needs_no_python():
    for library in PACKAGE.glob("l*/*.so"):
        needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
        assert "libpython" not in needed
