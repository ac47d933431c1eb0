"""The pair style on a GPU, against ASE's metatomic calculator on the CPU and between modes."""

import re

import numpy as np
import pytest
import structures
from lammps_runs import UNITS, assert_close

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_are_those_of_lammps(run_lammps, tiny_pet, ranks):
    """Found on the GPU, and compared whenever LAMMPS rebuilds its list."""
    commands = "velocity all create 900 1 mom yes\ntimestep 0.0005\nfix 1 all nve\n"
    commands += "neigh_modify every 1 delay 0 check no\nrun 3"
    for atoms in [structures.water(4), structures.crystal(), structures.slab()]:
        options = "device cuda check_consistency yes"
        found = run_lammps(atoms, tiny_pet, options=options, commands=commands, ranks=ranks)
        assert found.code == 0, found.log


@pytest.mark.parametrize("units", ["si", "electron"])
def test_units(run_lammps, reference, tiny_pet, units):
    atoms = structures.water()
    found = on_gpu(run_lammps, atoms, tiny_pet, "tf32x3", units=units)
    length, energy, _ = UNITS[units]
    for name in ["energy", "energies", "virial"]:
        setattr(found, name, getattr(found, name) * energy)
    found.forces = found.forces * energy / length
    assert_close(found, reference(atoms, tiny_pet))


def test_memory_is_estimated_before_the_first_step(run_lammps, demo_model):
    atoms = structures.water(10)
    options = "device cuda profile yes"
    log = run_lammps(atoms, demo_model, options=options, commands="fix 1 all nve\nrun 3").log
    line = re.search(
        r"about (\d+) KiB of GPU memory for each atom .memory fast., (\S+) of (\S+) available", log
    )
    estimate = int(line[1]) * 1024 * len(atoms) / 2**30
    assert estimate == pytest.approx(float(line[2]), abs=0.06)
    used = float(re.search(r"at most (\S+) GiB by the model", log)[1])
    # with the model itself, and in tenths
    assert 0.5 * used - 0.2 < estimate < 2.0 * used + 0.2
    assert "KiB of GPU memory" not in run_lammps(structures.water(), demo_model).log


def test_only_positions_and_the_cell_go_to_the_gpu_between_rebuilds(run_lammps, demo_model):
    atoms = structures.water(4)
    commands = "fix 1 all nve\ntimestep 0.0001\nneigh_modify delay 0 every 4 check no\nrun 8"
    log = run_lammps(atoms, demo_model, options="device cuda profile yes", commands=commands).log
    found = re.search(r"Between rebuilds (\S+) bytes for each atom and step go to the device", log)
    assert 24 < float(found[1]) <= 25


def test_no_memory_is_an_error_on_all_ranks(run_lammps, pair_model):
    atoms = structures.water()
    model = pair_model("memory", height=0.0)
    result = run_lammps(atoms, model, options="device cuda", ranks=2)
    assert result.code != 0 and result.log.count("ERROR") >= 1
    assert "at step 0, with " in result.error and "GiB of the GPU's memory in use" in result.error
    assert "out of memory" in result.error
