"""The pairs that the model gets are those of LAMMPS's neighbor list: with `check_consistency yes`
both are made whenever LAMMPS rebuilds its list, and any difference is an error."""

import re

import ase
import ase.build
import numpy as np
import pytest
import structures
from lammps_runs import execute, write_data

MOVES = """
velocity all create {temperature} 1 mom yes loop geom
fix 1 all {fix}
timestep 0.0005
neigh_modify every 1 delay 0 check no
run 3
"""


def random_atoms(cell, n, seed=0):
    random = np.random.default_rng(seed)
    atoms = ase.Atoms("O" * n, cell=cell, pbc=True)
    atoms.set_scaled_positions(random.uniform(size=(n, 3)))
    return structures.wrapped(atoms)


STRUCTURES = {
    "water": structures.water(3),
    "triclinic": structures.lower_triangular(random_atoms([[9, 0, 0], [-3, 8, 0], [4, 3, 21]], 60)),
    "flat": random_atoms([[2.1, 0, 0], [1.0, 3.3, 0], [-0.9, 1.6, 30.0]], 25),
    "primitive": structures.crystal(1),
    "slab": structures.slab(),
    "one atom": ase.Atoms("O", [[1, 2, 3]], cell=[3, 4, 20], pbc=True),
    "at corners": ase.Atoms("OOO", [[0, 0, 0], [6, 6, 6], [0, 12, 6]], cell=[12, 12, 12], pbc=True),
}


@pytest.mark.parametrize("boundary", ["p p p", "f p p", "p f p", "s p f", "s s s"])
def test_boundaries(pair_model, tmp_path, boundary):
    """All structures in one run of LAMMPS. Without bins: it has none for a box that is not periodic
    and much smaller than the cutoff."""
    model = pair_model(kinds=[1, 6, 8, 78])
    elements = ["H", "C", "O", "Pt"]
    script = ""
    for name, atoms in STRUCTURES.items():
        atoms = atoms.copy()
        if boundary != "p p p":
            # LAMMPS has no tilt along non-periodic directions
            atoms.set_cell(np.diag(np.diag(atoms.cell)))
            atoms.wrap()
        atoms.pbc = [letter == "p" for letter in boundary.split()]
        types = [elements.index(symbol) + 1 for symbol in atoms.get_chemical_symbols()]
        path = tmp_path / f"{name.replace(' ', '-')}.data"
        write_data(path, atoms, elements, types)
        script += f"""
clear
units metal
boundary {boundary}
read_data {path.name}
pair_style metatomic-tc fp32 device cpu check_consistency yes
pair_coeff * * {model} {" ".join(elements)}
neighbor 1.0 nsq
run 0
print "DONE {name}"
"""
    code, log = execute(script, tmp_path)
    assert code == 0, log
    assert len(re.findall("^DONE", log, re.MULTILINE)) == len(STRUCTURES)


@pytest.mark.parametrize(
    "atoms, fix, ranks",
    [
        (structures.water(3), "nve", 1),
        (structures.water(3), "npt temp 900 900 0.05 aniso 0 0 0.2", 2),
        (structures.crystal(3), "npt temp 900 900 0.05 tri 0 0 0.2", 4),
        (structures.gas(8), "nve", 4),
        (structures.slab(), "nve", 2),
    ],
    ids=["water", "water npt", "crystal npt", "gas", "slab"],
)
def test_dynamics(run_lammps, tiny_pet, atoms, fix, ranks):
    commands = MOVES.format(temperature=900, fix=fix)
    options = "device cpu check_consistency yes"
    found = run_lammps(atoms, tiny_pet, options=options, commands=commands, ranks=ranks)
    assert found.code == 0, found.log
    assert "Neighbor list builds = 3" in found.log


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_of_atomic_virials(run_lammps, tiny_pet, ranks):
    commands = "compute s all stress/atom NULL virial\ncompute r all reduce sum c_s[1]\n"
    commands += "thermo_style custom step c_r\nrun 0"
    options = "device cpu check_consistency yes"
    found = run_lammps(
        structures.water(), tiny_pet, options=options, commands=commands, ranks=ranks
    )
    assert found.code == 0, found.log


def test_types_that_the_model_does_not_see(run_lammps, tiny_pet):
    atoms = structures.slab()
    found = run_lammps(
        atoms,
        tiny_pet,
        ranks=2,
        elements=["C", "O", "Pt"],
        pair=f"""
pair_style hybrid/overlay metatomic-tc fp32 device cpu check_consistency yes lj/cut 4.0
pair_coeff * * metatomic-tc {tiny_pet} C NULL Pt
pair_coeff 1*2 2 lj/cut 0.0 1.0
pair_coeff 2 3 lj/cut 0.0 1.0
""",
    )
    assert found.code == 0, found.log


def test_pairs_of_the_model_that_hybrid_gives_to_another_style(run_lammps, tiny_pet):
    pair = f"""
pair_style hybrid metatomic-tc fp32 device cpu lj/cut 4.0
pair_coeff * * metatomic-tc {tiny_pet} H O
pair_coeff 1 2 lj/cut 0.0 1.0
"""
    error = run_lammps(structures.water(), tiny_pet, pair=pair).error
    assert "the model knows the atom types 1 and 2, but their pairs belong to another" in error


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_positions_and_the_cell_go_to_the_device_between_rebuilds(run_lammps, tiny_pet, ranks):
    atoms = structures.water(3)
    commands = "fix 1 all nve\ntimestep 0.0001\nneigh_modify delay 0 every 4 check no\nrun 8"
    options = "device cpu profile yes"
    log = run_lammps(atoms, tiny_pet, options=options, commands=commands, ranks=ranks).log
    found = re.search(r"Between rebuilds (\S+) bytes for each atom and step go to the device", log)
    # Three numbers of 8 bytes, and nine for the cell.
    assert 24 < float(found[1]) <= 25
