"""Every wrong input has a message that says what was found and what to do."""

import zipfile

import pytest
import structures
import torch
from lammps_runs import execute


@pytest.mark.parametrize(
    "style, message",
    [
        ("", "needs a mode"),
        ("fp31", "fp31"),
        ("fp32 devices cpu", "unknown keyword 'devices', the keywords are device, extensions, "),
        ("fp32 device", "keyword 'device' has no value"),
        ("fp32 device gpu", "device must be cpu, cuda or cuda:N, not 'gpu'"),
        ("fp32 device cuda:x", "device must be cpu, cuda or cuda:N, not 'cuda:x'"),
        ("fp32 device cpu device cuda", "keyword 'device' is given twice"),
        ("fp32 fallback maybe", "fallback must be yes or no, not 'maybe'"),
        ("fp32 check_consistency 2", "check_consistency must be yes or no, not '2'"),
        ("fp32 extensions /no/such/directory", "'/no/such/directory' is not a directory"),
    ],
)
def test_pair_style(run_lammps, style, message):
    result = run_lammps(structures.water(), None, pair=f"pair_style metatomic-tc {style}")
    assert result.code != 0
    assert message in result.error


def test_wrong_mode_names_the_modes(run_lammps):
    result = run_lammps(structures.water(), None, pair="pair_style metatomic-tc fp31")
    for mode in ["fp32", "tf32", "tf32x3", "fp16x3", "bf16x6", "bf16x9"]:
        assert mode in result.error


@pytest.mark.parametrize(
    "coefficients, message",
    [
        ("1 1 {model} H O", "Pair_coeff must start with * *"),
        ("* *", "expected pair_coeff * * MODEL.pt ELEMENT ... with one element for each of the 2"),
        (
            "* * {model} H",
            "for each of the 2 atom types after the model file in pair_coeff, found 1",
        ),
        ("* * {model} H O O", "pair_coeff, found 3"),
        ("* * {model} H Ox", "'Ox' in pair_coeff, for atom type 2, is not an element"),
        ("* * {model} H 0", "'0' in pair_coeff, for atom type 2, is not an element"),
        ("* * {model} NULL NULL", "all atom types are NULL"),
        ("* * {model} H Xe", "does not know element 54 (Xe) of atom type 2; it knows the atomic "),
        ("* * missing.pt H O", "cannot read the model file missing.pt"),
        ("* * {directory} H O", "{directory} is a directory, not a model"),
        ("* * {truncated} H O", "it is a damaged or incomplete archive; copy or download the file"),
        ("* * {checkpoint} H O", 'run "metatomic-tc export {checkpoint}"'),
        ("* * {renamed} H O", 'is a checkpoint, not an exported model: run "metatomic-tc export'),
        ("* * {zip} H O", "{zip} is not a metatomic model"),
        ("* * {text} H O", "{text} is not a metatomic model: it is not a TorchScript file"),
        ("* * {script} H O", "it is a TorchScript file that was not written by metatomic"),
    ],
)
def test_pair_coeff(run_lammps, tiny_pet, tiny_pet_checkpoint, tmp_path, coefficients, message):
    files = {
        "model": tiny_pet,
        "checkpoint": tiny_pet_checkpoint,
        "renamed": tmp_path / "renamed.pt",
        "zip": tmp_path / "archive.pt",
        "text": tmp_path / "text.pt",
        "script": tmp_path / "script.pt",
        "directory": tmp_path,
        "truncated": tmp_path / "truncated.pt",
    }
    files["truncated"].write_bytes(tiny_pet.read_bytes()[:20000])
    files["renamed"].write_bytes(tiny_pet_checkpoint.read_bytes())
    with zipfile.ZipFile(files["zip"], "w") as archive:
        archive.writestr("hello.txt", "hello")
    files["text"].write_text("hello")
    torch.jit.script(torch.nn.Linear(3, 3)).save(str(files["script"]))

    result = run_lammps(structures.water(), None, coefficients=coefficients.format(**files))
    assert result.code != 0
    assert message.format(**files) in result.error


@pytest.mark.parametrize(
    "setup, message",
    [
        ("newton off", "needs newton on"),
        ("neigh_modify exclude type 1 2", "does not work with neigh_modify exclude"),
    ],
)
def test_settings_of_other_commands(run_lammps, tiny_pet, setup, message):
    result = run_lammps(structures.water(), tiny_pet, setup=setup)
    assert result.code != 0
    assert message in result.error


def test_no_atom_ids(tiny_pet, tmp_path):
    script = f"""
units metal
atom_modify id no
region box block 0 9 0 9 0 9
create_box 1 box
create_atoms 1 single 1 2 3
mass 1 1
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H
run 0
"""
    code, log = execute(script, tmp_path)
    assert code != 0
    assert "needs atom IDs" in log


def test_units(run_lammps, tiny_pet):
    result = run_lammps(structures.water(), tiny_pet, units="lj")
    assert "needs units metal, real, si or electron, not lj" in result.error


def test_skin_of_another_unit(run_lammps, tiny_pet):
    """The default of units si is a millimeter."""
    result = run_lammps(
        structures.water(), tiny_pet, units="si", commands="neighbor 0.001 bin\nrun 0"
    )
    assert "the neighbor skin is 0.001, but the cutoff of the model only 4.5" in result.error


def test_no_model(run_lammps):
    pair = "pair_style metatomic-tc fp32 device cpu"
    assert "pair coeffs are not set" in run_lammps(structures.water(), None, pair=pair).error


def test_settings_again_need_coefficients_again(run_lammps, tiny_pet):
    pair = f"""
pair_style metatomic-tc fp32 device cpu
pair_coeff * * {tiny_pet} H O
pair_style metatomic-tc tf32x3 device cpu
"""
    assert "coeff" in run_lammps(structures.water(), None, pair=pair).error


def test_per_atom_virial_of_a_non_conservative_stress(run_lammps, pair_model):
    commands = "compute s all stress/atom NULL virial\ncompute r all reduce sum c_s[1]\n"
    commands += "thermo_style custom step c_r\nrun 0"
    options = "device cpu non_conservative stress"
    model = pair_model(extras=True)
    result = run_lammps(structures.water(), model, options=options, commands=commands)
    assert "there is no per-atom virial" in result.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(run_lammps, tiny_pet):
    result = run_lammps(structures.water(), tiny_pet, options="device cuda")
    assert "torch finds no CUDA GPU here" in result.error
