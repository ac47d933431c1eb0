"""Longer lives of a pair style: dynamics, several runs, `clear`, hybrid styles, failures."""

import re

import numpy as np
import pytest
import structures
from lammps_runs import assert_close

DYNAMICS = """
velocity all create {temperature} 1 mom yes loop geom
fix 1 all nve
timestep {timestep}
neigh_modify every 1 delay 0 check yes
run {steps}
"""


@pytest.mark.parametrize("mode", ["fp32", "tf32x3"])
def test_nve_conserves_energy(run_lammps, demo_model, mode):
    """To 2e-5 eV/atom, which is what velocity Verlet itself leaves at this time step."""
    atoms = structures.water()
    commands = DYNAMICS.format(temperature=300, timestep=0.0001, steps=20)
    found = run_lammps(atoms, demo_model, mode, commands=commands)
    potential, total = found.thermo[:, 1], found.thermo[:, 2]
    assert len(total) == 21
    assert np.ptp(potential) > 0.1
    assert np.ptp(total) < 2e-5 * len(atoms)


def test_dynamics_agree_between_ranks(run_lammps, tiny_pet):
    """Atoms move between ranks and lists are rebuilt: small skin, large velocities."""
    atoms = structures.gas(8)
    commands = "neighbor 0.5 bin\n"
    commands += DYNAMICS.format(temperature=8000, timestep=0.0005, steps=25)
    one, four = (
        run_lammps(atoms, tiny_pet, ranks=ranks, commands=commands, setup="processors * 1 1")
        for ranks in [1, 4]
    )
    assert "Neighbor list builds = 0" not in one.log
    assert "Dangerous builds = 0" in one.log
    assert np.abs(one.thermo[:, 1] - four.thermo[:, 1]).max() < 1e-4
    assert np.abs(one.forces - four.forces).max() < 1e-3


def test_after_dynamics_forces_are_those_of_ase(run_lammps, reference, tiny_pet, tmp_path):
    atoms = structures.crystal()
    commands = DYNAMICS.format(temperature=2000, timestep=0.001, steps=15)
    commands += "write_dump all custom x.dump x y z modify sort id format float %20.15g"
    found = run_lammps(atoms, tiny_pet, ranks=2, commands=commands)
    lines = (tmp_path / "x.dump").read_text().splitlines()[9:]
    atoms.positions = [[float(x) for x in line.split()[:3]] for line in lines]
    assert_close(found, reference(atoms, tiny_pet))


def test_clear_and_use_again(run_lammps, tiny_pet):
    atoms = structures.water()
    first = run_lammps(atoms, tiny_pet)
    again = run_lammps(
        atoms,
        tiny_pet,
        "tf32x3",
        commands=f"""
run 0
clear
units metal
boundary p p p
read_data structure.data
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
compute virial all pressure NULL virial
compute atomic all pe/atom
thermo_style custom step pe etotal vol c_virial[*]
thermo_modify format float %20.15g
run 0
""",
    )
    assert again.log.count("metatomic-tc: model") == 2
    assert_close(again, first, energy=1e-7, force=1e-6)


def test_settings_and_coefficients_can_be_given_again(run_lammps, tiny_pet):
    atoms = structures.water()
    pair = f"""
pair_style metatomic-tc tf32 device cpu
pair_coeff * * {tiny_pet} O H
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} O H
pair_coeff * * {tiny_pet} H O
"""
    assert_close(run_lammps(atoms, tiny_pet, pair=pair), run_lammps(atoms, tiny_pet))


def test_plugin_unload(run_lammps, tiny_pet):
    pair = f"""
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
run 0
plugin unload pair metatomic-tc
pair_style zero 4.0
pair_coeff * *
"""
    found = run_lammps(structures.water(), tiny_pet, pair=pair)
    assert found.code == 0 and found.energy == 0.0, found.log


def test_hybrid_with_another_style(run_lammps, reference, tiny_pet):
    """CO in `lj/cut`, platinum in the model: each pair of types belongs to one style."""
    atoms = structures.slab()
    platinum = atoms.numbers == 78
    found = run_lammps(
        atoms,
        tiny_pet,
        ranks=2,
        elements=["C", "O", "Pt"],
        pair=f"""
pair_style hybrid metatomic-tc fp32 device cpu lj/cut 4.0
pair_coeff * * metatomic-tc {tiny_pet} NULL NULL Pt
pair_coeff 1*2 * lj/cut 0.0 1.0
""",
    )
    expected = reference(atoms[platinum], tiny_pet)
    assert found.code == 0 and found.energy is not None, found.log
    assert np.abs(found.forces[platinum] - expected.forces).max() < 2e-5


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("trouble", ["exception", "memory", "nan"])
def test_a_failure_on_one_rank_stops_all(run_lammps, pair_model, trouble, ranks):
    atoms = structures.gas()
    atoms.symbols[atoms.symbols == "C"] = "H"
    atoms.positions[-1, 2] = 12.0
    model = pair_model(trouble, height=10.0)
    result = run_lammps(atoms, model, ranks=ranks, setup="processors * 1 1", commands="run 5")
    assert result.code != 0
    rank = ranks - 1
    assert result.log.count("ERROR") == 1
    if trouble == "nan":
        assert f"NaN or infinite on rank {rank} at step 0" in result.error
    else:
        assert f"the model failed on rank {rank} at step 0, with " in result.error
        reason = {"exception": "an atom is too high", "memory": "can't allocate memory"}[trouble]
        assert reason in result.error


def test_how_atoms_are_shared_among_ranks(run_lammps, tiny_pet):
    """24 atoms of which each of two ranks evaluates half, and the other half as ghosts."""
    commands = "run 0\nrun 0"
    log = run_lammps(structures.water(), tiny_pet, ranks=2, commands=commands).log
    lines = re.findall(r"metatomic-tc: each of 2 ranks evaluates \(min/avg/max\) (.*)", log)
    assert len(lines) == 1
    found = re.fullmatch(
        r"owned atoms (\d+)/12.0/(\d+), ghosts (\d+)/12.0/(\d+), "
        r"share of ghosts in its work (\d+)/50/(\d+) %",
        lines[0],
    )
    assert found, lines
    low, high, low_ghosts, high_ghosts, *_ = map(int, found.groups())
    assert low + high == low_ghosts + high_ghosts == 24
    assert ("evaluate more ghosts than atoms of their own" in log) == (high > 12)
    assert "ranks evaluates" not in run_lammps(structures.water(), tiny_pet).log


def test_advice_when_there_are_more_ghosts_than_atoms(run_lammps, tiny_pet):
    log = run_lammps(structures.gas(8), tiny_pet, ranks=4, setup="processors * 1 1").log
    assert "4 of 4 ranks evaluate more ghosts than atoms of their own" in log
