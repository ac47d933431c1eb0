"""Virials of atoms, for `compute stress/atom`, `centroid/stress/atom` and `heat/flux`."""

import numpy as np
import pytest
import structures
from lammps_runs import PRESSURE_UNIT

COMMANDS = """
compute s all stress/atom NULL virial
compute c all centroid/stress/atom NULL virial
{more}
run {steps}
write_dump all custom virials.dump id c_s[*] c_c[*] modify sort id format float %20.15g
"""


def virials(run_lammps, tmp_path, atoms, model, more="", steps=0, **arguments):
    """The run, [n, 6] of stress/atom and [n, 9] of centroid/stress/atom, in eV and LAMMPS's order:
    xx, yy, zz, xy, xz, yz, and yx, zx, zy."""
    commands = COMMANDS.format(more=more, steps=steps)
    found = run_lammps(atoms, model, commands=commands, **arguments)
    assert found.code == 0 and found.energy is not None, found.log
    data = np.loadtxt(tmp_path / "virials.dump", skiprows=9, ndmin=2)[:, 1:]
    data /= -PRESSURE_UNIT["metal"]
    return found, data[:, :6], data[:, 6:]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("structure", ["water", "crystal", "gas", "slab"])
def test_the_sum_is_the_virial(run_lammps, tiny_pet, tmp_path, structure, ranks):
    """Also in cells smaller than the cutoff, where an atom is its own neighbor."""
    atoms = getattr(structures, structure)()
    found, symmetric, centroid = virials(run_lammps, tmp_path, atoms, tiny_pet, ranks=ranks)
    assert np.abs(found.virial).max() > 1e-2
    tolerance = 3e-5 * len(atoms)
    assert np.abs(symmetric.sum(0) - found.virial).max() < tolerance
    total = centroid.sum(0)
    assert np.abs(total[:3] - found.virial[:3]).max() < tolerance
    assert np.abs((total[3:6] + total[6:]) / 2 - found.virial[3:]).max() < tolerance
    assert np.abs(symmetric[:, :3] - centroid[:, :3]).max() < 1e-9
    assert np.abs(symmetric[:, 3:] - (centroid[:, 3:6] + centroid[:, 6:]) / 2).max() < 1e-9
    # Forces are those of a run without per-atom virials.
    assert np.abs(found.forces - run_lammps(atoms, tiny_pet).forces).max() < 2e-5


@pytest.mark.first
def test_one_rank_and_two_agree_during_a_run(run_lammps, tiny_pet, tmp_path):
    atoms = structures.water()
    one, two = (
        virials(
            run_lammps,
            tmp_path,
            atoms,
            tiny_pet,
            ranks=ranks,
            steps=5,
            # With output at each step LAMMPS wants virials of atoms at each step.
            more="velocity all create 500 1 loop geom\nfix 1 all nve\ntimestep 0.0005\n"
            "neighbor 0.3 bin\nneigh_modify every 1 delay 0\nthermo 5",
        )
        for ranks in [1, 2]
    )
    for k in [1, 2]:
        assert np.abs(one[k] - two[k]).max() < 5e-4


@pytest.mark.parametrize("kind, h, tolerance", [("pair", 1e-4, 1e-5), ("pet", 1e-2, 5e-5)])
def test_the_definition(run_lammps, reference, pair_model, tiny_pet, tmp_path, kind, h, tolerance):
    """W_j = sum over i of (x_i - x_j) dU_i/dx_j, of a cluster by central differences: in FP64 of a
    model where it is symmetric, and in FP32 of PET, where it is not."""
    model = tiny_pet if kind == "pet" else pair_model(dtype="float64")
    atoms = structures.water()[:6]
    atoms.pbc = False
    _, symmetric, centroid = virials(run_lammps, tmp_path, atoms, model)
    expected = np.zeros((len(atoms), 3, 3))
    for j in range(len(atoms)):
        for b in range(3):
            energies = []
            for sign in [1, -1]:
                moved = atoms.copy()
                moved.positions[j, b] += sign * h
                energies.append(reference(moved, model).energies)
            derivative = (energies[0] - energies[1]) / (2 * h)
            expected[j, :, b] = derivative @ (atoms.positions - atoms.positions[j])
    first, second = [0, 1, 2, 0, 0, 1, 1, 2, 2], [0, 1, 2, 1, 2, 2, 0, 0, 1]
    expected = expected[:, first, second]
    asymmetry = np.abs(expected[:, 3:6] - expected[:, 6:]).max()
    assert asymmetry > 5 * tolerance or kind == "pair"
    assert centroid == pytest.approx(expected, abs=tolerance)


def test_heat_flux(run_lammps, pair_model, tmp_path):
    """J = d/dt sum of x_i U_i, of a cluster in vacuum: by the difference over two short steps."""
    model = pair_model(dtype="float64")
    atoms = structures.water()[:9]
    atoms.pbc = False
    dt = 2e-6
    commands = f"""
velocity all create 3000 1 loop geom
compute k all ke/atom
compute c all centroid/stress/atom NULL virial
compute j all heat/flux k atomic c
variable e atom c_k+c_atomic
variable ex atom x*v_e
variable ey atom y*v_e
variable ez atom z*v_e
compute m all reduce sum v_ex v_ey v_ez
fix 1 all nve
timestep {dt}
thermo_style custom step c_j[1] c_j[2] c_j[3] c_m[1] c_m[2] c_m[3]
thermo_modify format float %20.15g
run 2
"""
    log = run_lammps(atoms, model, commands=commands).log
    rows = [line.split() for line in log.splitlines() if len(line.split()) == 7]
    rows = np.array([row for row in rows if row[0] in ("0", "1", "2")], dtype=float)
    assert len(rows) == 3
    flux = (rows[2, 4:] - rows[0, 4:]) / (2 * dt)
    assert np.abs(flux).max() > 1.0
    assert rows[1, 1:4] == pytest.approx(flux, rel=1e-4, abs=1e-3)


def test_scale_and_hybrid(run_lammps, tiny_pet, tmp_path):
    atoms = structures.water()
    _, symmetric, centroid = virials(run_lammps, tmp_path, atoms, tiny_pet)
    pair = f"""
pair_style hybrid/overlay metatomic-tc fp32 device cpu scale 0.5 zero 4.0
pair_coeff * * metatomic-tc {tiny_pet} H O
pair_coeff * * zero
"""
    _, half, centroid_half = virials(run_lammps, tmp_path, atoms, tiny_pet, pair=pair)
    assert np.abs(2 * half - symmetric).max() < 1e-4
    assert np.abs(2 * centroid_half - centroid).max() < 1e-4
