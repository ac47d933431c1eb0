"""`metatomic-tc export`: every source, what it writes, and that it loses nothing."""

import shutil
import subprocess
import sys
import types
from pathlib import Path

import metatomic_tc
import pytest
import torch
from metatomic.torch import AtomisticModel, load_atomistic_model
from metatomic_tc import checkpoints
from metatomic_tc.cli import main
from metatomic_tc.export import (
    ExportResult,
    _check_extensions_directory,
    _destination,
    export,
    summary,
)
from metatomic_tc.model_files import ModelFileError, used_modes
from metatomic_tc.models import ConversionReport
from models import energy_and_forces, largest_difference

pytestmark = pytest.mark.filterwarnings("ignore")


def outputs_of(path: Path) -> set[str]:
    return set(load_atomistic_model(path).capabilities().outputs)


# ---- sources -------------------------------------------------------------------------------------


def test_from_a_checkpoint(tiny_pet_checkpoint, tiny_pet, water, tmp_path):
    before = tiny_pet_checkpoint.read_bytes()
    result = export(tiny_pet_checkpoint, tmp_path / "new.pt", mode="fp32")
    assert result.path == tmp_path / "new.pt" and result.size == result.path.stat().st_size
    assert result.atomic_types == [1, 6, 8, 78]
    assert tiny_pet_checkpoint.read_bytes() == before
    assert used_modes(result.path) == ["fp32"]
    energy, forces = energy_and_forces(tiny_pet, water)
    new_energy, new_forces = energy_and_forces(str(result.path), water)
    assert new_energy == pytest.approx(energy, rel=1e-6)
    assert largest_difference(new_forces, forces) <= 1e-6
    assert result.backend == "tc" and "backend: tc" in summary(result)


def test_the_stock_backend_is_the_model_bit_by_bit(tiny_pet_checkpoint, tiny_pet, water, tmp_path):
    target = tmp_path / "new.pt"
    arguments = ["export", str(tiny_pet_checkpoint), "-o", str(target), "--mode", "fp32"]
    assert main([*arguments, "--backend", "stock"]) == 0
    energy, forces = energy_and_forces(tiny_pet, water)
    new_energy, new_forces = energy_and_forces(str(target), water)
    assert new_energy == energy
    assert largest_difference(new_forces, forces) <= 1e-6
    again = export(target, tmp_path / "again.pt", mode="tf32", backend="stock")
    assert again.backend == "stock, as asked for"


def test_a_backend_that_cannot_be_had(tiny_pet, tiny_pet_checkpoint, tmp_path, monkeypatch, capsys):
    target = str(tmp_path / "new.pt")
    monkeypatch.setattr(metatomic_tc.pet.replace, "METATRAIN_VERSIONS", ["2031.1"])
    for source in (tiny_pet_checkpoint, tiny_pet):
        arguments = ["export", str(source), "-o", target]
        assert main([*arguments, "--backend", "tc"]) == 1
        assert "cannot have the backend tc: metatrain" in capsys.readouterr().err
        assert main(arguments) == 0
        assert "backend: stock, since metatrain" in capsys.readouterr().out


def test_the_backend_of_exported_models(demo_model, water, tmp_path, capsys):
    """A trained one, with energies of species."""
    target = tmp_path / "new.pt"
    assert main(["export", str(demo_model), "-o", str(target), "--mode", "fp32"]) == 0
    assert "backend: tc" in capsys.readouterr().out
    energy, forces = energy_and_forces(demo_model, water)
    new_energy, new_forces = energy_and_forces(str(target), water)
    assert abs(new_energy - energy) <= 1e-6 * len(water)
    assert largest_difference(new_forces, forces) <= 1e-5
    assert main(["export", str(target), "-o", str(tmp_path / "x.pt"), "--backend", "stock"]) == 1
    assert "that of metatrain cannot be put in its place" in capsys.readouterr().err


def test_from_an_exported_model(tiny_pet, water, tmp_path, capsys):
    target = tmp_path / "new.pt"
    assert main(["export", str(tiny_pet), "-o", str(target), "--mode", "tf32x3"]) == 0
    energy, forces = energy_and_forces(tiny_pet, water)
    new_energy, new_forces = energy_and_forces(str(target), water)
    assert abs(new_energy - energy) <= 1e-6 * len(water)
    assert largest_difference(new_forces, forces) <= 1e-5
    assert (new_forces != forces).any()

    captured = capsys.readouterr()
    assert "[3/3] Writing" in captured.err
    assert "27 compute in tf32x3, 2 too small" in captured.out
    assert "backend: tc" in captured.out
    assert "pair_style  metatomic-tc tf32x3" in captured.out
    assert f"pair_coeff  * * {target} H C O Pt" in captured.out


@pytest.fixture(scope="module")
def full_llpr(tiny_llpr_checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llpr") / "full.pt"
    return export(tiny_llpr_checkpoint, path, mode="fp32").path


def test_from_an_llpr_checkpoint(full_llpr, water):
    assert {
        "energy",
        "energy_uncertainty",
        "energy_ensemble",
        "non_conservative_forces",
    } <= outputs_of(full_llpr)
    energy_and_forces(str(full_llpr), water)


def test_chosen_layers(tiny_pet, tmp_path, capsys):
    path = tmp_path / "chosen.pt"
    assert main(["export", str(tiny_pet), "-o", str(path), "--layers", "*heads*"]) == 0
    assert "too small to gain or not chosen stay in FP32" in capsys.readouterr().out
    chosen = export(tiny_pet, tmp_path / "python.pt", layers="*heads*").report
    assert 0 < chosen.replaced < export(tiny_pet, tmp_path / "all.pt").report.replaced
    assert all("heads" in layer.path for layer in chosen.layers if layer.replaced)
    assert main(["export", str(tiny_pet), "-o", str(tmp_path / "none.pt"), "--layers", "nose"]) == 1
    assert "layers 'nose' chooses none of the" in capsys.readouterr().err
    assert not (tmp_path / "none.pt").exists()


def test_an_exported_file_can_be_exported_again(tiny_pet, tmp_path):
    export(tiny_pet, tmp_path / "tf32.pt", mode="tf32")
    export(tmp_path / "tf32.pt", tmp_path / "tf32x3.pt", mode="tf32x3")
    assert used_modes(tmp_path / "tf32.pt") == ["tf32"]
    assert used_modes(tmp_path / "tf32x3.pt") == ["tf32x3"]


# ---- --outputs -----------------------------------------------------------------------------------


def test_outputs_nobody_asked_for_are_dropped(tiny_two_heads_checkpoint, water, tmp_path):
    full = export(tiny_two_heads_checkpoint, tmp_path / "full.pt", mode="fp32")
    small = export(
        tiny_two_heads_checkpoint, tmp_path / "small.pt", mode="fp32", outputs=["energy"]
    )
    assert "non_conservative_forces" in outputs_of(full.path)
    assert not any("non_conservative" in name for name in outputs_of(small.path))
    # a node head and an edge head, each of two layers and a last one
    assert len(full.report.layers) - len(small.report.layers) == 6
    assert small.size < full.size
    energy, forces = energy_and_forces(str(full.path), water)
    small_energy, small_forces = energy_and_forces(str(small.path), water)
    assert small_energy == pytest.approx(energy, rel=1e-6)
    assert largest_difference(small_forces, forces) <= 1e-6


def test_outputs_of_an_llpr_model(tiny_llpr_checkpoint, water, tmp_path):
    energy_only = tmp_path / "energy.pt"
    arguments = ["export", str(tiny_llpr_checkpoint), "-o", str(energy_only), "--mode", "fp32"]
    assert main([*arguments, "--outputs", "energy"]) == 0
    names = outputs_of(energy_only)
    assert "energy" in names
    assert not any("uncertainty" in name or "ensemble" in name for name in names)
    assert not any("non_conservative" in name for name in names)


def test_uncertainties_survive_when_they_are_asked_for(
    tiny_llpr_checkpoint, full_llpr, water, tmp_path
):
    from metatomic.torch import ModelOutput
    from metatomic_ase import MetatomicCalculator

    keep = ["energy", "energy_uncertainty", "energy_ensemble"]
    small = export(tiny_llpr_checkpoint, tmp_path / "small.pt", mode="fp32", outputs=keep)
    names = outputs_of(small.path)
    assert set(keep) <= names and not any("non_conservative" in name for name in names)
    results = []
    for path in (small.path, full_llpr):
        calculator = MetatomicCalculator(path, device="cpu", uncertainty_threshold=None)
        wanted = {name: ModelOutput(unit="eV", sample_kind="system") for name in keep}
        with torch.jit.optimized_execution(False):
            found = calculator.run_model(water, wanted)
        results.append({name: found[name].block().values for name in keep})
    for name in keep:
        torch.testing.assert_close(results[0][name], results[1][name])
    assert results[0]["energy_uncertainty"].item() > 0


def test_unknown_outputs_are_an_error_that_lists_the_known_ones(
    tiny_two_heads_checkpoint, tmp_path
):
    with pytest.raises(ValueError, match="'dipole'.*energy, non_conservative_forces"):
        export(tiny_two_heads_checkpoint, tmp_path / "new.pt", outputs=["dipole"])
    assert list(tmp_path.iterdir()) == []


def test_outputs_of_an_exported_model_cannot_be_dropped(tiny_pet, tmp_path, capsys):
    target = tmp_path / "new.pt"
    assert main(["export", str(tiny_pet), "-o", str(target), "--outputs", "energy"]) == 2
    assert "needs the checkpoint" in capsys.readouterr().err
    assert main(["export", str(tiny_pet), "-o", str(target), "--outputs", ","]) == 2


# ---- what is written, and what is not lost -------------------------------------------------------


@pytest.mark.parametrize(
    "source, name",
    [("pet.ckpt", "pet.pt"), ("models/pet.ckpt", "pet.pt"), ("pet.pt", "pet-tf32.pt")],
)
def test_default_names(source, name):
    assert _destination(source, None, None, "tf32") == Path(name)


def test_the_input_is_never_overwritten(tiny_pet, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model.pt"
    shutil.copy(tiny_pet, model)
    (tmp_path / "link.pt").symlink_to(model)
    before = model.read_bytes()
    monkeypatch.chdir(tmp_path)
    for name in ("model.pt", str(model), "../" + tmp_path.name + "/model.pt", "link.pt"):
        assert main(["export", "model.pt", "-o", name]) == 2
        assert "is the input" in capsys.readouterr().err
    assert model.read_bytes() == before


def test_a_failure_leaves_earlier_files_as_they_were(tiny_pet, tmp_path, monkeypatch):
    target, extensions = tmp_path / "out.pt", tmp_path / "extensions"
    target.write_bytes(b"earlier")
    extensions.mkdir()
    (extensions / "libearlier.so").write_bytes(b"earlier")

    def save(self, file, collect_extensions=None):
        Path(file).write_bytes(b"half")
        (Path(collect_extensions) / "half").mkdir(parents=True)
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(AtomisticModel, "save", save)
    with pytest.raises(RuntimeError, match="disk is full"):
        export(tiny_pet, target, extensions=extensions)
    assert target.read_bytes() == b"earlier"
    assert [path.name for path in extensions.iterdir()] == ["libearlier.so"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extensions", "out.pt"]


def test_extensions_directories_with_other_files_are_refused(tiny_pet, tmp_path):
    (tmp_path / "thesis.tex").write_text("the only copy")
    with pytest.raises(ModelFileError, match="thesis.tex"):
        export(tiny_pet, tmp_path / "out.pt", extensions=tmp_path)
    assert (tmp_path / "thesis.tex").exists() and not (tmp_path / "out.pt").exists()


def test_extensions_make_the_model_load_where_metatomic_tc_is_not(tiny_pet, water, tmp_path):
    result = export(tiny_pet, tmp_path / "new.pt", extensions=tmp_path / "extensions")
    library = tmp_path / "extensions" / "metatomic_tc" / "lib" / "libmetatomic_tc.so"
    assert library.is_file()
    assert f"extensions_directory={str(tmp_path / 'extensions')!r}" in summary(result)
    # a second export may replace the directory
    _check_extensions_directory(tmp_path / "extensions", tmp_path / "other.pt")

    expected, _ = energy_and_forces(str(result.path), water)
    code = """
import sys, warnings
warnings.simplefilter("ignore")
import ase.io
from metatomic_ase import MetatomicCalculator
atoms = ase.io.read("water.xyz")
atoms.calc = MetatomicCalculator("new.pt", device="cpu", extensions_directory="extensions")
assert "metatomic_tc" not in sys.modules
energy = atoms.get_potential_energy()
import metatomic_tc  # finds the operators registered already
assert metatomic_tc.supported_modes("cpu")
print(repr(float(energy)))
"""
    water.write(tmp_path / "water.xyz")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # the file holds eight digits of the positions
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "output, message",
    [
        ("missing/out.pt", "mkdir -p"),
        ("out.ckpt", "name it out.pt"),
        (".", "is a directory"),
    ],
)
def test_outputs_that_cannot_be_written_fail_before_the_work(
    output, message, tiny_pet, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(tiny_pet), "-o", output]) == 2
    captured = capsys.readouterr().err
    assert message in captured and "[1/3]" not in captured


def test_models_with_many_elements_have_a_short_summary():
    report = ConversionReport("tf32x3", [], [], 0)
    text = summary(ExportResult(Path("new.pt"), 10**6, report, list(range(1, 103)), None))
    assert "new.pt ELEMENT ELEMENT ..." in text and "Lr" not in text.split("pair_coeff")[1]


# ---- upet names ----------------------------------------------------------------------------------


@pytest.fixture
def upet(monkeypatch, tiny_pet_checkpoint):
    """A upet package and a network with one model, pet-mad-s, in two versions."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    def list_upet(*, model, size, print_summary):
        versions = ["1.5.0", "1.10.0"] if (model, size) == ("pet-mad", "s") else []
        return [{"model": model, "size": size, "version": version} for version in versions]

    def download(repo_id, subfolder, filename):
        assert (repo_id, subfolder) == ("lab-cosmo/upet", "models")
        if filename not in ("pet-mad-s-v1.5.0.ckpt", "pet-mad-s-v1.10.0.ckpt"):
            raise EntryNotFoundError("404")
        return str(tiny_pet_checkpoint)

    module = types.ModuleType("upet")
    module.list_upet = list_upet
    monkeypatch.setitem(sys.modules, "upet", module)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return module


def test_from_a_upet_name(upet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "pet-mad-s"]) == 0
    assert "from huggingface.co" in capsys.readouterr().err
    model = load_atomistic_model(tmp_path / "pet-mad-s-v1.10.0.pt")
    assert model.metadata().name == "pet-mad-s v1.10.0"


@pytest.mark.parametrize(
    "arguments", [["pet-mad-s@1.5.0"], ["pet-mad-s-v1.5.0"], ["pet-mad-s", "--version", "v1.5.0"]]
)
def test_versions_of_a_upet_name(arguments, upet, monkeypatch, capsys):
    def read(path, outputs, name, backend):
        raise RuntimeError(f"reading {name}")

    monkeypatch.setattr(checkpoints, "read_checkpoint", read)
    assert main(["export", *arguments]) == 1
    assert "reading pet-mad-s v1.5.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["pet-mad-l"], 1, "no model 'pet-mad-l'"),
        (["pet-mad-s@9.9.9"], 1, "it has: 1.5.0, 1.10.0"),
        (["pet-mad-s@1.5.0", "--version", "1.10.0"], 2, "two versions"),
        (["pet-mad"], 2, "not the name of a upet model"),
    ],
)
def test_upet_names_that_do_not_exist(arguments, code, message, upet, capsys):
    assert main(["export", *arguments]) == code
    assert message in capsys.readouterr().err


def test_upet_without_the_package_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "upet", None)
    assert main(["export", "pet-mad-s"]) == 1
    assert "pip install upet" in capsys.readouterr().err


def test_upet_without_a_network_says_so(upet, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(**arguments):
        raise LocalEntryNotFoundError("no connection")

    def unreachable(**arguments):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(upet, "list_upet", unreachable)
    for name in ("pet-mad-s", "pet-mad-s@1.5.0"):
        assert main(["export", name]) == 1
        error = capsys.readouterr().err
        assert "need the network" in error and "Traceback" not in error


def test_a_version_is_for_names_only(tiny_pet, capsys):
    assert main(["export", str(tiny_pet), "--version", "1.0.0"]) == 2
    assert "--version is for names" in capsys.readouterr().err


def test_checkpoint_reading_keeps_all_outputs_by_default(tiny_two_heads_checkpoint):
    model, _ = checkpoints.read_checkpoint(tiny_two_heads_checkpoint)
    assert isinstance(model, AtomisticModel)
    assert {"energy", "non_conservative_forces"} <= set(model.capabilities().outputs)
    assert isinstance(metatomic_tc.convert(model), AtomisticModel)
