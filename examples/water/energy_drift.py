"""Prints the total energy and its drift from the LAMMPS log of a constant-energy run (units metal).

    python energy_drift.py [log.lammps]

For every line of thermodynamic output: the total energy and how far it is from the first one, in
meV per atom. Then the slope of a straight line fitted to it, in meV per atom and picosecond, and
its standard error: the atoms vibrate, and a short run cannot tell a drift from that.
"""

import re
import sys

import numpy as np


def read_log(path):
    """(columns, number of atoms) of the last run in a log that wrote Step, Time and TotEng."""
    columns, names, n_atoms = None, [], None
    try:
        lines = open(path).readlines()
    except OSError as error:
        sys.exit(f"{path} cannot be read ({error.strerror}); run first: lmp -in in.water")
    for line in lines:
        words = line.split()
        if words[:1] == ["Step"] and {"Time", "TotEng"} <= set(words):
            names, columns = words, {name: [] for name in words}
        elif line.startswith("Loop time"):
            n_atoms = int(re.search(r"with (\d+) atoms", line).group(1))
            names = []
        elif names and len(words) == len(names) and words[0].isdigit():
            for name, word in zip(names, words, strict=True):
                columns[name].append(float(word))
    if columns is None or n_atoms is None:
        sys.exit(f"{path} has no finished run whose thermo_style writes step, time and etotal")
    return {name: np.array(values) for name, values in columns.items()}, n_atoms


def main(path="log.lammps"):
    columns, n_atoms = read_log(path)
    step, time, energy = columns["Step"], columns["Time"], columns["TotEng"]
    change = 1000 * (energy - energy[0]) / n_atoms  # meV per atom

    print(f"{'step':>8} {'time, fs':>10} {'total energy, eV':>18} {'change, meV/atom':>18}")
    for row in zip(step, 1000 * time, energy, change, strict=True):
        print("{:8.0f} {:10.1f} {:18.6f} {:18.4f}".format(*row))
    if len(step) > 2:
        line, covariance = np.polyfit(time, change, 1, cov=True)
        scatter = np.std(change - np.polyval(line, time))
        print(
            f"drift {line[0]:.3f} +- {covariance[0, 0] ** 0.5:.3f} meV/atom/ps, "
            f"scatter about it {scatter:.4f} meV/atom ({n_atoms} atoms)"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
