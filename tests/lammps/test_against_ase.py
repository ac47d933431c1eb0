"""FP32 in LAMMPS is what ASE's metatomic calculator computes from the same, untouched file, on any
number of MPI ranks."""

import ase
import numpy as np
import pytest
import structures
from lammps_runs import UNITS, assert_close


def compare(run_lammps, reference, atoms, model, ranks, **arguments):
    expected = reference(atoms, model)
    # The model is random: the structures must still be such that mistakes would show.
    if len(atoms) > 1:
        assert np.abs(expected.forces).max() > 1e-2
    for count in ranks:
        found = run_lammps(atoms, model, ranks=count, **arguments)
        assert_close(found, expected)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_water(run_lammps, reference, tiny_pet, ranks):
    compare(run_lammps, reference, structures.water(), tiny_pet, [ranks])


def test_demo_model_and_192_atoms(run_lammps, reference, demo_model):
    atoms = structures.water(4)
    found = compare(run_lammps, reference, atoms, demo_model, [2])
    assert "float32, on cpu, mode fp32, " in found.log


def test_triclinic_crystal(run_lammps, reference, tiny_pet):
    compare(run_lammps, reference, structures.crystal(), tiny_pet, [1, 4])


def test_long_triclinic_crystal_has_several_ghosts_of_one_atom(run_lammps, reference, tiny_pet):
    atoms = structures.crystal(1, 0.0) * (1, 1, 8)
    atoms.rattle(0.1, seed=5)
    compare(run_lammps, reference, atoms, tiny_pet, [4], setup="processors 1 1 *")


def test_slab_with_an_empty_rank(run_lammps, reference, tiny_pet):
    atoms = structures.slab()
    # Ranks along z: two see only vacuum.
    assert atoms.positions[:, 2].max() < 12.0
    compare(run_lammps, reference, atoms, tiny_pet, [4], setup="processors 1 1 *")


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_atom_alone(run_lammps, reference, tiny_pet, ranks):
    atoms = ase.Atoms("O", [[1.0, 2.0, 3.0]], cell=[12.0] * 3, pbc=True)
    found = compare(run_lammps, reference, atoms, tiny_pet, [ranks])
    assert np.abs(found.forces).max() < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_atom_in_a_cell_smaller_than_the_cutoff(run_lammps, reference, tiny_pet, ranks):
    atoms = structures.crystal(1, 0.0)
    assert len(atoms) == 1 and atoms.cell.lengths().max() < 3.0
    expected = reference(atoms, tiny_pet)
    assert_close(run_lammps(atoms, tiny_pet, ranks=ranks), expected)
    assert np.abs(expected.virial).max() > 1e-2


@pytest.mark.parametrize(
    "boundary, ranks", [("p p s", 1), ("p p f", 2), ("f p s", 1), ("m m m", 1), ("f f f", 2)]
)
def test_mixed_boundaries(run_lammps, reference, tiny_pet, boundary, ranks):
    atoms = structures.water()
    atoms.pbc = [kind == "p" for kind in boundary.split()]
    compare(run_lammps, reference, atoms, tiny_pet, [ranks], boundary=boundary)


def test_sparse_gas(run_lammps, reference, tiny_pet):
    compare(run_lammps, reference, structures.gas(), tiny_pet, [2, 4], setup="processors * 1 1")


def test_ghosts_reach_beyond_the_interaction_range(run_lammps, reference, tiny_pet):
    atoms = structures.row_and_cluster()
    commands = "neighbor 0.1 bin\nrun 0"
    setup = "processors 2 1 1"
    compare(run_lammps, reference, atoms, tiny_pet, [2], commands=commands, setup=setup)
    row = reference(atoms[:4], tiny_pet)
    assert np.abs(reference(atoms, tiny_pet).forces[1] - row.forces[1]).max() > 5e-3


@pytest.mark.parametrize("units", ["real", "si", "electron"])
def test_units(run_lammps, reference, tiny_pet, units):
    atoms = structures.gas(4)
    expected = reference(atoms, tiny_pet)
    found = run_lammps(atoms, tiny_pet, units=units, ranks=2, setup="processors * 1 1")
    assert "order of the types" not in found.log
    length, energy, _ = UNITS[units]
    for name in ["energy", "energies", "virial"]:
        setattr(found, name, getattr(found, name) * energy)
    found.forces = found.forces * energy / length
    # LAMMPS's own constants of the units electron have nine digits.
    assert_close(found, expected)


def test_null_atoms_are_not_seen(run_lammps, reference, tiny_pet):
    atoms = structures.slab()
    platinum = atoms.numbers == 78
    expected = reference(atoms[platinum], tiny_pet)
    found = run_lammps(
        atoms,
        tiny_pet,
        ranks=2,
        elements=["C", "O", "Pt"],
        coefficients=f"* * {tiny_pet} NULL NULL Pt",
    )
    assert np.abs(found.forces[~platinum]).max() == 0.0
    assert np.abs(found.energies[~platinum]).max() == 0.0
    found.forces = found.forces[platinum]
    found.energies = found.energies[platinum]
    assert_close(found, expected)


def test_atomic_numbers_instead_of_symbols(run_lammps, reference, tiny_pet):
    atoms = structures.water()
    found = run_lammps(atoms, tiny_pet, coefficients=f"* * {tiny_pet} 1 O")
    assert_close(found, reference(atoms, tiny_pet))


@pytest.mark.parametrize("dtype, ranks", [("float32", 4), ("float64", 1)])
def test_a_model_that_is_not_pet(run_lammps, reference, pair_model, dtype, ranks):
    """Two neighbor lists, a strict half list and a full list, with cutoffs of their own."""
    model = pair_model(dtype=dtype)
    found = compare(run_lammps, reference, structures.water(), model, [ranks])
    assert f"model {model} (pair model), {dtype}, on cpu" in found.log


def test_consistency_checks_pass(run_lammps, reference, tiny_pet):
    atoms = structures.water()
    found = run_lammps(atoms, tiny_pet, ranks=2, options="device cpu check_consistency yes")
    assert_close(found, reference(atoms, tiny_pet))


@pytest.mark.parametrize("ranks", [1, 2])
def test_forces_and_pressure_are_derivatives(run_lammps, pair_model, ranks):
    """In FP64, by central differences, of a run that also rebuilds its neighbor lists."""
    model = pair_model(dtype="float64")
    h = 1e-4
    commands = f"""
run 0
displace_atoms one move {h} 0 0
run 0
displace_atoms one move {-2 * h} 0 0
run 0
displace_atoms one move {h} 0 0
change_box all x scale {1 + h} remap
run 0
change_box all x scale {(1 - h) / (1 + h)} remap
run 0
change_box all x scale {1 / (1 - h)} remap
run 0
"""
    found = run_lammps(
        structures.water(), model, ranks=ranks, commands="group one id 1\n" + commands
    )
    energies = found.thermo[:, 1]
    assert found.forces[0, 0] == pytest.approx(-(energies[1] - energies[2]) / (2 * h), abs=1e-5)
    assert found.virial[0] == pytest.approx(-(energies[3] - energies[4]) / (2 * h), abs=1e-4)
