import copy
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lammps_runs import PRESSURE_UNIT, UNITS, Result, execute, write_data


@pytest.fixture(scope="session")
def runs_without_commands() -> dict[tuple, Result]:
    """What `run_lammps` found, by input, for runs that many tests compare with."""
    return {}


@pytest.fixture
def run_lammps(tmp_path, runs_without_commands):
    """Runs `run 0`, or the `commands` given, for a structure in `pair_style metatomic-tc`. `run 0`
    of the same input runs once."""

    def run(
        atoms,
        model,
        mode="fp32",
        ranks=1,
        *,
        options="device cpu",
        coefficients=None,
        units="metal",
        boundary=None,
        setup="",
        pair=None,
        commands="run 0",
        types=None,
        elements=None,
    ):
        elements = elements or sorted(set(atoms.get_chemical_symbols()))
        if types is None:
            types = [elements.index(symbol) + 1 for symbol in atoms.get_chemical_symbols()]
        write_data(tmp_path / "structure.data", atoms, elements, types, units)
        boundary = boundary or " ".join("p" if p else "f" for p in atoms.pbc)
        coefficients = coefficients or f"* * {model} {' '.join(elements)}"
        pair = pair or f"pair_style metatomic-tc {mode} {options}\npair_coeff {coefficients}"
        script = f"""
units {units}
atom_style atomic
boundary {boundary}
{setup}
read_data structure.data
{pair}
neighbor {1.0 / UNITS.get(units, UNITS["metal"])[0]} bin
compute virial all pressure NULL virial
compute atomic all pe/atom
thermo_style custom step pe etotal vol c_virial[*]
thermo_modify format float %20.15g
thermo 1
{commands}
write_dump all custom final.dump id c_atomic fx fy fz modify sort id format float %20.15g
"""
        key = (script, (tmp_path / "structure.data").read_text(), ranks)
        if key not in runs_without_commands:
            result = read(script, ranks, units)
            if commands != "run 0":
                return result
            runs_without_commands[key] = result
        # Tests may change what they get.
        return copy.deepcopy(runs_without_commands[key])

    def read(script, ranks, units):
        code, log = execute(script, tmp_path, ranks)
        result = Result(code, log)
        if code != 0 or "ERROR" in log:
            return result
        rows = re.findall(r"^ +(\d+(?: +[-+.\deE]+){9}) *$", log, flags=re.MULTILINE)
        if not rows:
            # another thermo_style
            return result
        result.thermo = np.array([[float(x) for x in row.split()] for row in rows])
        result.energy = result.thermo[-1, 1]
        result.virial = result.thermo[-1, 4:] * result.thermo[-1, 3] / PRESSURE_UNIT[units]
        dump = np.loadtxt(tmp_path / "final.dump", skiprows=9, ndmin=2)
        result.energies, result.forces = dump[:, 1], dump[:, 2:]
        return result

    return run


@pytest.fixture(scope="session")
def reference():
    """ASE's metatomic calculator: a `Result` in eV and Å."""
    from metatomic_ase import MetatomicCalculator

    calculators = {}

    def run(atoms, model):
        if model not in calculators:
            calculators[model] = MetatomicCalculator(
                str(model), device="cpu", uncertainty_threshold=None
            )
        atoms = atoms.copy()
        atoms.calc = calculators[model]
        # TorchScript's optimizer takes some seconds, and does not pay for a few evaluations.
        with torch.jit.optimized_execution(False):
            result = Result(0, "", energies=atoms.get_potential_energies())
            result.forces = atoms.get_forces()
            if atoms.pbc.all():
                stress = atoms.get_stress()[[0, 1, 2, 5, 4, 3]]
                result.virial = -stress * atoms.get_volume()
        # ASE's own sum is FP32: off by more than 1e-6 eV per atom for some hundred atoms.
        result.energy = result.energies.sum()
        return result

    return run


@pytest.fixture(scope="session")
def pair_model(made_once):
    """Writes a `PairModel` (see pair_model.py), in a process of its own: the libraries that are
    loaded here would be recorded in the file."""

    def find_or_write(trouble="none", height=0.0, dtype="float32", extras=False, kinds=(1, 8)):
        script = Path(__file__).with_name("pair_model.py")
        arguments = [trouble, str(height), dtype, ",".join(map(str, kinds))]
        arguments += ["extras"] if extras else []

        def write(path):
            subprocess.run([sys.executable, script, path, *arguments], check=True)

        return made_once(f"pair-{'-'.join(arguments)}.pt", write)

    return find_or_write
