"""The pair style on a GPU, against ASE's metatomic calculator on the CPU and between modes."""

import re

import numpy as np
import pytest
import structures
from lammps_runs import assert_close

pytestmark = pytest.mark.gpu


def on_gpu(run_lammps, atoms, model, mode, **arguments):
    found = run_lammps(atoms, model, mode, options="device cuda", **arguments)
    assert f"mode {mode}, " in found.log and ", on cuda:0 NVIDIA" in found.log, found.log
    return found


@pytest.mark.parametrize("mode", ["fp32", "tf32x3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_water(run_lammps, reference, demo_model, mode, ranks):
    atoms = structures.water(4)
    found = on_gpu(run_lammps, atoms, demo_model, mode, ranks=ranks)
    assert_close(found, reference(atoms, demo_model))


def test_slab_with_an_empty_rank(run_lammps, reference, tiny_pet):
    atoms = structures.slab()
    found = on_gpu(run_lammps, atoms, tiny_pet, "fp32", ranks=4, setup="processors 1 1 *")
    assert_close(found, reference(atoms, tiny_pet))


def test_modes_differ(run_lammps, demo_model):
    atoms = structures.water(3)
    modes = ("fp32", "tf32x3", "tf32")
    runs = {mode: on_gpu(run_lammps, atoms, demo_model, mode) for mode in modes}

    def difference(mode):
        return np.abs(runs[mode].forces - runs["fp32"].forces).max()

    assert 0.0 < difference("tf32x3") < 2e-5
    assert difference("tf32") > 30 * difference("tf32x3")


def test_a_mode_that_the_gpu_lacks_is_an_error_or_falls_back_when_asked(run_lammps, tiny_pet):
    import metatomic_tc

    if "bf16x9" in metatomic_tc.supported_modes("cuda"):
        pytest.skip("this GPU has bf16x9")
    atoms = structures.water()
    refused = run_lammps(atoms, tiny_pet, "bf16x9", options="device cuda")
    assert refused.code != 0
    assert re.search(r"bf16x9 does not run on NVIDIA .* the modes that do are: fp32", refused.error)
    fallback = run_lammps(atoms, tiny_pet, "bf16x9", options="device cuda fallback yes")
    assert fallback.code == 0 and "mode fp32, " in fallback.log


def test_energy_is_conserved_as_in_fp32(run_lammps, demo_model):
    atoms = structures.water(4)
    commands = "velocity all create 300.0 1 mom yes\ntimestep 0.0005\nfix 1 all nve\nrun 200"
    deviations = {}
    for mode in ("fp32", "tf32x3"):
        thermo = on_gpu(run_lammps, atoms, demo_model, mode, commands=commands).thermo
        total = thermo[:, 2] / len(atoms)
        deviations[mode] = total.std()
    assert deviations["tf32x3"] < 1.2 * deviations["fp32"] + 1e-6
