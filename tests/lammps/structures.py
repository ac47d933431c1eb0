"""Structures of H, C, O and Pt, in cells that LAMMPS can have."""

import ase
import ase.build
import numpy as np


def water(repeats=2, seed=0):
    """repeats³ molecules at about 1 g/cm³, in random orientations, in a cubic box."""
    random = np.random.default_rng(seed)
    molecule = np.array([[0.0, 0.0, 0.0], [0.9572, 0.0, 0.0], [-0.24, 0.9266, 0.0]])
    positions = []
    for corner in np.ndindex(repeats, repeats, repeats):
        q, _ = np.linalg.qr(random.normal(size=(3, 3)))
        positions.append(molecule @ q + 3.1 * np.array(corner) + random.normal(scale=0.05, size=3))
    cell = [3.1 * repeats] * 3
    return wrapped(ase.Atoms("OHH" * repeats**3, np.concatenate(positions), cell=cell, pbc=True))


def wrapped(atoms):
    """
    Atoms inside the cell, as LAMMPS has them: ASE then rounds the same positions to FP32. Without
    their last bits, which depend on the processor: `velocity create ... loop geom` takes its random
    numbers from the bits of positions.
    """
    atoms.wrap(eps=0.0)
    atoms.positions = atoms.positions.round(8)
    return atoms


def lower_triangular(atoms):
    """The same structure, rotated so that LAMMPS can have it."""
    atoms = atoms.copy()
    atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
    return atoms


def crystal(repeats=2, rattle=0.1):
    """Triclinic fcc platinum."""
    atoms = lower_triangular(ase.build.bulk("Pt", "fcc", a=3.92) * (repeats, repeats, repeats))
    atoms.rattle(rattle, seed=1)
    return wrapped(atoms)


def slab():
    """CO on Pt(111), three layers, in the lower third of a periodic box 24 Å high."""
    atoms = ase.build.fcc111("Pt", (2, 2, 3), a=3.92, orthogonal=False)
    ase.build.add_adsorbate(atoms, ase.Atoms("CO", [[0, 0, 0], [0, 0, 1.15]]), 1.85, "ontop")
    atoms.set_cell([*atoms.cell[:2], [0, 0, 24.0]])
    atoms.positions[:, 2] += 0.6 - atoms.positions[:, 2].min()
    atoms.pbc = True
    atoms = lower_triangular(atoms)
    atoms.rattle(0.05, seed=2)
    return wrapped(atoms)


def gas(n=12, spacing=4.1):
    """CO molecules in a zigzag row: many hops, few neighbors, ranks of different fill."""
    random = np.random.default_rng(3)
    atoms = ase.Atoms(cell=[n * spacing, 15.0, 15.0], pbc=True)
    for i in range(n):
        axis = random.normal(size=3)
        axis *= 1.15 / np.linalg.norm(axis)
        start = np.array([spacing * (i + 0.3), 7.0 + (-1) ** i * 0.8, 7.0])
        atoms += ase.Atoms("CO", [start, start + axis])
    return wrapped(atoms)


def row_and_cluster():
    """Four atoms in a row and a cluster at its end, for a model with an interaction range of 9 Å.

    The second atom is at the middle of the cell, and the cluster 9.4 Å away. It still matters, by
    0.01 eV/Å: PET's adaptive cutoff of the last atom of the row depends on the cluster.
    """
    random = np.random.default_rng(0)
    positions = [[29.9 + 3.8 * k, 7.0, 7.0] for k in range(-1, 3)]
    while len(positions) < 9:
        x = np.array([random.uniform(39.3, 41.7), *random.uniform(4.5, 9.5, 2)])
        distances = np.linalg.norm(np.array(positions) - x, axis=1)
        if distances.min() > 1.3 and distances[3] < 4.3:
            positions.append(x)
    return ase.Atoms("OCOCOOOOO", positions, cell=[60, 14, 14], pbc=True)
