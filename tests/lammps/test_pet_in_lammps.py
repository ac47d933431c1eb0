"""In LAMMPS the PET backend of metatomic-tc gives what that of metatrain gives in ASE."""

import zipfile
from pathlib import Path

import ase
import numpy as np
import pytest
import structures
import torch
from lammps_runs import assert_close
from metatomic_tc.export import export


@pytest.fixture(scope="module")
def flat_pet(tiny_pet_checkpoint, made_once):
    """`tiny_pet` with the backend of metatomic-tc."""

    def make(path):
        result = export(tiny_pet_checkpoint, path, mode="fp32")
        assert result.backend.startswith("tc"), result.backend

    return made_once("flat.pt", make)


STRUCTURES = {
    "water": structures.water,
    "crystal": structures.crystal,
    "small cell": lambda: structures.crystal(1, 0.0),
    "slab": structures.slab,
    "gas": structures.gas,
    "beyond the interaction range": structures.row_and_cluster,
    "one atom": lambda: ase.Atoms("O", [[1.0, 2.0, 3.0]], cell=[12.0] * 3, pbc=True),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(run_lammps, reference, tiny_pet, flat_pet, name, ranks):
    atoms = STRUCTURES[name]()
    expected = reference(atoms, tiny_pet)
    assert_close(run_lammps(atoms, flat_pet, ranks=ranks), expected)


def test_empty_ranks(run_lammps, reference, tiny_pet, flat_pet):
    atoms = structures.slab()
    found = run_lammps(atoms, flat_pet, ranks=4, setup="processors 1 1 *")
    assert_close(found, reference(atoms, tiny_pet))


@pytest.mark.parametrize("pbc", [(True, True, False), (False, False, False)])
def test_boundaries(run_lammps, reference, tiny_pet, flat_pet, pbc):
    atoms = structures.water()
    atoms.pbc = pbc
    assert_close(run_lammps(atoms, flat_pet, ranks=2), reference(atoms, tiny_pet))


def test_per_atom_virials_add_up(run_lammps, reference, flat_pet, tiny_pet):
    atoms = structures.water()
    commands = """
compute stress all stress/atom NULL virial
compute sum all reduce sum c_stress[1] c_stress[2] c_stress[3] c_stress[4] c_stress[5] c_stress[6]
thermo_style custom step pe etotal vol c_virial[*] c_sum[*]
run 0
variable worst equal "abs(c_sum[1]+c_virial[1]*vol)+abs(c_sum[4]+c_virial[4]*vol)"
print "DEVIATION $(v_worst) OF $(abs(c_sum[1]))"
"""
    found = run_lammps(atoms, flat_pet, commands=commands)
    assert found.code == 0, found.log
    words = [line for line in found.log.splitlines() if line.startswith("DEVIATION")][-1].split()
    assert float(words[1]) < 1e-4 * float(words[3])


def test_modes_differ(run_lammps, reference, flat_pet):
    atoms = structures.water()
    forces = {mode: run_lammps(atoms, flat_pet, mode).forces for mode in ("fp32", "tf32x3", "tf32")}
    assert 0 < np.abs(forces["tf32x3"] - forces["fp32"]).max() < 2e-5
    assert np.abs(forces["tf32"] - forces["fp32"]).max() > 1e-4


def test_dynamics_through_rebuilds(run_lammps, flat_pet, tiny_pet):
    """With pairs that come and go between rebuilds."""
    commands = "velocity all create 600 1\nfix 1 all nve\nneigh_modify delay 0 every 4\nrun 12"
    atoms = structures.water()
    flat = run_lammps(atoms, flat_pet, ranks=2, commands=commands)
    stock = run_lammps(atoms, tiny_pet, commands=commands)
    assert flat.code == stock.code == 0, flat.log + stock.log
    assert np.abs(flat.forces - stock.forces).max() < 2e-4


@pytest.mark.parametrize("ranks", [1, 2])
def test_lean_memory(run_lammps, flat_pet, ranks):
    atoms = structures.slab()
    fast = run_lammps(atoms, flat_pet, ranks=ranks, options="device cpu memory fast")
    lean = run_lammps(atoms, flat_pet, ranks=ranks, options="device cpu memory lean")
    assert_close(lean, fast, energy=1e-7)
    assert "memory lean" in lean.log and "memory lean" not in fast.log


def test_a_backend_with_an_unknown_interface(run_lammps, reference, tiny_pet, flat_pet, tmp_path):
    """It runs as in every metatomic engine, and what cannot be done so says why."""
    path = tmp_path / "future.pt"
    rewrite_interface(flat_pet, path, 7)
    atoms = structures.slab()
    assert_close(run_lammps(atoms, path, ranks=2), reference(atoms, tiny_pet))
    why = (
        "the PET backend in the model has the interface 7, but this metatomic-tc drives the "
        "interfaces 0 to 1; export the model again from its checkpoint, with metatomic-tc export"
    )
    error = run_lammps(atoms, path, options="device cpu memory lean").error
    assert "memory lean is not possible" in error and why in error
    # the same file with the number that it was written with can be driven
    rewrite_interface(path, tmp_path / "present.pt", 1)
    lean = run_lammps(atoms, tmp_path / "present.pt", options="device cpu memory lean")
    assert_close(lean, reference(atoms, tiny_pet))


def rewrite_interface(source, destination, interface):
    """Another interface number in an exported model."""
    extra = dict.fromkeys(archive_extras(source), "")
    model = torch.jit.load(source, _extra_files=extra)
    model.module.backend.interface = interface
    torch.jit.save(model, destination, _extra_files=extra)


def archive_extras(path):
    """The names of what metatomic stores besides the module."""
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    return [name.removeprefix("extra/") for name in names if name.startswith("extra/")]


def test_a_file_from_before_interfaces_had_numbers(run_lammps, reference):
    path = Path(__file__).parent.parent / "data" / "pet-interface-0.pt"
    atoms = structures.slab()
    expected = reference(atoms, path)
    for memory in ("fast", "lean"):
        found = run_lammps(atoms, path, options=f"device cpu memory {memory}")
        assert_close(found, expected)


def test_lean_memory_needs_the_backend(run_lammps, tiny_pet):
    error = run_lammps(structures.water(), tiny_pet, options="device cpu memory lean").error
    assert "memory lean is not possible" in error and "backend of metatomic-tc" in error


def test_uncertainties(run_lammps, tiny_llpr_checkpoint, tmp_path):
    """Of an LLPR model, with both backends."""
    atoms = structures.water()
    commands = "fix u all pair 1 metatomic-tc uncertainty 0\nrun 0\n"
    commands += "write_dump all custom u.dump id f_u modify sort id format float %20.15g"
    found = []
    for backend in ("tc", "stock"):
        path = tmp_path / f"{backend}.pt"
        export(tiny_llpr_checkpoint, path, mode="fp32", backend=backend)
        run = run_lammps(atoms, path, ranks=2, commands=commands, options="device cpu profile yes")
        assert run.code == 0, run.log
        found.append(np.loadtxt(tmp_path / "u.dump", skiprows=9)[:, 1])
    assert found[1].min() > 0
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def test_profile_of_steps(run_lammps, flat_pet):
    commands = "fix 1 all nve\nrun 3"
    options = "device cpu profile yes"
    log = run_lammps(structures.water(), flat_pet, options=options, commands=commands).log
    seconds = {line.split("|")[0].strip(): line.split("|") for line in log.splitlines()}
    assert float(seconds["forward and backward"][1]) > 0.0
    assert float(seconds["forward"][1]) == float(seconds["backward"][1]) == 0.0


# ---- on a GPU, where a step is a CUDA graph ------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_on_a_gpu(run_lammps, reference, tiny_pet, flat_pet, name, ranks):
    atoms = STRUCTURES[name]()
    found = run_lammps(atoms, flat_pet, ranks=ranks, options="device cuda")
    assert "steps as CUDA graphs" in found.log and "are no CUDA graphs" not in found.log
    assert_close(found, reference(atoms, tiny_pet))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamics_on_a_gpu(run_lammps, flat_pet, tiny_pet, ranks):
    """With rebuilds, after which there are more or fewer atoms, pairs and edges."""
    commands = "velocity all create 600 1\nfix 1 all nve\nneigh_modify delay 0 every 4\nrun 24"
    atoms = structures.water(3)
    options = "device cuda"
    graph = run_lammps(atoms, flat_pet, ranks=ranks, commands=commands, options=options)
    stock = run_lammps(atoms, tiny_pet, commands=commands, options=options)
    assert graph.code == stock.code == 0, graph.log
    assert "are no CUDA graphs" not in graph.log
    np.testing.assert_allclose(graph.forces, stock.forces, atol=2e-3)
    np.testing.assert_allclose(graph.thermo[:, 2], stock.thermo[:, 2], atol=1e-4 * len(atoms))


@pytest.mark.gpu
def test_the_log_says_why_there_are_no_graphs(run_lammps, flat_pet, tmp_path):
    path = tmp_path / "future.pt"
    rewrite_interface(flat_pet, path, 7)
    found = run_lammps(structures.water(), path, options="device cuda")
    assert "no CUDA graphs since the PET backend in the model has the interface 7" in found.log


@pytest.mark.gpu
def test_per_atom_virials_between_graphs(run_lammps, flat_pet):
    dynamics = "velocity all create 300 1\nfix 1 all nve\nrun 20"
    stress = """
compute stress all stress/atom NULL virial
compute sum all reduce sum c_stress[1] c_stress[2] c_stress[3]
fix sum all ave/time 5 1 5 c_sum[*] file sum.txt
"""
    runs = [
        run_lammps(structures.water(), flat_pet, commands=commands, options="device cuda")
        for commands in (dynamics, stress + dynamics)
    ]
    assert runs[0].code == runs[1].code == 0, runs[1].log
    # not the same bits: products of other numbers of rows (no spare ones) have other sums
    np.testing.assert_allclose(runs[0].forces, runs[1].forces, atol=1e-5)
